//! How a result is printed: one object for scripts, text for people.

use serde::Serialize;

/// On stdout, as pretty JSON or as what `text` makes.
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
