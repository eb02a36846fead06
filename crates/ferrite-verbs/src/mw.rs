//! Memory windows: a part of a region that one queue pair's peer may reach, and nobody else.
//!
//! A region's own key is good for every queue pair of its protection domain. A window of type 2 is
//! bound to one queue pair by a work request on it, and the device refuses its key on any other
//! (types 2A and 2B of the specification differ in whether the domain is checked too, not in this).
//! The region under it needs [`Access::WINDOWS`] and no remote rights of its own.
//!
//! A window is for one binding: made, bound by [`SendRequest::bind`](crate::SendRequest::bind), and
//! gone. What is posted to the same queue pair later starts after the binding.
//!
//! Release it before its queue pair. Soft-RoCE's windows hold their queue pair, whose end waits for
//! them.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::{Error, ErrorKind, check};
use crate::mr::{Access, MemoryRegion, Registration};
use crate::pd::ProtectionDomain;
use crate::sys;
use crate::wr::RemoteSlice;

/// What `ibv_query_device` says of windows of type 2 (IBV_DEVICE_MEM_WINDOW_TYPE_2A and _2B).
pub(crate) const TYPE_2A: u32 = 1 << 23;
pub(crate) const TYPE_2B: u32 = 1 << 24;

/// The part of a key that whoever binds a window chooses.
const OWN_BITS: u32 = 0xff;

/// A window on a region: see [`MemoryRegion::window`].
///
/// Dropping it ends the peer's access; the region stays registered until then.
pub struct MemoryWindow {
    raw: NonNull<sys::ibv_mw>,
    /// The key that it gets by being bound.
    rkey: u32,
    addr: u64,
    len: u64,
    access: Access,
    /// Taken when the device has let go.
    region: Option<Arc<Registration>>,
}

// SAFETY: a window is a handle that any thread may use; nothing writes to it after it was made.
unsafe impl Send for MemoryWindow {}
// SAFETY: as above.
unsafe impl Sync for MemoryWindow {}

impl MemoryRegion {
    /// A window on a part of it, for the rights of `access` that are a peer's. It is reached when a
    /// queue pair of the same domain has taken [`SendRequest::bind`](crate::SendRequest::bind). The
    /// part of its key that is ours to choose comes from the operating system's generator.
    ///
    /// # Errors
    /// [`ErrorKind::DeviceLimit`] if the device has no windows, or none left; what the device said
    /// otherwise.
    ///
    /// # Panics
    /// If the range is not within the region.
    pub fn window(&self, range: Range<usize>, access: Access) -> Result<MemoryWindow, Error> {
        let remote = self.remote(range);
        let region = self.registration();
        let raw = region.domain().allocate_window(|| format!("{} bytes", remote.len))?;
        // SAFETY: just made.
        let first = unsafe { (*raw.as_ptr()).rkey };
        let RemoteSlice { addr, len, .. } = remote;
        let region = Some(Arc::clone(region));
        Ok(MemoryWindow { raw, rkey: own_key(first), addr, len, access, region })
    }
}

impl ProtectionDomain {
    /// Makes a window and lets go of it: whether there are any is not known before. bnxt_re's
    /// kernel driver has them, and its part of rdma-core has no call for it.
    ///
    /// # Errors
    /// As [`MemoryRegion::window`].
    pub fn try_window(&self) -> Result<(), Error> {
        let raw = self.allocate_window(|| "on trial".into())?;
        check("ibv_dealloc_mw", self.release_window(raw), || "on trial".into())
    }

    fn allocate_window(&self, what: impl Fn() -> String) -> Result<NonNull<sys::ibv_mw>, Error> {
        let context = self.context();
        let what = || format!("{} on {}", what(), context.device().name());
        // SAFETY: the context is open; the provider filled the operations when it was opened.
        let ops = unsafe { &(*context.raw()).ops };
        let (Some(allocate), Some(_)) = (ops.alloc_mw, ops.dealloc_mw) else {
            let error = Error::new(ErrorKind::DeviceLimit, "ibv_alloc_mw", what());
            return Err(error.because("the device has no memory windows"));
        };
        // SAFETY: the domain is alive; who gets the window keeps it so.
        let raw = unsafe { allocate(self.raw(), sys::ibv_mw_type::IBV_MW_TYPE_2) };
        NonNull::new(raw).ok_or_else(|| Error::last("ibv_alloc_mw", what()))
    }

    /// Called once for each window, or again after it failed.
    fn release_window(&self, raw: NonNull<sys::ibv_mw>) -> i32 {
        // SAFETY: the context is open while the domain is; the operation was there when the window
        // was made.
        let rc = match unsafe { (*self.context().raw()).ops.dealloc_mw } {
            // SAFETY: made by us and not released yet.
            Some(release) => unsafe { release(raw.as_ptr()) },
            None => rustix::io::Errno::NOSYS.raw_os_error(),
        };
        crate::leak::outcome(rc, self.context())
    }
}

/// Another key of the same window: its own bits are never those that it has before it is bound,
/// which a device may refuse.
fn own_key(first: u32) -> u32 {
    let mut byte = [0];
    #[cfg(not(miri))] // which has no such call
    let _ = rustix::rand::getrandom(&mut byte, rustix::rand::GetRandomFlags::empty());
    let step = 1 + u32::from(byte[0]) % OWN_BITS;
    (first & !OWN_BITS) | (first.wrapping_add(step) & OWN_BITS)
}

impl MemoryWindow {
    /// What the peer of the queue pair that it is bound to may address: send it these numbers.
    #[must_use]
    pub fn remote(&self) -> RemoteSlice {
        RemoteSlice { addr: self.addr, len: self.len, rkey: self.rkey }
    }

    /// Ends it now, and says whether the device let go: from then on no new access of the peer's
    /// begins. One that has begun may go on until the region is deregistered, which waits for it.
    ///
    /// # Errors
    /// What the device said. The window comes back as it was.
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

    /// The request that binds it, but for its number and flags.
    pub(crate) fn binding(&self) -> sys::ibv_send_wr__bindgen_ty_4__bindgen_ty_1 {
        let bind_info = sys::ibv_mw_bind_info {
            mr: self.region.as_ref().map_or(std::ptr::null_mut(), |region| region.raw()),
            addr: self.addr,
            length: self.len,
            mw_access_flags: self.access.of_window(),
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
        if !crate::leak::unless_released(self.release()) {
            // The peer may still write there.
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
    fn a_key_keeps_its_index_and_changes_its_own_bits() {
        for first in [0, 0xff, 0x1234_5600, 0x1234_56ff] {
            for _ in 0..1000 {
                let key = own_key(first);
                assert_eq!(key & !OWN_BITS, first & !OWN_BITS);
                assert_ne!(key, first);
            }
        }
    }
}
