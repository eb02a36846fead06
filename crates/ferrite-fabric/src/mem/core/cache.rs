//! Caches of free blocks, between the threads and the heaps.
//!
//! Each thread uses one shard, assigned in the order in which threads first use a cache. By default
//! there are as many shards as CPUs, at most 64, so threads seldom share one. Blocks are also
//! counted under the shard's lock, so counting costs no atomic addition. The totals in bytes can be
//! read without a lock. The module `mem` explains why the caches are shards and not thread-local.
//!
//! Locks are taken in the order shard, heap. The caller keeps the pool alive. So dropping something
//! under a lock never drops the pool, which owns that lock.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use super::heap::Heap;
use super::slab::Block;
use crate::mem::class::{Purpose, SizeClass};
use crate::mem::lock;

/// The maximum number of shards. With more CPUs than this, threads share shards.
const MAX_SHARDS: usize = 64;

pub(in crate::mem) struct Cache {
    shards: Box<[Shard]>,
    /// Maximum number of blocks in a magazine, by class.
    capacities: [usize; SizeClass::ALL.len()],
}

/// Aligned so that shards do not share cache lines.
#[repr(align(128))]
struct Shard {
    magazines: Mutex<Magazines>,
    /// The bytes taken and returned, by purpose. They are written only under the lock.
    flows: [Flow; Purpose::ALL.len()],
}

/// Total bytes that were taken and returned. A block may be returned to another shard than it was
/// taken from, so only the sums over all shards are meaningful.
#[derive(Default)]
struct Flow {
    taken: AtomicU64,
    returned: AtomicU64,
}

/// A shard that the caller has locked.
pub(in crate::mem) struct Held<'a> {
    magazines: MutexGuard<'a, Magazines>,
    flows: &'a [Flow; Purpose::ALL.len()],
}

/// The blocks of one shard, by purpose and class.
pub(in crate::mem) struct Magazines {
    by_purpose: [[Magazine; SizeClass::ALL.len()]; Purpose::ALL.len()],
    closed: bool,
}

#[derive(Default)]
pub(in crate::mem) struct Magazine {
    pub(in crate::mem) blocks: Vec<Block>,
    /// Total numbers of blocks that the threads of this shard have taken and returned. A block may
    /// be returned to another shard than it was taken from, so only the sums over all shards are
    /// meaningful.
    taken: u64,
    returned: u64,
}

/// The sums over all shards, in blocks.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(in crate::mem) struct Tally {
    pub(in crate::mem) in_use: u64,
    pub(in crate::mem) cached: u64,
}

impl Cache {
    /// Creates magazines of at most `blocks` blocks and `bytes` bytes, in `shards` shards. 0 shards
    /// means one for each CPU.
    pub(in crate::mem) fn new(shards: usize, blocks: usize, bytes: usize) -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let capacities = SizeClass::ALL.map(|class| blocks.min(bytes / class.bytes()));
        let shards = if shards == 0 { cpus } else { shards }.min(MAX_SHARDS);
        let shards = (0..shards).map(|_| Shard::new()).collect();
        Self { shards, capacities }
    }

    /// Returns how many blocks to fetch at once for an empty magazine.
    pub(in crate::mem) fn batch(&self, class: SizeClass) -> usize {
        (self.capacities[class.index()] / 2).max(1)
    }

    /// Locks the calling thread's shard.
    pub(in crate::mem) fn shard(&self) -> Held<'_> {
        let shard = &self.shards[thread_number() % self.shards.len()];
        Held { magazines: lock(&shard.magazines), flows: &shard.flows }
    }

    /// Returns the bytes of blocks in use, without a lock. The result is exact only while nobody
    /// takes or returns blocks.
    pub(in crate::mem) fn in_use_bytes(&self, purpose: Purpose) -> u64 {
        let net = self.shards.iter().map(|shard| &shard.flows[purpose.index()]).fold(
            0_u64,
            |sum, flow| {
                sum.wrapping_add(flow.taken.load(Ordering::Relaxed))
                    .wrapping_sub(flow.returned.load(Ordering::Relaxed))
            },
        );
        // The sum is negative if a block was taken from a shard that was already read, and returned
        // to one that was not.
        u64::try_from(net.cast_signed()).unwrap_or(0)
    }

    /// Returns the total bytes that were ever returned. While this does not change, no block was
    /// freed.
    pub(in crate::mem) fn returned_bytes(&self) -> u64 {
        let flows = self.shards.iter().flat_map(|shard| &shard.flows);
        flows.fold(0, |sum: u64, flow| sum.wrapping_add(flow.returned.load(Ordering::Relaxed)))
    }

    /// Adds a block to its magazine. If the magazine is full, passes half of it on to `heap`. If
    /// the heap wants the block back, passes the whole magazine on. If the cache is closed, drops
    /// the block.
    pub(in crate::mem) fn keep(&self, block: Block, heap: &Heap) {
        let (purpose, class) = (block.slab.purpose, block.slab.class);
        let mut shard = self.shard();
        let closed = shard.magazines.closed;
        add(&shard.flows[purpose.index()].returned, class);
        let magazine = shard.magazine(purpose, class);
        magazine.returned += 1;
        if closed {
            drop(shard); // unlock before the block is dropped
            return;
        }
        let is_wanted_back = heap.wants_back(&block);
        magazine.blocks.push(block);
        let capacity = self.capacities[class.index()];
        if is_wanted_back {
            heap.take_back(&mut magazine.blocks, 0);
        } else if magazine.blocks.len() > capacity {
            heap.take_back(&mut magazine.blocks, capacity / 2);
        }
    }

    /// Passes every block of `purpose` on to `heap`.
    pub(in crate::mem) fn drain(&self, purpose: Purpose, heap: &Heap) {
        for shard in &self.shards {
            for magazine in &mut lock(&shard.magazines).by_purpose[purpose.index()] {
                if !magazine.blocks.is_empty() {
                    heap.take_back(&mut magazine.blocks, 0);
                }
            }
        }
    }

    /// Drops all blocks, and keeps none from now on.
    pub(in crate::mem) fn close(&self) {
        for shard in &self.shards {
            let mut magazines = lock(&shard.magazines);
            magazines.closed = true;
            let blocks: Vec<_> = magazines
                .by_purpose
                .as_flattened_mut()
                .iter_mut()
                .map(|m| std::mem::take(&mut m.blocks))
                .collect();
            drop(magazines);
            drop(blocks); // after unlocking
        }
    }

    /// Returns the totals. They are exact only while nobody takes or returns blocks.
    pub(in crate::mem) fn tally(&self) -> [[Tally; SizeClass::ALL.len()]; Purpose::ALL.len()] {
        let mut tallies = [[Tally::default(); SizeClass::ALL.len()]; Purpose::ALL.len()];
        for shard in &self.shards {
            let shard = lock(&shard.magazines);
            let magazines = shard.by_purpose.as_flattened().iter();
            for (tally, magazine) in tallies.as_flattened_mut().iter_mut().zip(magazines) {
                tally.in_use =
                    tally.in_use.wrapping_add(magazine.taken).wrapping_sub(magazine.returned);
                tally.cached += magazine.blocks.len() as u64;
            }
        }
        // The sum is negative if a block was taken from a shard that was already read, and returned
        // to one that was not.
        for tally in tallies.as_flattened_mut() {
            tally.in_use = u64::try_from(tally.in_use.cast_signed()).unwrap_or(0);
        }
        tallies
    }
}

impl Magazines {
    fn new() -> Self {
        Self {
            by_purpose: std::array::from_fn(|_| std::array::from_fn(|_| Magazine::default())),
            closed: false,
        }
    }
}

impl Shard {
    fn new() -> Self {
        Self { magazines: Mutex::new(Magazines::new()), flows: Default::default() }
    }
}

impl Held<'_> {
    pub(in crate::mem) fn magazine(&mut self, purpose: Purpose, class: SizeClass) -> &mut Magazine {
        &mut self.magazines.by_purpose[purpose.index()][class.index()]
    }

    /// Takes a block out and counts it.
    pub(in crate::mem) fn pop(&mut self, purpose: Purpose, class: SizeClass) -> Option<Block> {
        let block = self.magazine(purpose, class).blocks.pop()?;
        self.count_taken(purpose, class);
        Some(block)
    }

    /// Counts a block that was taken, from a magazine or straight from the heap.
    pub(in crate::mem) fn count_taken(&mut self, purpose: Purpose, class: SizeClass) {
        self.magazine(purpose, class).taken += 1;
        add(&self.flows[purpose.index()].taken, class);
    }
}

/// Adds the bytes of a block. The caller holds the shard's lock, so nobody else writes.
fn add(flow: &AtomicU64, class: SizeClass) {
    flow.store(flow.load(Ordering::Relaxed).wrapping_add(class.bytes() as u64), Ordering::Relaxed);
}

/// Returns the thread's number. Threads get numbers in the order in which they first call this.
fn thread_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        // The value has no destructor, because other thread-local values may drop buffers at the
        // very end of a thread.
        static NUMBER: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    NUMBER.with(|number| {
        if number.get() == usize::MAX {
            number.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        number.get()
    })
}
