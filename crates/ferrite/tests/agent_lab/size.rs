//! How much the tests do. The defaults are small; `.ci/long agents` sets the full size.

use std::time::Duration;

fn number(name: &str, default: usize) -> usize {
    let value = std::env::var(name).ok();
    value.map_or(default, |text| text.parse().unwrap_or_else(|why| panic!("{name}: {why}")))
}

/// Returns the number of rounds: `FERRITE_AGENT_ROUNDS`.
pub(crate) fn rounds(default: usize) -> usize {
    number("FERRITE_AGENT_ROUNDS", default)
}

/// Returns the size of a dataset in MB: `FERRITE_AGENT_MEGABYTES`.
pub(crate) fn megabytes(default: usize) -> usize {
    number("FERRITE_AGENT_MEGABYTES", default)
}

/// Returns how long a load lasts: `FERRITE_AGENT_SECONDS`.
pub(crate) fn seconds(default: usize) -> Duration {
    Duration::from_secs(number("FERRITE_AGENT_SECONDS", default) as u64)
}

/// Returns whether times are compared with their limits, which needs a quiet machine:
/// `FERRITE_AGENT_STRICT`.
pub(crate) fn is_strict() -> bool {
    std::env::var_os("FERRITE_AGENT_STRICT").is_some()
}

/// Measured times.
#[derive(Debug, Default)]
pub(crate) struct Times(Vec<Duration>);

impl Times {
    pub(crate) fn add(&mut self, time: Duration) {
        self.0.push(time);
    }

    pub(crate) fn all(&self) -> &[Duration] {
        &self.0
    }

    pub(crate) fn max(&self) -> Duration {
        self.0.iter().max().copied().unwrap_or_default()
    }

    pub(crate) fn median(&self) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort();
        sorted.get(sorted.len() / 2).copied().unwrap_or_default()
    }
}

impl std::fmt::Display for Times {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "median {:.1?}, longest {:.1?}", self.median(), self.max())
    }
}
