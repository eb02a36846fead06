//! Where a [`ReplyFramer`](super::ReplyFramer) stands: numbers only, whatever it was fed.

use super::ReplyError;
use crate::resp::number::{Integer, Length};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Start,
    /// Before the type of a value.
    Type,
    /// Before the next chunk of a string.
    Chunk,
    /// In the line of a scalar, behind its type.
    Line {
        kind: Scalar,
        len: u32,
    },
    /// In the line of a length, behind its type.
    Size {
        kind: Counted,
        size: Size,
    },
    /// Behind the `\r` of a line.
    LineEnd(Then),
    /// In the bytes of a string; those of a verbatim string that come before its text.
    Blob {
        left: u64,
        format: Option<u8>,
        chunk: bool,
    },
    /// Behind the bytes of a string.
    BlobEnd {
        feed: bool,
        chunk: bool,
    },
    Failed(ReplyError),
}

/// Values that are one line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scalar {
    /// Simple strings, errors, doubles: any bytes.
    Text,
    Integer(Integer),
    BigNumber {
        digits: bool,
    },
    Boolean {
        seen: bool,
    },
    Null,
    /// The end of a streamed aggregate.
    End,
}

/// Values that begin with a length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Counted {
    Bulk,
    BlobError,
    Verbatim,
    Chunk,
    Array,
    Set,
    Map,
    Push,
    Attribute,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Size {
    Number(Length),
    /// `?`
    Open,
}

/// What a line that ended means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Then {
    Value,
    Blob {
        len: u64,
        verbatim: bool,
        chunk: bool,
    },
    Chunks,
    Level(Level),
    /// Attributes without a pair.
    Attributed,
    EndOfStream,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Level {
    pub(super) left: Left,
    pub(super) attribute: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Left {
    Values(u64),
    /// Until the end is said. Of a map only between pairs.
    Stream {
        map: bool,
        odd: bool,
    },
}
