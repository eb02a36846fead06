//! When a session is to end although neither its client nor its engine has hung up.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::pump::Moved;
use crate::sessions::{Entry, Open};

/// How long a client whose connection the engine has closed may take nothing of what was said
/// before.
const STALLED: Duration = Duration::from_secs(2);
/// A session that has moved nothing for this long has nothing under way.
const QUIET: Duration = Duration::from_millis(100);
/// The same for a session whose client has sent a part of a command: the rest may be on its way,
/// but it is no work of the engine's.
const QUIET_PARTIAL: Duration = Duration::from_secs(1);

/// How sessions hear of the gateway's end.
#[derive(Clone)]
pub(crate) struct Ending {
    pub(crate) ended: watch::Receiver<bool>,
    pub(crate) engine_stays: bool,
}

/// Ready when a session is to end: somebody wants it to, or the gateway ends and nothing is under
/// way.
pub(crate) async fn over(open: &Open, ending: Ending) {
    tokio::select! {
        () = quiet(&open.entry.moved, ending) => {}
        () = ended(&open.entry) => {}
    }
}

/// Ready when somebody wants a session to end, or when the engine has freed its client and the
/// client takes no more of what was said before.
async fn ended(entry: &Entry) {
    while !entry.is_killed.load(Ordering::Relaxed) {
        if entry.is_gone() {
            return stalled(&entry.moved, STALLED).await;
        }
        entry.ended.notified().await;
    }
}

/// Ready when nothing has gone to the client for this long.
async fn stalled(moved: &Moved, time: Duration) {
    let mut last = None;
    loop {
        let (_, to_client) = moved.both();
        if last.replace(to_client) == Some(to_client) {
            return;
        }
        sleep(time).await;
    }
}

/// Ready when the gateway ends and nothing has moved for a moment; if the engine goes on, it must
/// have had the last word.
async fn quiet(moved: &Moved, mut ending: Ending) {
    let _ = ending.ended.wait_for(|ended| *ended).await; // a gateway that is gone has ended
    let (mut last, mut since) = (moved.total(), Instant::now());
    loop {
        let is_partial = ending.engine_stays && moved.is_partial.load(Ordering::Relaxed);
        let is_quiet = since.elapsed() >= if is_partial { QUIET_PARTIAL } else { QUIET };
        if is_quiet && !(ending.engine_stays && moved.is_asking.load(Ordering::Relaxed)) {
            return;
        }
        sleep(QUIET / 5).await;
        let now = moved.total();
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
}
