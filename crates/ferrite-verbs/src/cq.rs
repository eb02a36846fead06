//! Completion queues, and the channels that wake a thread when a queue has completions.

use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rustix::io::Errno;

use crate::context::{Context, borrow_fd, exceeded, set_nonblocking, wait_readable};
use crate::error::{ENTRY_BYTES, Error, ErrorKind, last_errno, set_errno};
use crate::sys;
use crate::wc::WorkCompletion;

/// A channel that delivers events of completion queues. Clones share it. Many queues may use one
/// channel.
#[derive(Clone)]
pub struct CompletionChannel(Arc<ChannelInner>);

struct ChannelInner {
    raw: NonNull<sys::ibv_comp_channel>,
    context: Context,
}

// SAFETY: a channel is an fd with a handle; any thread may use it.
unsafe impl Send for ChannelInner {}
// SAFETY: as above.
unsafe impl Sync for ChannelInner {}

impl Drop for ChannelInner {
    fn drop(&mut self) {
        // SAFETY: we created the channel, and it is destroyed once, after every queue on it (each
        // holds an `Arc`).
        let rc = unsafe { (self.context.verbs().ibv.ibv_destroy_comp_channel)(self.raw.as_ptr()) };
        crate::leak::count_unless_released(rc);
    }
}

impl Context {
    /// Creates a channel for completion events.
    ///
    /// # Errors
    /// If the process has no file descriptors left, or the device was removed.
    pub fn create_completion_channel(&self) -> Result<CompletionChannel, Error> {
        // SAFETY: the context is open.
        let raw = unsafe { (self.verbs().ibv.ibv_create_comp_channel)(self.raw()) };
        let raw = NonNull::new(raw)
            .ok_or_else(|| Error::last("ibv_create_comp_channel", self.device().name()))?;
        let channel = CompletionChannel(Arc::new(ChannelInner { raw, context: self.clone() }));
        set_nonblocking(channel.as_fd(), "completion channel")?;
        Ok(channel)
    }

    /// Creates a completion queue for at least `depth` entries.
    ///
    /// With a `channel`, the queue can wake waiting threads. `vector` chooses the interrupt, modulo
    /// the number of completion vectors of the device.
    ///
    /// # Errors
    /// [`ErrorKind::DeviceLimit`] if the device does not support that depth; otherwise lack of
    /// memory, a cgroup's limit, or a device that was removed.
    pub fn create_completion_queue(
        &self,
        depth: u32,
        channel: Option<&CompletionChannel>,
        vector: u32,
    ) -> Result<CompletionQueue, Error> {
        static NEXT_KEY: AtomicUsize = AtomicUsize::new(1);
        let key = NEXT_KEY.fetch_add(1, Ordering::Relaxed);
        let raw_channel = channel.map_or(std::ptr::null_mut(), |channel| channel.0.raw.as_ptr());
        let vector = (vector % self.completion_vectors()).cast_signed();
        set_errno(0);
        // SAFETY: the context is open. The channel is alive, and the queue keeps it alive. The
        // queue's context pointer is only a number that is never dereferenced.
        let raw = unsafe {
            let key = std::ptr::without_provenance_mut(key);
            (self.verbs().ibv.ibv_create_cq)(
                self.raw(),
                depth.cast_signed(),
                key,
                raw_channel,
                vector,
            )
        };
        let raw = NonNull::new(raw).ok_or_else(|| {
            let error = Error::last(
                "ibv_create_cq",
                format!("{depth} entries on {}", self.device().name()),
            );
            let limit = self.limits().ok().and_then(|l| exceeded(&[("depth", depth, l.max_cqe)]));
            match limit {
                Some(limit) => error.with_kind(ErrorKind::DeviceLimit).because(limit),
                None => error.or_memlock(u64::from(depth) * ENTRY_BYTES),
            }
        })?;
        let inner =
            QueueInner { raw, key: CqKey(key), channel: channel.cloned(), context: self.clone() };
        Ok(CompletionQueue(Arc::new(inner)))
    }
}

impl CompletionChannel {
    /// Returns the key of the next queue that has an event, without waiting; `None` if no queue has
    /// one. Each [`CompletionQueue::request_notify`] gives at most one event. After an event,
    /// request the next one, then poll until the queue is empty.
    ///
    /// # Errors
    /// If the device was removed.
    pub fn next_event(&self) -> Result<Option<CqKey>, Error> {
        let ibv = self.0.context.verbs().ibv;
        let (mut cq, mut key) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the channel is alive, and `cq` and `key` are valid for the write.
        let rc = unsafe { (ibv.ibv_get_cq_event)(self.0.raw.as_ptr(), &raw mut cq, &raw mut key) };
        if rc != 0 {
            return match last_errno() {
                Errno::AGAIN | Errno::INTR => Ok(None),
                errno => Err(Error::os("ibv_get_cq_event", errno, "")),
            };
        }
        // SAFETY: ibv_destroy_cq waits for this acknowledgement, so `cq` is still valid.
        unsafe { (ibv.ibv_ack_cq_events)(cq, 1) };
        Ok(Some(CqKey(key.addr())))
    }

    /// Returns the key of the next queue that has an event, waiting up to `timeout`; `None` if
    /// `timeout` passed, or if another thread took the event.
    ///
    /// # Errors
    /// If the device was removed.
    pub fn wait(&self, timeout: Duration) -> Result<Option<CqKey>, Error> {
        match self.next_event()? {
            Some(key) => Ok(Some(key)),
            None if wait_readable(self.as_fd(), timeout)? => self.next_event(),
            None => Ok(None),
        }
    }
}

impl AsFd for CompletionChannel {
    /// Returns the file descriptor that is readable while an event is pending.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the fd belongs to the channel, which `self` keeps alive.
        unsafe { borrow_fd((*self.0.raw.as_ptr()).fd) }
    }
}

impl std::fmt::Debug for CompletionChannel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("CompletionChannel").field(&self.as_fd()).finish()
    }
}

/// Identifies a completion queue in events; never reused within a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CqKey(pub(crate) usize);

/// A completion queue. Clones share it.
#[derive(Clone)]
pub struct CompletionQueue(Arc<QueueInner>);

struct QueueInner {
    raw: NonNull<sys::ibv_cq>,
    key: CqKey,
    channel: Option<CompletionChannel>,
    context: Context,
}

// SAFETY: providers lock a completion queue internally (we never request a single-threaded one).
unsafe impl Send for QueueInner {}
// SAFETY: as above.
unsafe impl Sync for QueueInner {}

impl Drop for QueueInner {
    fn drop(&mut self) {
        // SAFETY: we created the queue, and it is destroyed once, after every queue pair on it
        // (each holds an `Arc`). All its events are acknowledged as soon as they are fetched.
        let rc = unsafe { (self.context.verbs().ibv.ibv_destroy_cq)(self.raw.as_ptr()) };
        if !crate::leak::count_unless_released(self.context.destroy_result(rc)) {
            // The queue still points to the channel, so leak the channel too.
            std::mem::forget(self.channel.clone());
        }
    }
}

impl CompletionQueue {
    pub(crate) fn raw(&self) -> *mut sys::ibv_cq {
        self.0.raw.as_ptr()
    }

    /// Returns the device that the queue belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// Returns the key that events of this queue carry.
    #[must_use]
    pub fn key(&self) -> CqKey {
        self.0.key
    }

    /// Returns how many completions fit.
    ///
    /// If more completions than this wait to be polled, the queue overruns and is unusable. Only an
    /// async event reports the overrun.
    #[must_use]
    pub fn depth(&self) -> u32 {
        // SAFETY: the queue is alive; the field changes only by resizing, which we do not do.
        u32::try_from(unsafe { (*self.raw()).cqe }).unwrap_or(0)
    }

    /// Polls up to `out.len()` completions without waiting; returns how many.
    ///
    /// # Errors
    /// If the queue is broken.
    pub fn poll(&self, out: &mut [WorkCompletion]) -> Result<usize, Error> {
        let len = i32::try_from(out.len()).unwrap_or(i32::MAX);
        // SAFETY: the queue is alive. The provider filled the operations when the context was
        // opened. `WorkCompletion` has the layout of `ibv_wc`, and `out` has room for `len` of
        // them.
        let got = unsafe {
            match (*(*self.raw()).context).ops.poll_cq {
                Some(poll) => poll(self.raw(), len, out.as_mut_ptr().cast()),
                None => -1,
            }
        };
        usize::try_from(got)
            .map_err(|_| Error::new(ErrorKind::System, "ibv_poll_cq", format!("returned {got}")))
    }

    /// Requests one event for the next completion. With `solicited_only`, only a failed completion
    /// raises the event, or a message that the sender marked as solicited. Poll once more after
    /// this call, because completions that arrived before it raise no event.
    ///
    /// # Errors
    /// If the device was removed.
    pub fn request_notify(&self, solicited_only: bool) -> Result<(), Error> {
        // SAFETY: as in `poll`.
        let rc = unsafe {
            match (*(*self.raw()).context).ops.req_notify_cq {
                Some(arm) => arm(self.raw(), solicited_only.into()),
                None => Errno::NOSYS.raw_os_error(),
            }
        };
        crate::error::check("ibv_req_notify_cq", rc, String::new)
    }

    /// Polls for completions and sleeps on the queue's channel while there are none; returns 0 if
    /// `timeout` passed. The channel must not be shared with other queues.
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`] without a channel; otherwise as [`CompletionQueue::poll`],
    /// [`CompletionQueue::request_notify`] and [`CompletionChannel::next_event`].
    pub fn wait(&self, out: &mut [WorkCompletion], timeout: Duration) -> Result<usize, Error> {
        let Some(channel) = &self.0.channel else {
            return Err(Error::new(
                ErrorKind::Misuse,
                "ibv_get_cq_event",
                "the completion queue has no channel",
            ));
        };
        let deadline = std::time::Instant::now() + timeout;
        loop {
            self.request_notify(false)?;
            let got = self.poll(out)?;
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            if got > 0 || left.is_zero() {
                return Ok(got);
            }
            if wait_readable(channel.as_fd(), left)? {
                channel.next_event()?;
            }
        }
    }
}

impl std::fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CompletionQueue")
            .field("key", &self.key())
            .field("depth", &self.depth())
            .finish()
    }
}
