//! Who notices that the peer died or that nothing moves: a thread beside the measured loop.
//!
//! The loop itself has no timeout: asking a clock costs a system call on some hosts, and sleeping
//! with one costs two. The watcher listens to the connection manager, compares the loop's counter
//! with its own clock, and ends a connection by stopping its queue pair: everything posted
//! completes as flushed, which wakes the loop in either mode.

use std::fmt;
use std::io::{IsTerminal as _, Write as _};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ferrite_verbs::{CmEventKind, CmId, QueuePair};

/// How often the watcher looks at the counter. Rare enough to leave no trace in the percentiles.
const TICK: Duration = Duration::from_millis(100);
/// Runs shorter than this show no progress.
const QUIET: Duration = Duration::from_secs(2);

/// Why a connection ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ConnectionLost {
    /// The peer hung up or died.
    PeerLeft(Rounds),
    /// Nothing moved for so long.
    Stuck(Duration, Rounds),
    /// The device is being removed.
    DeviceGone,
    /// The connection manager failed.
    Manager(String),
}

/// How far a run had come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rounds {
    done: u64,
    /// 0 where this side does not count them.
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
    /// For scripts.
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
                "the peer ended the connection{rounds}: it was stopped, or it failed and its own message says \
                 why"
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

/// What the loop and its watcher share.
pub(super) struct Watch {
    total: u64,
    timeout: Duration,
    show_progress: bool,
    done: AtomicU64,
    finished: AtomicBool,
    ending: OnceLock<ConnectionLost>,
    /// Wakes those who wait for the ending.
    ended: (Mutex<()>, Condvar),
}

impl Watch {
    /// For a run of `total` rounds (0: this side cannot count them), each of which must take less
    /// than `timeout`.
    pub(super) fn new(total: u64, timeout: Duration, show_progress: bool) -> Self {
        Self {
            total,
            timeout,
            show_progress: show_progress && std::io::stderr().is_terminal(),
            done: AtomicU64::new(0),
            finished: AtomicBool::new(false),
            ending: OnceLock::new(),
            ended: (Mutex::new(()), Condvar::new()),
        }
    }

    /// Runs `work` while the connection is watched. If the work fails because the connection ended,
    /// the ending is the error: a flushed work request is only its shadow.
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
                // The peer may have gone first. The event of it wakes the watcher at once.
                let _ = id.disconnect();
            }
            result
        });
        result.map_err(|error| match self.ending.get() {
            Some(ending) => ending.clone().into(),
            None => error,
        })
    }

    /// The loop's sign of life.
    pub(super) fn progress(&self, round: u64) {
        self.done.store(round, Ordering::Relaxed);
    }

    /// Whether the connection ended; for loops that no completion can wake.
    pub(super) fn check(&self) -> Result<(), ConnectionLost> {
        self.ending.get().map_or(Ok(()), |ending| Err(ending.clone()))
    }

    /// Waits for the peer to leave; `false` if it has not within `patience`. Another ending is an
    /// error.
    pub(super) fn peer_leaves_within(&self, patience: Duration) -> Result<bool, ConnectionLost> {
        let (mutex, ended) = &self.ended;
        let guard = mutex.lock().unwrap_or_else(PoisonError::into_inner);
        let _guard = ended.wait_timeout_while(guard, patience, |()| self.ending.get().is_none());
        match self.ending.get() {
            Some(ConnectionLost::PeerLeft(_)) => Ok(true),
            Some(other) => Err(other.clone()),
            None => Ok(false),
        }
    }

    fn watch(&self, id: &CmId, qp: &QueuePair) {
        let started = Instant::now();
        let mut seen = (0, started);
        let ending = loop {
            match id.channel().wait_event(TICK) {
                Ok(Some(event)) if event.id == id.key() => match event.kind {
                    CmEventKind::DISCONNECTED => {
                        break ConnectionLost::PeerLeft(self.rounds());
                    }
                    CmEventKind::DEVICE_REMOVAL => break ConnectionLost::DeviceGone,
                    _ => {}
                },
                // The listener shares the channel: another client is refused by being dropped.
                Ok(_) => {}
                Err(error) => break ConnectionLost::Manager(error.to_string()),
            }
            if self.finished.load(Ordering::Relaxed) {
                break ConnectionLost::PeerLeft(self.rounds());
            }
            let now = Instant::now();
            if seen.0 != self.done() {
                seen = (self.done(), now);
            } else if now - seen.1 >= self.timeout {
                break ConnectionLost::Stuck(self.timeout, self.rounds());
            }
            if self.show_progress && now - started > QUIET {
                eprint!("\r{} of {} rounds ", self.done(), self.total);
                let _ = std::io::stderr().flush();
            }
        };
        if self.show_progress && started.elapsed() > QUIET {
            eprint!("\r\x1b[K");
        }
        if !self.finished.load(Ordering::Relaxed) {
            let (mutex, ended) = &self.ended;
            let guard = mutex.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = self.ending.set(ending);
            drop(guard);
            ended.notify_all();
            // If the device has gone there is nothing to stop, and the loop hears of it by `check`.
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
