//! Sets of TCP ports, as `ports` and `deliver` of the agent name them.

use std::fmt;
use std::ops::RangeInclusive;

/// A set of TCP ports: single ports and ranges.
///
/// ```
/// use ferrite_config::ports::PortSet;
///
/// let ports = PortSet::parse(["6379", "7000-7009"]).unwrap();
/// assert!(ports.contains(7003) && !ports.contains(7010));
/// assert_eq!((ports.len(), ports.to_string()), (11, "6379,7000-7009".to_owned()));
/// assert!(PortSet::parse(["7009-7000"]).is_none());
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PortSet(Vec<RangeInclusive<u16>>);

impl PortSet {
    /// Parses ports and ranges. They may overlap.
    #[must_use]
    pub fn parse<T: AsRef<str>>(words: impl IntoIterator<Item = T>) -> Option<Self> {
        words.into_iter().map(|word| range(word.as_ref())).collect::<Option<_>>().map(Self)
    }

    /// Returns whether the set has a port.
    #[must_use]
    pub fn contains(&self, port: u16) -> bool {
        self.0.iter().any(|range| range.contains(&port))
    }

    /// Returns all ports in increasing order, each once.
    pub fn iter(&self) -> impl Iterator<Item = u16> {
        (1..=u16::MAX).filter(|port| self.contains(*port))
    }

    /// Returns the number of ports.
    #[must_use]
    pub fn len(&self) -> usize {
        self.iter().count()
    }

    /// Returns whether the set has no port.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for PortSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = |range: &RangeInclusive<u16>| match range.start() == range.end() {
            true => range.start().to_string(),
            false => format!("{}-{}", range.start(), range.end()),
        };
        f.write_str(&self.0.iter().map(word).collect::<Vec<_>>().join(","))
    }
}

/// Parses a port or a range of ports. Port 0 is not allowed.
pub(crate) fn range(text: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let number = |text: &str| text.parse::<u16>().ok().filter(|port| digits(text) && *port > 0);
    let (first, last) = (number(first)?, number(last)?);
    (first <= last).then_some(first..=last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_ranges_have_each_port_once() {
        let ports = PortSet::parse(["7000-7002", "7001-7003", "9"]).expect("ports");
        assert_eq!(ports.iter().collect::<Vec<_>>(), [9, 7000, 7001, 7002, 7003]);
        assert!(PortSet::parse([""; 0]).is_some_and(|ports| ports.is_empty()));
    }

    #[test]
    fn rejects_what_is_no_range() {
        for word in ["", "-", "0", "0-5", "5-", "-5", "+5", "5-4", "65536", "1-2-3", "a", "7000 "] {
            assert_eq!(range(word), None, "{word}");
        }
    }
}
