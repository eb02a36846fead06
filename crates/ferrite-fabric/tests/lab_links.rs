//! The link test suite on Soft-RoCE devices in the lab's guest (`cargo xtask lab-test links`).

mod links;

use ferrite_verbs::Verbs;
use links::{Fixture, Host, run_suite};

/// Runs a test on the guest's two hosts and checks that it leaks no objects.
fn run(test: impl FnOnce(&Fixture)) {
    let verbs = Verbs::system().expect("rdma-core");
    let emulated = std::env::var("FERRITE_LAB_KERNEL").is_ok_and(|kernel| kernel != "uml");
    let hosts = [Host::new("rxe1", "10.0.0.1"), Host::new("rxe2", "10.0.0.2")];
    let (work_divisor, storm_divisor) = if emulated { (20, 100) } else { (1, 2) };
    test(&Fixture { verbs: Some(verbs), tls: None, hosts, work_divisor, storm_divisor });
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

run_suite!(crate::run);
