//! Where snapshots come from: an engine with the module, or an admin port.

use std::time::{Duration, Instant};

use anyhow::ensure;

use super::snapshot::Snapshot;

/// A program that can be watched.
pub(super) trait Source: Send {
    /// Returns the address, for the title.
    fn address(&self) -> String;

    /// Returns the current state. Connects first, if necessary.
    ///
    /// # Errors
    /// The program cannot be reached, or it refuses to answer. A later call connects again.
    fn poll(&mut self) -> anyhow::Result<Snapshot>;

    /// Ends a session.
    ///
    /// # Errors
    /// The program cannot be reached, or it refuses to end the session.
    fn kill(&mut self, id: u64) -> anyhow::Result<()>;
}

/// How long to wait for a connection, or for more of an answer.
pub(super) const TIMEOUT: Duration = Duration::from_secs(5);
/// How long a whole answer may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);
/// The longest answer. A program sends a few tens of kilobytes, and some hundred bytes per session.
const ANSWER_MAX: usize = 16 << 20;

/// An answer that arrives in pieces. An endless answer is an error, so that the sender can neither
/// block the watcher nor use up its memory.
pub(super) struct Answer {
    pub(super) bytes: Vec<u8>,
    begun: Instant,
}

impl Answer {
    pub(super) fn new() -> Self {
        Self { bytes: Vec::new(), begun: Instant::now() }
    }

    pub(super) fn add(&mut self, piece: &[u8]) -> anyhow::Result<()> {
        self.bytes.extend(piece);
        ensure!(self.bytes.len() <= ANSWER_MAX, "the answer is longer than {ANSWER_MAX} bytes");
        let is_late = self.begun.elapsed() > ANSWER_TIMEOUT;
        ensure!(!is_late, "the answer is not complete after {ANSWER_TIMEOUT:?}");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_must_end() {
        let mut answer = Answer::new();
        assert!(answer.add(b"a piece").is_ok());
        answer.begun -= ANSWER_TIMEOUT * 2;
        let error = answer.add(b"a drop").expect_err("too late");
        assert_eq!(error.to_string(), "the answer is not complete after 15s");
    }
}
