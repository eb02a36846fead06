//! Completion and hints while the user types a line.

use std::borrow::Cow;
use std::cell::Cell;

use rustyline::completion::Completer;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::validate::Validator;
use rustyline::{Context, Helper};

use crate::docs::Docs;

pub(super) struct Assistant {
    pub(super) docs: Docs,
    pub(super) shows_hints: Cell<bool>,
}

/// A hint such as `key [value ...]`. It is only displayed, and never inserted into the line.
pub(super) struct Hint(String);

impl rustyline::hint::Hint for Hint {
    fn display(&self) -> &str {
        &self.0
    }

    fn completion(&self) -> Option<&str> {
        None
    }
}

impl Hinter for Assistant {
    type Hint = Hint;

    fn hint(&self, line: &str, at: usize, _: &Context<'_>) -> Option<Hint> {
        let is_wanted = self.shows_hints.get() && at == line.len();
        is_wanted.then(|| self.docs.hint(line)).flatten().map(Hint)
    }
}

impl Completer for Assistant {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        at: usize,
        _: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        Ok(self.docs.completions(line.get(..at).unwrap_or(line)))
    }
}

impl Highlighter for Assistant {
    fn highlight_hint<'h>(&self, hint: &'h str) -> Cow<'h, str> {
        Cow::Owned(format!("\x1b[90m{hint}\x1b[0m"))
    }
}

impl Validator for Assistant {}
impl Helper for Assistant {}
