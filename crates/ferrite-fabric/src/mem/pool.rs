//! The pool: its settings, how it is built, and its operations.

use std::sync::Arc;

use ferrite_verbs::{Access, ProtectionDomain, RemoteSlice};

use super::budget::Account;
use super::buf::{Buf, BufMut};
use super::class::{CHUNK_BYTES, Purpose, SizeClass};
use super::core::{Background, Core};
use super::error::PoolError;
use super::exposed::Exposed;
use super::heap::Heap;
use super::lease::Lease;
use super::stats::PoolStats;
use super::window::Window;

/// The settings of a pool. Sizes are in bytes and rounded to chunks of 2 MiB: limits down, the
/// others up.
///
/// ```
/// use ferrite_fabric::mem::PoolConfig;
///
/// let config = PoolConfig {
///     memory_pool_max: 64 << 20,
///     receive_reserve: 16 << 20,
///     ..PoolConfig::default()
/// };
/// assert_eq!(config.memory_pool_initial, 4 << 20);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolConfig {
    /// Registered when the pool is built. It is divided between sends and receives in proportion to
    /// their limits, with at least 2 MiB for each unless it is 0. Default: 4 MiB.
    pub memory_pool_initial: usize,
    /// Registered at a time when a heap is exhausted. Default: 4 MiB.
    pub memory_pool_increase: usize,
    /// The most that is ever registered, including receives. Every device of a pool pins it
    /// separately, and each counts against the locked-memory limit; a fabric divides it among its
    /// devices. Default: 1 GiB.
    pub memory_pool_max: usize,
    /// The part of it that only receives may use; sends have the rest. At least 2 MiB for either.
    /// Default: 512 MiB.
    pub receive_reserve: usize,
    /// Uses 2 MiB pages: from the host's reserve, or else merged by the kernel. Default: false.
    pub huge_pages: bool,
    /// Maximum number of free blocks, of one class and purpose, in a thread's cache. Default: 128.
    pub thread_cache_blocks: usize,
    /// The same in bytes: larger classes keep fewer blocks, or none. Default: 256 KiB.
    pub thread_cache_bytes: usize,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            memory_pool_initial: 4 << 20,
            memory_pool_increase: 4 << 20,
            memory_pool_max: 1 << 30,
            receive_reserve: 512 << 20,
            huge_pages: false,
            thread_cache_blocks: 128,
            thread_cache_bytes: 256 << 10,
        }
    }
}

impl PoolConfig {
    /// Rounds the sizes to whole chunks, or returns what is wrong with them.
    fn checked(mut self) -> Result<Self, PoolError> {
        for limit in [&mut self.memory_pool_max, &mut self.receive_reserve] {
            *limit = *limit / CHUNK_BYTES * CHUNK_BYTES;
        }
        for size in [&mut self.memory_pool_initial, &mut self.memory_pool_increase] {
            *size = size.saturating_add(CHUNK_BYTES - 1) / CHUNK_BYTES * CHUNK_BYTES;
        }
        self.memory_pool_increase = self.memory_pool_increase.max(CHUNK_BYTES);
        let Self {
            memory_pool_initial: initial,
            memory_pool_max: max,
            receive_reserve: reserve,
            ..
        } = self;
        let wrong = if reserve < CHUNK_BYTES {
            format!("receive_reserve must be at least {CHUNK_BYTES} bytes")
        } else if max < reserve.saturating_add(CHUNK_BYTES) {
            format!(
                "memory_pool_max ({max}) must exceed receive_reserve ({reserve}) by 2 MiB for sends"
            )
        } else if initial > max {
            format!("memory_pool_initial ({initial}) is more than memory_pool_max ({max})")
        } else {
            return Ok(self);
        };
        Err(PoolError::Misuse(wrong))
    }

    fn max_of(&self, purpose: Purpose) -> usize {
        match purpose {
            Purpose::Send => self.memory_pool_max - self.receive_reserve,
            Purpose::Receive => self.receive_reserve,
        }
    }

    /// Returns a purpose's part of what is registered at the start: at least a chunk, so that a
    /// host that refuses even that does so when the pool is built.
    fn initial_of(&self, purpose: Purpose) -> usize {
        if self.memory_pool_initial == 0 {
            return 0;
        }
        let share = self.memory_pool_initial as u128 * self.max_of(purpose) as u128;
        let share = (share / self.memory_pool_max as u128) as usize;
        (share.div_ceil(CHUNK_BYTES).max(1) * CHUNK_BYTES).min(self.max_of(purpose))
    }
}

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
    /// [`PoolError::Misuse`] if the sizes contradict each other; [`PoolError::Register`] if the
    /// locked-memory limit or the device refuses, with figures and a remedy.
    pub fn build(self) -> Result<Pool, PoolError> {
        let config = self.config.checked()?;
        let heaps = Purpose::ALL.map(|purpose| Heap::new(purpose, config.max_of(purpose)));
        let core = Arc::new(Core::new(config, self.domains, heaps));
        for purpose in Purpose::ALL {
            match core.config.initial_of(purpose) {
                0 => {}
                len => core.grow(purpose, len)?,
            }
        }
        Ok(Pool(Arc::new(Handle { core })))
    }
}

/// Registered memory, cut into buffers. Clones share it.
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
    /// Without domains it is plain memory.
    pub fn builder(domains: &[ProtectionDomain]) -> Builder {
        Builder { domains: domains.to_vec(), config: PoolConfig::default() }
    }

    /// Takes a buffer of `len` bytes, charged to `account` by the size of its block. Its contents
    /// are whatever the previous user left there.
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

    /// Takes a buffer that is charged to no account yet (see [`BufMut::charge_to`]), such as a
    /// receive that is posted before its sender is known.
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
    /// `access`, until it is revoked. Registers exactly its bytes, which count against the
    /// locked-memory limit a second time.
    ///
    /// **The peer sees the contents of the buffer**: overwrite what the previous user left there.
    ///
    /// # Errors
    /// Returns the buffer with:
    /// - [`PoolError::Register`] if the device or the locked-memory limit refuses;
    /// - [`PoolError::Misuse`] if the buffer is empty or belongs to another pool;
    /// - [`PoolError::NoDomain`] if there is no such domain.
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

    /// Exposes a buffer to peers that this process serves itself: nothing is registered.
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

    /// Returns up to `most` arenas of each purpose to the system: those that no buffer used,
    /// neither now nor at the previous call. The initial memory and one more arena stay.
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

    /// Returns the total bytes that were ever returned. While this does not change,
    /// [`Pool::shrink`] has nothing new to do.
    pub(crate) fn returned_bytes(&self) -> u64 {
        self.0.core.cache.returned_bytes()
    }

    /// Returns the bytes of blocks in use, without taking a lock:
    /// [`HeapStats::in_use_bytes`](super::HeapStats). For frequent calls, where [`Pool::stats`]
    /// would cost too much.
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

    /// Like [`Pool::owns`].
    #[must_use]
    pub fn owns_mut(&self, buf: &BufMut) -> bool {
        buf.is_of(&self.0.core)
    }

    /// Returns the domains that it is registered with.
    #[must_use]
    pub fn domains(&self) -> Vec<ProtectionDomain> {
        self.0.core.live_domains()
    }

    /// Ends every registration with the domain with this index, because its device goes away. The
    /// buffers stay.
    ///
    /// Nothing may be in flight on it: destroy its queue pairs and shared receive queues first.
    /// Otherwise the device answers the remaining requests with protection errors.
    pub fn retire_domain(&self, index: usize) {
        self.0.core.retire(index);
    }

    /// Replaces a retired domain, because its device is back. Registers all memory with it, and
    /// memory that the pool grows by later. Buffers in use can be used with it, too. Callers that
    /// need the pool to grow wait meanwhile.
    ///
    /// Nothing may be in flight on the index: requests with the keys of the old domain are invalid
    /// in the new one, and are answered with protection errors.
    ///
    /// # Errors
    /// [`PoolError::Register`] if the device or the locked-memory limit refuses; then nothing is
    /// registered with it. [`PoolError::Misuse`] if there is no domain with this index, or if it
    /// was not retired.
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

    /// Returns a snapshot of its counters. They are read one after the other, so they add up only
    /// while nobody takes or returns buffers. Does not wait for a registration in progress.
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

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn rounds_sizes_to_whole_chunks() {
        let config = PoolConfig {
            memory_pool_initial: 1,
            memory_pool_increase: 0,
            memory_pool_max: 9 * MIB,
            receive_reserve: 3 * MIB,
            ..PoolConfig::default()
        };
        let config = config.checked().expect("fits");
        assert_eq!((config.memory_pool_initial, config.memory_pool_increase), (2 * MIB, 2 * MIB));
        assert_eq!(Purpose::ALL.map(|purpose| config.max_of(purpose)), [6 * MIB, 2 * MIB]);
    }

    #[test]
    fn divides_the_initial_memory_by_the_limits() {
        let config = PoolConfig {
            memory_pool_initial: 64 * MIB,
            receive_reserve: 256 * MIB,
            ..PoolConfig::default()
        };
        let config = config.checked().expect("fits");
        assert_eq!(Purpose::ALL.map(|purpose| config.initial_of(purpose)), [48 * MIB, 16 * MIB]);
        let default = PoolConfig::default().checked().expect("fits");
        assert_eq!(Purpose::ALL.map(|purpose| default.initial_of(purpose)), [2 * MIB; 2]);
        let lopsided = PoolConfig { receive_reserve: 2 * MIB, ..PoolConfig::default() };
        assert_eq!(Purpose::ALL.map(|purpose| lopsided.initial_of(purpose)), [4 * MIB, 2 * MIB]);
        let lazy = PoolConfig { memory_pool_initial: 0, ..PoolConfig::default() };
        assert_eq!(Purpose::ALL.map(|purpose| lazy.initial_of(purpose)), [0; 2]);
    }

    #[test]
    fn refuses_contradictory_sizes() {
        for (wrong, word) in [
            (PoolConfig { receive_reserve: 0, ..PoolConfig::default() }, "receive_reserve must be"),
            (PoolConfig { receive_reserve: 1 << 30, ..PoolConfig::default() }, "for sends"),
            (PoolConfig { receive_reserve: usize::MAX, ..PoolConfig::default() }, "for sends"),
            (
                PoolConfig { memory_pool_initial: 2 << 30, ..PoolConfig::default() },
                "memory_pool_initial",
            ),
            (
                PoolConfig { memory_pool_initial: usize::MAX, ..PoolConfig::default() },
                "memory_pool_initial",
            ),
        ] {
            let error = wrong.checked().expect_err(word);
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}
