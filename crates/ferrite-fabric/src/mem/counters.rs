//! The counters of a pool that cannot be computed from its state.

use std::sync::atomic::{AtomicU64, Ordering};

use super::class::Purpose;
use super::error::{Budget, PoolError};

/// Counters that every user of the pool updates when an event happens.
#[derive(Default)]
pub(super) struct Counters {
    pub(super) growths: AtomicU64,
    pub(super) exposed_regions: AtomicU64,
    pub(super) exposed_bytes: AtomicU64,
    pub(super) quarantined_bytes: AtomicU64,
    pub(super) failed_deregister: AtomicU64,
    pub(super) send_exhausted: AtomicU64,
    pub(super) receive_exhausted: AtomicU64,
    pub(super) account_exhausted: AtomicU64,
    pub(super) too_large: AtomicU64,
    pub(super) map: AtomicU64,
    pub(super) register: AtomicU64,
}

impl Counters {
    #[cold]
    pub(super) fn count_failure(&self, error: &PoolError) {
        let counter = match error {
            PoolError::OverBudget { which: Budget::Heap(Purpose::Send), .. } => {
                &self.send_exhausted
            }
            PoolError::OverBudget { which: Budget::Heap(Purpose::Receive), .. } => {
                &self.receive_exhausted
            }
            PoolError::OverBudget { which: Budget::Account(_), .. } => &self.account_exhausted,
            PoolError::TooLarge { .. } => &self.too_large,
            PoolError::Map { .. } => &self.map,
            PoolError::Register(_) => &self.register,
            PoolError::Misuse(_) | PoolError::NoDomain { .. } => return,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}
