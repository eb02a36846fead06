//! Checks that a test leaves no RDMA objects behind.

use std::collections::BTreeMap;
use std::process::Command;

use ferrite_verbs::cm;

use super::{HOSTS, TEST_TIMEOUT, any_port, verbs};
use crate::wait::comes_true;

/// Checks at the end of a test that the kernel holds no more RDMA objects than before the test, and
/// this process no more file descriptors.
#[derive(Debug)]
pub struct LeakCheck(BTreeMap<String, u64>);

impl LeakCheck {
    /// Starts the check for tests that use the devices of all hosts.
    #[must_use]
    pub fn begin() -> Self {
        Self::with(&HOSTS)
    }

    /// Starts the check for tests that use only these devices. librdmacm keeps a device open once
    /// it has opened it. Therefore this function makes librdmacm open the devices before it counts
    /// objects.
    ///
    /// # Panics
    /// If a device cannot be opened.
    #[must_use]
    pub fn with(hosts: &[(&str, &str)]) -> Self {
        for host in hosts.iter().copied() {
            drop(cm::Listener::bind(&verbs(), any_port(host), 1).expect("a listener"));
        }
        Self(resources())
    }

    /// Checks that no object is left after the test has dropped all of them, and that none was
    /// leaked. Fewer objects than at the start are fine: an earlier test may have released its
    /// objects in the meantime.
    ///
    /// # Panics
    /// If an object or a file descriptor is left after [`TEST_TIMEOUT`], or was leaked.
    #[track_caller]
    pub fn end(self) {
        let left = || -> Vec<(String, u64)> {
            let more =
                |(what, count): &(String, u64)| *count > self.0.get(what).copied().unwrap_or(0);
            resources().into_iter().filter(more).collect()
        };
        // Identifiers remain in timewait for a while. The objects of a killed process disappear
        // after the process.
        let _ = comes_true(TEST_TIMEOUT, || left().is_empty());
        assert_eq!(left(), [], "more objects than at the start: {:?}", self.0);
        assert_eq!(ferrite_verbs::leaked_objects(), 0, "some objects could not be released");
    }
}

/// Returns the counts that must not grow when a program uses its device again: file descriptors,
/// and objects on the device except memory regions (pools grow).
#[must_use]
pub fn held_on(device: &str) -> BTreeMap<String, u64> {
    let counts = |what: &str| what.starts_with(device) && !what.ends_with(" mr") || what == "fds";
    resources().into_iter().filter(|(what, _)| counts(what)).collect()
}

/// Returns the numbers of the kernel's objects by device and kind ("rxe1 qp" → 1), and the number
/// of this process's file descriptors ("fds").
///
/// # Panics
/// If the tool `rdma` does not run.
#[must_use]
pub fn resources() -> BTreeMap<String, u64> {
    let out = Command::new("rdma").args(["resource", "show"]).output().expect("rdma");
    let text = String::from_utf8(out.stdout).expect("text");
    // 0: rxe1: qp 1 cq 0 pd 0 mr 0 ctx 0 srq 0 cm_id 0
    let mut held = BTreeMap::new();
    for line in text.lines() {
        let mut words = line.split_whitespace().skip(1);
        let device = words.next().expect("a device").trim_end_matches(':').to_owned();
        while let (Some(kind), Some(count)) = (words.next(), words.next()) {
            held.insert(format!("{device} {kind}"), count.parse().expect("a count"));
        }
    }
    let fds = std::fs::read_dir("/proc/self/fd").expect("the list of descriptors").count() as u64;
    held.insert("fds".to_owned(), fds);
    held
}
