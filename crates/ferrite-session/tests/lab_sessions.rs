//! The suite of sessions on Soft-RoCE devices in the lab's guest (`cargo xtask lab-test sessions`).

#[path = "lab_sessions/beside.rs"]
mod beside;
mod sessions;

use std::process::Command;

use ferrite_verbs::Verbs;
use sessions::{Scene, run_suite};

fn is_emulated() -> bool {
    std::env::var("FERRITE_LAB_KERNEL").is_ok_and(|kernel| kernel != "uml")
}

/// Runs a test on the guest's two hosts; nothing may be left of it.
fn run(test: impl AsyncFnOnce(Scene)) {
    sessions::run(Verbs::system().expect("rdma-core"), if is_emulated() { 20 } else { 2 }, test);
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

run_suite!(crate::run);

#[test]
fn gone_without_a_word() {
    struct Mend;
    impl Drop for Mend {
        fn drop(&mut self) {
            tc("del dev p2 root");
        }
    }
    let verbs = Verbs::system().expect("rdma-core");
    sessions::idle::gone_without_a_word(verbs, || {
        tc("add dev p2 root netem loss 100%");
        Mend
    });
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

fn tc(qdisc: &str) {
    let status = Command::new("tc").arg("qdisc").args(qdisc.split(' ')).status();
    assert!(status.is_ok_and(|status| status.success()), "tc qdisc {qdisc}");
}

/// What each costs other clients, which is a matter of time. Where every instruction is emulated,
/// that says nothing.
mod others_beside {
    macro_rules! tests {
        ($($test:ident),*) => { $(
            #[test]
            fn $test() {
                if !crate::is_emulated() {
                    crate::run(crate::beside::$test);
                }
            }
        )* };
    }
    tests!(
        broken_rules,
        tiny_writes,
        empty_writes,
        messages,
        half_open,
        slow_readers,
        never_polling,
        stopping_half_way
    );
}
