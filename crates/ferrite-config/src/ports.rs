//! Sets of TCP ports, as `ports` and `deliver` of the agent name them.

use std::fmt;
use std::ops::RangeInclusive;

/// The port of a cluster bus is the engine's port plus this, unless `cluster-port` is set.
pub(crate) const BUS_OFFSET: u16 = 10_000;

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

    /// Returns the port of the engine whose cluster bus has this port: the port 10,000 below.
    /// Returns `None` if that port is not in the set; then this port is not a bus.
    #[must_use]
    pub fn engine_of_bus(&self, port: u16) -> Option<u16> {
        port.checked_sub(BUS_OFFSET).filter(|engine| self.contains(*engine))
    }

    /// Returns all ports in increasing order, each once.
    pub fn iter(&self) -> impl Iterator<Item = u16> {
        (1..=u16::MAX).filter(|port| self.contains(*port))
    }

    /// Returns the ports for which `keep` is true.
    #[must_use]
    pub fn filter(&self, keep: impl Fn(u16) -> bool) -> Self {
        let mut ranges: Vec<RangeInclusive<u16>> = Vec::new();
        for port in self.iter().filter(|port| keep(*port)) {
            match ranges.last_mut().filter(|last| last.end().checked_add(1) == Some(port)) {
                Some(last) => *last = *last.start()..=port,
                None => ranges.push(port..=port),
            }
        }
        Self(ranges)
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
    fn bus_is_ten_thousand_above_a_port_of_the_set() {
        let ports = PortSet::parse(["7000-7009", "17000-17009"]).expect("ports");
        assert_eq!(ports.engine_of_bus(17_003), Some(7003));
        assert_eq!(ports.engine_of_bus(17_010), None);
        assert_eq!(ports.engine_of_bus(7003), None);
    }

    #[test]
    fn filtered_ports_are_ranges_again() {
        let ports = PortSet::parse(["9", "7003-7005", "7000-7002", "65535"]).expect("ports");
        assert_eq!(ports.filter(|port| port != 7001).to_string(), "9,7000,7002-7005,65535");
        assert!(ports.filter(|_| false).is_empty());
    }

    #[test]
    fn rejects_what_is_no_range() {
        for word in ["", "-", "0", "0-5", "5-", "-5", "+5", "5-4", "65536", "1-2-3", "a", "7000 "] {
            assert_eq!(range(word), None, "{word}");
        }
    }
}
