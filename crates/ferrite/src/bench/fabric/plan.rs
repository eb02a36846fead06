//! Turns the options into cases, in the order in which they are measured.

use std::time::Duration;

use super::{Measure, Options};
use crate::choice::{Mode, Op};

/// One measurement: a line of the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) op: Op,
    pub(super) measure: Measure,
    pub(super) size: u32,
    /// Number of operations before the measured ones.
    pub(super) warmup: u64,
    pub(super) amount: Amount,
    /// Operations in flight on each link; 1 for latency.
    pub(super) window: u32,
}

/// How much to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Amount {
    Operations(u64),
    Time(Duration),
}

/// How much a link can queue, by the fabric's settings.
#[derive(Debug, Clone, Copy)]
pub(super) struct QueueLimits {
    pub(super) messages: usize,
    pub(super) bytes: u64,
}

/// Returns the cases that the options ask for, and notes on those that cannot be measured.
pub(super) fn cases(options: &Options, limits: QueueLimits) -> (Vec<Case>, Vec<String>) {
    let mut cases = Vec::new();
    let mut notes = Vec::new();
    for measure in &options.measure {
        let sizes: &[u32] = match measure {
            _ if !options.size.is_empty() => &options.size,
            Measure::Latency => &[64],
            Measure::Bandwidth => &[64 << 10, 1 << 20],
        };
        for op in &options.op {
            if (*measure, *op, options.mode) == (Measure::Latency, Op::Write, Mode::Event) {
                notes.push(
                    "the latency of write is not measured in event mode: nothing wakes its receiver"
                        .into(),
                );
                continue;
            }
            cases.extend(sizes.iter().map(|size| case(options, limits, *measure, *op, *size)));
        }
    }
    (cases, notes)
}

fn case(options: &Options, limits: QueueLimits, measure: Measure, op: Op, size: u32) -> Case {
    let window = match measure {
        Measure::Latency => 1,
        Measure::Bandwidth => fitting_window(options.window, limits, size),
    };
    let (default, warmup) = match measure {
        Measure::Latency => (Amount::Operations(1000), 100),
        Measure::Bandwidth => {
            (Amount::Time(Duration::from_secs(2)), u64::from(window) * u64::from(options.links))
        }
    };
    let amount = options.iters.map(Amount::Operations).or(options.seconds.map(Amount::Time));
    Case {
        op,
        measure,
        size,
        warmup: options.warmup.unwrap_or(warmup),
        amount: amount.unwrap_or(default),
        window,
    }
}

/// Returns `window`, or a smaller window if a link cannot queue that many operations.
fn fitting_window(window: u32, limits: QueueLimits, size: u32) -> u32 {
    let messages =
        u64::from(window).min(limits.messages as u64).min(limits.bytes / u64::from(size));
    u32::try_from(messages).unwrap_or(window).max(1)
}

/// The operations that are left to do: those of the warm-up, then the measured ones. A number or a
/// time limits the measured ones.
#[derive(Debug)]
pub(super) struct Budget {
    left: u64,
    /// The end of the measured time, once the clock runs.
    deadline: Option<quanta::Instant>,
    time: Option<Duration>,
    warmup: u64,
    clock: quanta::Clock,
}

impl Budget {
    /// Creates a budget for warm-up and measured operations together. The clock starts after the
    /// warm-up.
    pub(super) fn of(case: &Case) -> Self {
        Self::new(case.warmup, case.amount)
    }

    pub(super) fn new(warmup: u64, amount: Amount) -> Self {
        let (left, time) = match amount {
            Amount::Operations(count) => (count.saturating_add(warmup), None),
            Amount::Time(time) => (u64::MAX, Some(time)),
        };
        Self { left, deadline: None, time, warmup, clock: quanta::Clock::new() }
    }

    /// Takes one operation. Returns `false` if none is left.
    pub(super) fn take(&mut self) -> bool {
        if self.left == 0 {
            return false;
        }
        if let Some(time) = self.time {
            if self.warmup > 0 {
                self.warmup -= 1;
            } else {
                let now = self.clock.now();
                let deadline = *self.deadline.get_or_insert(now + time);
                if now >= deadline {
                    self.left = 0;
                    return false;
                }
            }
        }
        self.left -= 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    const LIMITS: QueueLimits = QueueLimits { messages: 1024, bytes: 16 << 20 };

    fn planned(arguments: &[&str]) -> (Vec<Case>, Vec<String>) {
        let line = Line::try_parse_from([&["bench", "10.0.0.1"], arguments].concat())
            .expect("valid options");
        cases(&line.options, LIMITS)
    }

    #[test]
    fn measures_everything_by_default() {
        let (cases, notes) = planned(&[]);
        let shown: Vec<_> = cases.iter().map(|case| (case.measure, case.op, case.size)).collect();
        use {Measure::*, Op::*};
        let expected = [
            (Latency, Send, 64),
            (Latency, Write, 64),
            (Latency, Read, 64),
            (Bandwidth, Send, 64 << 10),
            (Bandwidth, Send, 1 << 20),
            (Bandwidth, Write, 64 << 10),
            (Bandwidth, Write, 1 << 20),
            (Bandwidth, Read, 64 << 10),
            (Bandwidth, Read, 1 << 20),
        ];
        assert_eq!(shown, expected);
        assert_eq!(
            (cases[0].amount, cases[0].warmup, cases[0].window),
            (Amount::Operations(1000), 100, 1)
        );
        let two_seconds = Amount::Time(Duration::from_secs(2));
        assert_eq!((cases[3].amount, cases[3].warmup, cases[3].window), (two_seconds, 16, 16));
        assert!(notes.is_empty());
    }

    #[test]
    fn options_select_cases() {
        let (cases, _) = planned(&[
            "--op",
            "read,send",
            "--measure",
            "bandwidth",
            "--size",
            "2mb,8KiB",
            "--iters",
            "7",
            "--links",
            "3",
        ]);
        let shown: Vec<_> =
            cases.iter().map(|case| (case.op, case.size, case.window, case.warmup)).collect();
        // The queue of 16 MiB limits the window of the operations of 2 MiB.
        let expected = [
            (Op::Read, 2 << 20, 8, 24),
            (Op::Read, 8 << 10, 16, 48),
            (Op::Send, 2 << 20, 8, 24),
            (Op::Send, 8 << 10, 16, 48),
        ];
        assert_eq!(shown, expected);
        assert!(cases.iter().all(|case| case.amount == Amount::Operations(7)));
    }

    #[test]
    fn skips_the_latency_of_write_in_event_mode() {
        let (cases, notes) = planned(&["--mode", "event", "--measure", "latency"]);
        assert_eq!(cases.iter().map(|case| case.op).collect::<Vec<_>>(), [Op::Send, Op::Read]);
        assert_eq!(notes.len(), 1);
    }

    #[test]
    fn budget_counts_warm_up_and_measured_operations() {
        let mut budget = Budget::new(3, Amount::Operations(4));
        assert_eq!(std::iter::from_fn(|| budget.take().then_some(())).count(), 7);
        let mut budget = Budget::new(3, Amount::Time(Duration::from_millis(1)));
        assert!(std::iter::from_fn(|| budget.take().then_some(())).count() > 3);
        assert!(!budget.take());
    }
}
