//! Names of streams: which side opened the stream, in which class, and its number.
//!
//! ```text
//!   31                                    3  2      1  0
//!   ┌──────────────────────────────────────┬─────────┬────────┐
//!   │                number                │  class  │ opener │
//!   └──────────────────────────────────────┴─────────┴────────┘
//! ```
//!
//! The class is part of the name because each class has its own channel, and OPEN records on
//! different channels can overtake each other. The numbers of one class arrive in increasing order.
//! So a receiver detects a reused name with one counter for each class.

/// The two ends of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Side {
    /// The side that accepted the link. Its streams have even names.
    Called,
    /// The side that connected the link. Its streams have odd names.
    Caller,
}

impl Side {
    /// Returns the other end.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::Called => Self::Caller,
            Self::Caller => Self::Called,
        }
    }
}

/// The class of a stream. A busy class does not delay the classes before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// The cluster bus: few bytes, and nodes that wait too long for them declare each other dead.
    Bus,
    /// Clients that wait for answers.
    Interactive,
    /// Streams that send much: replication, migration.
    Bulk,
}

impl Class {
    /// All classes, the most urgent first.
    pub const ALL: [Self; 3] = [Self::Bus, Self::Interactive, Self::Bulk];

    /// Returns the link channel of the class.
    #[must_use]
    pub fn channel(self) -> u16 {
        self as u16
    }

    /// Returns the class of a link channel.
    #[must_use]
    pub fn from_channel(channel: u16) -> Option<Self> {
        Self::ALL.get(usize::from(channel)).copied()
    }

    pub(super) fn index(self) -> usize {
        self as usize
    }
}

/// The name of a stream. A name is used once in the life of a link.
///
/// ```
/// use ferrite_proto::mux::{Class, Side, StreamId};
///
/// let id = StreamId::new(Side::Caller, Class::Bulk, 7).unwrap();
/// assert_eq!(id.to_wire(), 7 << 3 | 2 << 1 | 1);
/// assert_eq!((id.opener(), id.class(), id.number()), (Side::Caller, Class::Bulk, 7));
/// assert_eq!(StreamId::from_wire(id.to_wire()), Some(id));
/// assert_eq!(StreamId::from_wire(1), None, "numbers start at 1");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(u32);

impl StreamId {
    /// The largest number of a stream.
    pub const MAX_NUMBER: u32 = u32::MAX >> 3;

    /// Creates a name; `None` if the number is 0 or too large.
    #[must_use]
    pub fn new(opener: Side, class: Class, number: u32) -> Option<Self> {
        let is_valid = (1..=Self::MAX_NUMBER).contains(&number);
        is_valid.then_some(Self(number << 3 | (class as u32) << 1 | opener as u32))
    }

    /// Returns the name that a record has; `None` if no stream has such a name.
    #[must_use]
    pub fn from_wire(value: u32) -> Option<Self> {
        let has_class = (value >> 1 & 3) < Class::ALL.len() as u32;
        (has_class && value >> 3 > 0).then_some(Self(value))
    }

    /// Returns the name as records have it.
    #[must_use]
    pub fn to_wire(self) -> u32 {
        self.0
    }

    /// Returns the side that opened the stream.
    #[must_use]
    pub fn opener(self) -> Side {
        if self.0 & 1 == 1 { Side::Caller } else { Side::Called }
    }

    /// Returns the class in which the stream was opened.
    #[must_use]
    pub fn class(self) -> Class {
        match self.0 >> 1 & 3 {
            0 => Class::Bus,
            1 => Class::Interactive,
            _ => Class::Bulk,
        }
    }

    /// Returns the number of the stream. The streams of a side have increasing numbers.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0 >> 3
    }
}

impl std::fmt::Display for StreamId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// How many streams one side has opened, by the class in which it has opened them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Opened {
    /// Streams of the class *bus*.
    pub(super) bus: usize,
    /// Streams of the other classes.
    pub(super) others: usize,
}

impl Opened {
    /// Returns the count for streams of this class.
    pub(super) fn of(&mut self, class: Class) -> &mut usize {
        match class {
            Class::Bus => &mut self.bus,
            Class::Interactive | Class::Bulk => &mut self.others,
        }
    }
}

impl std::ops::Add for Opened {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { bus: self.bus + other.bus, others: self.others + other.others }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_order_by_number() {
        let mut last = None;
        for number in [1, 2, StreamId::MAX_NUMBER] {
            for class in Class::ALL {
                for opener in [Side::Called, Side::Caller] {
                    let id = StreamId::new(opener, class, number).expect("valid number");
                    assert_eq!((id.opener(), id.class(), id.number()), (opener, class, number));
                    assert_eq!(StreamId::from_wire(id.to_wire()), Some(id));
                    assert_eq!(id.to_wire() % 2 == 1, opener == Side::Caller);
                    assert!(last.replace(id) < Some(id));
                }
            }
        }
    }

    #[test]
    fn rejects_values_that_name_no_stream() {
        for value in [0, 1, 7, 8 | 3 << 1, u32::MAX] {
            assert_eq!(StreamId::from_wire(value), None, "{value:#x}");
        }
        for number in [0, StreamId::MAX_NUMBER + 1] {
            assert_eq!(StreamId::new(Side::Caller, Class::Bus, number), None);
        }
    }

    #[test]
    fn classes_have_channels() {
        for class in Class::ALL {
            assert_eq!(Class::from_channel(class.channel()), Some(class));
        }
        assert_eq!(Class::from_channel(3), None);
        assert_eq!(Side::Caller.other().other(), Side::Caller);
    }
}
