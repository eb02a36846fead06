//! Why bytes are not a reply.

/// Why bytes are not a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReplyError {
    /// The type byte is not defined in RESP, or not allowed here.
    #[error("Protocol error, got \"{}\" as reply type byte", .got.escape_ascii())]
    Type {
        /// The type byte.
        got: u8,
    },
    /// A push is inside another value.
    #[error("Protocol error: a push inside a reply")]
    NestedPush,
    /// A length is not a number.
    #[error("Protocol error: invalid length")]
    Length,
    /// The length of a string is missing, negative or beyond the limit, or is `?` where RESP allows
    /// no chunks.
    #[error("Protocol error: invalid bulk length")]
    BulkLength,
    /// A number of elements is missing, negative or beyond the limit, or is `?` where RESP allows
    /// no stream.
    #[error("Protocol error: invalid multibulk length")]
    AggregateLength,
    /// Values are nested deeper than the limit.
    #[error("Protocol error: a reply nested deeper than {limit} levels")]
    TooDeep {
        /// The limit.
        limit: u32,
    },
    /// The reply has more bytes than the limit.
    #[error("Protocol error: a reply of more than {limit} bytes")]
    TooLarge {
        /// The limit.
        limit: u64,
    },
    /// The reply has more values than the limit.
    #[error("Protocol error: a reply of more than {limit} values")]
    TooMany {
        /// The limit.
        limit: u64,
    },
    /// An integer is invalid or has more than 64 bits, or a big number is invalid.
    #[error("Protocol error: invalid number")]
    Number,
    /// A double is invalid. Only [`Value::parse`](crate::resp::Value::parse) and
    /// [`Value::parse_within`](crate::resp::Value::parse_within) return this.
    #[error("Protocol error: invalid double")]
    Double,
    /// A boolean is neither `t` nor `f`.
    #[error("Protocol error: invalid boolean")]
    Boolean,
    /// A verbatim string does not begin with a format of three bytes and a colon.
    #[error("Protocol error: invalid verbatim string")]
    Verbatim,
    /// A line does not end in `\r\n`.
    #[error("Protocol error: invalid line end")]
    LineEnd,
    /// A line is longer than the limit.
    #[error("Protocol error: line too long")]
    LineTooLong,
    /// A string is not followed by `\r\n`.
    #[error("Protocol error: invalid end of a string")]
    BlobEnd,
    /// The reply is not complete. Only [`Value::parse`](crate::resp::Value::parse) and
    /// [`Value::parse_within`](crate::resp::Value::parse_within) return this.
    #[error("Protocol error: incomplete reply")]
    Incomplete,
    /// There is more than one reply. Only [`Value::parse`](crate::resp::Value::parse) and
    /// [`Value::parse_within`](crate::resp::Value::parse_within) return this.
    #[error("Protocol error: unexpected bytes after the reply")]
    Trailing,
}
