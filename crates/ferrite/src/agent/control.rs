//! What asks a running agent to end, and to apply other settings.

use ferrite_config::Values;

use crate::reload::Reload;
use crate::signals::Signals;

/// What an agent is asked to do.
#[derive(Debug)]
pub(crate) enum Request {
    /// Apply those of the settings that can change.
    Reconfigure(Values),
    /// Accept nothing new, let connections end, and end. Asked for twice, it is [`Request::End`].
    Drain,
    /// Reset all connections and end.
    End,
}

/// Asks an agent to do something.
pub(crate) trait Control {
    /// Waits for the next request. Cancel-safe.
    async fn next(&mut self) -> Request;
}

/// The signals of a process that is nothing but an agent.
pub(super) struct SignalControl<F> {
    pub(super) signals: Signals,
    pub(super) reload: Reload<F>,
}

impl<F: Fn() -> anyhow::Result<Values>> Control for SignalControl<F> {
    async fn next(&mut self) -> Request {
        tokio::select! {
            () = self.signals.next() => {
                tracing::info!("signal received");
                Request::Drain
            }
            (values, changes) = self.reload.next() => {
                changes.report();
                Request::Reconfigure(values)
            }
        }
    }
}
