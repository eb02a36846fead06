//! Runs the client's tests on Soft-RoCE devices in the lab's guest (`cargo xtask lab-test client`).

mod client;

use client::run_suite;
use ferrite_verbs::Verbs;

/// Runs a test on the guest's two hosts, and checks that it leaves no objects behind.
fn run(test: impl AsyncFnOnce(&Verbs)) {
    client::run(&Verbs::system().expect("load rdma-core"), test);
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

run_suite!(crate::run);
