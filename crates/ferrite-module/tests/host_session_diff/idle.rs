//! Finds out from the kernel whether a process is idle.
//!
//! When bytes are sent over loopback, the thread that waits for them becomes runnable at once. So a
//! process is idle if all of its threads sleep and none of them has run between two snapshots. This
//! needs neither a time limit nor a marker command among those of the clients.

use std::path::PathBuf;

/// The threads of a sleeping process, and how often each has run.
pub(crate) type Snapshot = Vec<(u64, u64)>;

pub(crate) struct Process {
    tasks: PathBuf,
}

impl Process {
    pub(crate) fn new(pid: u32) -> Self {
        Self { tasks: format!("/proc/{pid}/task").into() }
    }

    /// Takes a snapshot; `None` while a thread runs or is about to.
    pub(crate) fn snapshot(&self) -> Option<Snapshot> {
        let mut threads = Vec::new();
        for task in std::fs::read_dir(&self.tasks).ok()? {
            let task = task.ok()?;
            let number = task.file_name().to_str()?.parse().ok()?;
            let stat = std::fs::read_to_string(task.path().join("stat")).ok()?;
            // The name before the state is in parentheses and may have any characters.
            let state = stat.rsplit_once(") ")?.1.chars().next()?;
            if !matches!(state, 'S' | 'I') {
                return None;
            }
            let times = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
            threads.push((number, times.split_ascii_whitespace().nth(2)?.parse().ok()?));
        }
        threads.sort_unstable();
        (!threads.is_empty()).then_some(threads)
    }
}
