//! Parses durations given on the command line, in seconds with an optional fraction.

use std::time::Duration;

/// Parses a duration from `least` seconds to one day.
pub(crate) fn parse(text: &str, least: f64) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "expected a number of seconds".to_owned())?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(time) if (least..=86_400.0).contains(&seconds) => Ok(time),
        _ => Err(format!("expected {least} to 86400 seconds")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_times_out_of_bounds() {
        assert_eq!(parse("2.5", 0.1), Ok(Duration::from_millis(2500)));
        for bad in ["0", "0.09", "-1", "nan", "inf", "1e9", "ten", ""] {
            assert!(parse(bad, 0.1).is_err(), "{bad}");
        }
    }
}
