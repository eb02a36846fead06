//! A slab: a chunk that was given to a size class, and what is known of each of its blocks.
//!
//! It lies in ordinary memory, away from the bytes it describes. It lives while the heap lists it
//! or a block of it is out, and keeps arena and pool alive that long.

use std::cell::UnsafeCell;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use super::arena::Arena;
use super::budget::Account;
use super::class::{Purpose, SizeClass};
use super::core::Core;

pub(super) struct Slab {
    pub(super) core: Arc<Core>,
    pub(super) arena: Arc<Arena>,
    /// Where the chunk begins in the arena.
    pub(super) offset: usize,
    /// The chunk's place in the heap's table.
    pub(super) chunk: u32,
    pub(super) purpose: Purpose,
    pub(super) class: SizeClass,
    metas: Box<[Meta]>,
}

/// What is known of one block.
#[derive(Default)]
pub(super) struct Meta {
    /// Handles on it; 0 while it is free.
    pub(super) refs: AtomicU32,
    /// How often it has come back.
    pub(super) generation: AtomicU32,
    /// Who is charged for it. Belongs to whoever has the only handle: see `lease.rs`.
    pub(super) charge: UnsafeCell<Option<Account>>,
}

impl Slab {
    pub(super) fn new(
        core: &Arc<Core>,
        arena: &Arc<Arena>,
        offset: usize,
        chunk: u32,
        purpose: Purpose,
        class: SizeClass,
    ) -> Self {
        let metas = (0..class.blocks_per_chunk()).map(|_| Meta::default()).collect();
        Self {
            core: Arc::clone(core),
            arena: Arc::clone(arena),
            offset,
            chunk,
            purpose,
            class,
            metas,
        }
    }

    pub(super) fn meta(&self, index: u32) -> &Meta {
        &self.metas[index as usize]
    }

    /// The first byte of a block.
    pub(super) fn at(&self, index: u32) -> NonNull<u8> {
        self.arena.at(self.offset + index as usize * self.class.bytes())
    }
}

/// A block that nobody uses, as a value: there is one for each block at most, in a free list, a
/// cache, or on its way. Dropping one loses the block, nothing worse.
pub(super) struct Block {
    pub(super) slab: Arc<Slab>,
    pub(super) index: u32,
}
