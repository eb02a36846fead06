//! SIGTERM and SIGINT, the signals that stop a program. The gateway, the agent and `ferrite bench
//! kv` stop in an orderly way after the first signal, and at once after a second one. The relay
//! exits at the first signal.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Receives the signals that stop a program.
pub(crate) struct Signals {
    terminated: Signal,
    interrupted: Signal,
}

impl Signals {
    /// Handles SIGTERM and SIGINT from now on.
    pub(crate) fn new() -> std::io::Result<Self> {
        let (terminated, interrupted) = (SignalKind::terminate(), SignalKind::interrupt());
        Ok(Self { terminated: signal(terminated)?, interrupted: signal(interrupted)? })
    }

    /// Waits for the next signal. Cancel-safe.
    pub(crate) async fn next(&mut self) {
        tokio::select! {
            _ = self.terminated.recv() => {}
            _ = self.interrupted.recv() => {}
        }
    }
}
