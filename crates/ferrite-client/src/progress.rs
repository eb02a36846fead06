//! The time limit of replies, which counts only the time in which no byte arrives or leaves.
//!
//! A limit for a whole reply would have to fit the largest value on the slowest network. A dead
//! server would be noticed only after that time.

use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use ferrite_session::Session;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, timeout_at};

/// The time at which a connection last moved a byte.
#[derive(Debug)]
pub(crate) struct Progress {
    begun: Instant,
    /// Microseconds after `begun`.
    last_us: AtomicU64,
    /// Whether the connection has ended or failed.
    is_ended: AtomicBool,
    traffic: Arc<Traffic>,
}

/// The bytes that one or more connections have moved.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    pub(crate) sent_bytes: AtomicU64,
    pub(crate) received_bytes: AtomicU64,
}

impl Progress {
    fn note(&self) {
        let us = u64::try_from(self.begun.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.last_us.store(us, Ordering::Relaxed);
    }

    /// Returns whether the connection has ended or failed. That is known before redis-rs reports it.
    pub(crate) fn is_ended(&self) -> bool {
        self.is_ended.load(Ordering::Relaxed)
    }

    fn last(&self) -> Instant {
        self.begun + Duration::from_micros(self.last_us.load(Ordering::Relaxed))
    }

    /// Waits for a reply. Returns `None` if the connection makes no progress for the time `limit`.
    pub(crate) async fn wait<T>(
        &self,
        limit: Option<Duration>,
        reply: impl Future<Output = T>,
    ) -> Option<T> {
        let mut reply = pin!(reply);
        let asked = Instant::now();
        loop {
            let from = self.last().max(asked);
            let deadline = limit.and_then(|limit| from.checked_add(limit));
            let Some(deadline) = deadline else { return Some(reply.await) };
            if let Ok(done) = timeout_at(deadline, &mut reply).await {
                return Some(done);
            }
            if self.last() <= from {
                return None;
            }
        }
    }
}

/// A session that records its progress.
pub(crate) struct Watched {
    session: Session,
    progress: Arc<Progress>,
}

impl Watched {
    pub(crate) fn new(session: Session, traffic: Arc<Traffic>) -> (Self, Arc<Progress>) {
        let last_us = AtomicU64::new(0);
        let (begun, is_ended) = (Instant::now(), AtomicBool::new(false));
        let progress = Arc::new(Progress { begun, last_us, is_ended, traffic });
        (Self { session, progress: Arc::clone(&progress) }, progress)
    }

    /// Records that bytes were moved, and counts them. Without bytes, the connection has ended.
    fn noted(
        &self,
        moved: io::Result<usize>,
        count: impl FnOnce(&Traffic) -> &AtomicU64,
    ) -> Poll<io::Result<usize>> {
        match moved {
            Ok(bytes @ 1..) => {
                self.progress.note();
                count(&self.progress.traffic).fetch_add(bytes as u64, Ordering::Relaxed);
            }
            Ok(0) | Err(_) => self.progress.is_ended.store(true, Ordering::Relaxed),
        }
        Poll::Ready(moved)
    }
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = out.filled().len();
        let read = ready!(Pin::new(&mut self.session).poll_read(cx, out));
        let moved = read.map(|()| out.filled().len() - before);
        self.noted(moved, |traffic| &traffic.received_bytes).map_ok(|_| ())
    }
}

impl AsyncWrite for Watched {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.session).poll_write(cx, bytes));
        self.noted(written, |traffic| &traffic.sent_bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.session).poll_write_vectored(cx, pieces));
        self.noted(written, |traffic| &traffic.sent_bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.session.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.session).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.session).poll_shutdown(cx)
    }
}
