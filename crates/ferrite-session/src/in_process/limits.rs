//! Limits for the memory that a client can make a session hold.
//!
//! The engine limits its own clients by `client-output-buffer-limit`, `client-query-buffer-limit`
//! and `maxmemory-clients`. Replies and commands that a session holds are not in the engine's
//! buffers, so the same limits are applied here.

use std::future::Future;
use std::io;
use std::time::Duration;

use ferrite_fabric::LogLimit;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout, timeout_at};

use super::InProcessSession;
use crate::disconnect_log::log_disconnect;
use crate::in_process_engine::{BEFORE_AUTH, Client, ClientLimits, REPLIES_MAX};

/// How many unauthenticated sessions may use the engine at a time. Each runs a few commands, then
/// the next session follows.
const BEFORE_AUTH_SESSIONS: usize = 2;
/// How long a session keeps its permit at most. Usually the engine rejects the client's commands at
/// once. But the client may have authenticated without the session's knowledge, and may then run a
/// command that blocks.
const BEFORE_AUTH_PERMIT_TIME: Duration = Duration::from_millis(20);

/// The queue of unauthenticated sessions that want to use the engine, in the order of their
/// requests. However many clients without a password send commands, other clients wait for only a
/// few of them.
#[derive(Debug)]
pub(crate) struct BeforeAuthQueue(Semaphore);

impl Default for BeforeAuthQueue {
    fn default() -> Self {
        Self(Semaphore::new(BEFORE_AUTH_SESSIONS))
    }
}

/// Awaits an event. Releases the permit, if there is one, after [`BEFORE_AUTH_PERMIT_TIME`] at the
/// latest.
pub(super) async fn run_with_permit<T>(
    permit: Option<SemaphorePermit<'_>>,
    event: impl Future<Output = T>,
) -> T {
    let mut event = std::pin::pin!(event);
    if permit.is_some()
        && let Ok(done) = timeout(BEFORE_AUTH_PERMIT_TIME, &mut event).await
    {
        return done;
    }
    drop(permit);
    event.await
}

/// Watches how many bytes a client leaves unread, and for how long.
#[derive(Default)]
pub(super) struct OutputGuard {
    over_soft_since: Option<Instant>,
    soft_time: Duration,
    unread: usize,
}

impl OutputGuard {
    /// Notes how many bytes are unread now.
    ///
    /// # Errors
    /// Returns an error if the client is over the hard limit, or over the soft limit for too long.
    fn note(&mut self, unread: usize, limits: &ClientLimits) -> io::Result<()> {
        if limits.hard_bytes > 0 && unread > limits.hard_bytes {
            return Err(limit_exceeded("hard", unread));
        }
        if limits.soft_bytes == 0 || unread <= limits.soft_bytes {
            self.over_soft_since = None;
            return Ok(());
        }
        (self.soft_time, self.unread) = (limits.soft_time, unread);
        let since = *self.over_soft_since.get_or_insert_with(Instant::now);
        if since.elapsed() >= limits.soft_time {
            Err(limit_exceeded("soft", unread))
        } else {
            Ok(())
        }
    }

    /// Waits for an event of this client, at most until the client has been over the soft limit for
    /// too long.
    pub(super) async fn watch<T>(
        &self,
        client: Option<u64>,
        event: impl Future<Output = io::Result<T>>,
    ) -> io::Result<T> {
        let Some(since) = self.over_soft_since else { return event.await };
        timeout_at(since + self.soft_time, event).await.unwrap_or_else(|_| {
            let error = limit_exceeded("soft", self.unread);
            log_output_limit(client, &error);
            Err(error)
        })
    }
}

fn limit_exceeded(which: &str, unread: usize) -> io::Error {
    io::Error::other(format!(
        "client is over the {which} client-output-buffer-limit with {unread} unread bytes"
    ))
}

fn log_output_limit(client: Option<u64>, error: &io::Error) {
    static LINES: LogLimit = LogLimit::new();
    log_disconnect(&LINES, client, error);
}

impl<'a, C: Client> InProcessSession<'a, C> {
    /// Waits until this session may use the engine. An authenticated session needs no permit.
    /// Before authentication, the client must first read most of its replies, so that no session
    /// waits for its client while it holds a permit.
    pub(super) async fn acquire_permit(&mut self) -> io::Result<Option<SemaphorePermit<'a>>> {
        if self.access.is_authenticated() {
            return Ok(None);
        }
        self.write_replies_below(BEFORE_AUTH).await?;
        Ok(self.paths.before_auth.0.acquire().await.ok()) // the semaphore is never closed
    }

    /// Checks the unsent replies against the engine's limits. Fewer than [`REPLIES_MAX`] bytes are
    /// always allowed.
    pub(super) fn check_output(&mut self) -> io::Result<()> {
        if self.replies.len() < REPLIES_MAX {
            self.output.over_soft_since = None;
            return Ok(());
        }
        let limits = self.engine.client_limits();
        self.output
            .note(self.replies.len(), &limits)
            .inspect_err(|error| log_output_limit(self.record.id(), error))
    }

    /// Returns the next, larger limit for reading ahead while the client is blocked in the engine.
    /// The session must keep reading to notice that the client disconnects. The engine reads ahead
    /// for the same reason.
    ///
    /// # Errors
    /// Returns an error if the client is over `client-query-buffer-limit`.
    pub(super) fn read_further_ahead(&self, ahead_max: usize) -> io::Result<usize> {
        let limit = self.engine.client_limits().query_bytes;
        if limit > 0 && ahead_max >= limit {
            let error = io::Error::other("client is over client-query-buffer-limit");
            static LINES: LogLimit = LogLimit::new();
            log_disconnect(&LINES, self.record.id(), &error);
            return Err(error);
        }
        let more = ahead_max.saturating_mul(2);
        Ok(if limit > 0 { more.min(limit) } else { more })
    }

    /// Records the memory that this session holds, and evicts the largest session if all sessions
    /// together hold too much.
    ///
    /// # Errors
    /// Returns an error if this session was evicted.
    pub(super) fn note_held(&self) -> io::Result<()> {
        let held = &self.open.entry.held;
        held.set(
            self.input.held_bytes() + self.replies.held_bytes() + self.engine_bytes.capacity(),
        );
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
        assert!(guard.note(usize::MAX, &limits(0, 0)).is_ok(), "zero means no limit");
    }

    #[tokio::test(start_paused = true)]
    async fn disconnects_clients_that_stay_over_the_soft_limit() {
        let mut guard = OutputGuard::default();
        let forever = std::future::pending::<io::Result<()>>;
        guard.note(1001, &limits(0, 1000)).expect("over the limit, but not for long");
        guard.note(999, &limits(0, 1000)).expect("below the limit again");
        guard.note(1001, &limits(0, 1000)).expect("over the limit, but not for long");
        assert!(guard.watch(None, std::future::ready(Ok(()))).await.is_ok());
        let error = guard.watch(None, forever()).await.expect_err("over the limit for too long");
        assert!(error.to_string().ends_with("with 1001 unread bytes"), "{error}");
        assert!(guard.note(1001, &limits(0, 1000)).is_err());
    }
}
