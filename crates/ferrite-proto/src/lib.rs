//! What two peers of Valkey Over RDMA say to each other, decided by values alone: no I/O, no clock,
//! no pointer.
//!
//! ```text
//!   message    the 32-byte control messages
//!   window     linear buffers that one side fills to the last byte and the other announces again
//!   endpoint   one end of a connection, client or server: events in, messages and writes out
//!   resp       where a RESP command or reply ends, whatever the pieces; views of complete ones
//!   session_command   which commands change a connection, by their identity
//! ```
//!
//! A driver owns memory, queues and the clock, and makes no decision of the protocol: it hands
//! completions to [`Endpoint`], then does what the `poll_*` methods say. Nothing that a peer sends
//! can make this crate panic, and no number of a peer's decides how much is allocated.
#![forbid(unsafe_code)]

pub mod endpoint;
pub mod message;
pub mod resp;
pub mod session_command;
pub mod window;

pub use endpoint::{Config, ConfigError, Endpoint, ProtocolError, Role, Stats};
pub use message::{MESSAGE_BYTES, Message, MessageError, Registration};
pub use session_command::SessionCommand;
pub use window::{ReceiveWindow, SendWindow, WindowError, Write};
