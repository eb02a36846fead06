//! Accounts: how much of a pool one peer may hold.

use std::sync::{Arc, Mutex};
use std::task::Waker;

use super::error::{Budget, PoolError};
use super::lock;

/// A limit on the memory held on behalf of somebody, such as a peer. Clones share it.
///
/// A buffer is charged by the size of its block when it is taken and credited when its last handle
/// goes, whoever has it then: the charge moves with the buffer. Exhaustion is an error for the
/// caller to act upon, never a wait.
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
    /// Locked while the account above is charged or credited, so that both change together.
    held: Mutex<Held>,
    above: Option<Above>,
}

#[derive(Debug, Default)]
struct Held {
    bytes: u64,
    /// To be woken when some of it comes back.
    waiters: Vec<Waker>,
}

/// Another account that has a part of what this one holds.
#[derive(Debug)]
struct Above {
    account: Account,
    /// So much it has nothing to do with.
    free_bytes: u64,
}

impl Inner {
    /// What of `used` the account above is charged for.
    fn above(&self, used: u64) -> Option<(&Account, u64)> {
        self.above.as_ref().map(|above| (&above.account, used.saturating_sub(above.free_bytes)))
    }
}

impl Account {
    /// At most `limit_bytes` at any time, for whoever `name` says in errors.
    #[must_use]
    pub fn new(name: impl Into<Arc<str>>, limit_bytes: u64) -> Self {
        Self(Arc::new(Inner {
            name: name.into(),
            limit_bytes,
            held: Mutex::default(),
            above: None,
        }))
    }

    /// One that shares the limit of this one with others like it, but for the first `free_bytes`
    /// that it holds: those it can always have, whatever the others hold.
    #[must_use]
    pub fn part(&self, name: impl Into<Arc<str>>, limit_bytes: u64, free_bytes: u64) -> Self {
        let above = Some(Above { account: self.clone(), free_bytes });
        Self(Arc::new(Inner { name: name.into(), limit_bytes, held: Mutex::default(), above }))
    }

    /// Whether nobody else has it.
    pub(crate) fn is_last(&self) -> bool {
        Arc::strong_count(&self.0) == 1
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
        lock(&self.0.held).bytes
    }

    /// Takes `bytes` out of the budget, all or nothing.
    pub(super) fn charge(&self, bytes: usize) -> Result<(), PoolError> {
        let asked = bytes as u64;
        let mut held = lock(&self.0.held);
        let used = &mut held.bytes;
        let Some(sum) = used.checked_add(asked).filter(|sum| *sum <= self.0.limit_bytes) else {
            let which = Budget::Account(Arc::clone(&self.0.name));
            return Err(PoolError::OverBudget {
                which,
                asked,
                limit: self.0.limit_bytes,
                used: *used,
            });
        };
        if let (Some((above, was)), Some((_, is))) = (self.0.above(*used), self.0.above(sum))
            && is > was
        {
            above.charge((is - was) as usize)?;
        }
        *used = sum;
        Ok(())
    }

    /// Gives back what [`Account::charge`] took.
    pub(super) fn credit(&self, bytes: usize) {
        let mut wakes = Vec::new();
        self.credit_and(bytes as u64, &mut wakes);
        wakes.into_iter().for_each(Waker::wake); // when nothing is locked
    }

    fn credit_and(&self, bytes: u64, wakes: &mut Vec<Waker>) {
        let mut held = lock(&self.0.held);
        let left = held.bytes.saturating_sub(bytes);
        if let (Some((above, was)), Some((_, is))) = (self.0.above(held.bytes), self.0.above(left))
            && was > is
        {
            above.credit_and(was - is, wakes);
        }
        held.bytes = left;
        wakes.append(&mut held.waiters);
    }

    /// Wakes `waker` once, or twice, when this account or the one above holds less than now.
    pub(crate) fn wake_on_credit(&self, waker: &Waker) {
        let waiters = &mut lock(&self.0.held).waiters;
        if !waiters.iter().any(|waiting| waiting.will_wake(waker)) {
            waiters.push(waker.clone());
        }
        if let Some(above) = &self.0.above {
            above.account.wake_on_credit(waker);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;

    #[test]
    fn all_or_nothing() {
        let account = Account::new("peer", 1000);
        account.charge(600).expect("fits");
        let error = account.charge(401).expect_err("over");
        assert_eq!(
            error.to_string(),
            "the budget of peer is exhausted: 401 bytes asked, 600 of 1000 in use"
        );
        account.charge(400).expect("fits exactly");
        account.credit(1000);
        assert_eq!(
            (account.used_bytes(), account.limit_bytes(), account.name()),
            (0, 1000, "peer")
        );
    }

    #[test]
    fn parts_share_a_limit_and_have_something_of_their_own() {
        let all = Account::new("a host", 100);
        let [a, b] = ["a link", "another"].map(|name| all.part(name, 200, 50));
        a.charge(150).expect("50 of its own, and 100 of all");
        assert_eq!((a.used_bytes(), all.used_bytes()), (150, 100));
        let error = a.charge(1).expect_err("no more for all");
        assert!(error.to_string().contains("a host"), "{error}");
        assert_eq!(a.used_bytes(), 150);
        b.charge(50).expect("its own");
        b.charge(1).expect_err("nothing beyond");
        a.credit(120);
        assert_eq!((a.used_bytes(), all.used_bytes()), (30, 0));
        b.charge(100).expect("again");
        assert_eq!(all.used_bytes(), 100);
        let error = b.charge(100).expect_err("its own limit");
        assert!(error.to_string().contains("another"), "{error}");
        b.credit(150);
        assert_eq!((b.used_bytes(), all.used_bytes()), (0, 0));
    }

    #[test]
    fn who_waits_is_woken_when_some_comes_back_to_either_account() {
        struct Count(AtomicUsize);
        impl Wake for Count {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let all = Account::new("a host", 100);
        let [a, b] = ["a link", "another"].map(|name| all.part(name, 200, 50));
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let (waker, woken) = (Waker::from(Arc::clone(&count)), || count.0.load(Ordering::Relaxed));
        a.charge(150).expect("all there is");
        b.charge(50).expect("its own");
        b.charge(1).expect_err("no more for all");
        for _ in 0..3 {
            b.wake_on_credit(&waker);
        }
        assert_eq!(woken(), 0);
        a.credit(1);
        assert_eq!(woken(), 1, "the account above holds less");
        a.credit(1);
        assert_eq!(woken(), 1, "once");
        b.credit(50);
        assert_eq!(woken(), 2, "its own does");
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
