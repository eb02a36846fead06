//! Runs the client's tests on Soft-RoCE devices in the lab's guest (`cargo xtask lab-test client`).

mod client;

use client::{TestServer, any_port, run_suite};
use ferrite_client::redis::AsyncCommands as _;
use ferrite_client::{Client, ClientBuilder, SessionTransport};
use ferrite_testkit::Engine;
use ferrite_verbs::Verbs;

/// Runs a test on the guest's two hosts, and checks that no verbs objects are left.
fn run(test: impl AsyncFnOnce(&Verbs)) {
    client::run(&Verbs::system().expect("load rdma-core"), test);
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

/// A client that is configured only by a URL uses RDMA. The local address in this test selects the
/// second host of the guest.
#[test]
fn opens_urls_over_rdma() {
    run(async |verbs| {
        let redis = Engine::redis(&[]);
        let server = TestServer::start(verbs, &redis);
        for policy in ["", "?rdma=prefer", "?rdma=require"] {
            let url = format!("redis+rdma://{}/1{policy}", server.address);
            let client = ClientBuilder::open(&url).expect("valid URL").local(any_port(1)).build();
            let mut connection = client.connect().await.expect("connect");
            assert_eq!(connection.transport_info().transport, SessionTransport::FerriteRdma);
            assert_eq!(connection.transport_info().device.as_deref(), Some("rxe2"));
            let () = connection.set("a", policy).await.expect("SET");
            assert_eq!(connection.get::<_, String>("a").await.expect("GET"), policy);
        }
        // Nobody listens there, over RDMA or TCP.
        let nobody = Client::open("redis+rdma://10.0.0.1:1?rdma=require").expect("valid URL");
        let error = nobody.connect().await.expect_err("nobody listens");
        assert!(error.is_io_error(), "{error}");
        server.end().await;
    });
}

run_suite!(crate::run);
