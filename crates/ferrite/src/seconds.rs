//! Durations given on the command line: a number of seconds, or a number with a unit.

use std::time::Duration;

use ferrite_config::time::{self, Unit};

/// Parses a duration from `least` seconds to one day.
pub(crate) fn parse(text: &str, least: f64) -> Result<Duration, String> {
    let time = time::parse(text, Some(Unit::Seconds))?;
    match (least..=86_400.0).contains(&time.as_secs_f64()) {
        true => Ok(time),
        false => Err(format!("expected {least} to 86400 seconds")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_times_out_of_bounds() {
        assert_eq!(parse("2.5", 0.1), Ok(Duration::from_millis(2500)));
        assert_eq!(parse("250ms", 0.1), Ok(Duration::from_millis(250)));
        for bad in ["0", "0.09", "-1", "nan", "inf", "1e9", "ten", "", "25h"] {
            assert!(parse(bad, 0.1).is_err(), "{bad}");
        }
    }
}
