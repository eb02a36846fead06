//! Buffers: a [`BufMut`] has one owner, who may write it. A [`Buf`] may have many readers.
//!
//! Neither type knows whether the device is using the memory. A reference from `deref` borrows the
//! value, and an operation in flight owns the value. So while the device may access the bytes,
//! nobody can have a conflicting reference.
#![expect(
    unsafe_code,
    reason = "makes slices of registered memory; each block states its obligations"
)]

use std::fmt;
use std::ops::{Bound, Deref, DerefMut, RangeBounds};
use std::ptr::NonNull;
use std::sync::Arc;

use bytes::Bytes;

use super::Core;
use super::lease::Lease;
use crate::mem::budget::Account;
use crate::mem::class::Purpose;
use crate::mem::error::PoolError;

/// How the device addresses a buffer: the arguments of
/// [`Sge::from_raw`](ferrite_verbs::Sge::from_raw). The contract of that function applies: **own
/// the buffer until the completion**.
///
/// ```
/// # use ferrite_fabric::mem::{Pool, Purpose};
/// # use ferrite_verbs::fake::{DeviceSpec, World};
/// # let world = World::new();
/// # world.add_device(DeviceSpec::new("fake1", "127.0.0.1".parse()?));
/// # let domain = world.verbs().device("fake1")?.open()?.allocate_protection_domain()?;
/// # let pool = Pool::builder(&[domain]).build()?;
/// let buf = pool.take_uncharged(64, Purpose::Send)?.freeze();
/// let parts = buf.slice(16..).raw_parts(0);
/// assert_eq!((parts.addr, parts.len), (buf.raw_parts(0).addr + 16, 48));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawParts {
    /// The address of the first byte.
    pub addr: u64,
    /// The length in bytes.
    pub len: u32,
    /// The local key for the requested domain, without remote rights; 0 if the device is gone.
    pub lkey: u32,
}

impl From<RawParts> for (u64, u32, u32) {
    /// Returns the arguments of [`Sge::from_raw`](ferrite_verbs::Sge::from_raw).
    fn from(RawParts { addr, len, lkey }: RawParts) -> Self {
        (addr, len, lkey)
    }
}

/// A part of a block, under a lease.
struct Span {
    lease: Lease,
    offset: u32,
    len: u32,
}

impl Span {
    fn at(&self) -> NonNull<u8> {
        // SAFETY: `offset + len` is at most the size of the block: `new`, `set_len` and `slice`
        // ensure that.
        unsafe { self.lease.at().add(self.offset as usize) }
    }

    fn capacity(&self) -> usize {
        self.lease.slab().class.bytes() - self.offset as usize
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the block is mapped while the lease lives, and the system zeroed it at first, so
        // all of it is initialised. Nobody writes it while the result lives: a `BufMut` is the only
        // handle and is borrowed, and a `Buf` never writes. Whoever passed the parts to the device
        // keeps the device's accesses apart (`Sge::from_raw`).
        unsafe { std::slice::from_raw_parts(self.at().as_ptr(), self.len as usize) }
    }

    fn raw_parts(&self, domain: usize) -> RawParts {
        RawParts {
            addr: self.at().as_ptr().addr() as u64,
            len: self.len,
            lkey: self.lease.slab().arena.lkey(domain),
        }
    }

    fn debug(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slab = self.lease.slab();
        f.debug_struct(name)
            .field("len", &self.len)
            .field("purpose", &slab.purpose)
            .field("class", &slab.class)
            .field("generation", &self.lease.generation())
            .finish_non_exhaustive()
    }
}

/// A buffer with a single owner, who may write it.
///
/// ```
/// use ferrite_fabric::mem::Purpose;
/// # use ferrite_fabric::mem::Pool;
/// # use ferrite_verbs::fake::{DeviceSpec, World};
/// # let world = World::new();
/// # world.add_device(DeviceSpec::new("fake1", "127.0.0.1".parse()?));
/// # let domain = world.verbs().device("fake1")?.open()?.allocate_protection_domain()?;
/// # let pool = Pool::builder(&[domain]).build()?;
/// let mut buf = pool.take_uncharged(1000, Purpose::Send)?;
/// assert_eq!((buf.len(), buf.capacity()), (1000, 1024));
/// buf[..5].copy_from_slice(b"hello");
/// buf.set_len(5);
/// assert_eq!(&buf.freeze()[..], b"hello");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct BufMut(Span);

impl BufMut {
    /// Returns the length of the buffer. Unlike `len` of the slice, this does not compute the
    /// address of the bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len as usize
    }

    /// Returns whether the buffer has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Creates a buffer of the first `len` bytes of a block that has no other handle.
    pub(in crate::mem) fn new(lease: Lease, len: usize) -> Self {
        debug_assert!(lease.is_unique(), "a mutable buffer has one handle");
        let mut buf = Self(Span { lease, offset: 0, len: 0 });
        buf.set_len(len);
        buf
    }

    /// Returns the largest possible length of the buffer, which is limited by the end of its block.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.0.capacity()
    }

    /// Changes the length of the buffer. Added bytes have whatever contents the block has there.
    ///
    /// # Panics
    /// If `len` is more than the capacity.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity(), "{len} bytes exceed the capacity of {}", self.capacity());
        self.0.len = len as u32; // a block is at most 2 MiB
    }

    /// Makes the buffer shareable. Nobody can write it from now on.
    #[must_use]
    pub fn freeze(self) -> Buf {
        Buf(self.0)
    }

    /// Moves the charge for the buffer's block to `account`. This is for a receive that was posted
    /// before its sender was known: it is charged once a message has arrived in it.
    ///
    /// # Errors
    /// [`PoolError::OverBudget`]; the charge then stays where it was.
    pub fn charge_to(&mut self, account: &Account) -> Result<(), PoolError> {
        let charged = self.0.lease.charge_to(account);
        charged.inspect_err(|error| self.0.lease.slab().core.counters.count_failure(error))
    }

    /// Returns how the device of the pool's `domain` addresses the buffer.
    ///
    /// # Panics
    /// If the pool has no domain with this index.
    #[must_use]
    pub fn raw_parts(&mut self, domain: usize) -> RawParts {
        self.0.raw_parts(domain)
    }

    /// Returns the purpose for which the buffer was taken.
    #[must_use]
    pub fn purpose(&self) -> Purpose {
        self.0.lease.slab().purpose
    }

    /// Returns how often the block had been returned to the pool when this buffer was taken. If the
    /// number has changed, the block has been reused. The count restarts at 0 when the pool divides
    /// the memory into blocks of another size.
    #[must_use]
    pub fn generation(&self) -> u32 {
        self.0.lease.generation()
    }

    pub(in crate::mem) fn at(&mut self) -> NonNull<u8> {
        self.0.at()
    }

    /// Returns the size of the buffer's block, which is the size that an account is charged for.
    pub(in crate::mem) fn block_bytes(&self) -> usize {
        self.0.lease.slab().class.bytes()
    }

    pub(in crate::mem) fn core(&self) -> &Arc<Core> {
        &self.0.lease.slab().core
    }

    pub(in crate::mem) fn is_of(&self, core: &Arc<Core>) -> bool {
        Arc::ptr_eq(self.core(), core)
    }
}

impl Deref for BufMut {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl DerefMut for BufMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `Span::bytes`; in addition, this is the only handle of the block, and it
        // is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.0.at().as_ptr(), self.0.len as usize) }
    }
}

impl AsRef<[u8]> for BufMut {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for BufMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.debug("BufMut", f)
    }
}

/// A buffer, or a part of one, that many may read and nobody may write. A clone costs one atomic
/// addition.
///
/// ```
/// use ferrite_fabric::mem::Purpose;
/// # use ferrite_fabric::mem::Pool;
/// # use ferrite_verbs::fake::{DeviceSpec, World};
/// # let world = World::new();
/// # world.add_device(DeviceSpec::new("fake1", "127.0.0.1".parse()?));
/// # let domain = world.verbs().device("fake1")?.open()?.allocate_protection_domain()?;
/// # let pool = Pool::builder(&[domain]).build()?;
/// let mut buf = pool.take_uncharged(11, Purpose::Receive)?;
/// buf.copy_from_slice(b"hello world");
/// let whole = buf.freeze();
/// let world = whole.slice(6..);
/// assert_eq!(&world[..], b"world");
/// let whole = whole.try_into_mut().unwrap_err(); // `world` is another handle
/// let bytes: bytes::Bytes = world.into(); // no copy
/// drop((whole, bytes));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Buf(Span);

impl Buf {
    /// Returns the length of the buffer. Unlike `len` of the slice, this does not compute the
    /// address of the bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len as usize
    }

    /// Returns whether the buffer has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Returns a part of the buffer. The part keeps the whole block in use.
    ///
    /// # Panics
    /// If the range exceeds the buffer.
    #[must_use]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Self {
        let len = self.len();
        let start = match range.start_bound() {
            Bound::Included(start) => *start,
            Bound::Excluded(before) => before.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(last) => last.saturating_add(1),
            Bound::Excluded(end) => *end,
            Bound::Unbounded => len,
        };
        assert!(
            start <= end && end <= len,
            "range {start}..{end} exceeds the buffer of {len} bytes"
        );
        let Span { lease, offset, .. } = &self.0;
        Self(Span {
            lease: lease.clone(),
            offset: offset + start as u32,
            len: (end - start) as u32,
        })
    }

    /// Converts the buffer to a mutable one, if this is the only handle. The capacity then reaches
    /// to the end of the block.
    ///
    /// # Errors
    /// Returns the buffer itself if there are other handles on the block.
    pub fn try_into_mut(self) -> Result<BufMut, Self> {
        if self.0.lease.is_unique() { Ok(BufMut(self.0)) } else { Err(self) }
    }

    /// Returns how the device of the pool's `domain` addresses the buffer.
    ///
    /// # Panics
    /// If the pool has no domain with this index.
    #[must_use]
    pub fn raw_parts(&self, domain: usize) -> RawParts {
        self.0.raw_parts(domain)
    }

    pub(in crate::mem) fn is_of(&self, core: &Arc<Core>) -> bool {
        Arc::ptr_eq(&self.0.lease.slab().core, core)
    }

    /// Returns the purpose for which the buffer was taken.
    #[must_use]
    pub fn purpose(&self) -> Purpose {
        self.0.lease.slab().purpose
    }

    /// See [`BufMut::generation`].
    #[must_use]
    pub fn generation(&self) -> u32 {
        self.0.lease.generation()
    }
}

impl Clone for Buf {
    fn clone(&self) -> Self {
        self.slice(..)
    }
}

impl Deref for Buf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl AsRef<[u8]> for Buf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl From<Buf> for Bytes {
    /// Converts the buffer without a copy. The block is returned when the last of the `Bytes` is
    /// dropped.
    fn from(buf: Buf) -> Self {
        Self::from_owner(buf)
    }
}

impl From<BufMut> for Buf {
    fn from(buf: BufMut) -> Self {
        buf.freeze()
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.debug("Buf", f)
    }
}
