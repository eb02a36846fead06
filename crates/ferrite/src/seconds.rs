//! Times as people type them: seconds, with a fraction or without.

use std::time::Duration;

/// From `least` to a day.
pub(crate) fn parse(text: &str, least: f64) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(time) if (least..=86_400.0).contains(&seconds) => Ok(time),
        _ => Err(format!("from {least} to 86400 seconds")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_bounded() {
        assert_eq!(parse("2.5", 0.1), Ok(Duration::from_millis(2500)));
        for bad in ["0", "0.09", "-1", "nan", "inf", "1e9", "ten", ""] {
            assert!(parse(bad, 0.1).is_err(), "{bad}");
        }
    }
}
