//! The names of the keys that one run writes and removes.

use std::sync::atomic::{AtomicBool, Ordering};

use ferrite_fabric::random::random;

/// The keys of one run: `ferrite-bench:RANDOM:NUMBER`. The random part keeps them apart from the
/// keys of the server's users, and from those of another run.
pub(super) struct KeySpace {
    prefix: String,
    is_written: AtomicBool,
}

impl KeySpace {
    pub(super) fn new() -> anyhow::Result<Self> {
        let prefix = format!("ferrite-bench:{:08x}:", random()? as u32);
        Ok(Self { prefix, is_written: AtomicBool::new(false) })
    }

    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    pub(super) fn name(&self, key: u32) -> String {
        format!("{}{key}", self.prefix)
    }

    /// Notes that a SET is about to be sent.
    pub(super) fn mark_written(&self) {
        // Reads first: all connections share this line of the cache.
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
        let (first, second) = (KeySpace::new().expect("random"), KeySpace::new().expect("random"));
        assert!(first.name(7).starts_with("ferrite-bench:") && first.name(7).ends_with(":7"));
        assert_ne!(first.name(7), second.name(7));
    }
}
