//! Sizes of messages and buffers given on the command line.

use ferrite_config::{size, table};

/// The largest buffer that the fabric allocates.
pub(crate) const MAX: u32 = table::CHUNK as u32;

/// Parses `64`, `64kb`, `64k` (64,000) and so on, up to the largest buffer.
pub(crate) fn parse(text: &str) -> Result<u32, String> {
    parse_up_to(text, MAX)
}

/// Parses a size from 1 to `max` bytes.
pub(crate) fn parse_up_to(text: &str, max: u32) -> Result<u32, String> {
    let bytes = size::parse_within(text, 1, max.into())?;
    u32::try_from(bytes).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_sizes_up_to_the_largest_buffer() {
        for (text, bytes) in [("1", 1), ("64kb", 65_536), ("8KiB", 8192), ("2mb", 2 << 20)] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        for bad in ["", "0", "kb", "3mb", "64X", "-1", "1.5kb"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert_eq!(parse("3mb"), Err("expected a size from 1 to 2mb".to_owned()));
        assert_eq!(parse_up_to("3mb", 512 << 20), Ok(3 << 20));
    }
}
