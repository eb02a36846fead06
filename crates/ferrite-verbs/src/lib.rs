//! RDMA verbs and RDMA CM, loaded at run time.
//!
//! This crate is the lowest layer of Ferrite and makes every call into libibverbs and librdmacm.
//! Its objects keep their parents alive, so they can only be destroyed in the right order. The
//! libraries are not linked. Where rdma-core is absent, [`Verbs::system`] returns an [`Absence`]
//! with its remedy, and the program continues.
//!
//! | file | object |
//! |---|---|
//! | `table.rs` `library.rs` | [`Verbs`]: the libraries, opened with dlopen; [`rdma_core`] |
//! | `device.rs` `context.rs` `port.rs` `gid.rs` | [`Device`], opened as [`Context`]; its [`Port`]s and [`GidEntry`]s |
//! | `quirks.rs` | [`DeviceQuirks`]: differences between providers that no query reports |
//! | `pd.rs` `mr.rs` `mw.rs` | [`ProtectionDomain`], [`MemoryRegion`], [`MemoryWindow`] |
//! | `cq.rs` `wc.rs` | [`CompletionQueue`], [`CompletionChannel`], [`WorkCompletion`] |
//! | `qp.rs` `srq.rs` `wr.rs` | [`QueuePair`], [`SharedReceiveQueue`], [`SendRequest`], [`RecvRequest`] |
//! | `async_event.rs` | [`AsyncEvent`] |
//! | `cm.rs` `cm_abi.rs` | [`EventChannel`], [`CmId`], [`CmEvent`]; blocking handshakes ([`cm`]) |
//! | `error.rs` `denied.rs` `code.rs` `leak.rs` | [`Error`], [`Absence`]; named numbers; [`leaked_objects`] |
//! | `sys.rs` | the C types and the function tables (private) |
//! | `fake.rs` | a software provider behind the same table (feature `fake`) |
//!
//! Safety: safe code cannot make the device access freed memory. A [`MemoryRegion`] owns its bytes
//! and never lends them. After a part of a region is posted to a queue, the queue keeps the region
//! registered until the queue is destroyed. A [`MemoryWindow`] keeps its region registered, too.
//! Callers can use their own memory through `unsafe` calls with a written contract
//! ([`ProtectionDomain::register`], [`Sge::from_raw`]). If the device refuses to release an object,
//! the object and its memory are leaked and counted ([`leaked_objects`]).
//!
//! Unknown codes from the device or the kernel are kept as numbers.
//!
//! ```no_run
//! # use ferrite_verbs::{Access, QueuePairConfig, Verbs};
//! # fn main() -> Result<(), ferrite_verbs::Error> {
//! let context = Verbs::system()?.device("rxe1")?.open()?;
//! let domain = context.allocate_protection_domain()?;
//! let mut region = domain.allocate(4096, Access::LOCAL)?;
//! region.write(0, b"hello");
//! let cq = context.create_completion_queue(64, None, 0)?;
//! let qp = domain.create_queue_pair(&QueuePairConfig::new(&cq))?;
//! println!("queue pair {:#x}", qp.number());
//! # Ok(()) }
//! ```
#![expect(unsafe_code, reason = "the FFI crate: each block states its obligations")]

mod async_event;
pub mod cm;
mod cm_abi;
mod code;
mod context;
mod cq;
mod denied;
mod device;
mod error;
#[cfg(feature = "fake")]
pub mod fake;
mod gid;
mod leak;
mod library;
mod mr;
mod mw;
mod pd;
mod port;
mod qp;
mod quirks;
mod srq;
mod sys;
mod table;
mod wc;
mod wr;

pub use async_event::{AsyncEvent, AsyncEventKind, Subject};
pub use cm::{CmEvent, CmEventKind, CmId, CmKey, ConnectParams, ConnectionRequest, EventChannel};
pub use context::{Context, Limits};
pub use cq::{CompletionChannel, CompletionQueue, CqKey};
pub use device::Device;
pub use error::{Absence, Error, ErrorKind, Memlock, RejectReason, Rejection};
pub use gid::{Gid, GidChoice, GidEntry, GidType, choose_gid};
pub use leak::leaked_objects;
pub use library::rdma_core;
pub use mr::{Access, MemoryRegion, RemoteSlice};
pub use mw::MemoryWindow;
pub use pd::ProtectionDomain;
pub use port::{LinkLayer, Mtu, Port, PortState};
pub use qp::{Capacity, Path, PeerAddress, QueuePair, QueuePairAttributes, QueuePairConfig, State};
pub use quirks::DeviceQuirks;
pub use srq::SharedReceiveQueue;
pub use table::Verbs;
pub use wc::{CompletionError, Opcode, Status, WorkCompletion};
pub use wr::{Operation, PostError, RecvRequest, SendRequest, Sge};
