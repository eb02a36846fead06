//! Objects that could not be released.
//!
//! A failed destroy means that the device may still touch what belongs to the object. `Drop` must
//! neither panic nor block, so the object and its memory are left where they are and counted here.

use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;

use crate::context::Context;

static LEAKED: AtomicU64 = AtomicU64::new(0);

/// How many objects this process had to leak because the device refused to release them. Always 0
/// in health; a test or a metric should watch it.
#[must_use]
pub fn leaked_objects() -> u64 {
    LEAKED.load(Ordering::Relaxed)
}

/// Counts a leak if `rc` is a failure; `true` when the object is gone.
pub(crate) fn unless_released(rc: i32) -> bool {
    if rc != 0 {
        LEAKED.fetch_add(1, Ordering::Relaxed);
    }
    rc == 0
}

/// What a destroy has to say, in the light of what became of the device: EIO means success when the
/// kernel has destroyed all objects by itself ([`Context::is_disassociated`]).
pub(crate) fn outcome(rc: i32, context: &Context) -> i32 {
    if rc == Errno::IO.raw_os_error() && context.is_disassociated() { 0 } else { rc }
}
