//! SIGINT and SIGTERM: the first one ends the measurement, so that the keys can be removed. A
//! second one ends the process at once.

use std::future::Future;

use anyhow::bail;
use tokio::sync::watch;

use super::super::progress::Progress;
use crate::signals::Signals;

/// Tells the threads of a run that a signal has arrived.
#[derive(Clone)]
pub(super) struct Interrupt(watch::Receiver<bool>);

impl Interrupt {
    /// Handles SIGINT and SIGTERM from now on.
    pub(super) fn new(progress: Progress) -> anyhow::Result<Self> {
        let (sender, receiver) = watch::channel(false);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut signals = {
            let _entered = runtime.enter();
            Signals::new()?
        };
        // The thread is never joined: it ends with the process.
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            runtime.block_on(async {
                signals.next().await;
                progress.print_above(
                    "ferrite: stopping and removing the keys; a second signal stops at once",
                );
                let _ = sender.send(true);
                signals.next().await;
                std::process::exit(1);
            });
        })?;
        Ok(Self(receiver))
    }

    /// Runs `work`. Fails when a signal arrives first.
    pub(super) async fn unless_interrupted<T>(
        &self,
        work: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<T> {
        let mut interrupted = self.0.clone();
        tokio::select! {
            biased; // no more work after a signal
            _ = interrupted.wait_for(|is_interrupted| *is_interrupted) => bail!("interrupted"),
            done = work => done,
        }
    }
}
