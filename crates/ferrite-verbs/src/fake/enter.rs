//! Runs a C function in the world of the object that it is called on.

use std::task::Poll;
use std::time::Duration;

use rustix::io::Errno;

use super::object::{Id, id_of, world_of};
use super::state::State;

/// Runs the C function `call` on the object behind `raw`, with the object's world locked. While
/// `call` is held ([`World::hold`](super::World::hold)), waits first. If a failure was injected for
/// `call`, returns that failure instead of running it.
///
/// # Safety
/// `raw` is null or points to a live [`Object`](super::object::Object).
pub(super) unsafe fn enter<C, T>(
    call: &'static str,
    raw: *mut C,
    run: impl FnOnce(&mut State, Id) -> Result<T, Errno>,
) -> Result<T, Errno> {
    let mut run = Some(run);
    // SAFETY: the caller guarantees that `raw` is null or points to a live object.
    unsafe {
        enter_until(call, raw, None, |state, id| match run.take() {
            Some(run) => Poll::Ready(run(state, id)),
            None => Poll::Pending,
        })
    }
}

/// Does the same as [`enter`] for a call that may have to wait. `step` runs again after every
/// change of the world. If the world does not change for `timeout`, the call fails with EBUSY.
///
/// # Safety
/// As [`enter`].
pub(super) unsafe fn enter_until<C, T>(
    call: &'static str,
    raw: *mut C,
    timeout: Option<Duration>,
    mut step: impl FnMut(&mut State, Id) -> Poll<Result<T, Errno>>,
) -> Result<T, Errno> {
    // SAFETY: the caller guarantees that `raw` is null or points to a live object.
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
        let (guard, timed_out) = world.wait(state, timeout);
        state = guard;
        if timed_out {
            return Err(Errno::BUSY);
        }
    }
}
