//! No acknowledged write is lost when an engine shuts down or fails over; over TCP.
//! `FERRITE_SHUTDOWNS=50` runs 50 rounds of each test.

mod client;
mod server;
mod shutdown;

use client::{Client, engines};
use server::{Server, free_port};
use shutdown::{
    Increment, Way, failover_keeps_acknowledged_writes, shutdown_keeps_acknowledged_writes,
};

fn connect(server: &Server) -> Increment {
    let mut client = Client::at(&server.info("address"));
    Box::new(move |key| {
        client.try_send(&[vec!["INCR", key]])
            && client.next().is_some_and(|reply| reply.starts_with(b":"))
    })
}

fn test_shutdown(way: Way) {
    for program in engines() {
        let arguments = ["rdma-port", &free_port(), "rdma-bind", "127.0.0.1", "call-path", "yes"];
        shutdown_keeps_acknowledged_writes(&program, &arguments, way, &connect);
    }
}

fn test_failover() {
    for program in engines() {
        let ports = [free_port(), free_port()];
        let arguments = ports.each_ref().map(|port| ["rdma-port", port, "rdma-bind", "127.0.0.1"]);
        failover_keeps_acknowledged_writes(&program, [&arguments[0], &arguments[1]], &connect);
    }
}

shutdown::shutdown_tests!();
