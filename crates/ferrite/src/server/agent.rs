//! The agent of `ferrite server`, on a thread of its own, so that a busy agent delays neither
//! signals nor the questions to the engine. The code is that of `ferrite agent`.

use anyhow::Context as _;
use ferrite_config::Values;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

use super::ServerError;
use super::error::AgentStart;
use crate::agent::{Control, Request, Setup, serve};

/// A running agent. Once the process ends, so does the agent.
pub(super) struct AgentThread {
    requests: UnboundedSender<Request>,
    result: oneshot::Receiver<anyhow::Result<bool>>,
}

/// The requests of the supervisor.
struct Requests(UnboundedReceiver<Request>);

impl Control for Requests {
    async fn next(&mut self) -> Request {
        self.0.recv().await.unwrap_or(Request::End)
    }
}

impl AgentThread {
    /// Starts an agent. `setup` is called on its thread, because it may take long. Returns when the
    /// agent listens.
    pub(super) async fn start(
        setup: impl FnOnce() -> anyhow::Result<Setup> + Send + 'static,
    ) -> anyhow::Result<Self> {
        let (requests, received) = unbounded_channel();
        let (listens, is_listening) = oneshot::channel();
        let (ended, result) = oneshot::channel();
        let run = move || {
            // Every line of the log that this thread writes has the name of the span.
            let _part = tracing::error_span!("agent").entered();
            let begin = move || {
                let _ = listens.send(());
                Ok(Requests(received))
            };
            let _ = ended.send(setup().and_then(|setup| serve(setup, begin)));
        };
        let thread = std::thread::Builder::new().name("ferrite-agent".into()).spawn(run);
        thread.context(AgentStart)?;
        let mut agent = Self { requests, result };
        match is_listening.await {
            Ok(()) => Ok(agent),
            Err(_) => Err(agent.end_of_thread().await.context(AgentStart)),
        }
    }

    /// Applies those of the settings that can change.
    pub(super) fn reconfigure(&self, values: &Values) {
        let _ = self.requests.send(Request::Reconfigure(values.clone()));
    }

    /// Asks the agent to let connections end, and to end.
    pub(super) fn drain(&self) {
        let _ = self.requests.send(Request::Drain);
    }

    /// Asks the agent to reset all connections, and to end.
    pub(super) fn end(&self) {
        let _ = self.requests.send(Request::End);
    }

    /// Waits until the agent has ended.
    pub(super) async fn ended(&mut self) {
        let _ = (&mut self.result).await;
    }

    /// Waits until the agent has ended, which it was not asked to do. Returns why. Cancel-safe.
    pub(super) async fn failed(&mut self) -> ServerError {
        ServerError::agent(&self.end_of_thread().await)
    }

    async fn end_of_thread(&mut self) -> anyhow::Error {
        match (&mut self.result).await {
            Ok(Err(error)) => error,
            Ok(Ok(_)) => anyhow::anyhow!("it has ended by itself"),
            Err(_) => anyhow::anyhow!("it has panicked; this is a bug"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agent_that_ends_unasked_has_failed_with_a_cause() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        for (end, expected) in [
            (Some(Err(anyhow::anyhow!("no listener"))), "agent: no listener"),
            (Some(Ok(true)), "agent: it has ended by itself"),
            (None, "agent: it has panicked; this is a bug"),
        ] {
            let (ended, result) = oneshot::channel();
            let mut agent = AgentThread { requests: unbounded_channel().0, result };
            match end {
                Some(end) => drop(ended.send(end)),
                None => drop(ended),
            }
            let error = runtime.block_on(agent.failed());
            assert_eq!((error.to_string().as_str(), error.code()), (expected, 1));
        }
    }
}
