//! Memory windows: parts of a region that only the peer of one queue pair may access.
//!
//! The key of a region is valid on every queue pair of its protection domain. A window of type 2 is
//! bound to one queue pair by a work request, and the device refuses its key on any other queue
//! pair. (With type 2B of the specification, the device also checks the domain; with 2A it does
//! not.)
//! The region that contains the window needs [`Access::WINDOWS`] and no remote rights of its own.
//!
//! A window is bound only once: it is created, bound with
//! [`SendRequest::bind`](crate::SendRequest::bind), and released. Requests that are posted to the
//! same queue pair after the bind request start after the binding.
//!
//! Release a window before its queue pair. A Soft-RoCE window holds a reference to its queue pair,
//! and destroying the queue pair waits until the window is released.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::{Error, ErrorKind, check};
use crate::mr::{Access, MemoryRegion, Registration, RemoteSlice};
use crate::pd::ProtectionDomain;
use crate::sys;

/// The bits of a key that the application chooses when it binds a window.
const APPLICATION_KEY_BITS: u32 = 0xff;

/// A window on a region: see [`MemoryRegion::window`].
///
/// Dropping the window ends the peer's access, as [`MemoryWindow::deallocate`] does. The window
/// keeps the region registered.
pub struct MemoryWindow {
    raw: NonNull<sys::ibv_mw>,
    /// The key that the window has once it is bound.
    rkey: u32,
    addr: u64,
    len: u64,
    access: Access,
    /// `None` once the device has released the window.
    region: Option<Arc<Registration>>,
}

// SAFETY: a window is a handle that any thread may use; nothing writes to it after its creation.
unsafe impl Send for MemoryWindow {}
// SAFETY: as above.
unsafe impl Sync for MemoryWindow {}

impl MemoryRegion {
    /// Creates a window on a part of the region, with the remote rights in `access`.
    ///
    /// The peer of a queue pair of the same domain can use the window after that queue pair has
    /// executed [`SendRequest::bind`](crate::SendRequest::bind). The application may choose some
    /// bits of the window's key. These come from the operating system's random number generator.
    ///
    /// # Errors
    /// [`ErrorKind::DeviceLimit`] if the provider has no memory windows; otherwise the error that
    /// the device reported.
    ///
    /// # Panics
    /// If the range is not within the region.
    pub fn window(&self, range: Range<usize>, access: Access) -> Result<MemoryWindow, Error> {
        let remote = self.remote(range);
        let region = self.registration();
        let raw = region.domain().allocate_window(|| format!("{} bytes", remote.len))?;
        // SAFETY: the window was just created.
        let first = unsafe { (*raw.as_ptr()).rkey };
        let RemoteSlice { addr, len, .. } = remote;
        let region = Some(Arc::clone(region));
        Ok(MemoryWindow { raw, rkey: choose_key(first), addr, len, access, region })
    }
}

impl ProtectionDomain {
    /// Creates a window and releases it, to find out whether the device supports windows. The
    /// device's flags are not reliable: bnxt_re's kernel driver has windows, but its provider in
    /// rdma-core has no call for them.
    ///
    /// # Errors
    /// As [`MemoryRegion::window`].
    pub fn try_window(&self) -> Result<(), Error> {
        let raw = self.allocate_window(|| "probe".into())?;
        check("ibv_dealloc_mw", self.release_window(raw), || "probe".into())
    }

    fn allocate_window(&self, what: impl Fn() -> String) -> Result<NonNull<sys::ibv_mw>, Error> {
        let context = self.context();
        let what = || format!("{} on {}", what(), context.device().name());
        // SAFETY: the context is open; the provider filled the operations when the context was
        // opened.
        let ops = unsafe { &(*context.raw()).ops };
        let (Some(allocate), Some(_)) = (ops.alloc_mw, ops.dealloc_mw) else {
            let error = Error::new(ErrorKind::DeviceLimit, "ibv_alloc_mw", what());
            return Err(error.because("the device has no memory windows"));
        };
        // SAFETY: the domain is alive, and the owner of the window keeps the domain alive.
        let raw = unsafe { allocate(self.raw(), sys::ibv_mw_type::IBV_MW_TYPE_2) };
        NonNull::new(raw).ok_or_else(|| Error::last("ibv_alloc_mw", what()))
    }

    /// Releases a window; returns the error number. Callers call this once for each window, and
    /// again only after a failure.
    fn release_window(&self, raw: NonNull<sys::ibv_mw>) -> i32 {
        // SAFETY: the context is open while the domain is; the operation existed when the window
        // was created.
        let rc = match unsafe { (*self.context().raw()).ops.dealloc_mw } {
            // SAFETY: we created the window, and it is not released yet.
            Some(release) => unsafe { release(raw.as_ptr()) },
            None => rustix::io::Errno::NOSYS.raw_os_error(),
        };
        self.context().destroy_result(rc)
    }
}

/// Chooses the key that a window gets when it is bound. The key differs from `first`, the key
/// before binding, because a device may refuse an unchanged key.
fn choose_key(first: u32) -> u32 {
    let mut byte = [0];
    #[cfg(not(miri))] // Miri has no getrandom
    let _ = rustix::rand::getrandom(&mut byte, rustix::rand::GetRandomFlags::empty());
    let step = 1 + u32::from(byte[0]) % APPLICATION_KEY_BITS;
    (first & !APPLICATION_KEY_BITS) | (first.wrapping_add(step) & APPLICATION_KEY_BITS)
}

impl MemoryWindow {
    /// Returns the numbers with which the peer of the bound queue pair addresses the window. Send
    /// them to the peer.
    #[must_use]
    pub fn remote(&self) -> RemoteSlice {
        RemoteSlice { addr: self.addr, len: self.len, rkey: self.rkey }
    }

    /// Releases the window now and reports whether the device released it. After `Ok`, the peer
    /// cannot start a new access. An access that has already started may continue. Deregistering
    /// the region waits until such an access has ended.
    ///
    /// # Errors
    /// The error that the device reported. The window is returned unchanged.
    pub fn deallocate(mut self) -> Result<(), (Self, Error)> {
        match check("ibv_dealloc_mw", self.release(), || format!("key {:#x}", self.rkey)) {
            Ok(()) => Ok(()),
            Err(error) => Err((self, error)),
        }
    }

    fn release(&mut self) -> i32 {
        let Some(region) = &self.region else { return 0 };
        let rc = region.domain().release_window(self.raw);
        if rc == 0 {
            self.region = None;
        }
        rc
    }

    /// Returns the fields of the work request that binds the window; the caller adds the request's
    /// number and flags.
    pub(crate) fn binding(&self) -> sys::ibv_send_wr__bindgen_ty_4__bindgen_ty_1 {
        let bind_info = sys::ibv_mw_bind_info {
            mr: self.region.as_ref().map_or(std::ptr::null_mut(), |region| region.raw()),
            addr: self.addr,
            length: self.len,
            mw_access_flags: self.access.window_flags(),
        };
        sys::ibv_send_wr__bindgen_ty_4__bindgen_ty_1 {
            mw: self.raw.as_ptr(),
            rkey: self.rkey,
            bind_info,
        }
    }
}

impl Drop for MemoryWindow {
    fn drop(&mut self) {
        if !crate::leak::count_unless_released(self.release()) {
            // The peer may still write to the region, so leak it.
            std::mem::forget(self.region.take());
        }
    }
}

impl std::fmt::Debug for MemoryWindow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryWindow").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chosen_key_changes_only_the_application_bits() {
        for first in [0, 0xff, 0x1234_5600, 0x1234_56ff] {
            for _ in 0..1000 {
                let key = choose_key(first);
                assert_eq!(key & !APPLICATION_KEY_BITS, first & !APPLICATION_KEY_BITS);
                assert_ne!(key, first);
            }
        }
    }
}
