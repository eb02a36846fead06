//! Parses and formats durations, for files, arguments and flags alike.

use std::time::Duration;

/// The units, in nanoseconds. The JSON schema uses them, too.
pub(crate) const UNITS: &[(&str, u64)] = &[
    ("us", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

/// The unit of a duration that is given as a bare number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// `us`
    Microseconds,
    /// `ms`
    Milliseconds,
    /// `s`
    Seconds,
}

impl Unit {
    /// Returns the name that follows a number, such as `ms`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Microseconds => "us",
            Self::Milliseconds => "ms",
            Self::Seconds => "s",
        }
    }

    /// Returns the duration as a whole number of this unit, rounded down.
    #[must_use]
    pub fn count(self, time: Duration) -> u64 {
        let count = match self {
            Self::Microseconds => time.as_micros(),
            Self::Milliseconds => time.as_millis(),
            Self::Seconds => time.as_secs().into(),
        };
        u64::try_from(count).unwrap_or(u64::MAX)
    }
}

/// Parses `500us`, `10ms`, `2.5s`, `5m` or `1h`. A number without a unit is in the unit `bare`. If
/// `bare` is `None`, it is an error.
///
/// # Errors
/// Returns an error that says what was expected.
pub fn parse(text: &str, bare: Option<Unit>) -> Result<Duration, String> {
    let error = || match bare {
        Some(unit) => format!("expected a number in {}, or with a unit: 500ms, 10s", unit.name()),
        None => "expected a time with its unit: 500ms, 10s, 5m or 1h".into(),
    };
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" => bare.map(Unit::name).ok_or_else(error)?,
        unit => unit,
    };
    let (_, nanoseconds) = *UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(error)?;
    // The calculation is in whole nanoseconds, so that a fraction such as 0.1s is exact.
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, "0"));
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    if !is_number(whole) || !is_number(fraction) || fraction.len() > 9 {
        return Err(error());
    }
    let scale = 10_u64.pow(fraction.len() as u32);
    let fraction: u64 = fraction.parse().map_err(|_| error())?;
    let parts = u128::from(fraction) * u128::from(nanoseconds) / u128::from(scale);
    let whole = whole.parse::<u64>().ok().and_then(|whole| whole.checked_mul(nanoseconds));
    let total = whole.and_then(|whole| whole.checked_add(u64::try_from(parts).ok()?));
    total.map(Duration::from_nanos).ok_or_else(error)
}

/// Formats a duration with the largest unit that divides it: `10ms`, `1s`, `5m`.
#[must_use]
pub fn format(time: Duration) -> String {
    let us = time.as_micros();
    let units = [("h", 3_600_000_000), ("m", 60_000_000), ("s", 1_000_000), ("ms", 1_000)];
    match units.iter().find(|(_, factor)| us != 0 && us.is_multiple_of(*factor)) {
        Some((name, factor)) => format!("{}{name}", us / factor),
        None => format!("{us}us"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_units_and_fractions() {
        for (text, us) in [
            ("0us", 0),
            ("500us", 500),
            ("10ms", 10_000),
            ("2.5s", 2_500_000),
            ("0.1s", 100_000),
            ("5m", 300_000_000),
            ("1h", 3_600_000_000),
        ] {
            assert_eq!(parse(text, None), Ok(Duration::from_micros(us)), "{text}");
        }
        assert_eq!(parse("7", Some(Unit::Seconds)), Ok(Duration::from_secs(7)));
        assert_eq!(parse("7", Some(Unit::Microseconds)), Ok(Duration::from_micros(7)));
        assert_eq!(parse("7ms", Some(Unit::Microseconds)), Ok(Duration::from_millis(7)));
    }

    #[test]
    fn rejects_what_is_no_time() {
        for text in ["", "s", "10", "-1s", "+1s", "1e9s", "nan", "1.s", ".5s", "1 s", "9e99h"] {
            assert!(parse(text, None).is_err(), "{text}");
        }
        assert!(parse("99999999999999999999s", None).is_err());
        assert!(parse("18446744073709551615h", None).is_err());
    }

    #[test]
    fn formats_what_it_parses() {
        for us in [0, 1, 500, 1_000, 10_000, 1_000_000, 90_000_000, 300_000_000, 3_600_000_000] {
            let time = Duration::from_micros(us);
            assert_eq!(parse(&format(time), None), Ok(time));
        }
        assert_eq!(format(Duration::from_secs(300)), "5m");
    }
}
