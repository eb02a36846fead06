//! Lines that a peer can cause are written once a minute, with how many there would have been.

use std::fmt;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::mem::lock;

/// Between two lines about the same cause.
const BETWEEN: Duration = Duration::from_secs(60);

/// For one cause of lines in a log: says when the next may be written.
///
/// ```
/// use ferrite_fabric::LogLimit;
///
/// static REFUSED: LogLimit = LogLimit::new();
/// if let Some(others) = REFUSED.pass() {
///     eprintln!("a peer was refused{others}");
/// }
/// assert!(REFUSED.pass().is_none(), "not within a minute");
/// ```
#[derive(Debug)]
pub struct LogLimit(Mutex<State>);

#[derive(Debug)]
struct State {
    last: Option<Instant>,
    suppressed: u64,
}

/// Lines that were not written since the last one: in words if there are some, else nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Suppressed(u64);

impl LogLimit {
    /// One that lets the first line pass.
    #[must_use]
    pub const fn new() -> Self {
        Self(Mutex::new(State { last: None, suppressed: 0 }))
    }

    /// Whether to write a line now; else it is counted.
    #[must_use]
    pub fn pass(&self) -> Option<Suppressed> {
        self.pass_at(Instant::now())
    }

    fn pass_at(&self, now: Instant) -> Option<Suppressed> {
        let mut state = lock(&self.0);
        if state.last.is_some_and(|last| now.saturating_duration_since(last) < BETWEEN) {
            state.suppressed += 1;
            return None;
        }
        state.last = Some(now);
        Some(Suppressed(std::mem::take(&mut state.suppressed)))
    }
}

impl Default for LogLimit {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for Suppressed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            count => write!(f, " ({count} more of these since the last line)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn once_a_minute_and_the_others_are_counted() {
        let (limit, begun) = (LogLimit::new(), Instant::now());
        let text = |after: Duration| limit.pass_at(begun + after).map(|others| others.to_string());
        assert_eq!(text(Duration::ZERO).as_deref(), Some(""));
        for second in 0..60 {
            assert_eq!(text(Duration::from_secs(second)), None);
        }
        assert_eq!(text(BETWEEN).as_deref(), Some(" (60 more of these since the last line)"));
        assert_eq!(text(BETWEEN * 2).as_deref(), Some(""));
    }
}
