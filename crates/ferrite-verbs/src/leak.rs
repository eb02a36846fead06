//! Objects that could not be released.
//!
//! After a failed destroy, the device may still access the object's memory. `Drop` must neither
//! panic nor block. So it leaks the object and its memory, and counts the leak here.

use std::sync::atomic::{AtomicU64, Ordering};

static LEAKED: AtomicU64 = AtomicU64::new(0);

/// Returns how many objects this process leaked because the device refused to release them.
///
/// The number is 0 in normal operation. Tests and metrics should watch it.
#[must_use]
pub fn leaked_objects() -> u64 {
    LEAKED.load(Ordering::Relaxed)
}

/// Counts a leak if `rc` is an error; returns `true` if the object was released.
pub(crate) fn count_unless_released(rc: i32) -> bool {
    if rc != 0 {
        LEAKED.fetch_add(1, Ordering::Relaxed);
    }
    rc == 0
}
