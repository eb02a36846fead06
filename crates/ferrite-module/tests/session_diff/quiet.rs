//! Whether a process is at rest, asked of the kernel.
//!
//! Bytes that a process has not read yet make the thread that waits for them runnable, at the
//! moment when they are sent over loopback. So a process has nothing left to do if all of its
//! threads sleep, and if none of them has run between two looks. No time limit decides, and no
//! marker command changes what the clients say.

use std::path::PathBuf;

/// The threads of a process, all asleep, and how often each has run.
pub(crate) type Look = Vec<(u64, u64)>;

pub(crate) struct Process {
    tasks: PathBuf,
}

impl Process {
    pub(crate) fn new(pid: u32) -> Self {
        Self { tasks: format!("/proc/{pid}/task").into() }
    }

    /// `None` while a thread runs or is about to.
    pub(crate) fn look(&self) -> Option<Look> {
        let mut threads = Vec::new();
        for task in std::fs::read_dir(&self.tasks).ok()? {
            let task = task.ok()?;
            let number = task.file_name().to_str()?.parse().ok()?;
            let stat = std::fs::read_to_string(task.path().join("stat")).ok()?;
            // The name before it is in parentheses and may have any characters.
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
