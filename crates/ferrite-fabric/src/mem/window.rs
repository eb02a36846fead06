//! How peers get at exposed memory: registrations, and the windows on them.
//!
//! A registration with remote rights is open to every queue pair of its domain. One with a window
//! on it is closed, and the window is open to the queue pair that it is bound to. A window must go
//! before its queue pair, which the link does, and before the registration under it, which whoever
//! exposes the memory does: it belongs to both, and the first to end closes it. But not while its
//! queue pair has yet to bind it, which would fail and break the link: then the memory waits for
//! that.
//!
//! Each has a registration of its own, of the same bytes: Soft-RoCE checks an access against the
//! bounds of the registration, not of the window, and lets one that has begun go on until the
//! registration ends.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use ferrite_verbs::{Error, MemoryRegion, MemoryWindow, RemoteSlice};

use super::buf::BufMut;
use super::lock;

/// A window, until it is closed.
pub(crate) struct Window {
    state: Mutex<State>,
    remote: RemoteSlice,
}

struct State {
    /// `None` when it is closed.
    open: Option<MemoryWindow>,
    /// The request that binds it is with the device.
    binding: bool,
    /// Memory that nobody exposes any more, and that waits for that request.
    left: Option<(Ways, BufMut)>,
}

impl Window {
    pub(super) fn new(window: MemoryWindow) -> Arc<Self> {
        let remote = window.remote();
        Arc::new(Self {
            state: Mutex::new(State { open: Some(window), binding: false, left: None }),
            remote,
        })
    }

    /// Where it is for the peer of the queue pair that it is bound to.
    pub(crate) fn remote(&self) -> RemoteSlice {
        self.remote
    }

    pub(super) fn is_open(&self) -> bool {
        lock(&self.state).open.is_some()
    }

    /// Has `post` give the request that binds it to the device, and say whether the device has it;
    /// `None` if it has not, or if the window is closed.
    pub(crate) fn bind(
        self: &Arc<Self>,
        post: impl FnOnce(&MemoryWindow) -> bool,
    ) -> Option<Binding> {
        let mut state = lock(&self.state);
        let posted = post(state.open.as_ref()?);
        state.binding |= posted;
        posted.then(|| Binding(Arc::clone(self)))
    }

    /// Ends it, bound or not: no access by its key begins any more.
    ///
    /// # Errors
    /// What the device said if it did not let go; it is open as before.
    pub(crate) fn close(&self) -> Result<(), Error> {
        let mut state = lock(&self.state);
        let Some(window) = state.open.take() else { return Ok(()) };
        window.deallocate().map_err(|(window, error)| {
            state.open = Some(window);
            error
        })
    }

    /// Keeps memory until it is bound; gives it back if nothing is waited for.
    fn keep(&self, ways: Ways, buf: BufMut) -> Result<(), (Ways, BufMut)> {
        let mut state = lock(&self.state);
        if !state.binding || state.open.is_none() {
            return Err((ways, buf));
        }
        state.left = Some((ways, buf));
        Ok(())
    }
}

/// The request that binds a window is with the device. To be dropped when it is done, or its queue
/// pair destroyed.
pub(crate) struct Binding(Arc<Window>);

impl Drop for Binding {
    fn drop(&mut self) {
        let left = {
            let mut state = lock(&self.0.state);
            state.binding = false;
            state.left.take()
        };
        if let Some((mut ways, buf)) = left {
            ways.windows.push((usize::MAX, Arc::clone(&self.0)));
            let core = Arc::clone(buf.core());
            core.elsewhere(move || ways.let_go(buf));
        }
    }
}

impl std::fmt::Debug for Binding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Binding").finish_non_exhaustive()
    }
}

/// All ways to one piece of memory.
#[derive(Default)]
pub(super) struct Ways {
    /// Both by the number of the domain.
    pub(super) windows: Vec<(usize, Arc<Window>)>,
    pub(super) regions: Vec<(usize, MemoryRegion)>,
}

impl Ways {
    /// Closes all; what a device said that did not let go. What it did not let go of stays here.
    pub(super) fn close(&mut self) -> Option<Error> {
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

    /// Closes all and gives the buffer back to its pool: now, or when the last of the windows that
    /// are being bound is.
    pub(super) fn let_go(mut self, mut buf: BufMut) {
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
