//! No acknowledged write is lost when an engine shuts down or fails over. The clients use TCP.
//! `FERRITE_SHUTDOWNS=50` runs 50 rounds of each test.

mod client;
mod shutdown;

use ferrite_testkit::engine::engines;
use ferrite_testkit::resp::Client;
use ferrite_testkit::{Engine, free_port};
use shutdown::{
    Increment, Way, failover_keeps_acknowledged_writes, shutdown_keeps_acknowledged_writes,
};

fn connect(server: &Engine) -> Increment {
    let mut client = Client::to_tcp(server.info("address"));
    Box::new(move |key| {
        client.try_send(&[vec!["INCR", key]])
            && client.next_reply().is_some_and(|reply| reply.starts_with(b":"))
    })
}

fn test_shutdown(way: Way) {
    for program in engines() {
        let arguments =
            ["rdma-port", &free_port().to_string(), "rdma-bind", "127.0.0.1", "call-path", "yes"];
        shutdown_keeps_acknowledged_writes(&program, &arguments, way, &connect);
    }
}

fn test_failover() {
    for program in engines() {
        let ports = [free_port().to_string(), free_port().to_string()];
        let arguments = ports.each_ref().map(|port| ["rdma-port", port, "rdma-bind", "127.0.0.1"]);
        failover_keeps_acknowledged_writes(&program, [&arguments[0], &arguments[1]], &connect);
    }
}

shutdown::shutdown_tests!();
