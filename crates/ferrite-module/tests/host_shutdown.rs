//! No acknowledged write is lost when an engine shuts down or hands over, over TCP.
//! `FERRITE_SHUTDOWNS=50` for as many rounds of each.

mod scene;
mod shutdown;
mod talk;

use scene::{Server, free_port};
use shutdown::{Increment, Way, failover_keeps_what_was_acknowledged, keeps_what_was_acknowledged};
use talk::{Peer, engines};

fn connect(server: &Server) -> Increment {
    let mut peer = Peer::called_at(&server.info("address"));
    Box::new(move |key| {
        peer.try_send(&[vec!["INCR", key]])
            && peer.next().is_some_and(|reply| reply.starts_with(b":"))
    })
}

fn keeps(way: Way) {
    for program in engines() {
        let arguments = ["rdma-port", &free_port(), "rdma-bind", "127.0.0.1", "call-path", "yes"];
        keeps_what_was_acknowledged(&program, &arguments, way, &connect);
    }
}

fn fails_over() {
    for program in engines() {
        let ports = [free_port(), free_port()];
        let arguments = ports.each_ref().map(|port| ["rdma-port", port, "rdma-bind", "127.0.0.1"]);
        failover_keeps_what_was_acknowledged(&program, [&arguments[0], &arguments[1]], &connect);
    }
}

shutdown::shutdown_tests!();
