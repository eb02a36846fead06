//! Registered memory: pools of buffers that the device may read and write.
//!
//! Registering memory is slow and pins it. So a [`Pool`] registers large pieces at a time, once per
//! device, and cuts buffers from them. [`BufMut`] and [`Buf`] are its buffers. An [`Account`]
//! limits how much a user may hold. [`Exposed`] is the only memory that a peer can access.
//!
//! # Life cycle of a buffer
//!
//! ```text
//!                                   Pool::take(len, purpose, &account)
//!   arena ──► chunk ──► block ────────────────┐  charged to the account
//!   mmap,     2 MiB,    of a size class       ▼
//!   pinned,   assigned  256 B … 2 MiB       BufMut ──────── Pool::expose ───────► Exposed
//!   no        to one    ▲                   unique, &mut [u8] ◄────── revoke ──── a peer reads and
//!   remote    class     │                     │   ▲                             writes; bytes are
//!   rights              │              freeze │   │ try_into_mut (last handle)  copied, never
//!   │                   │                     ▼   │                             borrowed
//!   │                   │                    Buf ──── clone, slice: one atomic add
//!   │                   │                   shared, &[u8] ──── into ──► bytes::Bytes, no copy
//!   │                   │                     │
//!   │                   │ last handle dropped ▼
//!   │                   └── cache ◄────────── credited, generation + 1
//!   │                       of the thread's shard; an excess goes back to the chunk, and a chunk
//!   │                       whose blocks are all back is free for any class
//!   ▼
//!   deregistered and unmapped when the last Pool and the last buffer in it are gone, or earlier
//!   by Pool::shrink, if it is unused
//! ```
//!
//! # Requests in flight
//!
//! Dropping the last handle of a buffer returns its block at once, and the next owner overwrites
//! the block. So **code that passes a buffer's [`RawParts`] to the device must own the buffer until
//! the completion was polled** or the queue pair is destroyed. The fabric's slots ensure this rule.
//! The `unsafe` [`Sge::from_raw`](ferrite_verbs::Sge::from_raw) requires it, and the parts reach a
//! device only through that function. The pool itself does not know, and need not know, what the
//! device does.
//!
//! # Isolation of sends and receives
//!
//! Sends and receives have separate heaps that share nothing ([`Purpose`]). No pattern of sends,
//! and no fragmentation that it causes, can take memory from receives. Reaching a limit is an error
//! ([`PoolError::OverBudget`]), never a wait.
//!
//! # Ownership
//!
//! ```text
//!   Pool ──► Core ──► heaps ──► chunks ──► Slab ──► Core    dropping the last Pool cuts the cycle
//!                                            └────► Arena     mapping and registrations
//!   Buf, BufMut ─── one count of the Slab per block
//! ```
//!
//! The pool's metadata lies in ordinary memory. A peer can overwrite only the bytes of buffers that
//! were exposed to it, and never a pointer.
//!
//! # Caches
//!
//! Freed blocks are kept in a few shards, each with its own mutex. A thread always uses the same
//! shard. Thread-local caches would save an uncontended lock, but other threads could not reach the
//! blocks in them. A pool at its limit would refuse memory that is free. A dropped pool would stay
//! pinned until every thread has ended, and nobody could count the cached blocks. With shards, any
//! thread that needs the memory can empty all of them.

mod arena;
mod budget;
mod class;
mod config;
mod core;
mod counters;
mod error;
mod exposed;
mod pool;
mod stats;
#[cfg(test)]
mod tests;

pub use self::core::buf::{Buf, BufMut, RawParts};
pub(crate) use self::core::window::{Binding, Window};
pub use arena::Pages;
pub use budget::Account;
pub use class::{Purpose, SizeClass};
pub use config::PoolConfig;
pub use error::{Budget, ErrorKind, PoolError};
pub use exposed::Exposed;
pub use pool::{Builder, Pool};
pub use stats::{Failures, HeapStats, PageStats, PoolStats};

/// Locks a mutex and ignores poisoning. A panic under one of the pool's locks leaves the data
/// consistent, because each critical section either moves whole values or counts.
pub(crate) fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
