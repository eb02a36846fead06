//! RESP, in both versions: finds where a command or a reply ends, and gives views of complete ones.
//!
//! Framers accept pieces of any size and keep only numbers. They copy no byte, and no number from a
//! peer makes them allocate memory. They report where a frame ends. A caller that has the whole
//! frame in one piece reads it with [`Command`] or [`Value`].
//!
//! [`CommandFramer`] ends commands where Redis and Valkey end them, with the same leniency. A proxy
//! must see the same boundaries as the server behind it. Otherwise a client could hide one command
//! in another.

mod args;
mod command;
mod encode;
mod line;
mod number;
mod reply;
mod value;
mod words;

pub use args::{Args, Command};
pub use command::{CommandError, CommandFramer};
pub use encode::{
    Head, encode_bulk, encode_command, encode_error, encode_integer, encode_null, encode_status,
};
pub use line::{Unbalanced, split_line, unquote};
pub use reply::{ReplyError, ReplyFramer};
pub use value::Value;
pub use words::{Words, plain_command};

/// How large a frame may be in each direction. A frame beyond a limit is an error of the peer.
///
/// ```
/// use ferrite_proto::resp::{CommandError, CommandFramer, Limits};
///
/// let limits = Limits { bulk_bytes: 1 << 20, ..Limits::default() };
/// let error = CommandFramer::new(limits).feed(b"*1\r\n$1048577\r\n").unwrap_err();
/// assert_eq!(error, CommandError::BulkLength);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The longest bulk string. Default 512 MiB, as in `proto-max-bulk-len`.
    pub bulk_bytes: u64,
    /// The maximum number of arguments of a command. Default 1,048,576, the limit that Redis once
    /// had.
    pub multibulk_args: u64,
    /// Whether the lines and bulk strings of a multibulk command must end in `\r\n`. Engines check
    /// this to different degrees. Default: no.
    pub exact_ends: bool,
    /// The longest inline command and the longest line of a reply. Default 64 KiB.
    pub inline_bytes: u32,
    /// The maximum number of elements of one aggregate in a reply; a pair of a map counts once.
    /// Default 4,294,967,295.
    pub elements: u64,
    /// How deep aggregates in a reply may be nested. Default 32. This is the only limit that costs
    /// memory: 24 bytes per level.
    pub depth: u32,
    /// The maximum size of one whole reply in bytes, including lengths and line ends. Default: no
    /// limit.
    pub reply_bytes: u64,
    /// The maximum number of values in one reply, including nested ones. Default: no limit.
    pub reply_values: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            bulk_bytes: 512 << 20,
            multibulk_args: 1 << 20,
            exact_ends: false,
            inline_bytes: 64 << 10,
            elements: u32::MAX.into(),
            depth: 32,
            reply_bytes: u64::MAX,
            reply_values: u64::MAX,
        }
    }
}

/// How far a framer got in the bytes that it was fed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// How many of the bytes belong to the frame. These are all bytes, unless the frame ends
    /// earlier.
    pub consumed: usize,
    /// Whether the frame ends after these bytes. The next byte begins the next frame.
    pub complete: bool,
}
