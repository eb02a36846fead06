//! Parses sizes given on the command line and in `ferrite.toml`.

/// The largest buffer that the fabric allocates.
pub(crate) const MAX: u32 = 2 << 20;

/// Parses `64`, `64K`, `64KiB`, `1M` and so on, up to the largest buffer.
pub(crate) fn parse(text: &str) -> Result<u32, String> {
    parse_up_to(text, MAX)
}

/// Parses a size up to `max`, which must be a whole number of mebibytes.
pub(crate) fn parse_up_to(text: &str, max: u32) -> Result<u32, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: u64 = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        _ => {
            return Err("expected a number of bytes, or one with K (1024) or M (1048576)".into());
        }
    };
    let number: u64 =
        digits.parse().map_err(|_| "expected a whole number, such as 64 or 64K".to_owned())?;
    number
        .checked_mul(unit)
        .and_then(|bytes| u32::try_from(bytes).ok())
        .filter(|bytes| (1..=max).contains(bytes))
        .ok_or_else(|| format!("expected a size from 1 byte to {}M", max >> 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_sizes_with_units() {
        let good =
            [("1", 1), ("64", 64), ("64K", 65_536), ("8kib", 8192), ("1M", 1 << 20), ("100b", 100)];
        for (text, bytes) in good {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        for bad in [
            "",
            "0",
            "K",
            "3M",
            "64X",
            "-1",
            "1.5K",
            "99999999999999999999",
            "18446744073709551615K",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert_eq!(parse("3M"), Err("expected a size from 1 byte to 2M".to_owned()));
        assert_eq!(parse_up_to("3M", 512 << 20), Ok(3 << 20));
    }
}
