//! Tests that need a second process: the test runs its own executable again, in another role.

use std::process::{Child, Command, Stdio};

use ferrite_verbs::cm;

use crate::lab;
use crate::suite::TIMEOUT;
use crate::suite::pair::{PairConfig, Parts, params};

const ROLE: &str = "FERRITE_LAB_ROLE";
/// The variable in which cargo and nextest get a runner for tests, if any.
const RUNNER: &str = "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER";

/// Returns the role that [`rerun_test`] started this process in.
pub(crate) fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// Prepares to run `test` again as `role` in another process, with `wrapper` before the command.
pub(crate) fn rerun_test(test: &str, role: &str, wrapper: &[&str]) -> Command {
    let mut words: Vec<String> = wrapper.iter().map(|word| (*word).to_owned()).collect();
    words.extend(
        std::env::var(RUNNER).iter().flat_map(|runner| runner.split(' ')).map(str::to_owned),
    );
    words.extend(std::env::args().take(1));
    let mut command = Command::new(&words[0]);
    command
        .args(&words[1..])
        .args(["--exact", test, "--nocapture"])
        .env(ROLE, role)
        .stdout(Stdio::null());
    command
}

/// Plays a role: connects to `target`, and waits to be killed.
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

/// A child that is killed when the test ends.
pub(crate) struct ChildGuard(pub(crate) Child);

impl Drop for ChildGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
