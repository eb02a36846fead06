//! Tests that need a second process: the test runs itself again and plays another role there.

use std::process::{Child, Command, Stdio};

use ferrite_verbs::cm;

use crate::lab;
use crate::suite::PATIENCE;
use crate::suite::pair::{PairConfig, Parts, params};

const ROLE: &str = "FERRITE_LAB_ROLE";
/// How cargo and nextest are told to start tests, if not directly.
const RUNNER: &str = "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER";

/// The role this process was started with by [`again`].
pub(crate) fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// `test` again, in a process of its own, behind the words of `wrapper`, as `role`.
pub(crate) fn again(test: &str, role: &str, wrapper: &[&str]) -> Command {
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

/// A role: connects to `target`, and waits to be killed.
pub(crate) fn connect_and_wait(target: &str) {
    let fixture = lab();
    let config = PairConfig::default();
    let local = Some(fixture.hosts[1].any_port());
    let target = target.parse().expect("an address");
    let id = cm::resolve(&fixture.verbs, local, target, PATIENCE).expect("resolve");
    let parts = Parts::new(&fixture, &fixture.hosts[1], &config);
    cm::connect(&id, &parts.qp, config.access, &params(&config), PATIENCE).expect("connect");
    std::thread::sleep(PATIENCE);
}

/// A child that is killed when the test ends.
pub(crate) struct Killed(pub(crate) Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
