//! Parses and formats sizes in bytes, for files, arguments and flags alike.
//!
//! The units are those of the engine's configuration, because the engine itself parses the value of
//! `CONFIG SET ferrite.rx-size 64kb`: `k` is 1,000 bytes and `kb` is 1,024. `KiB`, which
//! the engine does not know, is 1,024 as well.

/// The units with their factors, in lower case.
const UNITS: [(&str, u64); 11] = [
    ("", 1),
    ("b", 1),
    ("k", 1_000),
    ("kb", 1 << 10),
    ("kib", 1 << 10),
    ("m", 1_000_000),
    ("mb", 1 << 20),
    ("mib", 1 << 20),
    ("g", 1_000_000_000),
    ("gb", 1 << 30),
    ("gib", 1 << 30),
];

/// Parses `65536`, `64kb`, `64KiB`, `64k` (64,000), `1gb` and so on, in upper or lower case.
///
/// # Errors
/// Returns an error that says what was expected.
pub fn parse(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = text[digits.len()..].to_ascii_lowercase();
    let factor = UNITS.iter().find(|(name, _)| *name == unit).map(|(_, factor)| factor);
    let number = digits.parse::<u64>().ok().filter(|_| !digits.starts_with('+'));
    number.zip(factor).and_then(|(number, factor)| number.checked_mul(*factor)).ok_or_else(|| {
        "expected a size in bytes, or with a unit: 64kb is 65,536 bytes, 64k is 64,000".into()
    })
}

/// Parses a size from `min` to `max` bytes.
///
/// # Errors
/// Returns an error that says what was expected.
pub fn parse_within(text: &str, min: u64, max: u64) -> Result<u64, String> {
    match parse(text)? {
        bytes if (min..=max).contains(&bytes) => Ok(bytes),
        _ => Err(format!("expected a size from {} to {}", format(min), format(max))),
    }
}

/// Formats a size with the largest unit that divides it: `64kb`, `1gb`, `220`.
#[must_use]
pub fn format(bytes: u64) -> String {
    let units = [("gb", 30), ("mb", 20), ("kb", 10)];
    let fits = |&(_, shift): &(&str, u32)| bytes != 0 && bytes.is_multiple_of(1 << shift);
    match units.iter().find(|unit| fits(unit)) {
        Some((name, shift)) => format!("{}{name}", bytes >> shift),
        None => bytes.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_the_engines_units() {
        for (text, bytes) in [
            ("0", 0),
            ("64", 64),
            ("100b", 100),
            ("64k", 64_000),
            ("64K", 64_000),
            ("64kb", 65_536),
            ("64KiB", 65_536),
            ("2MB", 2 << 20),
            ("1m", 1_000_000),
            ("1GB", 1 << 30),
            ("1g", 1_000_000_000),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn rejects_what_is_no_size() {
        for text in ["", "k", "1x", "-1", "+1", "1.5kb", "1 kb", "1tb", "99999999999999999999"] {
            assert!(parse(text).is_err(), "{text}");
        }
        assert!(parse("18446744073709551615kb").is_err());
        assert_eq!(
            parse_within("3mb", 4096, 2 << 20),
            Err("expected a size from 4kb to 2mb".to_owned())
        );
    }

    #[test]
    fn formats_what_it_parses() {
        for bytes in [0, 1, 220, 1000, 4096, 65_536, 1_000_000, 3 << 20, 1 << 30, u64::MAX] {
            assert_eq!(parse(&format(bytes)), Ok(bytes));
        }
        assert_eq!([format(65_536), format(1 << 30), format(220)], ["64kb", "1gb", "220"]);
    }
}
