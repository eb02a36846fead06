//! Integers, parsed byte by byte.

/// A number in the form that Redis accepts as a length: a signed 64-bit number without `+`, leading
/// zeros or `-0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Length {
    negative: bool,
    digits: u8,
    magnitude: u64,
}

impl Length {
    /// Adds the next byte. Returns `None` if no valid number begins with these bytes.
    pub(super) fn push(&mut self, byte: u8) -> Option<()> {
        match byte {
            b'-' if !self.negative && self.digits == 0 => self.negative = true,
            b'0'..=b'9' => {
                let lone_zero = self.digits == 1 && self.magnitude == 0;
                let minus_zero = self.negative && self.digits == 0 && byte == b'0';
                if lone_zero || minus_zero {
                    return None;
                }
                self.magnitude = append(self.magnitude, byte, self.negative)?;
                self.digits += 1; // at most 19
            }
            _ => return None,
        }
        Some(())
    }

    /// Returns the number, if it has a digit.
    pub(super) fn finish(self) -> Option<i64> {
        if self.digits == 0 {
            return None;
        }
        signed(self.magnitude, self.negative)
    }
}

/// A number in the form of replies, which may have `+` or `-` and leading zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Integer {
    sign: Option<u8>,
    any: bool,
    magnitude: u64,
}

impl Integer {
    /// Adds the next byte. Returns `None` if no valid number begins with these bytes.
    pub(super) fn push(&mut self, byte: u8) -> Option<()> {
        match byte {
            b'-' | b'+' if self.sign.is_none() && !self.any => self.sign = Some(byte),
            b'0'..=b'9' => {
                self.magnitude = append(self.magnitude, byte, self.sign == Some(b'-'))?;
                self.any = true;
            }
            _ => return None,
        }
        Some(())
    }

    /// Returns the number, if it has a digit.
    pub(super) fn finish(self) -> Option<i64> {
        if self.any { signed(self.magnitude, self.sign == Some(b'-')) } else { None }
    }

    /// Parses all bytes at once.
    pub(super) fn parse(bytes: &[u8]) -> Option<i64> {
        let mut number = Self::default();
        bytes.iter().try_for_each(|byte| number.push(*byte))?;
        number.finish()
    }
}

/// Appends a digit, if the number still fits.
fn append(magnitude: u64, digit: u8, negative: bool) -> Option<u64> {
    let most = i64::MAX.unsigned_abs() + u64::from(negative);
    let magnitude = magnitude.checked_mul(10)?.checked_add(u64::from(digit - b'0'))?;
    (magnitude <= most).then_some(magnitude)
}

fn signed(magnitude: u64, negative: bool) -> Option<i64> {
    if negative { 0_i64.checked_sub_unsigned(magnitude) } else { i64::try_from(magnitude).ok() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn length(text: &str) -> Option<i64> {
        let mut number = Length::default();
        text.bytes().try_for_each(|byte| number.push(byte))?;
        number.finish()
    }

    #[test]
    fn lengths_are_strict() {
        for (text, value) in [("0", 0), ("-1", -1), ("10", 10)] {
            assert_eq!(length(text), Some(value));
        }
        assert_eq!(length(&i64::MAX.to_string()), Some(i64::MAX));
        assert_eq!(length(&i64::MIN.to_string()), Some(i64::MIN));
        let wrong = ["", "-", "+1", "01", "00", "-0", "--1", "1-", "1 ", " 1", "1a"];
        for text in wrong.into_iter().chain(["9223372036854775808", "-9223372036854775809"]) {
            assert_eq!(length(text), None, "{text:?}");
        }
        assert_eq!(length(&"9".repeat(500)), None);
    }

    #[test]
    fn integers_are_lenient() {
        for (text, value) in [("+1", 1), ("-0", 0), ("007", 7), ("-09", -9)] {
            assert_eq!(Integer::parse(text.as_bytes()), Some(value));
        }
        for text in ["", "+", "+-1", "1+", "1.0", "9223372036854775808"] {
            assert_eq!(Integer::parse(text.as_bytes()), None, "{text:?}");
        }
        assert_eq!(Integer::parse("0".repeat(500).as_bytes()), Some(0));
    }

    proptest! {
        #[test]
        fn parses_any_number(value: i64) {
            let text = value.to_string();
            prop_assert_eq!(length(&text), Some(value));
            prop_assert_eq!(Integer::parse(text.as_bytes()), Some(value));
        }
    }
}
