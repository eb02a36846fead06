//! SIGTERM and SIGINT: the first asks for an end in good order, the second for one at once.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signals that end a program.
pub(crate) struct Signals {
    terminated: Signal,
    interrupted: Signal,
}

impl Signals {
    /// Takes both from now on.
    pub(crate) fn new() -> std::io::Result<Self> {
        let (terminated, interrupted) = (SignalKind::terminate(), SignalKind::interrupt());
        Ok(Self { terminated: signal(terminated)?, interrupted: signal(interrupted)? })
    }

    /// Waits for the next one. Cancel-safe.
    pub(crate) async fn next(&mut self) {
        tokio::select! {
            _ = self.terminated.recv() => {}
            _ = self.interrupted.recv() => {}
        }
    }
}
