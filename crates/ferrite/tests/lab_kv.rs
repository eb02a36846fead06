//! `ferrite gateway`, `ferrite relay` and `ferrite bench kv` over RDMA, in the lab's virtual
//! machine.

mod kv {
    pub(crate) mod suite;
}

use kv::suite::{self, Network};

const NETWORK: Network = Network {
    listen: "10.0.0.1:6380",
    client: &["--local", "10.0.0.2"],
    rdma: "require",
    transport: "RDMA (Ferrite)",
};

#[test]
fn gateway_carries_every_kind_of_load() {
    suite::gateway_carries_every_kind_of_load(&NETWORK);
}

#[test]
fn bench_reports_why_a_client_is_rejected() {
    suite::bench_reports_why_a_client_is_rejected(&NETWORK);
}

#[test]
fn bench_compares_transports_in_turns() {
    suite::bench_compares_transports_in_turns(&NETWORK);
}

#[test]
fn bench_fabric_names_a_redis_server() {
    suite::bench_fabric_names_a_redis_server(&NETWORK);
}

#[test]
fn relay_carries_load_and_reports_failures() {
    suite::relay_carries_load_and_reports_failures(&NETWORK);
}

#[test]
fn second_signal_stops_the_gateway_at_once() {
    suite::second_signal_stops_the_gateway_at_once(&NETWORK);
}
