//! The suite of streams on Soft-RoCE devices in the lab's guest (`cargo xtask lab-test streams`).

mod streams;

use ferrite_verbs::Verbs;
use streams::{Host, Test, run_suite};

/// Runs a test on the guest's two hosts; nothing may be left of it.
fn run(test: impl Test) {
    let emulated = std::env::var("FERRITE_LAB_KERNEL").is_ok_and(|kernel| kernel != "uml");
    let hosts = [Host::new("rxe1", "10.0.0.1"), Host::new("rxe2", "10.0.0.2")];
    streams::run(Verbs::system().expect("rdma-core"), hosts, if emulated { 20 } else { 2 }, test);
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

run_suite!(crate::run);
