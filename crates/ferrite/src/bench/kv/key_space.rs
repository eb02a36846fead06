//! The names of the keys that one run writes and removes.

use std::hash::BuildHasher as _;
use std::sync::atomic::{AtomicBool, Ordering};

/// The keys of one run: `ferrite-bench:RANDOM:NUMBER`. The random part keeps them apart from the
/// keys of the server's users, and from those of another run.
pub(super) struct KeySpace {
    prefix: String,
    is_written: AtomicBool,
}

impl KeySpace {
    #[expect(clippy::disallowed_types, reason = "the names of keys are no secret")]
    pub(super) fn new() -> Self {
        let random = std::hash::RandomState::new().hash_one(std::process::id()) as u32;
        Self { prefix: format!("ferrite-bench:{random:08x}:"), is_written: AtomicBool::new(false) }
    }

    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    pub(super) fn name(&self, key: u32) -> String {
        format!("{}{key}", self.prefix)
    }

    /// Records that a command is about to be sent that may write a key of this run.
    pub(super) fn mark_written(&self) {
        // Reads first, to write rarely: all threads share this cache line.
        if !self.is_written() {
            self.is_written.store(true, Ordering::Relaxed);
        }
    }

    /// Returns whether the server may have keys of this run.
    pub(super) fn is_written(&self) -> bool {
        self.is_written.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_runs_have_no_key_in_common() {
        let (first, second) = (KeySpace::new(), KeySpace::new());
        assert!(first.name(7).starts_with("ferrite-bench:") && first.name(7).ends_with(":7"));
        assert_ne!(first.name(7), second.name(7));
    }
}
