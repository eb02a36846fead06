//! Prints the result of a command: a JSON object for scripts, text for people.

use serde::Serialize;

/// Prints `result` on stdout, as indented JSON or as the text that `text` returns.
pub(crate) fn print<T: Serialize>(
    result: &T,
    json: bool,
    text: impl FnOnce(&T) -> String,
) -> anyhow::Result<()> {
    if json {
        println!("{}", serde_json::to_string_pretty(result)?);
    } else {
        print!("{}", text(result));
    }
    Ok(())
}
