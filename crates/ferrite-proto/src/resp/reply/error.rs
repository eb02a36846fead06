//! Why bytes are no reply.

/// Why bytes are no reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReplyError {
    /// No type of RESP, or none that may stand here.
    #[error("Protocol error, got \"{}\" as reply type byte", .got.escape_ascii())]
    Type {
        /// What stands there.
        got: u8,
    },
    /// A push inside another value.
    #[error("Protocol error: a push inside a reply")]
    NestedPush,
    /// A length that is no number.
    #[error("Protocol error: invalid length")]
    Length,
    /// A string's length below zero or above the limit.
    #[error("Protocol error: invalid bulk length")]
    BulkLength,
    /// A number of elements below zero or above the limit.
    #[error("Protocol error: invalid multibulk length")]
    AggregateLength,
    /// Nested deeper than the limit.
    #[error("Protocol error: nested deeper than {limit}")]
    TooDeep {
        /// The limit.
        limit: u32,
    },
    /// More bytes than the limit.
    #[error("Protocol error: a reply of more than {limit} bytes")]
    TooLarge {
        /// The limit.
        limit: u64,
    },
    /// More values than the limit.
    #[error("Protocol error: a reply of more than {limit} values")]
    TooMany {
        /// The limit.
        limit: u64,
    },
    /// No number, or one of more than 64 bits.
    #[error("Protocol error: invalid number")]
    Number,
    /// No double.
    #[error("Protocol error: invalid double")]
    Double,
    /// Neither `t` nor `f`.
    #[error("Protocol error: invalid boolean")]
    Boolean,
    /// Three letters and a colon do not stand before the text.
    #[error("Protocol error: invalid verbatim string")]
    Verbatim,
    /// A line without `\r\n` where it belongs.
    #[error("Protocol error: invalid line end")]
    LineEnd,
    /// A line longer than the limit.
    #[error("Protocol error: too long line")]
    LineTooLong,
    /// A string without `\r\n` behind it.
    #[error("Protocol error: invalid end of a string")]
    BlobEnd,
    /// Not a whole reply: of [`Value::parse`](crate::resp::Value::parse) only.
    #[error("Protocol error: the reply does not end here")]
    Incomplete,
    /// More than one reply: of [`Value::parse`](crate::resp::Value::parse) only.
    #[error("Protocol error: the reply ends before")]
    Trailing,
}
