//! Commands on their way to be called, with what was found out about them when they were looked at.

use std::ops::Range;

use ferrite_proto::resp::Words;

use super::input::{Found, Input};

/// What there is to know of a command that may be called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Callable {
    /// So many words, its name included, or (negative) no fewer.
    pub arity: i32,
    /// It may write, or be sent to replicas otherwise.
    pub writes: bool,
    /// It is one of several that have its name, by its first argument.
    pub is_subcommand: bool,
    /// It may make a key ready for which another client waits (BLPOP and the like).
    pub unblocks: bool,
    /// It is GET: with one argument, a key whose value it answers.
    pub reads_string: bool,
}

impl Callable {
    /// Whether it may have so many words, its name included.
    #[must_use]
    #[inline]
    pub fn takes(self, words: usize) -> bool {
        let words = i32::try_from(words).unwrap_or(i32::MAX);
        if self.arity < 0 { words >= -self.arity } else { words == self.arity }
    }
}

/// A command of a run.
#[derive(Debug, Clone)]
pub(super) struct Due {
    pub(super) found: Found,
    /// If it is to be called.
    pub(super) callable: Option<Callable>,
}

/// Where these commands lie, one behind the other.
pub(super) fn place_of(run: &[Due]) -> Range<usize> {
    match (run.first(), run.last()) {
        (Some(first), Some(last)) => first.found.place.start..last.found.place.end,
        _ => 0..0,
    }
}

/// Commands to be called, in order.
#[derive(Clone, Copy)]
pub struct Commands<'a> {
    pub(super) input: &'a Input,
    pub(super) run: &'a [Due],
}

impl<'a> Commands<'a> {
    /// What is known of each, and its words.
    #[inline]
    pub fn iter(self) -> impl Iterator<Item = (Callable, Words<'a>)> {
        self.run.iter().map_while(move |due| Some((due.callable?, self.input.words(&due.found))))
    }
}
