//! The pool: how it is built, and its operations.

use std::sync::Arc;

use ferrite_verbs::{Access, ProtectionDomain, RemoteSlice};

use super::budget::Account;
use super::class::{CHUNK_BYTES, Purpose, SizeClass};
use super::config::PoolConfig;
use super::core::buf::{Buf, BufMut};
use super::core::heap::Heap;
use super::core::lease::Lease;
use super::core::window::Window;
use super::core::{Background, Core};
use super::error::PoolError;
use super::exposed::Exposed;
use super::stats::PoolStats;

/// Builds a [`Pool`]: see [`Pool::builder`].
///
/// ```
/// use ferrite_fabric::mem::{Pool, PoolConfig};
/// # use ferrite_verbs::fake::{DeviceSpec, World};
/// # let world = World::new();
/// # world.add_device(DeviceSpec::new("fake1", "127.0.0.1".parse()?));
/// # let domain = world.verbs().device("fake1")?.open()?.allocate_protection_domain()?;
/// let pool = Pool::builder(&[domain])
///     .config(PoolConfig { receive_reserve: 32 << 20, ..PoolConfig::default() })
///     .memory_pool_max(64 << 20)
///     .build()?;
/// assert_eq!(pool.stats().send.max_bytes, 32 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct Builder {
    domains: Vec<ProtectionDomain>,
    config: PoolConfig,
}

impl Builder {
    /// Sets all settings at once.
    pub fn config(self, config: PoolConfig) -> Self {
        Self { config, ..self }
    }

    /// See [`PoolConfig::memory_pool_initial`].
    pub fn memory_pool_initial(mut self, bytes: usize) -> Self {
        self.config.memory_pool_initial = bytes;
        self
    }

    /// See [`PoolConfig::memory_pool_increase`].
    pub fn memory_pool_increase(mut self, bytes: usize) -> Self {
        self.config.memory_pool_increase = bytes;
        self
    }

    /// See [`PoolConfig::memory_pool_max`].
    pub fn memory_pool_max(mut self, bytes: usize) -> Self {
        self.config.memory_pool_max = bytes;
        self
    }

    /// See [`PoolConfig::receive_reserve`].
    pub fn receive_reserve(mut self, bytes: usize) -> Self {
        self.config.receive_reserve = bytes;
        self
    }

    /// See [`PoolConfig::huge_pages`].
    pub fn huge_pages(mut self, wanted: bool) -> Self {
        self.config.huge_pages = wanted;
        self
    }

    /// See [`PoolConfig::thread_cache_blocks`].
    pub fn thread_cache_blocks(mut self, blocks: usize) -> Self {
        self.config.thread_cache_blocks = blocks;
        self
    }

    /// See [`PoolConfig::thread_cache_bytes`].
    pub fn thread_cache_bytes(mut self, bytes: usize) -> Self {
        self.config.thread_cache_bytes = bytes;
        self
    }

    /// Maps and registers the initial memory.
    ///
    /// # Errors
    /// - [`PoolError::Misuse`] if a size is invalid, or the sizes contradict each other.
    /// - [`PoolError::Map`] if the system has no memory.
    /// - [`PoolError::Register`] if the locked-memory limit or the device refuses, with figures and
    ///   a remedy.
    pub fn build(self) -> Result<Pool, PoolError> {
        let config = self.config.checked()?;
        let heaps = Purpose::ALL.map(|purpose| {
            let limits = (config.max_of(purpose), config.regions_of(purpose));
            Heap::new(purpose, limits, config.kept_of(purpose))
        });
        let core = Arc::new(Core::new(config, self.domains, heaps));
        for purpose in Purpose::ALL {
            match core.config.initial_of(purpose) {
                0 => {}
                mut len => {
                    while len > 0 {
                        let piece = len.min(core.config.max_region);
                        core.grow(purpose, piece)?;
                        len -= piece;
                    }
                }
            }
        }
        Ok(Pool(Arc::new(Handle { core })))
    }
}

/// Registered memory, cut into buffers. Clones share the memory.
///
/// When the last clone is dropped, free memory is returned to the system at once. Buffers in use
/// stay valid, and each arena is released with its last buffer.
///
/// ```
/// use ferrite_fabric::mem::{Account, Pool, Purpose};
/// # use ferrite_verbs::fake::{DeviceSpec, World};
/// # let world = World::new();
/// # world.add_device(DeviceSpec::new("fake1", "127.0.0.1".parse()?));
/// # let domain = world.verbs().device("fake1")?.open()?.allocate_protection_domain()?;
/// let pool =
///     Pool::builder(&[domain]).memory_pool_max(64 << 20).receive_reserve(16 << 20).build()?;
/// let peer = Account::new("peer 10.0.0.7", 1 << 20);
/// let mut buf = pool.take(5, Purpose::Send, &peer)?;
/// buf.copy_from_slice(b"hello");
/// let bytes: bytes::Bytes = buf.freeze().into();
/// drop(pool);
/// assert_eq!(&bytes[..], b"hello");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Pool(Arc<Handle>);

/// Closes the pool when the last of its clones is dropped.
struct Handle {
    core: Arc<Core>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.core.close();
    }
}

impl Pool {
    /// Returns a builder for a pool whose memory all of `domains` may use, one for each device of
    /// the process. Their order gives the indices for [`BufMut::raw_parts`] and [`Pool::expose`].
    /// Without domains, the memory is not registered.
    pub fn builder(domains: &[ProtectionDomain]) -> Builder {
        Builder { domains: domains.to_vec(), config: PoolConfig::default() }
    }

    /// Takes a buffer of `len` bytes. The account is charged for the size of the buffer's block.
    /// The contents are whatever the previous user left there.
    ///
    /// # Errors
    /// - [`PoolError::OverBudget`] if the account or the heap is exhausted: slow down, and retry
    ///   when buffers were returned.
    /// - [`PoolError::TooLarge`] beyond 2 MiB.
    /// - [`PoolError::Register`] or [`PoolError::Map`] if the pool has to grow and the host
    ///   refuses.
    pub fn take(
        &self,
        len: usize,
        purpose: Purpose,
        account: &Account,
    ) -> Result<BufMut, PoolError> {
        self.take_for(len, purpose, Some(account))
    }

    /// Returns the size below which a received message is copied out of its buffer.
    pub(crate) fn copy_below(&self) -> usize {
        self.0.core.config.copy_below
    }

    /// Takes a buffer that is charged to no account yet (see [`BufMut::charge_to`]). An example is
    /// a receive that is posted before its sender is known.
    ///
    /// # Errors
    /// Like [`Pool::take`].
    pub fn take_uncharged(&self, len: usize, purpose: Purpose) -> Result<BufMut, PoolError> {
        self.take_for(len, purpose, None)
    }

    fn take_for(
        &self,
        len: usize,
        purpose: Purpose,
        account: Option<&Account>,
    ) -> Result<BufMut, PoolError> {
        let core = &self.0.core;
        let Some(class) = SizeClass::holding(len) else {
            let error = PoolError::TooLarge { asked: len as u64, max: CHUNK_BYTES as u64 };
            core.counters.count_failure(&error);
            return Err(error);
        };
        if let Some(account) = account {
            account
                .charge(class.bytes())
                .inspect_err(|error| core.counters.count_failure(error))?;
        }
        match core.take(purpose, class) {
            Ok(block) => Ok(BufMut::new(Lease::new(block, account.cloned()), len)),
            Err(error) => {
                if let Some(account) = account {
                    account.credit(class.bytes());
                }
                Err(error)
            }
        }
    }

    /// Exposes the buffer to peers that are connected through the domain with this index, within
    /// `access`, until the buffer is revoked. Registers exactly the bytes of the buffer. These
    /// bytes count against the locked-memory limit a second time.
    ///
    /// **The peer sees the contents of the buffer**: overwrite the bytes that the previous user
    /// left there.
    ///
    /// # Errors
    /// Returns the buffer with:
    /// - [`PoolError::Register`] if the device or the locked-memory limit refuses;
    /// - [`PoolError::Misuse`] if the buffer is empty or belongs to another pool;
    /// - [`PoolError::NoDomain`] if there is no such domain, or its device is gone.
    pub fn expose(
        &self,
        buf: BufMut,
        domain: usize,
        access: Access,
    ) -> Result<Exposed, (BufMut, PoolError)> {
        let core = &self.0.core;
        let wrong = if !buf.is_of(core) {
            "the buffer belongs to another pool"
        } else if buf.is_empty() {
            "an empty buffer cannot be exposed"
        } else {
            return match core.domain(domain) {
                Some(of) => {
                    let mut exposed = Exposed::new(buf);
                    match exposed.register(domain, &of, access) {
                        Ok(_) => Ok(exposed),
                        Err(error) => Err((exposed.into_buf(), error)),
                    }
                }
                None => Err((buf, PoolError::NoDomain { index: domain })),
            };
        };
        Err((buf, PoolError::Misuse(wrong.into())))
    }

    /// Sets the executor for calls that may block in the device, such as ending registrations.
    pub(crate) fn set_background(&self, background: Background) {
        self.0.core.set_background(background);
    }

    /// Exposes a buffer to peers whose requests this process executes. Nothing is registered.
    ///
    /// # Errors
    /// Returns the buffer with [`PoolError::Misuse`] if it is empty or belongs to another pool.
    pub fn expose_without_device(&self, buf: BufMut) -> Result<Exposed, (BufMut, PoolError)> {
        if !buf.is_of(&self.0.core) {
            return Err((buf, PoolError::Misuse("the buffer belongs to another pool".into())));
        }
        if buf.is_empty() {
            return Err((buf, PoolError::Misuse("an empty buffer cannot be exposed".into())));
        }
        Ok(Exposed::new(buf))
    }

    /// Exposes a buffer to the peer of one queue pair of `domain`, and to nobody else. The queue
    /// pair must bind the window.
    pub(crate) fn expose_by_window(
        &self,
        buf: BufMut,
        domain: usize,
        access: Access,
    ) -> Result<(Exposed, Arc<Window>), (BufMut, PoolError)> {
        let mut exposed = self.expose_without_device(buf)?;
        match self.open_window(&mut exposed, domain, access) {
            Ok(window) => Ok((exposed, window)),
            Err(error) => Err((exposed.into_buf(), error)),
        }
    }

    /// Opens an exposed buffer to the peer of one more queue pair, which must bind the window.
    pub(crate) fn open_window(
        &self,
        exposed: &mut Exposed,
        domain: usize,
        access: Access,
    ) -> Result<Arc<Window>, PoolError> {
        match self.0.core.domain(domain) {
            Some(of) => exposed.open_window(domain, &of, access),
            None => Err(PoolError::NoDomain { index: domain }),
        }
    }

    /// Opens an exposed buffer to peers on another domain. Returns how they address it.
    pub(crate) fn expose_also(
        &self,
        exposed: &mut Exposed,
        domain: usize,
        access: Access,
    ) -> Result<RemoteSlice, PoolError> {
        match self.0.core.domain(domain) {
            Some(of) => exposed.register(domain, &of, access),
            None => Err(PoolError::NoDomain { index: domain }),
        }
    }

    /// Asks the devices again to release buffers that are in quarantine
    /// ([`PoolStats::quarantined_bytes`]). Returns how many were released. A pool that runs out of
    /// memory does this by itself.
    #[expect(clippy::must_use_candidate, reason = "called for its effect")]
    pub fn retry_quarantined(&self) -> usize {
        self.0.core.retry_quarantined()
    }

    /// Returns up to `most` unused arenas of each purpose to the system, but no more than were
    /// already unused at the previous call. For each purpose, the first arena and one unused arena
    /// stay. [`PoolConfig::receive_initial`] bytes for receives stay, too.
    ///
    /// Returns `false` if nothing more can be released until buffers are returned. Fabrics call
    /// this every few seconds while it returns `true`.
    #[expect(clippy::must_use_candidate, reason = "called for its effect")]
    pub fn shrink(&self, most: usize) -> bool {
        self.0.core.shrink(most)
    }

    /// Returns whether [`Pool::shrink`] may have something to do.
    pub(crate) fn has_grown(&self) -> bool {
        self.0.core.heaps.iter().any(Heap::has_grown)
    }

    /// Returns the total size of the blocks that their users have ever given back to the pool.
    /// While this does not change, [`Pool::shrink`] has nothing new to do.
    pub(crate) fn returned_bytes(&self) -> u64 {
        self.0.core.cache.returned_bytes()
    }

    /// Returns the bytes of blocks in use, like [`HeapStats::in_use_bytes`](super::HeapStats), but
    /// without taking a lock. This is for frequent calls, where [`Pool::stats`] would cost too
    /// much.
    #[must_use]
    pub fn in_use_bytes(&self, purpose: Purpose) -> u64 {
        self.0.core.cache.in_use_bytes(purpose)
    }

    /// Returns the maximum memory for a purpose: [`HeapStats::max_bytes`](super::HeapStats).
    #[must_use]
    pub fn max_bytes(&self, purpose: Purpose) -> u64 {
        self.0.core.heaps[purpose.index()].max_bytes as u64
    }

    /// Returns whether a buffer belongs to this pool.
    #[must_use]
    pub fn owns(&self, buf: &Buf) -> bool {
        buf.is_of(&self.0.core)
    }

    /// Returns whether a mutable buffer belongs to this pool.
    #[must_use]
    pub fn owns_mut(&self, buf: &BufMut) -> bool {
        buf.is_of(&self.0.core)
    }

    /// Returns the domains that the pool's memory is registered with.
    #[must_use]
    pub fn domains(&self) -> Vec<ProtectionDomain> {
        self.0.core.live_domains()
    }

    /// Ends the registration of all arenas with the domain with this index, because its device goes
    /// away. The buffers stay. The registrations of exposed buffers do not end.
    ///
    /// Nothing may be in flight on the domain: destroy its queue pairs and shared receive queues
    /// first. Otherwise the device answers the remaining requests with protection errors.
    pub fn retire_domain(&self, index: usize) {
        self.0.core.retire(index);
    }

    /// Replaces a retired domain, because its device is back. Registers all memory of the pool with
    /// the new domain, including memory that is added later. Buffers that are in use now can be
    /// used with the new domain, too. During the call, other callers that need the pool to grow
    /// wait.
    ///
    /// Nothing may be in flight on the old domain. Requests with its keys are invalid in the new
    /// domain, and are answered with protection errors.
    ///
    /// # Errors
    /// [`PoolError::Register`] if the device or the locked-memory limit refuses; nothing is
    /// registered with the new domain then. [`PoolError::Misuse`] if there is no domain with this
    /// index, or if it was not retired.
    ///
    /// ```
    /// # use ferrite_fabric::mem::{Pool, Purpose};
    /// # use ferrite_verbs::fake::{DeviceSpec, World};
    /// # let world = World::new();
    /// # world.add_device(DeviceSpec::new("fake1", "10.0.0.1".parse()?));
    /// # let domain = world.verbs().device("fake1")?.open()?.allocate_protection_domain()?;
    /// let pool = Pool::builder(&[domain]).build()?;
    /// let buf = pool.take_uncharged(100, Purpose::Send)?;
    /// # world.remove_device("fake1");
    /// pool.retire_domain(0); // the device goes
    /// # world.add_device(DeviceSpec::new("fake1", "10.0.0.1".parse()?));
    /// # let domain = world.verbs().device("fake1")?.open()?.allocate_protection_domain()?;
    /// pool.restore_domain(0, &domain)?; // and one comes back
    /// # drop(buf);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn restore_domain(&self, index: usize, domain: &ProtectionDomain) -> Result<(), PoolError> {
        self.0.core.restore(index, domain)
    }

    /// Returns a snapshot of the pool's counters. They are not all read at the same instant, so
    /// they add up only while nobody takes or returns buffers. Does not wait for a registration in
    /// progress.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        PoolStats::of(&self.0.core)
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("domains", &self.domains()).finish_non_exhaustive()
    }
}
