//! The progress bar on a terminal. It is drawn between cases, and by a thread ten times a second,
//! so that it adds nothing to the measured times.

use std::io::IsTerminal as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use super::plan::Case;
use super::report::size_text;
use crate::choice::name;

pub(super) struct Progress(ProgressBar);

impl Progress {
    /// Creates a bar for `cases` cases; hidden if it is not `wanted` or stderr is not a terminal.
    pub(super) fn new(cases: usize, wanted: bool) -> Self {
        if !wanted || !std::io::stderr().is_terminal() {
            return Self(ProgressBar::hidden());
        }
        let bar = ProgressBar::new(cases as u64);
        if let Ok(style) =
            ProgressStyle::with_template("{spinner} {pos}/{len} {bar:20} {msg} {elapsed}")
        {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(100));
        Self(bar)
    }

    /// Shows the current step.
    pub(super) fn step(&self, text: &str) {
        self.0.set_message(text.to_owned());
    }

    /// Shows the case that is measured next.
    pub(super) fn case(&self, case: &Case) {
        self.0.set_message(format!(
            "{} of {}, {}",
            name(&case.measure),
            name(&case.op),
            size_text(case.size)
        ));
        self.0.inc(1);
    }

    pub(super) fn finish(&self) {
        self.0.finish_and_clear();
    }
}
