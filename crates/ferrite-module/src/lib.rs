//! `ferrite.so`: `loadmodule ferrite.so` gives a stock Redis or Valkey an RDMA listener in its own
//! process.
//!
//! ```text
//!   engine's main thread                                    the thread `ferrite`
//!   entry ── OnLoad, CONFIG, INFO, FERRITE, events          transport: the fabric's engine, the gateway of ferrite-session
//!     │ every callback behind catch_unwind                    │ clients over RDMA (or TCP, where RDMA is preferred)
//!     ▼                                                       ▼
//!   module ── what it is told ──── asks, never waits long ──► sessions, each with a connection of its own
//!                                                             to the engine's Unix or TCP socket (the proxy path)
//!   event_loop ── unless `call-path no`: the engine's loop drives the fabric and runs sessions, which call what they can
//! ```
//!
//! | file | what it is |
//! |---|---|
//! | `api.rs` | the module API as a table of functions, found at load; `unsafe` |
//! | `entry.rs` | what the engine calls; `unsafe` |
//! | `options.rs` | arguments and CONFIG: one table of names, defaults and limits |
//! | `target.rs` | which of the engine's own sockets the proxy path takes |
//! | `transport.rs` | the thread |
//! | `event_loop.rs` `tasks.rs` | sessions on the engine's main thread: a turn of its loop, and the futures that it runs |
//! | `calls.rs` `router.rs` `keys.rs` | commands that run by a call instead of over the proxy connection, which those are, and reads by key |
//! | `capacity.rs` | whether the engine had a place for a client when it came |
//! | `clients.rs` | sessions' proxy connections as clients of the engine: what it says about them |
//! | `module.rs` | what there is between load and the engine's end |
//! | `info.rs` `command.rs` | INFO and FERRITE as values |
//! | `log.rs` | what the library warns of, in the engine's log |
//!
//! The thread never takes the engine's lock, and the engine's thread waits for ours only for a few
//! milliseconds (INFO), at load and at the end. A crash here is a crash of somebody's database: no
//! panic leaves a callback, and what a peer says gets to the API only as arguments of calls that
//! are allowed and guarded.

mod api;
mod calls;
mod capacity;
mod clients;
mod command;
mod descriptors;
mod entry;
mod event_loop;
mod info;
mod keys;
mod listen;
mod log;
mod module;
mod options;
mod router;
mod target;
mod tasks;
mod transport;
