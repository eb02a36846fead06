//! The open connections of the admin port.
//!
//! Beyond the limit, the connection that was unused for longest is closed. So clients that send
//! nothing, and clients that do not read their answers, cannot lock out a scraper.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::task::AbortHandle;

/// The maximum number of open connections. A scraper needs one.
const CONNECTIONS: usize = 16;

/// The open connections, and the number of uses so far, which is the clock for `last_use`.
#[derive(Debug, Default)]
pub(crate) struct Connections {
    open: Vec<(AbortHandle, Arc<Activity>)>,
    uses: Arc<AtomicU64>,
}

/// When a connection was last used, that is, accepted or given a request.
#[derive(Debug)]
pub(crate) struct Activity {
    last_use: AtomicU64,
    is_answering: AtomicBool,
    uses: Arc<AtomicU64>,
}

impl Connections {
    /// Returns the activity of a new connection.
    pub(crate) fn new_activity(&self) -> Arc<Activity> {
        let last_use = self.uses.fetch_add(1, Ordering::Relaxed).into();
        let (is_answering, uses) = (false.into(), Arc::clone(&self.uses));
        Arc::new(Activity { last_use, is_answering, uses })
    }

    /// Adds a connection, and closes another one if there are too many. Connections whose request
    /// is being answered are closed last.
    pub(crate) fn add(&mut self, connection: AbortHandle, activity: Arc<Activity>) {
        self.open.retain(|(connection, _)| !connection.is_finished());
        if self.open.len() >= CONNECTIONS {
            let oldest = self.open.iter().enumerate().min_by_key(|(_, (_, activity))| {
                let is_answering = activity.is_answering.load(Ordering::Relaxed);
                (is_answering, activity.last_use.load(Ordering::Relaxed))
            });
            if let Some((index, _)) = oldest {
                self.open.swap_remove(index).0.abort();
            }
        }
        self.open.push((connection, activity));
    }
}

impl Activity {
    /// Notes that a request has arrived.
    pub(crate) fn begin(&self) {
        self.is_answering.store(true, Ordering::Relaxed);
        self.last_use.store(self.uses.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Notes that the answer to the request is ready. The client may not have read it yet.
    pub(crate) fn end(&self) {
        self.is_answering.store(false, Ordering::Relaxed);
    }
}
