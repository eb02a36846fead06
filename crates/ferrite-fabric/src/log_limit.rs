//! Limits the log lines that a peer can cause to one per minute for each cause, and counts the
//! suppressed lines.

use std::fmt;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::mem::lock;

/// The interval between two lines with the same cause.
const BETWEEN: Duration = Duration::from_secs(60);

/// Limits the log lines for one cause.
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

/// The number of lines that were suppressed since the last written line. Displays as nothing if it
/// is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Suppressed(u64);

impl LogLimit {
    /// Creates a limit that lets the first line pass.
    #[must_use]
    pub const fn new() -> Self {
        Self(Mutex::new(State { last: None, suppressed: 0 }))
    }

    /// Returns the number of suppressed lines if a line may be written now. Otherwise counts this
    /// line as suppressed.
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
            count => write!(f, " ({count} similar messages suppressed)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_one_line_a_minute_and_counts_the_others() {
        let (limit, begun) = (LogLimit::new(), Instant::now());
        let text = |after: Duration| limit.pass_at(begun + after).map(|others| others.to_string());
        assert_eq!(text(Duration::ZERO).as_deref(), Some(""));
        for second in 0..60 {
            assert_eq!(text(Duration::from_secs(second)), None);
        }
        assert_eq!(text(BETWEEN).as_deref(), Some(" (60 similar messages suppressed)"));
        assert_eq!(text(BETWEEN * 2).as_deref(), Some(""));
    }
}
