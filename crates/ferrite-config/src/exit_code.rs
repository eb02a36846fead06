//! The exit codes of all programs: one table for the programs, their help and the book.
//!
//! The codes 69 to 71 are those of sysexits.h.

/// The program has done what it was asked to.
pub const SUCCESS: u8 = 0;
/// Any failure that has no code of its own.
pub const FAILURE: u8 = 1;
/// Wrong flags, a wrong file or environment variable, or settings that contradict each other.
pub const USAGE: u8 = 2;
/// RDMA is required, and this host or this user cannot use it (EX_UNAVAILABLE).
pub const UNAVAILABLE: u8 = 69;
/// A failure of `ferrite server` that has no code of its own, such as a bug (EX_SOFTWARE).
pub const INTERNAL: u8 = 70;
/// `ferrite server` finds no engine or module, the engine does not answer, or it exits with code 0
/// before it is ready (EX_OSERR).
pub const ENGINE: u8 = 71;
/// Added to the number of the signal that killed the engine: `ferrite server` exits with the sum,
/// as shells do.
pub const BY_SIGNAL: u8 = 128;

/// Each code, as text, with its meaning.
pub const TABLE: [(&str, &str); 7] = [
    ("0", "success"),
    ("1", "failure; with `ferrite-cli -e`, also an error reply"),
    (
        "2",
        "wrong usage, an error in a configuration file or environment variable, or contradicting \
         settings",
    ),
    (
        "69",
        "RDMA is required and unavailable: a library, kernel support, a device, a port, a \
         permission or enough locked memory is missing; the message says which and what to do",
    ),
    ("70", "internal failure of `ferrite server`"),
    (
        "71",
        "`ferrite server`: the engine or the module is missing, the engine does not answer, or \
         the engine exits with code 0 before it is ready",
    ),
    ("others", "`ferrite server`: the engine's own code; 128 + N if signal N killed the engine"),
];

/// Returns the table for `--help` of `ferrite` and `ferrite server`.
#[must_use]
pub fn help() -> String {
    lines(&TABLE)
}

/// Returns the table for `--help` of `ferrite-cli`, without the codes of `ferrite server` alone.
#[must_use]
pub fn help_of_cli() -> String {
    let of_server = |(_, meaning): &(_, &str)| meaning.contains("`ferrite server`");
    let rows: Vec<_> = TABLE.into_iter().filter(|row| !of_server(row)).collect();
    lines(&rows)
}

fn lines(rows: &[(&str, &str)]) -> String {
    let mut text = String::from("Exit codes:");
    for (code, meaning) in rows {
        text += &format!("\n  {code:6}");
        let mut column = 8;
        for word in meaning.split(' ') {
            if column + 1 + word.len() > WIDTH {
                text += &format!("\n{:8}", "");
                column = 8;
            }
            text += &format!(" {word}");
            column += 1 + word.len();
        }
    }
    text
}

/// The width of the lines of `--help`, which fit on most terminals.
const WIDTH: usize = 80;

/// Returns the table for the book.
#[must_use]
pub fn markdown() -> String {
    let rows = TABLE.iter().map(|(code, meaning)| format!("| {code} | {meaning} |\n"));
    format!("| exit code | meaning |\n|---|---|\n{}", rows.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_has_every_code() {
        for code in [SUCCESS, FAILURE, USAGE, UNAVAILABLE, INTERNAL, ENGINE] {
            assert_eq!(TABLE.iter().filter(|(known, _)| *known == code.to_string()).count(), 1);
        }
        assert!(help().contains("\n  69     RDMA is required"), "{}", help());
        assert!(help().lines().all(|line| line.len() <= WIDTH), "{}", help());
        assert!(TABLE.iter().any(|(_, meaning)| meaning.contains(&BY_SIGNAL.to_string())));
    }

    #[test]
    fn cli_has_no_codes_of_the_server() {
        let help = help_of_cli();
        let codes = help.lines().skip(1).filter_map(|line| line.get(2..8)).map(str::trim);
        let codes: Vec<_> = codes.filter(|code| !code.is_empty()).collect();
        assert_eq!(codes, ["0", "1", "2", "69"], "{help}");
    }
}
