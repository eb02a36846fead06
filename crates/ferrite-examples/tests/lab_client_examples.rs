//! The examples of ferrite-client between the two hosts of the lab: a gateway on the first, the
//! example on the second.

mod client_examples;

use client_examples::redis_server::Redis;
use client_examples::run_suite;
use ferrite_fabric::{Fabric, ListenOptions, Rdma};
use ferrite_session::{EngineAddress, Gateway, GatewayConfig};
use ferrite_verbs::Verbs;

fn run(test: fn(&[String], &str)) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    runtime.block_on(async {
        let redis = Redis::start("lab-examples", &[]).await;
        let verbs = Verbs::system().expect("rdma-core");
        let fabric = Fabric::builder(&verbs).rdma(Rdma::Require).build().expect("a fabric");
        tokio::spawn(fabric.drive());
        let options = ListenOptions::new().accept_foreign_peers();
        let at = "10.0.0.1:0".parse().expect("an address");
        let listener = fabric.listen_with(at, &options).expect("listen");
        let at = listener.local_addr().to_string();
        let address = EngineAddress::Unix(redis.socket.clone());
        let gateway =
            Gateway::new(GatewayConfig { protected_mode: false, ..GatewayConfig::new(address) });
        let serves = gateway.clone();
        let serving =
            tokio::spawn(async move { serves.serve(listener, std::future::pending()).await });
        let arguments = [at, "10.0.0.2".to_owned()];
        let tested = tokio::task::spawn_blocking(move || test(&arguments, "RDMA (Ferrite)"));
        tested.await.expect("no panic");
        assert!(gateway.stats().ferrite_sessions > 0 && gateway.stats().tcp_sessions == 0);
        serving.abort();
    });
}

run_suite!(crate::run);
