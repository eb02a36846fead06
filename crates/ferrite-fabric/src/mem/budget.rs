//! Accounts: how much of a pool one peer may hold.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::error::{Budget, PoolError};

/// A limit on the memory held on behalf of somebody, such as a peer. Clones share it.
///
/// A buffer is charged by the size of its block when it is taken and credited when its last handle goes, whoever has
/// it then: the charge moves with the buffer. Exhaustion is an error for the caller to act upon, never a wait.
///
/// ```
/// use ferrite_fabric::mem::{Account, Purpose};
/// # use ferrite_fabric::mem::Pool;
/// # use ferrite_verbs::fake::{DeviceSpec, World};
/// # let world = World::new();
/// # world.add_device(DeviceSpec::new("fake1", "127.0.0.1".parse()?));
/// # let domain = world.verbs().device("fake1")?.open()?.allocate_protection_domain()?;
/// # let pool = Pool::builder(&[domain]).build()?;
/// let peer = Account::new("peer 10.0.0.7", 8 << 10);
/// let message = pool.take(5000, Purpose::Receive, &peer)?.freeze();
/// assert_eq!(peer.used_bytes(), 8 << 10);
/// assert!(pool.take(1, Purpose::Receive, &peer).is_err());
/// drop(message);
/// assert_eq!(peer.used_bytes(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Account(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    name: Arc<str>,
    limit_bytes: u64,
    used_bytes: AtomicU64,
}

impl Account {
    /// At most `limit_bytes` at any time, for whoever `name` says in errors.
    #[must_use]
    pub fn new(name: impl Into<Arc<str>>, limit_bytes: u64) -> Self {
        Self(Arc::new(Inner { name: name.into(), limit_bytes, used_bytes: AtomicU64::new(0) }))
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The most it may hold.
    #[must_use]
    pub fn limit_bytes(&self) -> u64 {
        self.0.limit_bytes
    }

    /// What it holds.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.0.used_bytes.load(Ordering::Relaxed)
    }

    /// Takes `bytes` out of the budget, all or nothing.
    pub(super) fn charge(&self, bytes: usize) -> Result<(), PoolError> {
        let asked = bytes as u64;
        let fits = |used: u64| used.checked_add(asked).filter(|sum| *sum <= self.0.limit_bytes);
        self.0.used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).map(drop).map_err(|used| {
            let which = Budget::Account(Arc::clone(&self.0.name));
            PoolError::OverBudget { which, asked, limit: self.0.limit_bytes, used }
        })
    }

    /// Gives back what [`Account::charge`] took.
    pub(super) fn credit(&self, bytes: usize) {
        self.0.used_bytes.fetch_sub(bytes as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_or_nothing() {
        let account = Account::new("peer", 1000);
        account.charge(600).expect("fits");
        let error = account.charge(401).expect_err("over");
        assert_eq!(error.to_string(), "the budget of peer is exhausted: 401 bytes asked, 600 of 1000 in use");
        account.charge(400).expect("fits exactly");
        account.credit(1000);
        assert_eq!((account.used_bytes(), account.limit_bytes(), account.name()), (0, 1000, "peer"));
    }

    #[test]
    fn threads_together_stay_below_the_limit() {
        let account = Account::new("peer", 100);
        let granted: usize = std::thread::scope(|scope| {
            let takers: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| (0..100).filter(|_| account.charge(1).is_ok()).count()))
                .collect();
            takers.into_iter().map(|taker| taker.join().expect("no panic")).sum()
        });
        assert_eq!((granted, account.used_bytes()), (100, 100));
    }
}
