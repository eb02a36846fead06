//! A slab: a chunk that was assigned to a size class, with the metadata of its blocks.
//!
//! The metadata lies in ordinary memory, away from the bytes that it describes. A slab lives while
//! the heap lists it, or one of its blocks is cached or in use. It keeps the arena and the pool's
//! state alive for that time.

use std::cell::UnsafeCell;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use super::Core;
use crate::mem::arena::Arena;
use crate::mem::budget::Account;
use crate::mem::class::{Purpose, SizeClass};

pub(in crate::mem) struct Slab {
    pub(in crate::mem) core: Arc<Core>,
    pub(in crate::mem) arena: Arc<Arena>,
    /// The chunk's offset in the arena.
    pub(in crate::mem) offset: usize,
    /// The chunk's index in the heap's table.
    pub(in crate::mem) chunk: u32,
    pub(in crate::mem) purpose: Purpose,
    pub(in crate::mem) class: SizeClass,
    metas: Box<[Meta]>,
}

/// The metadata of one block.
#[derive(Default)]
pub(in crate::mem) struct Meta {
    /// Number of handles; 0 while the block is free.
    pub(in crate::mem) refs: AtomicU32,
    /// How often the block was returned to the pool, since this slab was created.
    pub(in crate::mem) generation: AtomicU32,
    /// The account that is charged for the block. Only the block's single lease may access this
    /// field: see `lease.rs`.
    pub(in crate::mem) charge: UnsafeCell<Option<Account>>,
}

impl Slab {
    pub(in crate::mem) fn new(
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

    pub(in crate::mem) fn meta(&self, index: u32) -> &Meta {
        &self.metas[index as usize]
    }

    /// Returns the first byte of a block.
    pub(in crate::mem) fn at(&self, index: u32) -> NonNull<u8> {
        self.arena.at(self.offset + index as usize * self.class.bytes())
    }
}

/// A free block outside of its heap's free lists, as a value. At most one value exists for each
/// block, in a cache or in transit. Dropping the value loses the block, but does no other harm.
pub(in crate::mem) struct Block {
    pub(in crate::mem) slab: Arc<Slab>,
    pub(in crate::mem) index: u32,
}
