//! A slab: a chunk that was assigned to a size class, with the metadata of its blocks.
//!
//! The metadata lies in ordinary memory, away from the bytes it describes. A slab lives while the
//! heap lists it or one of its blocks is in use, and keeps the arena and the pool alive that long.

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
    /// The chunk's offset in the arena.
    pub(super) offset: usize,
    /// The chunk's index in the heap's table.
    pub(super) chunk: u32,
    pub(super) purpose: Purpose,
    pub(super) class: SizeClass,
    metas: Box<[Meta]>,
}

/// The metadata of one block.
#[derive(Default)]
pub(super) struct Meta {
    /// Number of handles; 0 while the block is free.
    pub(super) refs: AtomicU32,
    /// How often the block was returned.
    pub(super) generation: AtomicU32,
    /// The account that is charged for it. Only the block's single lease may access it: see
    /// `lease.rs`.
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

    /// Returns the first byte of a block.
    pub(super) fn at(&self, index: u32) -> NonNull<u8> {
        self.arena.at(self.offset + index as usize * self.class.bytes())
    }
}

/// A free block, as a value. At most one exists for each block: in a free list, in a cache, or in
/// transit. Dropping it loses the block, but does no other harm.
pub(super) struct Block {
    pub(super) slab: Arc<Slab>,
    pub(super) index: u32,
}
