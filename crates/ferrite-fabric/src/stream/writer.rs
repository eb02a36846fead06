//! The writing side of a stream: turns bytes into messages.
//!
//! Over RDMA, a write copies the bytes into registered memory, queues the message and returns,
//! without waiting for an acknowledgement. A few bytes are sent inline instead. The link's queue
//! limits how much may wait (`send_queue_messages`, `send_queue_bytes`), and the peer's window
//! limits how much is in flight. Over TCP, the bytes go to the kernel directly, unless earlier
//! messages are still queued. The caller keeps the bytes that the kernel does not accept.

use std::io::{self, IoSlice};
use std::task::{Context, Poll, ready};

use tokio::task::coop;

use super::CHANNEL;
use crate::error::ErrorKind;
use crate::handles::{Link, Transport};
use crate::link::tcp::CALLERS_SLICES;
use crate::mem::{Buf, ErrorKind as PoolErrorKind, Purpose};

/// Maximum number of bytes to copy at a time, which is a block of the pool. Several blocks are
/// being sent while the next one is copied.
const CHUNK: usize = 64 << 10;
/// Up to this size, bytes are gathered on the stack to be sent inline.
const SMALL: usize = 256;
/// Every device that supports inline sends accepts at least this many bytes.
const INLINE_MIN: usize = 32;

pub(super) struct Writer {
    pub(super) link: Link,
    chunk: usize,
    /// Whether this side writes no more.
    pub(super) over: bool,
}

impl Writer {
    pub(super) fn new(link: Link) -> Self {
        let most = usize::try_from(link.peer_hello().max_message_bytes).unwrap_or(CHUNK);
        Self { link, chunk: most.clamp(1, CHUNK), over: false }
    }

    /// Sends a part of the slices, and at least one byte unless they are empty. Returns the number
    /// of bytes sent.
    pub(super) fn poll_write(
        &self,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.over {
            let what = "this side has shut down the stream";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::BrokenPipe, what)));
        }
        let total = slices.iter().map(|slice| slice.len()).sum();
        if total == 0 {
            return Poll::Ready(Ok(0));
        }
        let budget = ready!(coop::poll_proceed(cx));
        let written = ready!(self.poll_send(cx, slices, total))?;
        budget.made_progress();
        Poll::Ready(Ok(written))
    }

    /// Sends a part of `buf` without a copy. Returns the number of bytes sent.
    pub(super) fn poll_write_buf(
        &self,
        cx: &mut Context<'_>,
        buf: &Buf,
    ) -> Poll<io::Result<usize>> {
        // Over TCP, `poll_write` does not copy either.
        if self.over || buf.is_empty() || self.link.transport() != Transport::Rdma {
            return self.poll_write(cx, &[IoSlice::new(buf)]);
        }
        let budget = ready!(coop::poll_proceed(cx));
        let (shared, len) = (self.link.shared(), buf.len().min(self.chunk));
        loop {
            ready!(shared.poll_room(len as u64, cx.waker()))?;
            match shared.post(CHANNEL, buf.slice(..len)) {
                Ok(()) => break,
                // Another user of the link has filled the queue meanwhile.
                Err((_, error)) if error.kind() == ErrorKind::Full => {}
                Err((_, error)) => return Poll::Ready(Err(error.into())),
            }
        }
        budget.made_progress();
        Poll::Ready(Ok(len))
    }

    fn poll_send(
        &self,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
        total: usize,
    ) -> Poll<io::Result<usize>> {
        if total <= SMALL && self.send_now(slices, total)? {
            return Poll::Ready(Ok(total));
        }
        let shared = self.link.shared();
        let first = &slices[..slices.len().min(CALLERS_SLICES)];
        let len = first.iter().map(|slice| slice.len()).sum::<usize>();
        if len > 0
            && let Some(sent) = ready!(shared.poll_send_through(CHANNEL, first, len, cx.waker()))?
        {
            return Poll::Ready(Ok(sent));
        }
        let len = total.min(self.chunk);
        loop {
            ready!(shared.poll_room(len as u64, cx.waker()))?;
            let mut buf = match self.link.pool().take_uncharged(len, Purpose::Send) {
                Ok(buf) => buf,
                Err(error)
                    if matches!(
                        error.kind(),
                        PoolErrorKind::Exhausted | PoolErrorKind::Refused
                    ) =>
                {
                    return self.poll_without_memory(cx, slices, total);
                }
                Err(error) => return Poll::Ready(Err(crate::Error::from(error).into())),
            };
            gather(slices, &mut buf);
            match shared.post(CHANNEL, buf.freeze()) {
                Ok(()) => return Poll::Ready(Ok(len)),
                // Another user of the link has filled the queue meanwhile.
                Err((_, error)) if error.kind() == ErrorKind::Full => {}
                Err((_, error)) => return Poll::Ready(Err(error.into())),
            }
        }
    }

    /// Sends the first `len` bytes at once, if possible: inline over RDMA, or to the kernel over
    /// TCP. Returns whether they were sent.
    fn send_now(&self, slices: &[IoSlice<'_>], len: usize) -> io::Result<bool> {
        let mut gathered = [0; SMALL];
        let bytes = match slices {
            [only] => &only[..len],
            _ => {
                gather(slices, &mut gathered[..len]);
                &gathered[..len]
            }
        };
        Ok(self.link.shared().send_now(CHANNEL, bytes)?)
    }

    /// Handles a pool that is exhausted or cannot grow at the moment. This is not a failure,
    /// because operations in progress will return blocks.
    #[cold]
    fn poll_without_memory(
        &self,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
        total: usize,
    ) -> Poll<io::Result<usize>> {
        if self.link.shared().poll_progress(cx.waker()) {
            return Poll::Pending;
        }
        // Other links hold all the memory, and their progress does not wake this task. A few inline
        // bytes need no memory of the pool.
        let len = total.min(INLINE_MIN);
        if self.send_now(slices, len)? {
            return Poll::Ready(Ok(len));
        }
        self.link.shared().wait_for_memory(cx.waker());
        Poll::Pending
    }

    /// Tells the peer that nothing more will be written.
    pub(super) fn shutdown(&mut self) -> io::Result<()> {
        if std::mem::replace(&mut self.over, true) {
            return Ok(());
        }
        match self.link.shared().post_end(CHANNEL) {
            // If the link is already closed, the peer needs no notice.
            Err(error) if error.kind() != ErrorKind::Closed => Err(error.into()),
            _ => Ok(()),
        }
    }
}

/// Fills `out` from the slices, which must contain at least as many bytes.
fn gather(slices: &[IoSlice<'_>], mut out: &mut [u8]) {
    for slice in slices {
        let len = slice.len().min(out.len());
        let (part, rest) = out.split_at_mut(len);
        part.copy_from_slice(&slice[..len]);
        out = rest;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Wake, Waker};

    use crate::{Fabric, Rdma};

    struct Flag(AtomicBool);

    impl Wake for Flag {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    /// Covers a link that ends between a failed attempt to send and the request to wait for memory.
    #[test]
    fn a_writer_that_waits_for_memory_is_woken_although_the_link_has_ended() {
        let fabric = Fabric::system().rdma(Rdma::Forbid).build().expect("a fabric");
        let address = "127.0.0.1:0".parse().expect("an address");
        let mut listener = fabric.listen(address).expect("a listener");
        let connecting = fabric.connect(listener.local_addr());
        let made = fabric.block_on(async { futures_util::join!(connecting, listener.accept()) });
        let (here, there) = (made.0.expect("a link"), made.1.expect("a link"));
        here.abort();
        there.abort();
        while fabric.stats().links > 0 {
            fabric.poll();
        }
        let flag = Arc::new(Flag(AtomicBool::new(false)));
        here.shared().wait_for_memory(&Waker::from(Arc::clone(&flag)));
        assert!(flag.0.load(Ordering::SeqCst));
    }
}
