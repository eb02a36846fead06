//! The suite of sessions on Soft-RoCE devices in the lab's guest (`cargo xtask lab-test sessions`).

mod sessions;

use ferrite_verbs::Verbs;
use sessions::{Scene, run_suite};

/// Runs a test on the guest's two hosts; nothing may be left of it.
fn run(test: impl AsyncFnOnce(Scene)) {
    let emulated = std::env::var("FERRITE_LAB_KERNEL").is_ok_and(|kernel| kernel != "uml");
    sessions::run(Verbs::system().expect("rdma-core"), if emulated { 20 } else { 2 }, test);
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

run_suite!(crate::run);
