//! The type of a setting's value.

use std::time::Duration;

use crate::time::Unit;

/// The type of a setting's value.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// `yes` or `no`, which can also be written `true` or `false`; in files only `true` or `false`.
    Switch,
    /// A whole number.
    Number {
        /// The smallest number.
        min: i64,
        /// The largest number.
        max: i64,
    },
    /// A number of bytes, with a unit or without.
    Size {
        /// The smallest size.
        min: u64,
        /// The largest size.
        max: u64,
    },
    /// A duration.
    Time {
        /// The unit of a number that has none. `None` if the unit must be given.
        bare: Option<Unit>,
        /// The shortest duration.
        min: Duration,
        /// The longest duration.
        max: Duration,
    },
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A text that the function accepts. The function's error describes what it accepts.
    Text(fn(&str) -> Result<(), &'static str>),
    /// Words separated by commas or spaces; in files also a list. The function accepts each word.
    /// Its error describes the list.
    List(fn(&str) -> Result<(), &'static str>),
}
