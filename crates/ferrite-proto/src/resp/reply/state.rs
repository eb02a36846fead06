//! The state of a [`ReplyFramer`](super::ReplyFramer). Its size is fixed: it keeps none of the
//! bytes that were fed.

use super::ReplyError;
use crate::resp::number::{Integer, Length};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Start,
    /// Before the type byte of a value.
    Type,
    /// Before the next chunk of a string.
    Chunk,
    /// In the line of a scalar, after its type byte.
    Line {
        kind: Scalar,
        len: u32,
    },
    /// In the line of a length, after its type byte.
    Size {
        kind: SizedKind,
        size: Size,
    },
    /// After the `\r` of a line.
    LineEnd(AfterLine),
    /// In the bytes of a string. `format` is the position in the format of a verbatim string;
    /// `None` after the format, and for other strings.
    Blob {
        left: u64,
        format: Option<u8>,
        chunk: bool,
    },
    /// After the bytes of a string. `feed` tells whether `\r` was received. Then `\n` must follow.
    BlobEnd {
        feed: bool,
        chunk: bool,
    },
    Failed(ReplyError),
}

/// The kind of a value that consists of one line.
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

/// The kind of a value that begins with a length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SizedKind {
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
    /// `?`: the length is not stated.
    Open,
}

/// What the end of a line means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AfterLine {
    Value,
    Blob {
        len: u64,
        verbatim: bool,
        chunk: bool,
    },
    Chunks,
    Level(Level),
    /// Attributes without any pair.
    Attributed,
    EndOfStream,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Level {
    pub(super) left: Remaining,
    pub(super) attribute: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Remaining {
    Values(u64),
    /// Values until the end marker. In a map, the marker may come only between pairs.
    Stream {
        map: bool,
        odd: bool,
    },
}
