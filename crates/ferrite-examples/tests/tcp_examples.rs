//! The examples of ferrite-client straight to a `redis-server`, on a host that needs no RDMA.

mod client_examples;

use client_examples::redis_server::Redis;
use client_examples::run_suite;

fn run(test: fn(&[String], &str)) {
    let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|bound| bound.local_addr());
    let at = free.expect("a free port");
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let name = format!("tcp-examples-{}", at.port());
    let port = at.port().to_string();
    let _redis = runtime.block_on(Redis::start(&name, &["--bind", "127.0.0.1", "--port", &port]));
    test(&[at.to_string()], "TCP");
}

run_suite!(crate::run);
