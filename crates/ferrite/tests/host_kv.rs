//! `ferrite gateway`, `ferrite relay` and `ferrite bench kv` over TCP, on any host.

#[path = "kv/suite.rs"]
mod kv;

const NETWORK: kv::Network =
    kv::Network { listen: "127.0.0.1:0", client: &[], rdma: "forbid", transport: "TCP" };

#[test]
fn gateway_carries_every_kind_of_load() {
    kv::gateway_carries_every_kind_of_load(&NETWORK);
}

#[test]
fn bench_reports_why_a_client_is_rejected() {
    kv::bench_reports_why_a_client_is_rejected(&NETWORK);
}

#[test]
fn relay_carries_load_and_reports_failures() {
    kv::relay_carries_load_and_reports_failures(&NETWORK);
}

#[test]
fn second_signal_stops_the_gateway_at_once() {
    kv::second_signal_stops_the_gateway_at_once(&NETWORK);
}
