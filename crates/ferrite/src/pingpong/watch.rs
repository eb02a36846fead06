//! A thread next to the measured loop that notices a dead peer or a lack of progress.
//!
//! The loop itself has no timeout: reading a clock costs a system call on some hosts, and sleeping
//! with a timeout costs two. The watcher receives the events of the connection manager and checks
//! that the loop's counter grows. To end a connection, the watcher stops the queue pair. All posted
//! requests then complete as flushed, which wakes the loop in either mode.

use std::fmt;
use std::io::{IsTerminal as _, Write as _};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ferrite_verbs::{CmEventKind, CmId, QueuePair};

/// How often the watcher reads the counter: too rarely to affect the percentiles.
const TICK: Duration = Duration::from_millis(100);
/// How long a run must take before its progress is shown.
const PROGRESS_AFTER: Duration = Duration::from_secs(2);

/// Why a connection ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ConnectionLost {
    /// The peer disconnected or died.
    PeerLeft(Rounds),
    /// There was no progress for this time.
    Stuck(Duration, Rounds),
    /// The device is being removed.
    DeviceGone,
    /// The connection manager failed.
    Manager(String),
}

/// How many rounds of a run were done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rounds {
    done: u64,
    /// The number of rounds in the run; 0 if this side does not count them.
    total: u64,
}

impl fmt::Display for Rounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.total == 0 {
            Ok(())
        } else {
            write!(f, " after {} of {} rounds", self.done, self.total)
        }
    }
}

impl ConnectionLost {
    /// Returns the kind of the error in JSON.
    pub(crate) fn kind_name(&self) -> &'static str {
        match self {
            Self::PeerLeft(_) => "disconnected",
            Self::Stuck(..) => "timeout",
            Self::DeviceGone => "device_gone",
            Self::Manager(_) => "failure",
        }
    }
}

impl fmt::Display for ConnectionLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PeerLeft(rounds) => write!(
                f,
                "the peer closed the connection{rounds}: the peer was stopped or has failed; \
                 see its output"
            ),
            Self::Stuck(timeout, rounds) => write!(
                f,
                "no progress for {} s{rounds}: the peer is stopped or unreachable",
                timeout.as_secs_f64()
            ),
            Self::DeviceGone => f.write_str("the RDMA device is being removed"),
            Self::Manager(text) => write!(f, "the connection manager failed: {text}"),
        }
    }
}

impl std::error::Error for ConnectionLost {}

/// The state that the loop and its watcher share.
pub(super) struct Watch {
    total: u64,
    timeout: Duration,
    show_progress: bool,
    done: AtomicU64,
    finished: AtomicBool,
    lost: OnceLock<ConnectionLost>,
    /// Wakes threads that wait for the end of the connection.
    ended: (Mutex<()>, Condvar),
}

impl Watch {
    /// Creates the state for `total` rounds (0 if this side cannot count them). Each round must
    /// take less than `timeout`.
    pub(super) fn new(total: u64, timeout: Duration, show_progress: bool) -> Self {
        Self {
            total,
            timeout,
            show_progress: show_progress && std::io::stderr().is_terminal(),
            done: AtomicU64::new(0),
            finished: AtomicBool::new(false),
            lost: OnceLock::new(),
            ended: (Mutex::new(()), Condvar::new()),
        }
    }

    /// Runs `work` while a thread watches the connection. Disconnects if `work` succeeds.
    ///
    /// # Errors
    ///
    /// Returns the error of `work`. If the connection was lost, returns the reason of the loss
    /// instead: the error of `work` may only name a flushed completion.
    pub(super) fn over<T>(
        &self,
        id: &CmId,
        qp: &QueuePair,
        work: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let result = std::thread::scope(|scope| {
            scope.spawn(|| self.watch(id, qp));
            let result = work();
            self.finished.store(true, Ordering::Relaxed);
            if result.is_ok() {
                // Fails if the peer disconnected first. The event of the disconnection wakes the
                // watcher at once.
                let _ = id.disconnect();
            }
            result
        });
        result.map_err(|error| match self.lost.get() {
            Some(lost) => lost.clone().into(),
            None => error,
        })
    }

    /// Records that a round is done.
    pub(super) fn progress(&self, round: u64) {
        self.done.store(round, Ordering::Relaxed);
    }

    /// Fails if the connection was lost. Polling loops call this, because they may get no
    /// completion.
    pub(super) fn check(&self) -> Result<(), ConnectionLost> {
        self.lost.get().map_or(Ok(()), |lost| Err(lost.clone()))
    }

    /// Waits until the peer leaves. Returns `false` if the peer does not leave within `timeout`.
    ///
    /// # Errors
    ///
    /// The connection was lost for another reason.
    pub(super) fn peer_leaves_within(&self, timeout: Duration) -> Result<bool, ConnectionLost> {
        let (mutex, ended) = &self.ended;
        let guard = mutex.lock().unwrap_or_else(PoisonError::into_inner);
        let _guard = ended.wait_timeout_while(guard, timeout, |()| self.lost.get().is_none());
        match self.lost.get() {
            Some(ConnectionLost::PeerLeft(_)) => Ok(true),
            Some(other) => Err(other.clone()),
            None => Ok(false),
        }
    }

    fn watch(&self, id: &CmId, qp: &QueuePair) {
        let started = Instant::now();
        let mut last_progress = (0, started);
        let lost = loop {
            match id.channel().wait_event(TICK) {
                Ok(Some(event)) if event.id == id.key() => match event.kind {
                    CmEventKind::DISCONNECTED => {
                        break ConnectionLost::PeerLeft(self.rounds());
                    }
                    CmEventKind::DEVICE_REMOVAL => break ConnectionLost::DeviceGone,
                    _ => {}
                },
                // The listener shares the channel. Dropping another client's request rejects it.
                Ok(_) => {}
                Err(error) => break ConnectionLost::Manager(error.to_string()),
            }
            if self.finished.load(Ordering::Relaxed) {
                break ConnectionLost::PeerLeft(self.rounds());
            }
            let now = Instant::now();
            if last_progress.0 != self.done() {
                last_progress = (self.done(), now);
            } else if now - last_progress.1 >= self.timeout {
                break ConnectionLost::Stuck(self.timeout, self.rounds());
            }
            if self.show_progress && now - started > PROGRESS_AFTER {
                eprint!("\r{} of {} rounds ", self.done(), self.total);
                let _ = std::io::stderr().flush();
            }
        };
        if self.show_progress && started.elapsed() > PROGRESS_AFTER {
            eprint!("\r\x1b[K");
        }
        if !self.finished.load(Ordering::Relaxed) {
            let (mutex, ended) = &self.ended;
            let guard = mutex.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = self.lost.set(lost);
            drop(guard);
            ended.notify_all();
            // Fails if the device is gone. The loop then notices the loss in `check`.
            let _ = qp.stop();
        }
    }

    fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    fn rounds(&self) -> Rounds {
        Rounds { done: self.done(), total: self.total }
    }
}
