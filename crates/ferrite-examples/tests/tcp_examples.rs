//! Runs the examples of ferrite-client with a `redis-server` over TCP, on a host that needs no
//! RDMA.

mod client_examples;

use client_examples::redis_server::Redis;
use client_examples::run_suite;

fn run(test: fn(&[String], &str)) {
    let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|bound| bound.local_addr());
    let address = free.expect("find a free port");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("build the runtime");
    let name = format!("tcp-examples-{}", address.port());
    let port = address.port().to_string();
    let _redis = runtime.block_on(Redis::start(&name, &["--bind", "127.0.0.1", "--port", &port]));
    test(&[address.to_string()], "TCP");
}

run_suite!(crate::run);
