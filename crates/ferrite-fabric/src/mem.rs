//! Registered memory: pools of buffers that the device may read and write.
//!
//! Registering memory is slow and pins it, so it is done for large pieces at a time, once per
//! device, and buffers are cut from those. A [`Pool`] does that; [`BufMut`] and [`Buf`] are its
//! buffers, [`Account`]s say who may have how much, and [`Exposed`] is the only memory that a peer
//! can reach.
//!
//! # The life of a buffer
//!
//! ```text
//!                                   Pool::take(len, purpose, &account)
//!   arena ──► chunk ──► block ────────────────┐  charged to the account
//!   mmap,     2 MiB,    of a size class       ▼
//!   pinned,   given to  256 B … 2 MiB       BufMut ────────── Pool::expose ─────────► Exposed
//!   no        one       ▲                   unique, &mut [u8] ◄──────── revoke ────── a peer reads and writes;
//!   remote    class     │                     │   ▲                                   bytes are copied, never
//!   rights              │              freeze │   │ try_into_mut (the last handle)    borrowed
//!   │                   │                     ▼   │
//!   │                   │                    Buf ──── clone, slice: one atomic add
//!   │                   │                   shared, &[u8] ──── into ──► bytes::Bytes, no copy
//!   │                   │                     │
//!   │                   │  last handle gone   ▼
//!   │                   └── cache ◄────────── credited, generation + 1
//!   │                       of the thread's shard; more than a few go back to the chunk,
//!   │                       and a chunk whose blocks are all back is free for any class
//!   ▼
//!   deregistered and unmapped when the last Pool and the last buffer in it are gone
//! ```
//!
//! # In flight
//!
//! Dropping the last handle of a buffer returns its block at once, and the next taker overwrites
//! it. So **whoever gives a buffer's [`RawParts`] to the device must own the buffer until the
//! completion has been reaped** or the queue pair is destroyed. That is the duty of the fabric's
//! slot, and the contract of the `unsafe` [`Sge::from_raw`](ferrite_verbs::Sge::from_raw), by which
//! alone the parts reach a device. Nothing here can know what the device does; nothing here needs
//! to.
//!
//! # Who starves whom
//!
//! Sends and receives have heaps that share nothing ([`Purpose`]): no pattern of sends, whatever it
//! leaves fragmented, can take a receive's memory. Every limit answers with an error
//! ([`PoolError::OverBudget`]), never with a wait.
//!
//! # Who keeps whom alive
//!
//! ```text
//!   Pool ──► Core ──► heaps ──► chunks ──► Slab ──► Core      the cycle is cut when the last Pool goes
//!                                            └────► Arena     mapping and registrations
//!   Buf, BufMut ─── one count of the Slab per block
//! ```
//!
//! What the pool knows of its blocks lies in ordinary memory. A peer that writes wherever it can
//! reach a key overwrites bytes of buffers that were exposed to it, and no pointer.
//!
//! # Caches
//!
//! Freed blocks are kept in a few shards, each under a mutex of its own; a thread always uses the
//! same one. Real thread-local caches would save an uncontended lock, but a block in another
//! thread's cache cannot be had back: a pool at its limit would refuse memory that is free, a pool
//! that is dropped would stay pinned until every thread has ended, and nobody could count it.
//! Shards can be emptied by whoever needs the memory.

mod arena;
mod budget;
mod buf;
mod cache;
mod class;
mod core;
mod error;
mod exposed;
mod heap;
mod lease;
mod pool;
mod slab;
mod stats;
#[cfg(test)]
mod tests;
mod window;

pub use arena::Pages;
pub use budget::Account;
pub use buf::{Buf, BufMut, RawParts};
pub use class::{Purpose, SizeClass};
pub use error::{Budget, ErrorKind, PoolError};
pub use exposed::Exposed;
pub use pool::{Builder, Pool, PoolConfig};
pub use stats::{Failures, HeapStats, PageStats, PoolStats};
pub(crate) use window::{Binding, Window};

/// A panic while a lock of ours was held has left the data consistent: each critical section either
/// moves whole values or counts.
pub(crate) fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
