//! Why a stream was reset: the codes of RESET records.

use std::fmt;

/// Why a stream was reset. A code that this version does not know is a valid cause, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cause(u32);

impl Cause {
    /// The program's connection failed or was reset.
    pub const CONNECTION_LOST: Self = Self(1);
    /// The destination refused the connection.
    pub const REFUSED: Self = Self(2);
    /// Policy forbids the destination or the source.
    pub const FORBIDDEN: Self = Self(3);
    /// The destination could not be reached, or did not answer in time.
    pub const UNREACHABLE: Self = Self(4);
    /// The opener has too many streams.
    pub const TOO_MANY_STREAMS: Self = Self(5);
    /// The opener opens streams too fast.
    pub const TOO_MANY_OPENS: Self = Self(6);
    /// The streams of the link hold too many bytes, and this stream holds the most.
    pub const NO_MEMORY: Self = Self(7);
    /// The peer had stopped accepting streams. It has processed nothing of this stream, so the
    /// stream can be opened on another link.
    pub const GOING_AWAY: Self = Self(8);
    /// The link ended. Never sent: each side reports it to its own programs.
    pub const LINK_LOST: Self = Self(9);

    /// Returns the cause with this code.
    #[must_use]
    pub fn from_wire(code: u32) -> Self {
        Self(code)
    }

    /// Returns the code as records have it.
    #[must_use]
    pub fn to_wire(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match *self {
            Self::CONNECTION_LOST => "the connection was lost",
            Self::REFUSED => "the destination refused the connection",
            Self::FORBIDDEN => "policy forbids the connection",
            Self::UNREACHABLE => "the destination is unreachable",
            Self::TOO_MANY_STREAMS => "too many streams",
            Self::TOO_MANY_OPENS => "streams are opened too fast",
            Self::NO_MEMORY => "too many bytes wait to be read",
            Self::GOING_AWAY => "the peer accepts no new streams",
            Self::LINK_LOST => "the link was lost",
            Self(code) => return write!(f, "unknown cause {code}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_codes_are_values() {
        assert_eq!(Cause::from_wire(2), Cause::REFUSED);
        assert_eq!(Cause::from_wire(77).to_string(), "unknown cause 77");
        let texts: std::collections::BTreeSet<_> =
            (1..=9).map(|code| Cause::from_wire(code).to_string()).collect();
        assert_eq!(texts.len(), 9);
        assert!(texts.iter().all(|text| !text.starts_with("unknown")));
    }
}
