//! Writes to stdout, which may be a closed pipe, and to stderr.
//!
//! Most of the output comes from a server, so this module escapes output to a terminal
//! (`terminal.rs`). Files and pipes get the original bytes. Only three parts do not write through
//! this module: the progress bar and clap, which show no text from a server, and the line editor of
//! the prompt, whose hints and completions `docs.rs` escapes.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{self, IsTerminal as _, Write as _};

use crate::format::Style;
use crate::terminal;

/// The reader of stdout has closed the pipe. This error ends the program without a message.
#[derive(Debug)]
pub(crate) struct OutputClosed;

impl std::fmt::Display for OutputClosed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("stdout is a closed pipe")
    }
}

impl std::error::Error for OutputClosed {}

/// Writes bytes to stdout and flushes stdout, since the reader may wait for them. Escapes control
/// characters on a terminal.
pub(crate) fn write(bytes: &[u8]) -> anyhow::Result<()> {
    write_own(&if io::stdout().is_terminal() {
        terminal::escape(bytes)
    } else {
        Cow::Borrowed(bytes)
    })
}

/// Writes bytes to stdout and flushes stdout, without escaping. The bytes may contain our own
/// escape sequences. The caller must escape text from a server.
pub(crate) fn write_own(bytes: &[u8]) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(bytes).and_then(|()| stdout.flush()).map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => OutputClosed.into(),
        _ => anyhow::Error::from(error).context("cannot write to stdout"),
    })
}

/// Writes a line to stderr.
pub(crate) fn write_stderr(line: impl Display) {
    let line = format!("{line}\n");
    let is_terminal = io::stderr().is_terminal();
    let bytes =
        if is_terminal { terminal::escape(line.as_bytes()) } else { line.as_bytes().into() };
    let _ = io::stderr().lock().write_all(&bytes); // there is no place to report this error
}

pub(crate) fn is_json(style: Style) -> bool {
    matches!(style, Style::Json | Style::QuotedJson)
}
