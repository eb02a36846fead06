//! Calls the commands of a run in-process. Those that the engine refuses are proxied.

use std::io;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::task::Poll;

use tokio::io::AsyncWrite as _;

use super::InProcessSession;
use super::exchange::ExchangeOutcome;
use super::proxy_connection::EMPTY_LINE;
use crate::in_process_engine::{Access, Client, Commands, REPLIES_MAX, RunCommand, range_of};

impl<C: Client> InProcessSession<'_, C> {
    pub(super) async fn call(&mut self, mut run: &[RunCommand]) -> io::Result<ExchangeOutcome> {
        self.refresh_memory();
        if self.active_at != self.engine.seconds() {
            self.show_activity().await;
        }
        while !run.is_empty() {
            let commands = Commands { input: &self.input, run };
            let called = self.record.call(commands, &mut self.replies);
            self.paths.called.fetch_add(called.done as u64, Ordering::Relaxed);
            let (done, rest) = run.split_at(called.done.min(run.len()));
            self.count_input(done);
            self.has_unmarked_writes |= called.wrote;
            self.must_settle |= called.must_settle;
            if called.is_stale {
                self.access = self.record.refresh();
                if self.access == Access::Gone {
                    return Ok(ExchangeOutcome::Answered);
                }
            }
            if called.is_full {
                self.send_replies().await?;
                self.pause_if_due(false).await;
                run = rest;
                continue;
            }
            // Commands that were not called are proxied, so that the engine itself replies.
            let is_closed = called.is_closed || self.access != Access::InProcess;
            let refused = if is_closed { rest.len() } else { called.refused.max(1) };
            let (refused, later) = rest.split_at(refused.min(rest.len()));
            if !refused.is_empty() {
                match self.proxy(refused, None).await? {
                    ExchangeOutcome::Answered if self.access == Access::Gone => {
                        return Ok(ExchangeOutcome::Answered);
                    }
                    ExchangeOutcome::Answered => {}
                    ExchangeOutcome::Disconnected => return Ok(ExchangeOutcome::Disconnected),
                    ExchangeOutcome::OutOfSync { mut unsent } => {
                        unsent.extend_from_slice(&self.input.bytes()[range_of(later)]);
                        return Ok(ExchangeOutcome::OutOfSync { unsent });
                    }
                }
            }
            if self.replies.len() >= REPLIES_MAX {
                self.send_replies().await?;
            }
            run = later;
        }
        Ok(ExchangeOutcome::Answered)
    }

    /// Sends an empty line over the proxy connection, so that the engine notes that the client is
    /// active. With calls alone, the client would seem idle to CLIENT LIST, CLIENT KILL and a
    /// `timeout` that is set later.
    #[cold]
    async fn show_activity(&mut self) {
        self.active_at = self.engine.seconds();
        let writes = &mut self.proxy_writes;
        // A failure does not matter here. The connection accepts no byte in two cases. Either the
        // engine has not read earlier bytes yet, which show activity as well, or the connection has
        // ended, which is detected elsewhere.
        std::future::poll_fn(|cx| {
            Poll::Ready(Pin::new(&mut *writes).poll_write(cx, EMPTY_LINE).is_ready())
        })
        .await;
    }
}
