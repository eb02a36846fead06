//! RESP, in both versions: where a command or a reply ends, and views of complete ones.
//!
//! Framers are fed pieces of any size and keep numbers only: no byte is copied and nothing is
//! allocated by a number of a peer's. They say where a frame ends; whoever has the whole frame in
//! one piece looks into it by [`Command`] or [`Value`].
//!
//! Commands end where Redis and Valkey end them, sloppiness included: who passes commands on must
//! see the same boundaries as the server behind, or a client could hide one command in another.

mod args;
mod command;
mod encode;
mod number;
mod reply;
mod value;
mod words;

pub use args::{Args, Command};
pub use command::{CommandError, CommandFramer};
pub use encode::{
    Head, encode_bulk, encode_command, encode_error, encode_integer, encode_null, encode_status,
};
pub use reply::{ReplyError, ReplyFramer};
pub use value::Value;
pub use words::{Words, plain_command};

/// How large a frame may be in each direction. What is over a limit is an error of the peer's.
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
    /// The longest bulk string. Default 512 MiB, as `proto-max-bulk-len`.
    pub bulk_bytes: u64,
    /// The most arguments of a command. Default 1,048,576: what Redis took before it took any
    /// number.
    pub multibulk_args: u64,
    /// Whether a command's lines and bulk strings must end in `\r\n`, which engines check to
    /// different degrees. Default: no.
    pub exact_ends: bool,
    /// The longest inline command and the longest line of a reply. Default 64 KiB.
    pub inline_bytes: u32,
    /// The most elements of one aggregate of a reply, pairs of a map counting once. Default
    /// 4,294,967,295.
    pub elements: u64,
    /// How deep aggregates of a reply may be nested. Default 32. The only limit that costs memory:
    /// 24 bytes a level.
    pub depth: u32,
    /// The most bytes of one reply, whatever it is made of. Default: no limit.
    pub reply_bytes: u64,
    /// The most values of one reply, those inside others included. Default: no limit.
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

/// How far a framer came in what it was fed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes that belong to the frame: all, unless it ended before.
    pub consumed: usize,
    /// Whether the frame ends behind them. The next byte begins the next frame.
    pub complete: bool,
}
