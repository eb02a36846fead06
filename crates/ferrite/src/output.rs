//! Prints the result of a command: a JSON object for scripts, text for people.
//!
//! A reader that has seen enough, such as `head`, closes stdout. That is no failure of the command.

use std::io::{ErrorKind, Write as _};

use serde::Serialize;

/// Prints `result` on stdout, as indented JSON or as the text that `text` returns.
pub(crate) fn print<T: Serialize>(
    result: &T,
    json: bool,
    text: impl FnOnce(&T) -> String,
) -> anyhow::Result<()> {
    let text = match json {
        true => serde_json::to_string_pretty(result)? + "\n",
        false => text(result),
    };
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => Ok(written?),
    }
}

/// Prints an event of a program that runs for long, as one line of JSON. If nobody reads it, the
/// program goes on.
pub(crate) fn print_event(event: &impl Serialize) {
    if let Ok(text) = serde_json::to_string(event) {
        let _ = writeln!(std::io::stdout(), "{text}");
    }
}
