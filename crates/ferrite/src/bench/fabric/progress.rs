//! What a person at a terminal sees meanwhile. Drawn between cases, and by a thread ten times a
//! second: nothing is added to what is measured.

use std::io::IsTerminal as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use super::plan::Case;
use super::report::size_text;
use crate::choice::name;

pub(super) struct Progress(ProgressBar);

impl Progress {
    /// For `cases` cases, if it is `wanted` and somebody is there to see it.
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

    pub(super) fn now(&self, what: &str) {
        self.0.set_message(what.to_owned());
    }

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
