//! The shared state of a pool: its heaps, caches and counters, and how blocks are taken and
//! returned.
//!
//! The submodules need this state, directly or through a slab. A slab keeps the state alive, and
//! every buffer in the slab keeps the slab alive. In the diagram, `A ◄─ B` means that B uses A. The
//! upper row holds free blocks. The lower row holds blocks in use; a window gives a peer access to
//! a buffer.
//!
//! ```text
//!   slab ◄─ heap  ◄─ cache
//!     ▲──── lease ◄─ buf   ◄─ window
//! ```

pub(super) mod buf;
pub(super) mod cache;
pub(super) mod heap;
pub(super) mod lease;
mod slab;
pub(super) mod window;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock};

use ferrite_verbs::ProtectionDomain;

use self::buf::BufMut;
use self::cache::Cache;
use self::heap::Heap;
use self::slab::Block;
use self::window::Registrations;
use super::arena::Arena;
use super::class::{Purpose, SizeClass};
use super::config::PoolConfig;
use super::counters::Counters;
use super::error::{Budget, PoolError};
use super::lock;

pub(super) struct Core {
    pub(super) config: PoolConfig,
    /// The protection domains; `None` where the device is gone. The lock is never held during a
    /// registration, so readers do not wait.
    domains: Mutex<Vec<Option<ProtectionDomain>>>,
    /// Locked while an arena is created, while unused arenas are taken out, and while a domain is
    /// retired or restored. So no arena is registered with a retired domain.
    registering: Mutex<()>,
    /// The memory node of the first device that has one.
    pub(super) numa_node: Option<u32>,
    /// The heaps, indexed by [`Purpose`].
    pub(super) heaps: [Heap; Purpose::ALL.len()],
    pub(super) cache: Cache,
    pub(super) counters: Counters,
    quarantine: Mutex<Quarantine>,
    /// Runs calls that may block in the device. Without it, the calling thread makes these calls.
    background: OnceLock<Background>,
}

/// An executor for work that may block.
pub(crate) type Background = Box<dyn Fn(Box<dyn FnOnce() + Send>) + Send + Sync>;

/// Exposed buffers that a device has not released.
#[derive(Default)]
struct Quarantine {
    held: Vec<(Registrations, BufMut)>,
    closed: bool,
}

impl Core {
    pub(super) fn new(
        config: PoolConfig,
        domains: Vec<ProtectionDomain>,
        heaps: [Heap; 2],
    ) -> Self {
        let cache =
            Cache::new(config.cache_shards, config.thread_cache_blocks, config.thread_cache_bytes);
        let numa_node = domains.iter().find_map(|domain| domain.context().device().numa_node());
        let (counters, quarantine, background) =
            (Counters::default(), Mutex::default(), OnceLock::new());
        let domains = Mutex::new(domains.into_iter().map(Some).collect());
        let registering = Mutex::default();
        Self {
            config,
            domains,
            registering,
            numa_node,
            heaps,
            cache,
            counters,
            quarantine,
            background,
        }
    }

    fn heap(&self, purpose: Purpose) -> &Heap {
        &self.heaps[purpose.index()]
    }

    /// Takes a free block. Grows the heap if it has none.
    pub(super) fn take(
        self: &Arc<Self>,
        purpose: Purpose,
        class: SizeClass,
    ) -> Result<Block, PoolError> {
        let mut shard = self.cache.shard();
        if let Some(block) = shard.pop(purpose, class) {
            return Ok(block);
        }
        let blocks = &mut shard.magazine(purpose, class).blocks;
        self.heap(purpose).take(self, class, self.cache.batch(class), blocks);
        let block = shard.pop(purpose, class);
        drop(shard);
        if self.heap(purpose).take_is_low() {
            self.grow_ahead(purpose);
        }
        if let Some(block) = block {
            return Ok(block);
        }
        let block = self.take_by_growing(purpose, class)?;
        self.cache.shard().count_taken(purpose, class);
        Ok(block)
    }

    /// Returns a block that is no longer used.
    pub(super) fn release(&self, block: Block) {
        let heap = self.heap(block.slab.purpose);
        self.cache.keep(block, heap);
    }

    #[cold]
    fn take_by_growing(
        self: &Arc<Self>,
        purpose: Purpose,
        class: SizeClass,
    ) -> Result<Block, PoolError> {
        let heap = self.heap(purpose);
        let mut one = Vec::with_capacity(1);
        let _growing = lock(&heap.growth);
        loop {
            heap.take(self, class, 1, &mut one);
            if let Some(block) = one.pop() {
                return Ok(block);
            }
            let refused = match heap.room(self.config.memory_pool_increase) {
                0 => None,
                len => match self.grow(purpose, len) {
                    Ok(()) => {
                        self.counters.growths.fetch_add(1, Ordering::Relaxed);
                        continue;
                    }
                    Err(error) => {
                        self.counters.count_failure(&error);
                        Some(error)
                    }
                },
            };
            // The heap cannot grow, but the quarantine and the caches may hold usable blocks.
            self.retry_quarantined();
            self.cache.drain(purpose, heap);
            heap.take(self, class, 1, &mut one);
            return one
                .pop()
                .ok_or_else(|| refused.unwrap_or_else(|| self.over_budget(heap, purpose, class)));
        }
    }

    /// Grows the heap before it is exhausted, if there is a background executor. Otherwise the next
    /// caller would wait for the registration.
    #[cold]
    fn grow_ahead(self: &Arc<Self>, purpose: Purpose) {
        let Some(background) = self.background.get() else { return };
        let core = Arc::clone(self);
        background(Box::new(move || {
            let heap = core.heap(purpose);
            let _growing = lock(&heap.growth);
            let len = heap.room(core.config.memory_pool_increase);
            if len == 0 || !heap.has_no_free_chunk() {
                return;
            }
            match core.grow(purpose, len) {
                Ok(()) => {
                    core.counters.growths.fetch_add(1, Ordering::Relaxed);
                }
                Err(error) => core.counters.count_failure(&error),
            }
        }));
    }

    /// Adds an arena of `len` bytes.
    pub(super) fn grow(&self, purpose: Purpose, len: usize) -> Result<(), PoolError> {
        let _registering = lock(&self.registering);
        let domains = lock(&self.domains).clone();
        let arena = Arena::new(len, &domains, self.config.huge_pages, self.numa_node)?;
        self.heap(purpose).add(&Arc::new(arena));
        Ok(())
    }

    /// Returns arenas that were unused for a while to the system, up to `most` for each purpose.
    /// Returns whether more can be released later, if they stay unused.
    pub(super) fn shrink(&self, most: usize) -> bool {
        let mut has_more = false;
        for (purpose, heap) in Purpose::ALL.into_iter().zip(&self.heaps) {
            self.cache.drain(purpose, heap);
            // While arenas are taken out, no arena may be created or registered with a domain. If
            // another thread is doing so, do not wait for it.
            let Ok(registering) = self.registering.try_lock() else {
                has_more = true;
                continue;
            };
            let (idle, has_idle) = heap.take_idle(most);
            has_more |= has_idle;
            drop(registering);
            if !idle.is_empty() {
                self.run_in_background(move || drop(idle));
            }
        }
        has_more
    }

    /// Returns the domain with this index, unless its device is gone.
    pub(super) fn domain(&self, index: usize) -> Option<ProtectionDomain> {
        lock(&self.domains).get(index).cloned().flatten()
    }

    /// Returns the number of domains, including those whose device is gone.
    pub(super) fn domains(&self) -> usize {
        lock(&self.domains).len()
    }

    /// Returns the domains whose device is present.
    pub(super) fn live_domains(&self) -> Vec<ProtectionDomain> {
        lock(&self.domains).iter().flatten().cloned().collect()
    }

    /// Ends the registration of every arena with one domain.
    pub(super) fn retire(&self, index: usize) {
        let _registering = lock(&self.registering);
        if let Some(domain) = lock(&self.domains).get_mut(index) {
            *domain = None;
        }
        for heap in &self.heaps {
            heap.holdings().arenas.iter().for_each(|arena| arena.retire(index));
        }
    }

    /// Registers all arenas with a domain that replaces a retired one; all or nothing.
    pub(super) fn restore(&self, index: usize, domain: &ProtectionDomain) -> Result<(), PoolError> {
        // An arena that another thread is about to create waits for this lock. It is then
        // registered with the restored domain, too.
        let _registering = lock(&self.registering);
        let wrong = {
            let domains = lock(&self.domains);
            match domains.get(index) {
                Some(None) => None,
                Some(Some(_)) => Some(format!("cannot restore domain {index}: it is not retired")),
                None => {
                    let count = domains.len();
                    Some(format!("cannot restore domain {index}: the pool has {count} domains"))
                }
            }
        };
        if let Some(wrong) = wrong {
            return Err(PoolError::Misuse(wrong));
        }
        let arenas: Vec<_> = self.heaps.iter().flat_map(|heap| heap.holdings().arenas).collect();
        let mut regions = Vec::with_capacity(arenas.len());
        for arena in &arenas {
            match arena.register(domain) {
                Ok(region) => regions.push(region),
                Err(error) => {
                    self.counters.count_failure(&error);
                    arenas.iter().zip(regions).for_each(|(arena, region)| arena.release(region));
                    return Err(error);
                }
            }
        }
        arenas.iter().zip(regions).for_each(|(arena, region)| arena.restore(index, region));
        if let Some(place) = lock(&self.domains).get_mut(index) {
            *place = Some(domain.clone());
        }
        Ok(())
    }

    /// Counts and returns the error for a heap that is at its maximum.
    fn over_budget(&self, heap: &Heap, purpose: Purpose, class: SizeClass) -> PoolError {
        let tally = self.cache.tally()[purpose.index()];
        let used =
            SizeClass::ALL.into_iter().zip(tally).map(|(of, n)| n.in_use * of.bytes() as u64).sum();
        let (asked, limit) = (class.bytes() as u64, heap.max_bytes as u64);
        let error = PoolError::OverBudget { which: Budget::Heap(purpose), asked, limit, used };
        self.counters.count_failure(&error);
        error
    }

    pub(super) fn set_background(&self, background: Background) {
        let _ = self.background.set(background); // called once: a fabric has one pool
    }

    /// Runs `work`, which may block in the device: on the background executor if there is one,
    /// otherwise on this thread.
    pub(super) fn run_in_background(&self, work: impl FnOnce() + Send + 'static) {
        match self.background.get() {
            Some(background) => background(Box::new(work)),
            None => work(),
        }
    }

    /// Keeps a buffer that the device has not released yet, so that nobody uses it.
    pub(super) fn quarantine(&self, registrations: Registrations, buf: BufMut) {
        self.counters.quarantined_bytes.fetch_add(buf.block_bytes() as u64, Ordering::Relaxed);
        self.hold(registrations, buf);
    }

    /// Holds the buffer until the next attempt to release it. Leaks it if the pool is closed.
    fn hold(&self, registrations: Registrations, buf: BufMut) {
        let mut quarantine = lock(&self.quarantine);
        if quarantine.closed {
            drop(quarantine);
            leak(registrations, buf);
        } else {
            quarantine.held.push((registrations, buf));
        }
    }

    /// Asks the devices again to release the buffers in quarantine. Returns how many were released.
    pub(super) fn retry_quarantined(&self) -> usize {
        let held = std::mem::take(&mut lock(&self.quarantine).held);
        let tried = held.len();
        let mut refused = 0;
        for (mut registrations, buf) in held {
            if registrations.close().is_none() {
                self.counters
                    .quarantined_bytes
                    .fetch_sub(buf.block_bytes() as u64, Ordering::Relaxed);
            } else {
                refused += 1;
                self.hold(registrations, buf);
            }
        }
        tried - refused
    }

    /// Closes the pool after the last [`Pool`](super::Pool) was dropped: free memory goes back to
    /// the system.
    pub(super) fn close(&self) {
        lock(&self.quarantine).closed = true;
        self.retry_quarantined();
        self.cache.close();
        for heap in &self.heaps {
            heap.close();
        }
    }
}

/// Leaks the buffer and with it the mapping, because the device may write there for ever. Dropping
/// the registrations tries once more to release them, and counts a leak if that fails
/// ([`ferrite_verbs::leaked_objects`]).
fn leak(registrations: Registrations, buf: BufMut) {
    std::mem::forget(buf);
    drop(registrations);
}
