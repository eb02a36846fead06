//! Prints results and events on stdout: JSON for scripts, text for people.
//!
//! `println!` panics if nobody reads stdout any more (`| head`) or a disk is full. A command fails
//! if it cannot write its result. An event that cannot be written is dropped, because the program
//! has other work to do.

use std::fmt::{self, Write as _};
use std::io::{self, Write as _};

use ferrite_fabric::is_deceptive;
use serde::Serialize;

/// Stdout cannot be written.
#[derive(Debug)]
pub(crate) struct StdoutError(io::Error);

impl fmt::Display for StdoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot write to stdout: {}", self.0)
    }
}

impl std::error::Error for StdoutError {}

impl StdoutError {
    /// Returns whether the reader has closed the pipe, as `head` does after its last line. This
    /// failure needs no message.
    pub(crate) fn is_broken_pipe(&self) -> bool {
        self.0.kind() == io::ErrorKind::BrokenPipe
    }
}

/// Prints `result` on stdout, as indented JSON or as the text that `text` returns.
pub(crate) fn print<T: Serialize>(
    result: &T,
    json: bool,
    text: impl FnOnce(&T) -> String,
) -> anyhow::Result<()> {
    if json { print_json(result) } else { Ok(write(&text(result))?) }
}

/// Prints a result on stdout as indented JSON.
pub(crate) fn print_json(result: &impl Serialize) -> anyhow::Result<()> {
    Ok(write(&format!("{}\n", serde_json::to_string_pretty(result)?))?)
}

/// Writes a text to stdout. Escapes control characters, so that a peer's text cannot control the
/// terminal.
pub(crate) fn write(text: &str) -> Result<(), StdoutError> {
    let (text, mut stdout) = (escape_controls(text), io::stdout().lock());
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(StdoutError)
}

/// Prints an event on stdout, as one line of JSON. Ignores failures.
pub(crate) fn print_event(event: &impl Serialize) {
    if let Ok(text) = serde_json::to_string(event) {
        write_line(&text);
    }
}

/// Writes a line about an event to stdout. Ignores failures.
pub(crate) fn write_line(text: &str) {
    let _ = write(&format!("{text}\n"));
}

/// Escapes the characters with which a peer's text could control a terminal or reorder other text.
/// Keeps newlines and tabs. The escapes are those of JSON.
pub(crate) fn escape_controls(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '\t' => out.push(c),
            c if is_deceptive(c) => {
                let mut units = [0; 2]; // JSON escapes the units of UTF-16
                for unit in c.encode_utf16(&mut units) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            other => out.push(other),
        }
    }
    out
}
