//! Commands that are about to be called, each with the properties that its lookup has found.

use std::ops::Range;

use ferrite_proto::resp::Words;

use super::input::{FoundCommand, Input};

/// The properties of a command that may be called in-process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Callable {
    /// The number of words, including the command's name. A negative value -N means at least N
    /// words.
    pub arity: i32,
    /// Whether the command may write data, or be sent to replicas for another reason.
    pub writes: bool,
    /// Whether the command is one of several with the same name, which the first argument selects.
    pub is_subcommand: bool,
    /// Whether the command may fill a key that another client is blocked on (BLPOP and the like).
    pub unblocks: bool,
    /// Whether the command is GET: its only argument is a key, and its reply is the key's value.
    pub reads_string: bool,
    /// Whether the command may have several keys, or keys whose positions depend on its arguments.
    pub has_several_keys: bool,
    /// Whether the command is PING. The engine refuses it after a failure to write to disk, as it
    /// refuses writes.
    pub reports_disk_errors: bool,
}

impl Callable {
    /// Returns whether the command may have this number of words, including its name.
    #[must_use]
    #[inline]
    pub fn takes(self, words: usize) -> bool {
        let words = i32::try_from(words).unwrap_or(i32::MAX);
        if self.arity < 0 { words >= -self.arity } else { words == self.arity }
    }
}

/// A command of a run. A run is a series of consecutive commands that a session handles together.
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
