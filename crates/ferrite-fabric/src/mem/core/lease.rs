//! A lease: a counted handle on a block that is in use. Handles are counted only here.
//!
//! All leases of a block together own one reference count of its slab. The first lease gets the
//! count from its [`Block`], and the last one turns it back into a block. So cloning is one atomic
//! addition, and neither slab, arena nor pool can be dropped before the last lease.
#![expect(
    unsafe_code,
    reason = "reference counts in the block's metadata; each block states its obligations"
)]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::slab::{Block, Meta, Slab};
use crate::mem::budget::Account;
use crate::mem::error::PoolError;

/// Maximum number of handles of a block. No program needs more, and the counter cannot wrap even if
/// all threads add at once.
const MAX_HANDLES: u32 = u32::MAX / 2;

pub(in crate::mem) struct Lease {
    slab: NonNull<Slab>,
    index: u32,
}

// SAFETY: a lease is a shared reference to a `Slab`, whose fields are immutable or atomic. Only the
// single lease of a block accesses `Meta::charge` (`charge_mut`, and the last `drop`).
unsafe impl Send for Lease {}
// SAFETY: as above.
unsafe impl Sync for Lease {}

impl Lease {
    /// Takes a free block into use. The caller has charged `account` for it; the last lease credits
    /// the account.
    pub(in crate::mem) fn new(block: Block, account: Option<Account>) -> Self {
        let Block { slab, index } = block;
        let before = slab.meta(index).refs.swap(1, Ordering::Relaxed);
        debug_assert_eq!(before, 0, "a free block has no handles");
        // SAFETY: never null. The leases now own the count of the slab: the last `drop` takes it
        // back.
        let slab = unsafe { NonNull::new_unchecked(Arc::into_raw(slab).cast_mut()) };
        let mut lease = Self { slab, index };
        if let Some(charge) = lease.charge_mut() {
            *charge = account;
        }
        lease
    }

    pub(in crate::mem) fn slab(&self) -> &Slab {
        // SAFETY: the block's leases own a count of the slab, and this is one of them.
        unsafe { self.slab.as_ref() }
    }

    /// Returns the first byte of the block. The address is valid for the size of the block's class
    /// while a lease lives.
    pub(in crate::mem) fn at(&self) -> NonNull<u8> {
        self.slab().at(self.index)
    }

    pub(in crate::mem) fn generation(&self) -> u32 {
        self.meta().generation.load(Ordering::Relaxed)
    }

    /// Returns whether this is the only handle. If so, all accesses of earlier handles happened
    /// before this call.
    pub(in crate::mem) fn is_unique(&self) -> bool {
        self.meta().refs.load(Ordering::Acquire) == 1
    }

    /// Moves the charge to `account`. If the account has no room, nothing changes.
    pub(in crate::mem) fn charge_to(&mut self, account: &Account) -> Result<(), PoolError> {
        let bytes = self.slab().class.bytes();
        account.charge(bytes)?;
        match self.charge_mut() {
            Some(charge) => {
                if let Some(before) = charge.replace(account.clone()) {
                    before.credit(bytes);
                }
                Ok(())
            }
            None => {
                account.credit(bytes);
                Err(PoolError::Misuse(
                    "a shared buffer cannot be charged to another account".into(),
                ))
            }
        }
    }

    /// Returns the account that is charged for the block; `None` if there are other handles.
    fn charge_mut(&mut self) -> Option<&mut Option<Account>> {
        if !self.is_unique() {
            return None;
        }
        // SAFETY: this is the only lease of the block. While the result lives, `&mut self` prevents
        // that a second lease is created, or that this one is used otherwise. The load above orders
        // this access after those of the leases that are gone.
        Some(unsafe { &mut *self.meta().charge.get() })
    }

    fn meta(&self) -> &Meta {
        self.slab().meta(self.index)
    }
}

// SAFETY: `charge` is the only field that is not atomic, and it belongs to the holder of the
// block's only lease.
unsafe impl Sync for Meta {}

impl Clone for Lease {
    fn clone(&self) -> Self {
        let handles = self.meta().refs.fetch_add(1, Ordering::Relaxed);
        if handles > MAX_HANDLES {
            std::process::abort(); // as `Arc` does: the program must be leaking clones in a loop
        }
        Self { slab: self.slab, index: self.index }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let meta = self.meta();
        if meta.refs.fetch_sub(1, Ordering::Release) != 1 {
            return;
        }
        // This orders all accesses of other handles before the next use of the block.
        fence(Ordering::Acquire);
        // SAFETY: the count has reached 0, so no other lease exists or can be created, and the cell
        // is ours.
        let account = unsafe { (*meta.charge.get()).take() };
        meta.generation.fetch_add(1, Ordering::Relaxed);
        let index = self.index;
        // SAFETY: `new` turned one count of the slab into this pointer; the leases owned it
        // together, and the last one returns it, once.
        let slab = unsafe { Arc::from_raw(self.slab.as_ptr().cast_const()) };
        if let Some(account) = account {
            account.credit(slab.class.bytes());
        }
        // The block gets a count of its own, because others may take it and close the pool before
        // `release` returns: `slab` must live until then.
        let block = Block { slab: Arc::clone(&slab), index };
        slab.core.release(block);
    }
}
