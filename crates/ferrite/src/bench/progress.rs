//! The progress bar of a benchmark, on a terminal. The bar has its own thread, so that drawing does
//! not add to the measured times.

use std::io::IsTerminal as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

const TICK: Duration = Duration::from_millis(100);

/// A progress bar. Clones draw the same bar.
#[derive(Clone)]
pub(super) struct Progress(ProgressBar);

impl Progress {
    /// Creates a bar of this length; hidden if stderr is not a terminal. `template` is in
    /// indicatif's syntax.
    pub(super) fn new(length: u64, template: &str) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self(ProgressBar::hidden());
        }
        let bar = ProgressBar::new(length);
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(TICK);
        Self(bar)
    }

    pub(super) fn is_shown(&self) -> bool {
        !self.0.is_hidden()
    }

    /// Shows the current step.
    pub(super) fn step(&self, text: impl Into<String>) {
        self.0.set_message(text.into());
    }

    pub(super) fn advance(&self) {
        self.0.inc(1);
    }

    pub(super) fn set_position(&self, position: u64) {
        self.0.set_position(position);
    }

    /// Prints a line on stderr, above the bar.
    pub(super) fn print_above(&self, line: &str) {
        self.0.suspend(|| eprintln!("{line}"));
    }

    /// Removes the bar.
    pub(super) fn finish(&self) {
        self.0.finish_and_clear();
    }
}
