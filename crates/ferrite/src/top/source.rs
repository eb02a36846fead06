//! Where snapshots come from: an engine with the module, or an admin port.

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
