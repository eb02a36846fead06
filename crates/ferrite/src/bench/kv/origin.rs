//! Where a result comes from: version, date and command line, without passwords.

use std::sync::LazyLock;

/// Options whose value is not shown.
const SECRETS: [&str; 1] = ["--auth"];

/// Returns the lines that stand below a plot.
pub(super) fn lines() -> [String; 2] {
    [format!("ferrite {}, {}", version(), date()), command_line()]
}

pub(super) fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// Returns the local time of the first call, to the minute.
pub(super) fn date() -> &'static str {
    static DATE: LazyLock<String> =
        LazyLock::new(|| jiff::Zoned::now().strftime("%Y-%m-%d %H:%M %Z").to_string());
    &DATE
}

/// Returns the command line as a shell would accept it, with `***` for passwords.
pub(super) fn command_line() -> String {
    let words = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
    format!("ferrite {}", quoted(words))
}

fn quoted(words: impl IntoIterator<Item = String>) -> String {
    let mut is_secret = false;
    let shown = words.into_iter().map(|word| {
        if std::mem::replace(&mut is_secret, SECRETS.contains(&word.as_str())) {
            return "***".to_owned();
        }
        match word.split_once('=') {
            Some((option, _)) if SECRETS.contains(&option) => format!("{option}=***"),
            _ => quote(word),
        }
    });
    shown.collect::<Vec<_>>().join(" ")
}

fn quote(word: String) -> String {
    let is_plain =
        |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.' | ',' | ':' | '/' | '=' | '@');
    if !word.is_empty() && word.chars().all(is_plain) {
        return word;
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_words_and_hides_passwords() {
        let words = ["bench", "kv", "--auth", "it's", "--auth=it's", "--command", "SET a ''", ""];
        assert_eq!(
            quoted(words.map(str::to_owned)),
            r"bench kv --auth *** --auth=*** --command 'SET a '\'''\''' ''"
        );
    }
}
