//! How peers access exposed memory: registrations, and memory windows on them.
//!
//! A registration with remote rights is open to every queue pair of its domain. A registration for
//! windows has no remote rights. A peer can access its memory only through a window, on the queue
//! pair that the window is bound to.
//!
//! A window must be closed before its queue pair is destroyed; the link ensures that. It must also
//! be closed before the registration under it ends; the owner of the exposed memory ensures that.
//! The link and the owner hold the window, and the first of them to end closes it. But a window
//! whose bind request is still in flight must not be closed, because the request would fail and
//! break the link. In that case the memory is released only after the request has completed.
//!
//! Each exposed buffer has its own registration under its windows, of exactly the bytes of the
//! buffer. Soft-RoCE needs that: it checks an access against the bounds of the registration, not of
//! the window. It also lets an access that has started continue until the registration ends.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use ferrite_verbs::{Error, MemoryRegion, MemoryWindow, RemoteSlice};

use super::buf::BufMut;
use crate::mem::lock;

/// A window, until it is closed.
pub(crate) struct Window {
    state: Mutex<State>,
    remote: RemoteSlice,
}

struct State {
    /// The window; `None` when it is closed.
    open: Option<MemoryWindow>,
    /// Whether the request that binds the window is in flight.
    binding: bool,
    /// Memory to release when the bind request has completed. Its owner has given it up, so until
    /// then nobody in this process uses it.
    left: Option<(Registrations, BufMut)>,
}

impl Window {
    pub(in crate::mem) fn new(window: MemoryWindow) -> Arc<Self> {
        let remote = window.remote();
        Arc::new(Self {
            state: Mutex::new(State { open: Some(window), binding: false, left: None }),
            remote,
        })
    }

    /// Returns how the peer addresses the window, on the queue pair that the window is bound to.
    pub(crate) fn remote(&self) -> RemoteSlice {
        self.remote
    }

    pub(in crate::mem) fn is_open(&self) -> bool {
        lock(&self.state).open.is_some()
    }

    /// Calls `post` to post the request that binds the window. `post` returns whether the device
    /// accepted the request. Returns `None` if the device did not accept it, or if the window is
    /// closed.
    pub(crate) fn bind(
        self: &Arc<Self>,
        post: impl FnOnce(&MemoryWindow) -> bool,
    ) -> Option<Binding> {
        let mut state = lock(&self.state);
        let posted = post(state.open.as_ref()?);
        state.binding |= posted;
        posted.then(|| Binding(Arc::clone(self)))
    }

    /// Closes the window, bound or not. No access with its key can start any more.
    ///
    /// # Errors
    /// Returns the device's error if the window could not be closed. The window is then still open.
    pub(crate) fn close(&self) -> Result<(), Error> {
        let mut state = lock(&self.state);
        let Some(window) = state.open.take() else { return Ok(()) };
        window.deallocate().map_err(|(window, error)| {
            state.open = Some(window);
            error
        })
    }

    /// Keeps memory until the bind request in flight has completed. Returns the memory if no
    /// request is in flight, or if the window is closed.
    fn keep(
        &self,
        registrations: Registrations,
        buf: BufMut,
    ) -> Result<(), (Registrations, BufMut)> {
        let mut state = lock(&self.state);
        if !state.binding || state.open.is_none() {
            return Err((registrations, buf));
        }
        state.left = Some((registrations, buf));
        Ok(())
    }
}

/// A bind request that is in flight. Drop it when the request is done or its queue pair was
/// destroyed.
pub(crate) struct Binding(Arc<Window>);

impl Drop for Binding {
    fn drop(&mut self) {
        let left = {
            let mut state = lock(&self.0.state);
            state.binding = false;
            state.left.take()
        };
        if let Some((mut registrations, buf)) = left {
            registrations.windows.push((usize::MAX, Arc::clone(&self.0)));
            let core = Arc::clone(buf.core());
            core.run_in_background(move || registrations.release(buf));
        }
    }
}

impl std::fmt::Debug for Binding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Binding").finish_non_exhaustive()
    }
}

/// All registrations and windows of one exposed buffer.
#[derive(Default)]
pub(in crate::mem) struct Registrations {
    /// The windows, each with the index of its domain.
    pub(in crate::mem) windows: Vec<(usize, Arc<Window>)>,
    /// The registrations, each with the index of its domain.
    pub(in crate::mem) regions: Vec<(usize, MemoryRegion)>,
}

impl Registrations {
    /// Closes all windows and registrations. Returns the device's first error; those that could not
    /// be closed stay here.
    pub(in crate::mem) fn close(&mut self) -> Option<Error> {
        let mut first = None;
        self.windows.retain(|(_, window)| match window.close() {
            Ok(()) => false,
            Err(error) => {
                first.get_or_insert(error);
                true
            }
        });
        for (index, region) in std::mem::take(&mut self.regions) {
            if let Err((region, error)) = region.deregister() {
                self.regions.push((index, region));
                first.get_or_insert(error);
            }
        }
        first
    }

    /// Closes everything and returns the buffer to its pool: now, or when the last bind request in
    /// flight has completed. If a device does not release the memory, the buffer goes into
    /// quarantine.
    pub(in crate::mem) fn release(mut self, mut buf: BufMut) {
        let mut bound = Vec::new();
        while let Some((index, window)) = self.windows.pop() {
            match window.keep(self, buf) {
                Ok(()) => {
                    bound
                        .iter()
                        .for_each(|(_, window): &(usize, Arc<Window>)| drop(window.close()));
                    return;
                }
                Err(back) => (self, buf) = back,
            }
            bound.push((index, window));
        }
        self.windows = bound;
        if self.close().is_some() {
            let core = Arc::clone(buf.core());
            core.counters.failed_deregister.fetch_add(1, Ordering::Relaxed);
            core.quarantine(self, buf);
        }
    }
}
