//! A progress bar on stderr, for modes that take long. The bar is hidden if stderr is not a
//! terminal.

use std::io::IsTerminal as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

const TICK: Duration = Duration::from_millis(100);

/// The unit of the work.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Unit {
    Bytes,
    Keys,
}

/// A progress bar, visible or hidden.
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// Creates a progress bar for this amount of work. If the amount is unknown, shows only counts.
    pub(crate) fn new(unit: Unit, amount: Option<u64>) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self(ProgressBar::hidden());
        }
        let template = match (unit, amount) {
            (Unit::Bytes, Some(_)) => "{bar:20} {percent:>3} %  {bytes} of {total_bytes} sent{msg}",
            (Unit::Bytes, None) => "{spinner} {bytes} sent{msg}",
            (Unit::Keys, Some(_)) => "{bar:20} {percent:>3} %  {pos} of {len} keys{msg}",
            (Unit::Keys, None) => "{spinner} {pos} keys{msg}",
        };
        let bar = amount.map_or_else(ProgressBar::no_length, ProgressBar::new);
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(TICK);
        Self(bar)
    }

    pub(crate) fn is_shown(&self) -> bool {
        !self.0.is_hidden()
    }

    /// Sets the amount of work that is done.
    pub(crate) fn set_done(&self, done: u64) {
        self.0.set_position(done);
    }

    /// Adds to the amount of work that is done.
    pub(crate) fn add_done(&self, more: u64) {
        self.0.inc(more);
    }

    /// Sets the text after the counts.
    pub(crate) fn set_note(&self, note: String) {
        self.0.set_message(note);
    }

    /// Hides the bar while `write` writes lines.
    pub(crate) fn above<T>(&self, write: impl FnOnce() -> T) -> T {
        self.0.suspend(write)
    }

    /// Removes the bar.
    pub(crate) fn finish(&self) {
        self.0.finish_and_clear();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.finish();
    }
}
