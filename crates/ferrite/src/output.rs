//! Prints the result of a command: a JSON object for scripts, text for people.

use std::fmt::Write as _;

use serde::Serialize;

/// Prints `result` on stdout, as indented JSON or as the text that `text` returns.
pub(crate) fn print<T: Serialize>(
    result: &T,
    json: bool,
    text: impl FnOnce(&T) -> String,
) -> anyhow::Result<()> {
    if json {
        println!("{}", escape_controls(&serde_json::to_string_pretty(result)?));
    } else {
        print!("{}", escape_controls(&text(result)));
    }
    Ok(())
}

/// Replaces the characters by which text of a peer could control a terminal, or change the order of
/// other text. Ends of lines and tabs stay. The escapes are those of JSON.
pub(crate) fn escape_controls(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '\t' => out.push(c),
            '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            c if c.is_control() => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            other => out.push(other),
        }
    }
    out
}
