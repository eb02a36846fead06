//! What all handles of a pool share: its heaps, caches and counters, and the way of a block out and
//! back.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock};

use ferrite_verbs::ProtectionDomain;

use super::arena::Arena;
use super::buf::BufMut;
use super::cache::Cache;
use super::class::{Purpose, SizeClass};
use super::error::{Budget, PoolError};
use super::heap::Heap;
use super::lock;
use super::pool::PoolConfig;
use super::slab::Block;
use super::stats::Counters;
use super::window::Ways;

pub(super) struct Core {
    pub(super) config: PoolConfig,
    /// `None` where the device is gone. Never held while something is registered: who only wants to
    /// know does not wait.
    domains: Mutex<Vec<Option<ProtectionDomain>>>,
    /// Held while an arena is made, or a domain goes or comes: so that no arena is registered with
    /// a domain that goes.
    registering: Mutex<()>,
    /// The memory node that the first device with one is on.
    pub(super) numa_node: Option<u32>,
    /// By [`Purpose`].
    pub(super) heaps: [Heap; Purpose::ALL.len()],
    pub(super) cache: Cache,
    pub(super) counters: Counters,
    quarantine: Mutex<Quarantine>,
    /// Where calls are made that may wait for the device; nothing said: where they come up.
    elsewhere: OnceLock<Elsewhere>,
}

/// Has something done where waiting harms nobody.
pub(crate) type Elsewhere = Box<dyn Fn(Box<dyn FnOnce() + Send>) + Send + Sync>;

/// Buffers that were exposed and that the device has not let go.
#[derive(Default)]
struct Quarantine {
    held: Vec<(Ways, BufMut)>,
    closed: bool,
}

impl Core {
    pub(super) fn new(
        config: PoolConfig,
        domains: Vec<ProtectionDomain>,
        heaps: [Heap; 2],
    ) -> Self {
        let cache = Cache::new(config.thread_cache_blocks, config.thread_cache_bytes);
        let numa_node = domains.iter().find_map(|domain| domain.context().device().numa_node());
        let (counters, quarantine, elsewhere) =
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
            elsewhere,
        }
    }

    fn heap(&self, purpose: Purpose) -> &Heap {
        &self.heaps[purpose.index()]
    }

    /// A free block.
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
        if self.heap(purpose).take_low() {
            self.grow_ahead(purpose);
        }
        if let Some(block) = block {
            return Ok(block);
        }
        let block = self.take_by_growing(purpose, class)?;
        self.cache.shard().count_taken(purpose, class);
        Ok(block)
    }

    /// A block that is not used any more.
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
            // No more from the host: perhaps others keep some that they do not use.
            self.retry_quarantined();
            self.cache.drain(purpose, heap);
            heap.take(self, class, 1, &mut one);
            return one
                .pop()
                .ok_or_else(|| refused.unwrap_or_else(|| self.over_budget(heap, purpose, class)));
        }
    }

    /// Grows before that is needed, if it can be done elsewhere: whoever needs it would have to
    /// wait for the registration.
    #[cold]
    fn grow_ahead(self: &Arc<Self>, purpose: Purpose) {
        let Some(elsewhere) = self.elsewhere.get() else { return };
        let core = Arc::clone(self);
        elsewhere(Box::new(move || {
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

    /// Gives arenas back to the system that nobody has used for a while; whether there is more to
    /// give back later, if nobody uses it.
    pub(super) fn shrink(&self, most: usize) -> bool {
        let mut has_more = false;
        for (purpose, heap) in Purpose::ALL.into_iter().zip(&self.heaps) {
            self.cache.drain(purpose, heap);
            // None is made meanwhile, nor registered with a domain; whoever does that is not waited
            // for.
            let Ok(registering) = self.registering.try_lock() else {
                has_more = true;
                continue;
            };
            let (idle, has_idle) = heap.take_idle(most);
            has_more |= has_idle;
            drop(registering);
            if !idle.is_empty() {
                self.elsewhere(move || drop(idle));
            }
        }
        has_more
    }

    /// The domain with this index, unless its device is gone.
    pub(super) fn domain(&self, index: usize) -> Option<ProtectionDomain> {
        lock(&self.domains).get(index).cloned().flatten()
    }

    /// How many domains there are, those whose device is gone included.
    pub(super) fn domains(&self) -> usize {
        lock(&self.domains).len()
    }

    /// The domains whose device is there.
    pub(super) fn live_domains(&self) -> Vec<ProtectionDomain> {
        lock(&self.domains).iter().flatten().cloned().collect()
    }

    /// Ends every registration with one domain.
    pub(super) fn retire(&self, index: usize) {
        let _registering = lock(&self.registering);
        if let Some(domain) = lock(&self.domains).get_mut(index) {
            *domain = None;
        }
        for heap in &self.heaps {
            heap.holdings().arenas.iter().for_each(|arena| arena.retire(index));
        }
    }

    /// Registers everything with a domain in the place of one that is gone; all or nothing.
    pub(super) fn restore(&self, index: usize, domain: &ProtectionDomain) -> Result<(), PoolError> {
        // an arena that is made meanwhile waits, and is registered with it
        let _registering = lock(&self.registering);
        let wrong = {
            let domains = lock(&self.domains);
            match domains.get(index) {
                Some(None) => None,
                Some(Some(_)) => Some(format!("domain {index} of the pool was not retired")),
                None => {
                    let count = domains.len();
                    Some(format!(
                        "the pool has {count} domains: there is none to restore at {index}"
                    ))
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
                    arenas.iter().zip(regions).for_each(|(arena, region)| arena.let_go(region));
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

    /// The heap is at its maximum: counted.
    fn over_budget(&self, heap: &Heap, purpose: Purpose, class: SizeClass) -> PoolError {
        let tally = self.cache.tally()[purpose.index()];
        let used =
            SizeClass::ALL.into_iter().zip(tally).map(|(of, n)| n.in_use * of.bytes() as u64).sum();
        let (asked, limit) = (class.bytes() as u64, heap.max_bytes as u64);
        let error = PoolError::OverBudget { which: Budget::Heap(purpose), asked, limit, used };
        self.counters.count_failure(&error);
        error
    }

    pub(super) fn set_elsewhere(&self, elsewhere: Elsewhere) {
        let _ = self.elsewhere.set(elsewhere); // a fabric has one pool, and says it once
    }

    /// Does `errand`, which may wait for the device.
    pub(super) fn elsewhere(&self, errand: impl FnOnce() + Send + 'static) {
        match self.elsewhere.get() {
            Some(elsewhere) => elsewhere(Box::new(errand)),
            None => errand(),
        }
    }

    /// Keeps a buffer that the device has not let go from ever being used.
    pub(super) fn quarantine(&self, ways: Ways, buf: BufMut) {
        self.counters.quarantined_bytes.fetch_add(buf.block_bytes() as u64, Ordering::Relaxed);
        self.put_away(ways, buf);
    }

    /// Until it is tried again; for ever if the pool is gone.
    fn put_away(&self, ways: Ways, buf: BufMut) {
        let mut quarantine = lock(&self.quarantine);
        if quarantine.closed {
            drop(quarantine);
            give_up(ways, buf);
        } else {
            quarantine.held.push((ways, buf));
        }
    }

    /// Asks the device once more to let go of what is in quarantine; returns how many buffers came
    /// free.
    pub(super) fn retry_quarantined(&self) -> usize {
        let held = std::mem::take(&mut lock(&self.quarantine).held);
        let tried = held.len();
        let mut refused = 0;
        for (mut ways, buf) in held {
            if ways.close().is_none() {
                self.counters
                    .quarantined_bytes
                    .fetch_sub(buf.block_bytes() as u64, Ordering::Relaxed);
            } else {
                refused += 1;
                self.put_away(ways, buf);
            }
        }
        tried - refused
    }

    /// The last [`Pool`](super::Pool) is gone: nothing is taken any more, and what is free goes
    /// back to the system.
    pub(super) fn close(&self) {
        lock(&self.quarantine).closed = true;
        self.retry_quarantined();
        self.cache.close();
        for heap in &self.heaps {
            heap.close();
        }
    }
}

/// Leaks the buffer, and with it the mapping: the device may write there for ever. Dropping the
/// registrations tries once more and counts it ([`ferrite_verbs::leaked_objects`]).
fn give_up(ways: Ways, buf: BufMut) {
    std::mem::forget(buf);
    drop(ways);
}
