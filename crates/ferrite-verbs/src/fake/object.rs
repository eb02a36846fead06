//! The C face of an object: the struct that callers point to, and behind it the way to its world.
//!
//! ```text
//! *mut ibv_qp ──► ┌ Object<ibv_qp> ────────┐
//!                 │ raw: ibv_qp  (first!)  │
//!                 │ id ─────────────────────────► State.queue_pairs[id]   all that is true of it
//!                 │ world ──────────────────────► Inner { Mutex<State> }
//!                 └────────────────────────┘
//! ```
//!
//! Every C function of the fake starts in [`enter`] here and ends in [`code`], [`minus_one`] or
//! [`pointer`]; between them runs safe code on the locked [`State`].

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

use super::state::State;
use super::{Inner, World};
use crate::sys;

/// Names an object within its world; never used twice.
pub(super) type Id = u64;

/// How long a destroy waits for events to be acknowledged, where the C library would wait for ever.
pub(super) const ACK_PATIENCE: Duration = Duration::from_secs(5);

/// What a pointer that we gave out points to.
#[repr(C)]
pub(super) struct Object<C> {
    raw: C,
    id: Id,
    world: Link,
}

enum Link {
    /// Callers may hold the object longer than the [`World`].
    Strong(World),
    /// The world owns the object.
    Weak(Weak<Inner>),
}

impl<C> Object<C> {
    /// Puts `raw` on the heap for a caller to hold; [`free`] takes it back.
    pub(super) fn give(raw: C, id: Id, world: World) -> Ptr<C> {
        Ptr(Box::into_raw(Box::new(Self { raw, id, world: Link::Strong(world) })).cast())
    }

    /// The same for an object that the world itself owns.
    pub(super) fn keep(raw: C, id: Id, world: Weak<Inner>) -> Ptr<C> {
        Ptr(Box::into_raw(Box::new(Self { raw, id, world: Link::Weak(world) })).cast())
    }
}

/// Takes an object back.
///
/// # Safety
/// `raw` came from [`Object::give`] or [`Object::keep`], and nobody uses it any more.
pub(super) unsafe fn free<C>(raw: Ptr<C>) {
    // SAFETY: the caller vouches for it; the allocation was made as an `Object<C>`.
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

// SAFETY: the pointer is a name here; what it points to is written only under the world's lock, or
// by the caller who owns the object.
unsafe impl<C> Send for Ptr<C> {}

impl Ptr<sys::verbs_context> {
    /// What callers know a context by: the part of it that the first ABI had.
    pub(super) fn context(self) -> *mut sys::ibv_context {
        self.0.wrapping_byte_add(offset_of!(sys::verbs_context, context)).cast()
    }
}

/// The way back from [`Ptr::context`].
pub(super) fn extended(context: *mut sys::ibv_context) -> *mut sys::verbs_context {
    context.wrapping_byte_sub(offset_of!(sys::verbs_context, context)).cast()
}

/// The name of the object behind `raw`; `None` for a null pointer.
///
/// # Safety
/// `raw` is null or points to a live [`Object`].
pub(super) unsafe fn id_of<C>(raw: *mut C) -> Option<Id> {
    // SAFETY: the caller vouches for it; `id` is never written after the object was made.
    (!raw.is_null()).then(|| unsafe { (*raw.cast::<Object<C>>()).id })
}

unsafe fn world_of<C>(raw: *mut C) -> Option<World> {
    if raw.is_null() {
        return None;
    }
    // SAFETY: as in `id_of`.
    match unsafe { &(*raw.cast::<Object<C>>()).world } {
        Link::Strong(world) => Some(world.clone()),
        Link::Weak(inner) => inner.upgrade().map(World),
    }
}

/// Runs the C function `call` on the object behind `raw`: finds its world, locks it, and takes an
/// injected failure instead if there is one.
///
/// # Safety
/// `raw` is null or points to a live [`Object`].
pub(super) unsafe fn enter<C, T>(
    call: &'static str,
    raw: *mut C,
    run: impl FnOnce(&mut State, Id) -> Result<T, Errno>,
) -> Result<T, Errno> {
    let mut run = Some(run);
    // SAFETY: the caller vouches for `raw`.
    unsafe {
        enter_until(call, raw, None, |state, id| match run.take() {
            Some(run) => Poll::Ready(run(state, id)),
            None => Poll::Pending,
        })
    }
}

/// The same for a call that may have to wait: `step` is asked again after every change of the
/// world, until `patience` ends (EBUSY).
///
/// # Safety
/// As [`enter`].
pub(super) unsafe fn enter_until<C, T>(
    call: &'static str,
    raw: *mut C,
    patience: Option<Duration>,
    mut step: impl FnMut(&mut State, Id) -> Poll<Result<T, Errno>>,
) -> Result<T, Errno> {
    // SAFETY: the caller vouches for `raw`.
    let (world, id) =
        unsafe { (world_of(raw).ok_or(Errno::INVAL)?, id_of(raw).ok_or(Errno::INVAL)?) };
    let mut state = world.lock();
    state.calls.entry(std::thread::current().id()).or_default().insert(call);
    if state.held.contains(call) {
        *state.waiting.entry(call).or_default() += 1;
        while state.held.contains(call) {
            state = world.wait(state, None).0;
        }
        *state.waiting.entry(call).or_default() -= 1;
    }
    if let Some(errno) = state.take_fault(call) {
        return Err(errno);
    }
    loop {
        if let Poll::Ready(result) = step(&mut state, id) {
            world.0.changed.notify_all();
            return result;
        }
        let (guard, timed_out) = world.wait(state, patience);
        state = guard;
        if timed_out {
            return Err(Errno::BUSY);
        }
    }
}

/// Verbs' convention: 0 or an error number, which is in errno as well.
pub(super) fn code(result: Result<(), Errno>) -> c_int {
    result.map_or_else(|errno| set_errno(errno).raw_os_error(), |()| 0)
}

/// librdmacm's convention: 0, or −1 and errno.
pub(super) fn minus_one(result: Result<(), Errno>) -> c_int {
    result.map_or_else(
        |errno| {
            set_errno(errno);
            -1
        },
        |()| 0,
    )
}

/// The convention of what creates: a pointer, or null and errno.
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

/// Events with an fd that is readable exactly while there are any.
pub(super) struct Events<T> {
    queue: VecDeque<T>,
    fd: PipeReader,
    /// Has written a byte while there are events. Without it the descriptor reports an error.
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
            // Cannot block: the pipe is empty.
            let _ = rustix::io::write(signal, &[1]);
        }
        self.queue.push_back(event);
    }

    /// Nothing comes any more.
    pub(super) fn close(&mut self) {
        self.signal = None;
    }

    /// The first event; `Pending` when there is none and the caller left the fd blocking, else
    /// EAGAIN.
    pub(super) fn take(&mut self) -> Poll<Result<T, Errno>> {
        if let Some(event) = self.queue.pop_front() {
            self.lower();
            return Poll::Ready(Ok(event));
        }
        if self.signal.is_none() {
            return Poll::Ready(Err(Errno::IO));
        }
        if cfg!(miri) {
            // has no such call; those that we make never block
            return Poll::Ready(Err(Errno::AGAIN));
        }
        match fcntl_getfl(&self.fd) {
            Ok(flags) if !flags.contains(OFlags::NONBLOCK) => Poll::Pending,
            _ => Poll::Ready(Err(Errno::AGAIN)),
        }
    }

    /// How many events match.
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
        self.lower();
        Vec::from_iter::<VecDeque<T>>(gone)
    }

    fn lower(&self) {
        if self.queue.is_empty() {
            // Cannot block: a byte is there.
            let _ = rustix::io::read(&self.fd, &mut [0_u8; 1]);
        }
    }
}
