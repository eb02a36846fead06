//! Runs the examples of ferrite-client with a `redis-server` over TCP, on any host.

mod client_examples;

use client_examples::run_suite;
use ferrite_testkit::{Engine, free_port};

fn run(test: fn(&[String], &str)) {
    let port = free_port().to_string();
    let _redis = Engine::redis(&["--bind", "127.0.0.1", "--port", &port]);
    test(&[format!("127.0.0.1:{port}")], "TCP");
}

run_suite!(crate::run);
