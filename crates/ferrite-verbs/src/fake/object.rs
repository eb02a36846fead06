//! The C structs that callers hold, and the reference from each struct to its world.
//!
//! ```text
//! *mut ibv_qp ──► ┌ Object<ibv_qp> ────────┐
//!                 │ raw: ibv_qp  (first!)  │
//!                 │ id ─────────────────────────► State.queue_pairs[id]   its state
//!                 │ world ──────────────────────► Inner { Mutex<State> }
//!                 └────────────────────────┘
//! ```
//!
//! Most C functions of the fake call [`enter`](super::enter::enter), which runs safe code on the
//! locked [`State`](super::state::State). Then [`code`], [`minus_one`] or [`pointer`] converts the
//! result.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::io::{PipeReader, PipeWriter};
use std::mem::offset_of;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Weak;
use std::task::Poll;
use std::time::Duration;

use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::Errno;

use super::{Inner, World};
use crate::sys;

/// Identifies an object within its world. An id is never reused.
pub(super) type Id = u64;

/// How long a destroy waits for unacknowledged events. The C library would wait for ever.
pub(super) const ACK_WAIT: Duration = Duration::from_secs(5);

/// The allocation behind a pointer that a caller holds.
#[repr(C)]
pub(super) struct Object<C> {
    raw: C,
    id: Id,
    world: WorldRef,
}

enum WorldRef {
    /// Callers may hold the object longer than the [`World`].
    Strong(World),
    /// The world owns the object.
    Weak(Weak<Inner>),
}

impl<C> Object<C> {
    /// Allocates `raw` for a caller to hold; [`free`] releases it.
    pub(super) fn for_caller(raw: C, id: Id, world: World) -> Ptr<C> {
        Ptr(Box::into_raw(Box::new(Self { raw, id, world: WorldRef::Strong(world) })).cast())
    }

    /// Allocates `raw` for the world itself; [`free`] releases it.
    pub(super) fn for_world(raw: C, id: Id, world: Weak<Inner>) -> Ptr<C> {
        Ptr(Box::into_raw(Box::new(Self { raw, id, world: WorldRef::Weak(world) })).cast())
    }
}

/// Releases an object.
///
/// # Safety
/// `raw` came from [`Object::for_caller`] or [`Object::for_world`], and nothing uses it any more.
pub(super) unsafe fn free<C>(raw: Ptr<C>) {
    // SAFETY: the caller guarantees that `raw` came from `Object`, which allocated an `Object<C>`,
    // and that nothing uses it any more.
    drop(unsafe { Box::from_raw(raw.0.cast::<Object<C>>()) });
}

/// A pointer to an [`Object`]'s C struct, kept in the state.
pub(super) struct Ptr<C>(pub(super) *mut C);

impl<C> Clone for Ptr<C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C> Copy for Ptr<C> {}

// SAFETY: the C struct is written only under the world's lock, or by the caller that owns the
// object. So the pointer may move to another thread.
unsafe impl<C> Send for Ptr<C> {}

impl Ptr<sys::verbs_context> {
    /// Returns the pointer that callers use: to the part of the context that the first ABI defined.
    pub(super) fn context(self) -> *mut sys::ibv_context {
        self.0.wrapping_byte_add(offset_of!(sys::verbs_context, context)).cast()
    }
}

/// Reverses [`Ptr::context`].
pub(super) fn extended(context: *mut sys::ibv_context) -> *mut sys::verbs_context {
    context.wrapping_byte_sub(offset_of!(sys::verbs_context, context)).cast()
}

/// Returns the id of the object behind `raw`; `None` for a null pointer.
///
/// # Safety
/// `raw` is null or points to a live [`Object`].
pub(super) unsafe fn id_of<C>(raw: *mut C) -> Option<Id> {
    // SAFETY: the caller guarantees that the object is alive. `id` is never written after the
    // object's creation.
    (!raw.is_null()).then(|| unsafe { (*raw.cast::<Object<C>>()).id })
}

/// Returns the world of the object behind `raw`; `None` for a null pointer.
///
/// # Safety
/// As [`id_of`].
pub(super) unsafe fn world_of<C>(raw: *mut C) -> Option<World> {
    if raw.is_null() {
        return None;
    }
    // SAFETY: as in `id_of`.
    match unsafe { &(*raw.cast::<Object<C>>()).world } {
        WorldRef::Strong(world) => Some(world.clone()),
        WorldRef::Weak(inner) => inner.upgrade().map(World),
    }
}

/// Converts a result to the convention of verbs: 0, or an error number that is also in errno.
pub(super) fn code(result: Result<(), Errno>) -> c_int {
    result.map_or_else(|errno| set_errno(errno).raw_os_error(), |()| 0)
}

/// Converts a result to the convention of librdmacm, and of the functions of libibverbs that fetch
/// events: 0, or −1 with the error in errno.
pub(super) fn minus_one(result: Result<(), Errno>) -> c_int {
    result.map_or_else(
        |errno| {
            set_errno(errno);
            -1
        },
        |()| 0,
    )
}

/// Converts a result to the convention of functions that create objects: a pointer, or null with
/// the error in errno.
pub(super) fn pointer<C>(result: Result<*mut C, Errno>) -> *mut C {
    result.unwrap_or_else(|errno| {
        set_errno(errno);
        std::ptr::null_mut()
    })
}

fn set_errno(errno: Errno) -> Errno {
    crate::error::set_errno(errno.raw_os_error());
    errno
}

/// A queue of events with a file descriptor. Until the queue is closed, the descriptor is readable
/// exactly while the queue has events.
pub(super) struct Events<T> {
    queue: VecDeque<T>,
    fd: PipeReader,
    /// The write end of the pipe. It gets a byte when an event arrives in an empty queue. Once it
    /// is closed, the descriptor reports a hang-up.
    signal: Option<PipeWriter>,
}

impl<T> Events<T> {
    pub(super) fn new() -> Result<Self, Errno> {
        let (fd, signal) =
            std::io::pipe().map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        Ok(Self { queue: VecDeque::new(), fd, signal: Some(signal) })
    }

    pub(super) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    pub(super) fn push(&mut self, event: T) {
        let Some(signal) = &self.signal else { return };
        if self.queue.is_empty() {
            // This cannot block, because the pipe is empty.
            let _ = rustix::io::write(signal, &[1]);
        }
        self.queue.push_back(event);
    }

    /// Closes the queue, so that no more events arrive. Events that have arrived stay.
    pub(super) fn close(&mut self) {
        self.signal = None;
    }

    /// Takes the first event. Without an event, returns EIO if the queue is closed, `Pending` if
    /// the caller left the fd blocking, and EAGAIN otherwise.
    pub(super) fn take(&mut self) -> Poll<Result<T, Errno>> {
        if let Some(event) = self.queue.pop_front() {
            self.clear_signal();
            return Poll::Ready(Ok(event));
        }
        if self.signal.is_none() {
            return Poll::Ready(Err(Errno::IO));
        }
        if cfg!(miri) {
            // Miri has no fcntl. This crate makes all its descriptors non-blocking.
            return Poll::Ready(Err(Errno::AGAIN));
        }
        match fcntl_getfl(&self.fd) {
            Ok(flags) if !flags.contains(OFlags::NONBLOCK) => Poll::Pending,
            _ => Poll::Ready(Err(Errno::AGAIN)),
        }
    }

    /// Returns how many events match.
    pub(super) fn count(&self, matches: impl Fn(&T) -> bool) -> usize {
        self.queue.iter().filter(|event| matches(event)).count()
    }

    /// Removes and returns the events that match.
    pub(super) fn remove(&mut self, matches: impl Fn(&T) -> bool) -> Vec<T> {
        if !self.queue.iter().any(&matches) {
            return Vec::new();
        }
        let (gone, kept) =
            std::mem::take(&mut self.queue).into_iter().partition(|event| matches(event));
        self.queue = kept;
        self.clear_signal();
        Vec::from_iter::<VecDeque<T>>(gone)
    }

    fn clear_signal(&self) {
        if self.queue.is_empty() {
            // This cannot block, because the pipe contains a byte.
            let _ = rustix::io::read(&self.fd, &mut [0_u8; 1]);
        }
    }
}
