//! Runs the session suite on Soft-RoCE devices in the lab's guest (`cargo xtask lab-test
//! sessions`).

mod lab_sessions {
    pub(crate) mod attack_cost;
}
mod sessions;

use std::process::Command;

use ferrite_verbs::Verbs;
use sessions::{Harness, run_suite};

fn is_emulated() -> bool {
    std::env::var("FERRITE_LAB_KERNEL").is_ok_and(|kernel| kernel != "uml")
}

/// Runs a test on the guest's two hosts, and checks that it leaves no objects behind.
fn run(test: impl AsyncFnOnce(Harness)) {
    let verbs = Verbs::system().expect("load rdma-core");
    sessions::run(verbs, if is_emulated() { 20 } else { 2 }, test);
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

run_suite!(crate::run);

#[test]
fn detects_a_server_that_vanished() {
    struct RepairNetwork;
    impl Drop for RepairNetwork {
        fn drop(&mut self) {
            tc("del dev p2 root");
        }
    }
    let verbs = Verbs::system().expect("load rdma-core");
    sessions::idle::detects_a_server_that_vanished(verbs, || {
        tc("add dev p2 root netem loss 100%");
        RepairNetwork
    });
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

fn tc(qdisc: &str) {
    let status = Command::new("tc").arg("qdisc").args(qdisc.split(' ')).status();
    assert!(status.is_ok_and(|status| status.success()), "tc qdisc {qdisc} failed");
}

/// Measures what each attack costs other clients. Where every instruction is emulated, times mean
/// nothing, so the tests do nothing there.
mod measured_isolation {
    macro_rules! tests {
        ($($test:ident),*) => { $(
            #[test]
            fn $test() {
                if !crate::is_emulated() {
                    crate::run(crate::lab_sessions::attack_cost::$test);
                }
            }
        )* };
    }
    tests!(
        protocol_violations,
        tiny_writes,
        empty_writes,
        keepalive_flood,
        clients_without_a_window,
        slow_readers,
        never_polling,
        unfinished_connects
    );
}
