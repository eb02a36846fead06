//! What a client can make a session keep.
//!
//! The engine limits its own clients by `client-output-buffer-limit` and `maxmemory-clients`.
//! Replies that were made in-process are not in the engine's buffers, so the same limits are
//! applied here.

use std::future::Future;
use std::io;
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout, timeout_at};

use super::{Client, ClientLimits, InProcessSession, REPLIES_MAX};

/// Before authentication: unread replies, commands that have not ended, and input that is read
/// ahead, each. Together with what the session itself needs it stays below 64 KiB.
pub(super) const BEFORE_AUTH: usize = 8 << 10;

/// Sessions before authentication that use the engine at a time. Each has a few commands there,
/// then the next has its turn.
const BEFORE_AUTH_AT_A_TIME: usize = 2;
/// How long a session keeps the others waiting. Engines refuse a client without a password at once;
/// but where it cannot be told whether a client has one, it may run a command that blocks.
const BEFORE_AUTH_TIME: Duration = Duration::from_millis(20);

/// Who may use the engine before authentication, in the order in which they ask. However many
/// clients without a password send commands, the others wait for few of them.
#[derive(Debug)]
pub(crate) struct BeforeAuthQueue(Semaphore);

impl Default for BeforeAuthQueue {
    fn default() -> Self {
        Self(Semaphore::new(BEFORE_AUTH_AT_A_TIME))
    }
}

/// Awaits an event that was waited for in that queue, if it was.
pub(super) async fn within_turn<T>(
    permit: Option<SemaphorePermit<'_>>,
    event: impl Future<Output = T>,
) -> T {
    let mut event = std::pin::pin!(event);
    if permit.is_some()
        && let Ok(done) = timeout(BEFORE_AUTH_TIME, &mut event).await
    {
        return done;
    }
    drop(permit);
    event.await
}

/// Watches how much a client leaves unread, and for how long.
#[derive(Default)]
pub(super) struct OutputGuard {
    over_soft_since: Option<Instant>,
    soft_time: Duration,
}

impl OutputGuard {
    /// Notes how much is unread now.
    fn note(&mut self, unread: usize, limits: &ClientLimits) -> io::Result<()> {
        if limits.hard_bytes > 0 && unread > limits.hard_bytes {
            return Err(over("hard", unread));
        }
        if limits.soft_bytes == 0 || unread <= limits.soft_bytes {
            self.over_soft_since = None;
            return Ok(());
        }
        self.soft_time = limits.soft_time;
        let since = *self.over_soft_since.get_or_insert_with(Instant::now);
        if since.elapsed() >= limits.soft_time { Err(over("soft", unread)) } else { Ok(()) }
    }

    /// Waits for an event, at most until the client has been over the soft limit for too long.
    pub(super) async fn watch<T>(
        &self,
        event: impl Future<Output = io::Result<T>>,
    ) -> io::Result<T> {
        match self.over_soft_since {
            None => event.await,
            Some(since) => timeout_at(since + self.soft_time, event)
                .await
                .unwrap_or_else(|_| Err(over("soft", 0))),
        }
    }
}

fn over(which: &str, unread: usize) -> io::Error {
    io::Error::other(format!(
        "client is over the {which} limit of client-output-buffer-limit: {unread} bytes are unread"
    ))
}

impl<'a, C: Client> InProcessSession<'a, C> {
    /// Waits until this session may use the engine: before authentication, the client must have
    /// read most replies, and then others go first. Nobody who has the permit waits for a client.
    pub(super) async fn wait_for_turn(&mut self) -> io::Result<Option<SemaphorePermit<'a>>> {
        if self.access.is_authenticated() {
            return Ok(None);
        }
        self.write_replies_below(BEFORE_AUTH).await?;
        Ok(self.paths.before_auth.0.acquire().await.ok()) // it is never closed
    }

    /// Holds replies that were just made to the engine's limits.
    pub(super) fn check_output(&mut self) -> io::Result<()> {
        if self.replies.len() < REPLIES_MAX {
            self.output.over_soft_since = None;
            return Ok(());
        }
        let limits = self.engine.client_limits();
        self.output.note(self.replies.len(), &limits).inspect_err(|error| {
            tracing::warn!(client = self.record.id(), %error, "client disconnected");
        })
    }

    /// Returns how much may be read ahead of a client that waits in the engine, when so much was
    /// not enough to see its end: the engine reads on meanwhile, too.
    pub(super) fn read_further_ahead(&self, ahead_max: usize) -> io::Result<usize> {
        let limit = self.engine.client_limits().query_bytes;
        if limit > 0 && ahead_max >= limit {
            let error = io::Error::other("client is over client-query-buffer-limit");
            tracing::warn!(client = self.record.id(), %error, "client disconnected");
            return Err(error);
        }
        let more = ahead_max.saturating_mul(2);
        Ok(if limit > 0 { more.min(limit) } else { more })
    }

    /// Records what this session holds, and lets the largest go if all together hold too much.
    ///
    /// # Errors
    /// The session itself was chosen: it is over.
    pub(super) fn note_held(&self) -> io::Result<()> {
        let held = &self.open.entry.held;
        held.set(self.input.held_bytes() + self.replies.held_bytes() + self.heard.capacity());
        if held.total() > REPLIES_MAX {
            let limit = self.engine.client_limits().all_clients_bytes;
            if limit > 0 && held.total() > limit {
                self.open.evict_largest();
            }
        }
        if held.is_evicted() { Err(io::ErrorKind::OutOfMemory.into()) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(hard_bytes: usize, soft_bytes: usize) -> ClientLimits {
        let soft_time = Duration::from_millis(20);
        ClientLimits { hard_bytes, soft_bytes, soft_time, ..ClientLimits::default() }
    }

    #[test]
    fn disconnects_beyond_the_hard_limit() {
        let mut guard = OutputGuard::default();
        assert!(guard.note(1000, &limits(1000, 0)).is_ok());
        assert!(guard.note(1001, &limits(1000, 0)).is_err());
        assert!(guard.note(usize::MAX, &limits(0, 0)).is_ok(), "no limit");
    }

    #[tokio::test(start_paused = true)]
    async fn disconnects_who_stays_over_the_soft_limit() {
        let mut guard = OutputGuard::default();
        let forever = std::future::pending::<io::Result<()>>;
        guard.note(1001, &limits(0, 1000)).expect("not for long yet");
        guard.note(999, &limits(0, 1000)).expect("below again");
        guard.note(1001, &limits(0, 1000)).expect("not for long yet");
        assert!(guard.watch(std::future::ready(Ok(()))).await.is_ok());
        assert!(guard.watch(forever()).await.is_err());
        assert!(guard.note(1001, &limits(0, 1000)).is_err());
    }
}
