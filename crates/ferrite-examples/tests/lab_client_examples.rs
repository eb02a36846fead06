//! Runs the examples of ferrite-client between the two hosts of the lab: a gateway on the first
//! host, the example on the second.

mod client_examples;

use client_examples::run_suite;
use ferrite_fabric::{Fabric, ListenOptions, Rdma};
use ferrite_session::{EngineAddress, Gateway, GatewayConfig};
use ferrite_testkit::Engine;
use ferrite_verbs::Verbs;

fn run(test: fn(&[String], &str)) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("build the runtime");
    runtime.block_on(async {
        let redis = Engine::redis(&[]);
        let verbs = Verbs::system().expect("load rdma-core");
        let fabric = Fabric::builder(&verbs).rdma(Rdma::Require).build().expect("build the fabric");
        tokio::spawn(fabric.drive());
        let options = ListenOptions::new().accept_foreign_peers();
        let address = "10.0.0.1:0".parse().expect("valid address");
        let listener = fabric.listen_with(address, &options).expect("listen");
        let address = listener.local_addr().to_string();
        let engine = EngineAddress::Unix(redis.socket());
        let gateway =
            Gateway::new(GatewayConfig { protected_mode: false, ..GatewayConfig::new(engine) });
        let running = gateway.clone();
        let serving =
            tokio::spawn(async move { running.serve(listener, std::future::pending()).await });
        let arguments = [address, "10.0.0.2".to_owned()];
        let tested = tokio::task::spawn_blocking(move || test(&arguments, "RDMA (Ferrite)"));
        tested.await.expect("test does not panic");
        assert!(gateway.stats().ferrite_sessions > 0 && gateway.stats().tcp_sessions == 0);
        serving.abort();
    });
}

run_suite!(crate::run);
