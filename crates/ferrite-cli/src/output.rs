//! Stdout, which may be a pipe that nobody reads any more, and stderr.
//!
//! Nothing else writes to them. What goes to a terminal is made harmless here (`terminal.rs`),
//! since most of it comes from a server; what goes elsewhere are the bytes.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{self, IsTerminal as _, Write as _};

use crate::format::Style;
use crate::terminal;

/// Whoever read stdout has gone: nothing more can be said there, and nothing needs to be.
#[derive(Debug)]
pub(crate) struct NobodyReads;

impl std::fmt::Display for NobodyReads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("nobody reads the output")
    }
}

impl std::error::Error for NobodyReads {}

/// Writes now: who reads may wait for it.
pub(crate) fn write(bytes: &[u8]) -> anyhow::Result<()> {
    write_own(&if io::stdout().is_terminal() {
        terminal::shown(bytes)
    } else {
        Cow::Borrowed(bytes)
    })
}

/// The same for what has escape sequences of ours, and nothing of a server's that was not made
/// harmless.
pub(crate) fn write_own(bytes: &[u8]) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(bytes).and_then(|()| stdout.flush()).map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => NobodyReads.into(),
        _ => anyhow::Error::from(error).context("writing to stdout"),
    })
}

/// A line on stderr.
pub(crate) fn tell(line: impl Display) {
    let line = format!("{line}\n");
    let is_terminal = io::stderr().is_terminal();
    let bytes = if is_terminal { terminal::shown(line.as_bytes()) } else { line.as_bytes().into() };
    let _ = io::stderr().lock().write_all(&bytes); // nobody is left to hear of it
}

pub(crate) fn is_json(style: Style) -> bool {
    matches!(style, Style::Json | Style::QuotedJson)
}
