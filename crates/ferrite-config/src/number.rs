//! Whole numbers on the command line.

use std::fmt::Display;
use std::str::FromStr;

/// Returns a parser of numbers from `least` to `most`, for a flag. Its error says what is expected,
/// which the error of the standard library does not.
pub fn number<N>(least: N, most: N) -> impl Fn(&str) -> Result<N, String> + Clone
where
    N: FromStr + PartialOrd + Display + Copy,
{
    move |text| {
        let number = text.parse().ok().filter(|number| (least..=most).contains(number));
        number.ok_or_else(|| format!("expected a number from {least} to {most}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_words_and_numbers_out_of_range_with_what_is_expected() {
        let percent = number::<u8>(1, 100);
        assert_eq!((percent("1"), percent("100")), (Ok(1), Ok(100)));
        for wrong in ["", "0", "101", "256", "-1", "1.5", "abc"] {
            assert_eq!(percent(wrong), Err("expected a number from 1 to 100".into()), "{wrong}");
        }
    }
}
