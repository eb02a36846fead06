//! `ferrite.so`: `loadmodule ferrite.so` gives a stock Redis or Valkey an RDMA listener in its own
//! process.
//!
//! ```text
//!   engine's main thread                              thread `ferrite`
//!   entry: OnLoad, CONFIG, INFO, FERRITE, events      transport: the fabric and the gateway
//!     │ every callback runs in catch_unwind             │ clients over RDMA or TCP
//!     ▼                                                 ▼
//!   module ──── requests over a channel ────────────► sessions, each with its own proxy connection
//!                                                     to the engine's Unix or TCP socket
//!   event_loop (unless `call-path no`): the engine's event loop runs the sessions, which call the
//!   engine in-process where they can, and drives the fabric (unless `poller-thread yes`)
//! ```
//!
//! | file | contents |
//! |---|---|
//! | `api.rs` | safe wrappers of the module API's functions, found at load; `unsafe` |
//! | `entry.rs` | the callbacks that the engine calls; `unsafe` |
//! | `options.rs` | arguments and CONFIG: values of the table in `ferrite-config` |
//! | `listen.rs` | the addresses that the module listens on |
//! | `target.rs` | which of the engine's own sockets the proxy path connects to |
//! | `transport.rs` | the thread `ferrite` |
//! | `event_loop.rs` `slice.rs` `tasks.rs` | sessions on the engine's main thread: slices and futures |
//! | `calls.rs` `calls/` `call_path.rs` | commands that run in-process, not over the proxy connection |
//! | `engine_handle.rs` | the interface through which sessions use the engine that they run in |
//! | `router.rs` `keys.rs` | which commands may be called; the key path, which reads long strings |
//! | `capacity.rs` | whether the engine had reached `maxclients` when a client connected |
//! | `descriptors.rs` | keeps sessions' file descriptors above the numbers that the engine needs |
//! | `clients.rs` | the engine's view of each session's proxy connection |
//! | `module.rs` | the module's state between load and the engine's shutdown |
//! | `endpoints.rs` | the endpoints of a cluster's nodes, which the modules announce to each other |
//! | `info.rs` `command.rs` | the contents of INFO and the subcommands of FERRITE |
//! | `admin.rs` | the metrics and the readiness at the admin port |
//! | `log.rs` | writes the log messages of the module and of its crates to the engine's log |
//!
//! The thread `ferrite` never takes the engine's lock. The engine's main thread waits for the
//! thread `ferrite` only at load, at shutdown, and for a few milliseconds when INFO or FERRITE
//! reads that thread's counters. A crash here crashes somebody's database. Therefore no panic
//! leaves a callback, and data from a peer reaches the module API only as arguments of calls that
//! were checked first.

mod admin;
mod api;
mod call_path;
mod calls;
mod capacity;
mod clients;
mod command;
mod descriptors;
mod endpoints;
mod engine_handle;
mod entry;
mod event_loop;
mod info;
mod keys;
mod listen;
mod log;
mod module;
mod options;
mod router;
mod slice;
mod target;
mod tasks;
mod transport;
