//! Accounts: limits on how much of a pool one user may hold.

use std::sync::{Arc, Mutex};
use std::task::Waker;

use super::error::{Budget, PoolError};
use super::lock;

/// A limit on the memory held for one user, such as a peer. Clones share the limit.
///
/// When a buffer is taken, the account is charged for the size of the block. The account is
/// credited when the last handle of the buffer is dropped, whoever holds that handle. Reaching the
/// limit is an error that the caller must handle, never a wait.
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
    /// Locked while the parent is charged or credited, so that both accounts change together.
    held: Mutex<Held>,
    parent: Option<Parent>,
}

#[derive(Debug, Default)]
struct Held {
    bytes: u64,
    /// Tasks to wake when some memory is credited.
    waiters: Vec<Waker>,
}

/// An account that is charged for a part of the memory that this account holds.
#[derive(Debug)]
struct Parent {
    account: Account,
    /// The parent is charged only for the bytes beyond this number.
    free_bytes: u64,
}

impl Inner {
    /// Returns the parent, and the part of `used` that it is charged for.
    fn parent(&self, used: u64) -> Option<(&Account, u64)> {
        self.parent.as_ref().map(|parent| (&parent.account, used.saturating_sub(parent.free_bytes)))
    }
}

impl Account {
    /// Creates an account that holds at most `limit_bytes` at any time. `name` appears in errors.
    #[must_use]
    pub fn new(name: impl Into<Arc<str>>, limit_bytes: u64) -> Self {
        Self(Arc::new(Inner {
            name: name.into(),
            limit_bytes,
            held: Mutex::default(),
            parent: None,
        }))
    }

    /// Creates an account that is a part of this one. The bytes that the part holds beyond
    /// `free_bytes` are also charged to this account, so all parts share its limit. The first
    /// `free_bytes` are charged only to the part, so the other parts cannot use them up.
    #[must_use]
    pub fn part(&self, name: impl Into<Arc<str>>, limit_bytes: u64, free_bytes: u64) -> Self {
        let parent = Some(Parent { account: self.clone(), free_bytes });
        Self(Arc::new(Inner { name: name.into(), limit_bytes, held: Mutex::default(), parent }))
    }

    /// Returns whether this is the only handle.
    pub(crate) fn is_last(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    /// Returns the name of the account.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the limit.
    #[must_use]
    pub fn limit_bytes(&self) -> u64 {
        self.0.limit_bytes
    }

    /// Returns how many bytes the account holds.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        lock(&self.0.held).bytes
    }

    /// Charges `bytes`, all or nothing.
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
        if let (Some((parent, was)), Some((_, is))) = (self.0.parent(*used), self.0.parent(sum))
            && is > was
        {
            parent.charge((is - was) as usize)?;
        }
        *used = sum;
        Ok(())
    }

    /// Credits bytes that [`Account::charge`] has charged.
    pub(super) fn credit(&self, bytes: usize) {
        let mut wakes = Vec::new();
        self.credit_and(bytes as u64, &mut wakes);
        wakes.into_iter().for_each(Waker::wake); // after all locks were released
    }

    fn credit_and(&self, bytes: u64, wakes: &mut Vec<Waker>) {
        let mut held = lock(&self.0.held);
        let left = held.bytes.saturating_sub(bytes);
        if let (Some((parent, was)), Some((_, is))) =
            (self.0.parent(held.bytes), self.0.parent(left))
            && was > is
        {
            parent.credit_and(was - is, wakes);
        }
        held.bytes = left;
        wakes.append(&mut held.waiters);
    }

    /// Wakes `waker` at the next credit to this account, and again at the next credit to its
    /// parent.
    pub(crate) fn wake_on_credit(&self, waker: &Waker) {
        let waiters = &mut lock(&self.0.held).waiters;
        if !waiters.iter().any(|waiting| waiting.will_wake(waker)) {
            waiters.push(waker.clone());
        }
        if let Some(parent) = &self.0.parent {
            parent.account.wake_on_credit(waker);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;

    #[test]
    fn charges_all_or_nothing() {
        let account = Account::new("peer", 1000);
        account.charge(600).expect("the bytes fit");
        let error = account.charge(401).expect_err("it exceeds the limit");
        assert_eq!(
            error.to_string(),
            "the budget of peer is exhausted: 401 bytes requested, 600 of 1000 in use"
        );
        account.charge(400).expect("the bytes fit exactly");
        account.credit(1000);
        assert_eq!(
            (account.used_bytes(), account.limit_bytes(), account.name()),
            (0, 1000, "peer")
        );
    }

    #[test]
    fn parts_share_a_limit_beyond_their_free_bytes() {
        let all = Account::new("a host", 100);
        let [a, b] = ["a link", "another"].map(|name| all.part(name, 200, 50));
        a.charge(150).expect("50 free bytes, and 100 of the parent");
        assert_eq!((a.used_bytes(), all.used_bytes()), (150, 100));
        let error = a.charge(1).expect_err("the parent is exhausted");
        assert!(error.to_string().contains("a host"), "{error}");
        assert_eq!(a.used_bytes(), 150);
        b.charge(50).expect("the free bytes");
        b.charge(1).expect_err("the parent is exhausted");
        a.credit(120);
        assert_eq!((a.used_bytes(), all.used_bytes()), (30, 0));
        b.charge(100).expect("the parent has room again");
        assert_eq!(all.used_bytes(), 100);
        let error = b.charge(100).expect_err("it exceeds the account's own limit");
        assert!(error.to_string().contains("another"), "{error}");
        b.credit(150);
        assert_eq!((b.used_bytes(), all.used_bytes()), (0, 0));
    }

    #[test]
    fn wakes_waiters_when_the_account_or_its_parent_is_credited() {
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
        a.charge(150).expect("50 free bytes, and the whole limit of the parent");
        b.charge(50).expect("the free bytes");
        b.charge(1).expect_err("the parent is exhausted");
        for _ in 0..3 {
            b.wake_on_credit(&waker);
        }
        assert_eq!(woken(), 0);
        a.credit(1);
        assert_eq!(woken(), 1, "the parent holds less");
        a.credit(1);
        assert_eq!(woken(), 1, "a waker is called only once");
        b.credit(50);
        assert_eq!(woken(), 2, "the account itself holds less");
    }

    #[test]
    fn threads_together_stay_below_the_limit() {
        let account = Account::new("peer", 100);
        let granted: usize = std::thread::scope(|scope| {
            let takers: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| (0..100).filter(|_| account.charge(1).is_ok()).count()))
                .collect();
            takers.into_iter().map(|taker| taker.join().expect("the thread did not panic")).sum()
        });
        assert_eq!((granted, account.used_bytes()), (100, 100));
    }
}
