//! A heap: the arenas of one purpose, their chunks, and which class each chunk is assigned to.
//!
//! A chunk is assigned to a class when the class needs it, and is free again when its last block
//! was returned. So a burst of one size does not keep memory from the other sizes. The lowest
//! chunks are used first, which lets the higher ones become free. One lock protects the state. The
//! caches in front of the heap (`cache.rs`) take and return blocks in batches. The heap grows under
//! a second lock (`growth`), so that other callers do not wait.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::Core;
use super::slab::{Block, Slab};
use crate::mem::arena::Arena;
use crate::mem::class::{CHUNK_BYTES, Purpose, SizeClass};
use crate::mem::lock;

/// The value for "no chunk".
const NONE: u32 = u32::MAX;

pub(in crate::mem) struct Heap {
    purpose: Purpose,
    pub(in crate::mem) max_bytes: usize,
    max_arenas: usize,
    /// Bytes that stay mapped even if they are unused.
    kept_bytes: usize,
    /// Locked while an arena is created. Only callers that need the arena wait.
    pub(in crate::mem) growth: Mutex<()>,
    /// Whether the last free chunk was assigned since the last check.
    is_low: AtomicBool,
    /// Number of arenas, for readers without the lock.
    arenas: AtomicUsize,
    /// Blocks of this chunk and of higher ones are returned to the heap at once and not cached. So
    /// the next blocks are taken from lower chunks. The value is [`NONE`], unless most of the heap
    /// is free but a few blocks keep an unneeded arena in use.
    returns_from: AtomicU32,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    arenas: Vec<Arc<Arena>>,
    mapped_bytes: usize,
    chunks: Vec<Chunk>,
    /// Indices of chunks whose arena was released.
    vacant: Vec<u32>,
    /// Number of unused arenas that the last check could have released but did not. The first arena
    /// and one spare arena are not counted, because they are always kept.
    idle_before: usize,
    /// Chunks that are not assigned to a class.
    free: BTreeSet<u32>,
    /// For each class, its chunks with free blocks.
    partial: [BTreeSet<u32>; SizeClass::ALL.len()],
    /// Whether the last [`Pool`](super::Pool) was dropped. Blocks are then no longer accepted.
    closed: bool,
}

struct Chunk {
    /// `None` if the arena was released.
    arena: Option<Arc<Arena>>,
    offset: usize,
    assigned: Option<Assigned>,
    /// The previous assignment of the chunk. Often a chunk is assigned to the same class again, and
    /// creating a slab takes longer than taking a hundred blocks.
    previous: Option<Assigned>,
}

/// A chunk's class, and which of its blocks are free.
struct Assigned {
    slab: Arc<Slab>,
    free: Vec<u32>,
}

/// The memory of a heap, for the statistics.
#[derive(Default)]
pub(in crate::mem) struct Holdings {
    pub(in crate::mem) mapped_bytes: usize,
    pub(in crate::mem) free_bytes: usize,
    pub(in crate::mem) arenas: Vec<Arc<Arena>>,
}

impl Heap {
    pub(in crate::mem) fn new(
        purpose: Purpose,
        (max_bytes, max_arenas): (usize, usize),
        kept_bytes: usize,
    ) -> Self {
        Self {
            purpose,
            max_bytes,
            max_arenas,
            kept_bytes,
            growth: Mutex::default(),
            is_low: AtomicBool::new(false),
            arenas: AtomicUsize::new(0),
            returns_from: AtomicU32::new(NONE),
            state: Mutex::default(),
        }
    }

    /// Puts up to `want` blocks of `class` into `out`, from the chunks of that class. If these
    /// chunks have no free block, assigns a free chunk to the class. Also assigns one if the class
    /// has free blocks only in chunks from `returns_from` on, and a lower chunk is free.
    pub(in crate::mem) fn take(
        &self,
        core: &Arc<Core>,
        class: SizeClass,
        want: usize,
        out: &mut Vec<Block>,
    ) {
        let state = &mut *lock(&self.state);
        let returns_from = self.returns_from.load(Ordering::Relaxed);
        let end = out.len() + want;
        let start = out.len();
        while out.len() < end {
            let chunk = match state.partial[class.index()].first() {
                Some(chunk) if *chunk < returns_from || !state.has_free_below(returns_from) => {
                    *chunk
                }
                _ if out.len() > start => return,
                _ => match state.assign(core, self.purpose, class) {
                    Some(chunk) => {
                        self.is_low.store(state.free.is_empty(), Ordering::Relaxed);
                        chunk
                    }
                    None => return,
                },
            };
            let Some(assigned) = &mut state.chunks[chunk as usize].assigned else { return };
            if let Some(index) = assigned.free.pop() {
                out.push(Block { slab: Arc::clone(&assigned.slab), index });
            }
            if assigned.free.is_empty() {
                state.partial[class.index()].remove(&chunk);
            }
        }
    }

    /// Takes back all but the last `keep` of `blocks`. If the heap is closed, leaves the blocks
    /// where they are. The caller then drops them, outside of every lock.
    pub(in crate::mem) fn take_back(&self, blocks: &mut Vec<Block>, keep: usize) {
        let state = &mut *lock(&self.state);
        if state.closed {
            return;
        }
        let excess = blocks.len().saturating_sub(keep);
        for Block { slab, index } in blocks.drain(..excess) {
            let (chunk, class) = (slab.chunk, slab.class);
            let Some(assigned) = &mut state.chunks[chunk as usize].assigned else { continue };
            assigned.free.push(index);
            if assigned.free.len() == class.blocks_per_chunk() {
                let freed = &mut state.chunks[chunk as usize];
                freed.previous = freed.assigned.take();
                state.partial[class.index()].remove(&chunk);
                state.free.insert(chunk);
            } else {
                state.partial[class.index()].insert(chunk);
            }
        }
    }

    /// Returns whether the last free chunk was assigned since the last call. The heap must then
    /// grow soon.
    pub(in crate::mem) fn take_is_low(&self) -> bool {
        self.is_low.load(Ordering::Relaxed) && self.is_low.swap(false, Ordering::Relaxed)
    }

    /// Returns whether every chunk is assigned to a class.
    pub(in crate::mem) fn has_no_free_chunk(&self) -> bool {
        lock(&self.state).free.is_empty()
    }

    /// Returns how large an arena of at most `step` bytes may be without exceeding the maximum.
    /// Returns 0 if there may be no more arenas.
    pub(in crate::mem) fn room(&self, step: usize) -> usize {
        let state = lock(&self.state);
        if state.arenas.len() >= self.max_arenas {
            return 0;
        }
        step.min(self.max_bytes - state.mapped_bytes)
    }

    /// Adds the chunks of an arena. The caller holds `growth`, or the pool is still being built.
    pub(in crate::mem) fn add(&self, arena: &Arc<Arena>) {
        let state = &mut *lock(&self.state);
        for offset in (0..arena.len()).step_by(CHUNK_BYTES) {
            let new =
                Chunk { arena: Some(Arc::clone(arena)), offset, assigned: None, previous: None };
            let chunk = if let Some(chunk) = state.vacant.pop() {
                state.chunks[chunk as usize] = new;
                chunk
            } else {
                let Ok(chunk) = u32::try_from(state.chunks.len()) else { return };
                state.chunks.push(new);
                chunk
            };
            state.free.insert(chunk);
        }
        state.mapped_bytes += arena.len();
        state.arenas.push(Arc::clone(arena));
        self.arenas.store(state.arenas.len(), Ordering::Relaxed);
    }

    /// Takes out up to `most` unused arenas, but no more than were already unused at the previous
    /// call. The first arena stays, and so do `kept_bytes` bytes. One unused arena stays, too:
    /// without it, the next caller that needs an arena would wait for a registration.
    ///
    /// The caller drops the arenas outside of every lock, which ends their registration. Also
    /// returns whether the next call may take out more.
    pub(in crate::mem) fn take_idle(&self, most: usize) -> (Vec<Arc<Arena>>, bool) {
        let state = &mut *lock(&self.state);
        let is_used = |arena: &Arc<Arena>| {
            let of = |chunk: &&Chunk| chunk.arena.as_ref().is_some_and(|of| Arc::ptr_eq(of, arena));
            state.chunks.iter().filter(of).any(|chunk| chunk.assigned.is_some())
        };
        let (used, idle): (Vec<_>, Vec<_>) =
            state.arenas.iter().skip(1).cloned().partition(is_used);
        let idle_bytes: usize = idle.iter().map(|arena| arena.len()).sum();
        let smallest = used.iter().map(|arena| arena.len()).min();
        let free_bytes = state.free_bytes();
        let is_sparse = free_bytes > state.mapped_bytes / 2
            && smallest.is_some_and(|bytes| free_bytes.saturating_sub(idle_bytes) >= bytes);
        let returns_from = if is_sparse { state.chunks_in_need() } else { NONE };
        self.returns_from.store(returns_from, Ordering::Relaxed);
        let spare = idle.len().saturating_sub(1);
        let smallest_idle = idle.iter().map(|arena| arena.len()).min();
        let before = std::mem::replace(&mut state.idle_before, spare);
        let most = before.min(most).min(spare);
        let mut excess = state.mapped_bytes.saturating_sub(self.kept_bytes);
        let is_excess = |arena: &Arc<Arena>| {
            let fits = arena.len() <= excess;
            excess = excess.saturating_sub(arena.len());
            fits
        };
        let taken: Vec<_> = idle.into_iter().rev().take(most).take_while(is_excess).collect();
        for arena in &taken {
            for (index, chunk) in (0..).zip(&mut state.chunks) {
                if chunk.arena.as_ref().is_some_and(|of| Arc::ptr_eq(of, arena)) {
                    (chunk.arena, chunk.previous) = (None, None);
                    state.free.remove(&index);
                    state.vacant.push(index);
                }
            }
            state.arenas.retain(|of| !Arc::ptr_eq(of, arena));
            state.mapped_bytes -= arena.len();
        }
        state.idle_before -= taken.len();
        self.arenas.store(state.arenas.len(), Ordering::Relaxed);
        let excess = state.mapped_bytes.saturating_sub(self.kept_bytes);
        let may_shrink = smallest_idle.is_some_and(|bytes| bytes <= excess);
        (taken, state.idle_before > 0 && may_shrink)
    }

    /// Returns whether a block must be returned at once: its chunk is one of those whose few blocks
    /// keep the heap from shrinking.
    pub(in crate::mem) fn wants_back(&self, block: &Block) -> bool {
        block.slab.chunk >= self.returns_from.load(Ordering::Relaxed)
    }

    /// Returns whether the heap has more than its first arena and a spare one.
    pub(in crate::mem) fn has_grown(&self) -> bool {
        self.arenas.load(Ordering::Relaxed) > 2
    }

    /// Returns the memory that the heap holds now.
    pub(in crate::mem) fn holdings(&self) -> Holdings {
        let state = lock(&self.state);
        Holdings {
            mapped_bytes: state.mapped_bytes,
            free_bytes: state.free_bytes(),
            arenas: state.arenas.clone(),
        }
    }

    /// Releases everything. From now on each arena lives as long as one of its blocks is in use.
    pub(in crate::mem) fn close(&self) {
        let rest =
            std::mem::replace(&mut *lock(&self.state), State { closed: true, ..State::default() });
        drop(rest); // after unlocking
    }
}

impl State {
    fn free_bytes(&self) -> usize {
        let assigned = self.chunks.iter().filter_map(|chunk| chunk.assigned.as_ref());
        let in_chunks: usize =
            assigned.map(|assigned| assigned.free.len() * assigned.slab.class.bytes()).sum();
        in_chunks + self.free.len() * CHUNK_BYTES
    }

    fn has_free_below(&self, chunk: u32) -> bool {
        self.free.first().is_some_and(|first| *first < chunk)
    }

    /// Returns how many of the lowest chunks have room for twice the bytes in use. This is at least
    /// the number of chunks in the first arena, which always stays. Blocks of these chunks may stay
    /// in caches. Otherwise a chunk whose blocks are all returned must be assigned again, which
    /// costs more than taking a block.
    fn chunks_in_need(&self) -> u32 {
        let in_use = self.mapped_bytes - self.free_bytes();
        let first = self.arenas.first().map_or(0, |arena| arena.len());
        u32::try_from((2 * in_use).max(first).div_ceil(CHUNK_BYTES)).unwrap_or(NONE)
    }

    /// Assigns a free chunk to `class`.
    fn assign(&mut self, core: &Arc<Core>, purpose: Purpose, class: SizeClass) -> Option<u32> {
        let index = self.free.pop_first()?;
        let chunk = &mut self.chunks[index as usize];
        let previous = chunk.previous.take().filter(|previous| previous.slab.class == class);
        chunk.assigned = if previous.is_some() {
            previous
        } else {
            let slab = Slab::new(core, chunk.arena.as_ref()?, chunk.offset, index, purpose, class);
            // The order is reversed, so that the lowest block is taken first.
            let free = (0..class.blocks_per_chunk() as u32).rev().collect();
            Some(Assigned { slab: Arc::new(slab), free })
        };
        self.partial[class.index()].insert(index);
        Some(index)
    }
}
