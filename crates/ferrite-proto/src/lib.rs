//! Valkey Over RDMA, RESP and the multiplexer as plain state machines: no I/O, no clock, no
//! pointers.
//!
//! ```text
//!   message    the 32-byte control messages
//!   window     linear buffers: one side fills them to the last byte, the other re-announces them
//!   endpoint   one end of a connection, client or server: events in, messages and writes out
//!   mux        many streams over one link: records, credit, turns, classes
//!   resp       finds where RESP commands and replies end, and reads complete ones without a copy
//!   cluster    redirects, slots and RDMA endpoints, as a client of a cluster reads them
//!   session_command   which commands change the state of a connection
//! ```
//!
//! A driver owns the memory, the queues and the clock, and makes no protocol decision. It passes
//! completions to [`Endpoint`], and then posts what `poll_message` and `write_plan` return. No
//! input from a peer can make this crate panic, and no number from a peer decides how much is
//! allocated.
#![forbid(unsafe_code)]

pub mod cluster;
pub mod endpoint;
pub mod message;
pub mod mux;
pub mod resp;
pub mod session_command;
pub mod window;

pub use endpoint::{Config, ConfigError, Endpoint, ProtocolError, Role, Stats};
pub use message::{MESSAGE_BYTES, Message, MessageError, Registration};
pub use session_command::SessionCommand;
pub use window::{ReceiveWindow, SendWindow, WindowError, Write};
