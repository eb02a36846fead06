//! Protection domains: the scope in which memory keys are valid.

use std::ptr::NonNull;
use std::sync::Arc;

use crate::context::Context;
use crate::error::Error;
use crate::sys;

/// A protection domain.
///
/// Regions, queue pairs and shared receive queues of one domain work together; the device refuses
/// keys of other domains. Clones share the domain.
#[derive(Clone)]
pub struct ProtectionDomain(Arc<Inner>);

struct Inner {
    raw: NonNull<sys::ibv_pd>,
    context: Context,
}

// SAFETY: a protection domain is a handle; calls on it may come from any thread.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: allocated by us and released once, after every child (each holds an `Arc` of us).
        let rc = unsafe { (self.context.verbs().ibv.ibv_dealloc_pd)(self.raw.as_ptr()) };
        crate::leak::count_unless_released(self.context.destroy_result(rc));
    }
}

impl Context {
    /// Creates a protection domain.
    ///
    /// # Errors
    /// If the device, the host or a cgroup has no room for another.
    pub fn allocate_protection_domain(&self) -> Result<ProtectionDomain, Error> {
        // SAFETY: the context is open.
        let raw = unsafe { (self.verbs().ibv.ibv_alloc_pd)(self.raw()) };
        let raw =
            NonNull::new(raw).ok_or_else(|| Error::last("ibv_alloc_pd", self.device().name()))?;
        Ok(ProtectionDomain(Arc::new(Inner { raw, context: self.clone() })))
    }
}

impl ProtectionDomain {
    pub(crate) fn raw(&self) -> *mut sys::ibv_pd {
        self.0.raw.as_ptr()
    }

    /// Returns the device that the domain belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.0.context
    }
}

impl std::fmt::Debug for ProtectionDomain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ProtectionDomain").field(&self.context().device().name()).finish()
    }
}
