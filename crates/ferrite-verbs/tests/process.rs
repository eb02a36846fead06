//! Helpers for tests that need a second process. The test runs its own executable again, in another
//! role.

use std::process::{Command, Stdio};

use ferrite_testkit::process::rerun_as;
use ferrite_verbs::cm;

use crate::lab;
use crate::suite::TIMEOUT;
use crate::suite::pair::{PairConfig, Parts, params};

/// Returns a command that runs `test` again as `role` in another process. `wrapper` is put before
/// the command.
pub(crate) fn rerun_test(test: &str, role: &str, wrapper: &[&str]) -> Command {
    let mut command = rerun_as(test, role, wrapper);
    command.stdout(Stdio::null());
    command
}

/// Runs in the child process: connects to `target`, and waits to be killed.
pub(crate) fn connect_and_wait(target: &str) {
    let fixture = lab();
    let config = PairConfig::default();
    let local = Some(fixture.hosts[1].any_port());
    let target = target.parse().expect("an address");
    let id = cm::resolve(&fixture.verbs, local, target, TIMEOUT).expect("resolve");
    let parts = Parts::new(&fixture, &fixture.hosts[1], &config);
    cm::connect(&id, &parts.qp, config.access, &params(&config), TIMEOUT).expect("connect");
    std::thread::sleep(TIMEOUT);
}
