//! Decides when a session must end although neither its client nor its proxy connection has closed:
//! it was killed, the engine frees its client, or the gateway shuts down.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::pump::Moved;
use crate::sessions::{Entry, OpenSession};

/// How long a client may read nothing after the engine has freed it, or was asked to close it.
/// Replies that were made before are still delivered to a client that keeps reading.
const STALL_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a session must have moved no bytes before it may end when the gateway shuts down.
const QUIET_TIME: Duration = Duration::from_millis(100);
/// The quiet time, instead of [`QUIET_TIME`], of a session whose client has sent only a part of a
/// command to an engine that keeps running. The rest may still arrive, but the engine is not
/// working on it yet.
const QUIET_TIME_PARTIAL: Duration = Duration::from_secs(1);

/// How long a killed session may wait for the reply to the command that the engine is running.
const LAST_REPLY_TIMEOUT: Duration = Duration::from_secs(1);

/// Tells sessions that the gateway shuts down.
#[derive(Clone)]
pub(crate) struct Shutdown {
    /// Becomes true when the gateway shuts down.
    pub(crate) signal: watch::Receiver<bool>,
    pub(crate) engine_keeps_running: bool,
}

/// Waits until a session must end: it was killed, the engine has freed its client or was asked to
/// close it, or the gateway shuts down and nothing is in flight.
pub(crate) async fn wait_for_end(open: &OpenSession, shutdown: Shutdown) {
    tokio::select! {
        () = wait_for_quiet_shutdown(&open.entry.moved, shutdown) => {}
        () = wait_for_kill(&open.entry) => {}
    }
}

/// Waits until one of these happens:
/// - The session is killed, and the engine has begun to reply to the pending command, or
///   [`LAST_REPLY_TIMEOUT`] is over.
/// - The engine has freed the session's client, or was asked to close it, and the client has
///   stopped reading the replies that were made before.
///
/// This does not wait until a client that the engine was asked to close is freed: engines never
/// free a client that has turned its replies off and kills itself.
async fn wait_for_kill(entry: &Entry) {
    while !entry.is_killed.load(Ordering::Relaxed) {
        if entry.is_gone() || entry.is_closing.load(Ordering::Relaxed) {
            return wait_for_stall(&entry.moved, STALL_TIMEOUT).await;
        }
        entry.ended.notified().await;
    }
    wait_for_reply(&entry.moved).await;
}

/// Waits until the engine has begun to reply to the client's pending command, at most
/// [`LAST_REPLY_TIMEOUT`]. Returns at once if [`pump`](crate::pump::pump) has sent no command that
/// waits for a reply. The pump sends no further command to the engine meanwhile.
///
/// A client that kills its own session gets the reply first, as with CLIENT KILL. A session that
/// only copies bytes cannot know who has killed it, so it waits in any case.
async fn wait_for_reply(moved: &Moved) {
    let (until, (_, before)) = (Instant::now() + LAST_REPLY_TIMEOUT, moved.both());
    let is_pending = || moved.is_asking.load(Ordering::Relaxed) && moved.both().1 == before;
    while is_pending() && Instant::now() < until {
        sleep(QUIET_TIME / 20).await;
    }
}

/// Waits until no byte has gone to the client for this long.
async fn wait_for_stall(moved: &Moved, time: Duration) {
    let mut last = None;
    loop {
        let (_, to_client) = moved.both();
        if last.replace(to_client) == Some(to_client) {
            return;
        }
        sleep(time).await;
    }
}

/// Waits until the gateway shuts down and the session has been quiet for [`QUIET_TIME`]. If the
/// engine keeps running, waits longer for the rest of a command ([`QUIET_TIME_PARTIAL`]), and also
/// waits until the engine has begun to reply to a pending command.
async fn wait_for_quiet_shutdown(moved: &Moved, mut shutdown: Shutdown) {
    let _ = shutdown.signal.wait_for(|ended| *ended).await; // a dropped gateway has shut down, too
    let (mut last, mut since) = (moved.total(), Instant::now());
    loop {
        let is_partial = shutdown.engine_keeps_running && moved.is_partial.load(Ordering::Relaxed);
        let is_quiet = since.elapsed() >= if is_partial { QUIET_TIME_PARTIAL } else { QUIET_TIME };
        if is_quiet && !(shutdown.engine_keeps_running && moved.is_asking.load(Ordering::Relaxed)) {
            return;
        }
        sleep(QUIET_TIME / 5).await;
        let now = moved.total();
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
}
