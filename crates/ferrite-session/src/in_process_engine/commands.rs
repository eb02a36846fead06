//! Commands that are about to be called, with the properties that were found when they were looked
//! up.

use std::ops::Range;

use ferrite_proto::resp::Words;

use super::input::{FoundCommand, Input};

/// The properties of a command that may be called in-process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Callable {
    /// The number of words, its name included. If negative, its absolute value is the smallest
    /// number of words.
    pub arity: i32,
    /// Whether it may write data, or be sent to replicas for another reason.
    pub writes: bool,
    /// Whether it is one of several commands with the same name, selected by the first argument.
    pub is_subcommand: bool,
    /// Whether it may fill a key that another client is blocked on (BLPOP and the like).
    pub unblocks: bool,
    /// Whether it is GET, whose one argument is a key, and which returns the key's value.
    pub reads_string: bool,
}

impl Callable {
    /// Returns whether the command may have this number of words, its name included.
    #[must_use]
    #[inline]
    pub fn takes(self, words: usize) -> bool {
        let words = i32::try_from(words).unwrap_or(i32::MAX);
        if self.arity < 0 { words >= -self.arity } else { words == self.arity }
    }
}

/// A command of a run.
#[derive(Debug, Clone)]
pub(crate) struct RunCommand {
    pub(crate) found: FoundCommand,
    /// The command's properties if it runs in-process; `None` if it is proxied.
    pub(crate) callable: Option<Callable>,
}

/// Returns the range of these consecutive commands in the input.
pub(crate) fn range_of(run: &[RunCommand]) -> Range<usize> {
    match (run.first(), run.last()) {
        (Some(first), Some(last)) => first.found.range.start..last.found.range.end,
        _ => 0..0,
    }
}

/// Commands to call, in order.
#[derive(Clone, Copy)]
pub struct Commands<'a> {
    pub(crate) input: &'a Input,
    pub(crate) run: &'a [RunCommand],
}

impl<'a> Commands<'a> {
    /// Returns the properties and the words of each command.
    #[inline]
    pub fn iter(self) -> impl Iterator<Item = (Callable, Words<'a>)> {
        self.run.iter().map_while(move |due| Some((due.callable?, self.input.words(&due.found))))
    }
}
