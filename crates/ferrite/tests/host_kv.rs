//! The gateway, the relay and the load generator over TCP, on any host.

#[path = "kv/suite.rs"]
mod kv;

const PLACE: kv::Place =
    kv::Place { listen: "127.0.0.1:0", client: &[], rdma: "forbid", transport: "TCP" };

#[test]
fn load_through_the_gateway() {
    kv::load_through_the_gateway(&PLACE);
}

#[test]
fn refusals_are_explained() {
    kv::refusals_are_explained(&PLACE);
}

#[test]
fn load_through_the_relay() {
    kv::load_through_the_relay(&PLACE);
}

#[test]
fn second_signal_ends_at_once() {
    kv::second_signal_ends_at_once(&PLACE);
}
