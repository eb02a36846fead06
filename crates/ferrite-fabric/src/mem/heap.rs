//! A heap: the arenas of one purpose, their chunks, and which class has which chunk.
//!
//! Chunks belong to no class until one needs them, and to none again when their last block is back:
//! so a burst of one size does not keep memory from another. The lowest chunks are used first,
//! which lets the others become free. Everything is under one lock; the caches in front of it
//! (`cache.rs`) come here in batches. Growing happens outside that lock, under one of its own.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::arena::Arena;
use super::class::{CHUNK_BYTES, Purpose, SizeClass};
use super::core::Core;
use super::lock;
use super::slab::{Block, Slab};

/// No chunk has this number.
const NONE: u32 = u32::MAX;

pub(super) struct Heap {
    purpose: Purpose,
    pub(super) max_bytes: usize,
    /// Held while an arena is made: those who need it wait for it, nobody else does.
    pub(super) growth: Mutex<()>,
    /// The last free chunk was given to a class since this was asked.
    is_low: AtomicBool,
    /// Arenas, for who only wants to know how many.
    arenas: AtomicUsize,
    /// Blocks of chunks from this one on come back here at once, so that the next ones are taken
    /// from lower chunks. [`NONE`] unless most of the heap is free, and no arena is that could be.
    returns_from: AtomicU32,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    arenas: Vec<Arc<Arena>>,
    mapped_bytes: usize,
    chunks: Vec<Chunk>,
    /// Places of chunks whose arena has gone.
    vacant: Vec<u32>,
    /// Arenas that nobody used when it was last looked at, but for one.
    idle_before: usize,
    /// Chunks that no class has.
    free: BTreeSet<u32>,
    /// For each class, its chunks that have free blocks.
    partial: [BTreeSet<u32>; SizeClass::ALL.len()],
    /// The last [`Pool`](super::Pool) is gone: what comes back goes to nobody.
    closed: bool,
}

struct Chunk {
    /// `None`: it has gone.
    arena: Option<Arc<Arena>>,
    offset: usize,
    given: Option<Given>,
    /// What it was given before. Often it is wanted for the same class again, and a slab takes
    /// longer to make than a hundred blocks to take.
    before: Option<Given>,
}

/// A chunk's class, and which of its blocks are here.
struct Given {
    slab: Arc<Slab>,
    free: Vec<u32>,
}

/// What a heap has, for the statistics.
#[derive(Default)]
pub(super) struct Holdings {
    pub(super) mapped_bytes: usize,
    pub(super) free_bytes: usize,
    pub(super) arenas: Vec<Arc<Arena>>,
}

impl Heap {
    pub(super) fn new(purpose: Purpose, max_bytes: usize) -> Self {
        Self {
            purpose,
            max_bytes,
            growth: Mutex::default(),
            is_low: AtomicBool::new(false),
            arenas: AtomicUsize::new(0),
            returns_from: AtomicU32::new(NONE),
            state: Mutex::default(),
        }
    }

    /// Puts up to `want` blocks of `class` into `out`: as many as there are in chunks of that
    /// class, and from a free chunk only if there is none, or if their blocks are to come back and
    /// it is lower.
    pub(super) fn take(
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
                _ => match state.give(core, self.purpose, class) {
                    Some(chunk) => {
                        self.is_low.store(state.free.is_empty(), Ordering::Relaxed);
                        chunk
                    }
                    None => return,
                },
            };
            let Some(given) = &mut state.chunks[chunk as usize].given else { return };
            if let Some(index) = given.free.pop() {
                out.push(Block { slab: Arc::clone(&given.slab), index });
            }
            if given.free.is_empty() {
                state.partial[class.index()].remove(&chunk);
            }
        }
    }

    /// Takes the blocks in `blocks` beyond the last `keep` back. If the heap is closed it leaves
    /// them where they are: the caller drops them, outside of every lock.
    pub(super) fn take_back(&self, blocks: &mut Vec<Block>, keep: usize) {
        let state = &mut *lock(&self.state);
        if state.closed {
            return;
        }
        let excess = blocks.len().saturating_sub(keep);
        for Block { slab, index } in blocks.drain(..excess) {
            let (chunk, class) = (slab.chunk, slab.class);
            let Some(given) = &mut state.chunks[chunk as usize].given else { continue };
            given.free.push(index);
            if given.free.len() == class.blocks_per_chunk() {
                let freed = &mut state.chunks[chunk as usize];
                freed.before = freed.given.take();
                state.partial[class.index()].remove(&chunk);
                state.free.insert(chunk);
            } else {
                state.partial[class.index()].insert(chunk);
            }
        }
    }

    /// Whether the last free chunk has gone since this was asked: soon it has to grow.
    pub(super) fn take_low(&self) -> bool {
        self.is_low.load(Ordering::Relaxed) && self.is_low.swap(false, Ordering::Relaxed)
    }

    /// Whether every chunk belongs to a class.
    pub(super) fn has_no_free_chunk(&self) -> bool {
        lock(&self.state).free.is_empty()
    }

    /// How much an arena of `step` bytes may have without passing the maximum.
    pub(super) fn room(&self, step: usize) -> usize {
        step.min(self.max_bytes - lock(&self.state).mapped_bytes)
    }

    /// Adds the chunks of an arena. The caller holds `growth`, or is alone.
    pub(super) fn add(&self, arena: &Arc<Arena>) {
        let state = &mut *lock(&self.state);
        for offset in (0..arena.len()).step_by(CHUNK_BYTES) {
            let new = Chunk { arena: Some(Arc::clone(arena)), offset, given: None, before: None };
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

    /// Takes out up to `most` arenas that nobody has used, now and when this was last asked; never
    /// the first, and one stays for who comes next, who would have to wait for its registration.
    /// The caller drops them, which ends their registration, outside of every lock. And whether
    /// there are more, that nobody may have used when this is asked again.
    pub(super) fn take_idle(&self, most: usize) -> (Vec<Arc<Arena>>, bool) {
        let state = &mut *lock(&self.state);
        let is_used = |arena: &Arc<Arena>| {
            let of = |chunk: &&Chunk| chunk.arena.as_ref().is_some_and(|of| Arc::ptr_eq(of, arena));
            state.chunks.iter().filter(of).any(|chunk| chunk.given.is_some())
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
        let before = std::mem::replace(&mut state.idle_before, spare);
        let most = before.min(most).min(spare);
        let taken: Vec<_> = idle.into_iter().rev().take(most).collect();
        for arena in &taken {
            for (index, chunk) in (0..).zip(&mut state.chunks) {
                if chunk.arena.as_ref().is_some_and(|of| Arc::ptr_eq(of, arena)) {
                    (chunk.arena, chunk.before) = (None, None);
                    state.free.remove(&index);
                    state.vacant.push(index);
                }
            }
            state.arenas.retain(|of| !Arc::ptr_eq(of, arena));
            state.mapped_bytes -= arena.len();
        }
        state.idle_before -= taken.len();
        self.arenas.store(state.arenas.len(), Ordering::Relaxed);
        (taken, state.idle_before > 0)
    }

    /// Whether a block is to come back at once, because few like it keep the heap from shrinking.
    pub(super) fn wants_back(&self, block: &Block) -> bool {
        block.slab.chunk >= self.returns_from.load(Ordering::Relaxed)
    }

    /// Whether it has more than what it began with, and one for who comes next.
    pub(super) fn has_grown(&self) -> bool {
        self.arenas.load(Ordering::Relaxed) > 2
    }

    /// What it has now.
    pub(super) fn holdings(&self) -> Holdings {
        let state = lock(&self.state);
        Holdings {
            mapped_bytes: state.mapped_bytes,
            free_bytes: state.free_bytes(),
            arenas: state.arenas.clone(),
        }
    }

    /// Lets go of everything: from here on each arena lives as long as a block of it is out.
    pub(super) fn close(&self) {
        let rest =
            std::mem::replace(&mut *lock(&self.state), State { closed: true, ..State::default() });
        drop(rest); // after the lock
    }
}

impl State {
    fn free_bytes(&self) -> usize {
        let given = self.chunks.iter().filter_map(|chunk| chunk.given.as_ref());
        let in_chunks: usize = given.map(|given| given.free.len() * given.slab.class.bytes()).sum();
        in_chunks + self.free.len() * CHUNK_BYTES
    }

    fn has_free_below(&self, chunk: u32) -> bool {
        self.free.first().is_some_and(|first| *first < chunk)
    }

    /// How many of the lowest chunks would do for what is in use, with as much again, and those of
    /// the first arena at least, which stays. Blocks of these may stay in caches: a chunk whose
    /// blocks all come back is given anew for the next, which costs more than a block.
    fn chunks_in_need(&self) -> u32 {
        let in_use = self.mapped_bytes - self.free_bytes();
        let first = self.arenas.first().map_or(0, |arena| arena.len());
        u32::try_from((2 * in_use).max(first).div_ceil(CHUNK_BYTES)).unwrap_or(NONE)
    }

    /// Gives a free chunk to `class`.
    fn give(&mut self, core: &Arc<Core>, purpose: Purpose, class: SizeClass) -> Option<u32> {
        let index = self.free.pop_first()?;
        let chunk = &mut self.chunks[index as usize];
        let before = chunk.before.take().filter(|before| before.slab.class == class);
        chunk.given = if before.is_some() {
            before
        } else {
            let slab = Slab::new(core, chunk.arena.as_ref()?, chunk.offset, index, purpose, class);
            // Backwards, so that the lowest is taken first.
            let free = (0..class.blocks_per_chunk() as u32).rev().collect();
            Some(Given { slab: Arc::new(slab), free })
        };
        self.partial[class.index()].insert(index);
        Some(index)
    }
}
