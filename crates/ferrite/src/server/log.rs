//! The log: the engine's lines as they come, and ours in the same form.

use std::collections::VecDeque;
use std::io::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::task::JoinHandle;

/// Lines that are remembered, for the last words of an engine that does not come up.
const REMEMBERED: usize = 20;
/// A child of the engine (one that saves) may hold its output open when the engine has ended.
const REST: Duration = Duration::from_millis(500);
/// What the module says, in any engine's log.
const MODULE: &str = "> ferrite: ";

/// Says something of ours.
pub(super) fn notice(text: &str) {
    say('*', text);
}

pub(super) fn warning(text: &str) {
    say('#', text);
}

/// As engines do, with F as the role: `123:F 15 Nov 2026 10:00:00.000 * text`.
fn say(level: char, text: &str) {
    let now = jiff::Zoned::now().strftime("%d %b %Y %H:%M:%S%.3f");
    let line = format!("{}:F {now} {level} {text}\n", std::process::id());
    // In one piece, beside the engine's. Nobody may be there to read it.
    let _ = std::io::stderr().lock().write_all(line.as_bytes());
}

/// What one engine says, passed on.
pub(super) struct Words {
    last: Arc<Mutex<VecDeque<String>>>,
    readers: Vec<JoinHandle<()>>,
}

impl Words {
    pub(super) fn new() -> Self {
        Self { last: Arc::default(), readers: Vec::new() }
    }

    /// Passes on what comes, until its end.
    pub(super) fn follow(&mut self, output: impl AsyncRead + Unpin + Send + 'static) {
        let last = Arc::clone(&self.last);
        self.readers.push(tokio::spawn(async move {
            let (mut output, mut line) = (BufReader::new(output), Vec::new());
            while matches!(output.read_until(b'\n', &mut line).await, Ok(read) if read > 0) {
                if line.last() != Some(&b'\n') {
                    line.push(b'\n');
                }
                let _ = std::io::stderr().lock().write_all(&line);
                let text = String::from_utf8_lossy(&line).trim().to_owned();
                let mut last = lock(&last);
                if last.len() == REMEMBERED {
                    last.pop_front();
                }
                last.push_back(text);
                drop(last);
                line.clear();
            }
        }));
    }

    /// Until everything was passed on, or long enough.
    pub(super) async fn end(&mut self) {
        // One that has ended must not be asked again, also when this is called again after it was cancelled.
        while let Some(reader) = self.readers.last_mut() {
            let _ = tokio::time::timeout(REST, reader).await;
            self.readers.pop();
        }
    }

    /// What the module said last, if it was among the last words.
    pub(super) fn of_module(&self) -> Option<String> {
        lock(&self.last).iter().rev().find_map(|line| of_module(line)).map(Into::into)
    }

    /// The last line that says something.
    pub(super) fn last(&self) -> Option<String> {
        lock(&self.last).iter().rfind(|line| !line.is_empty()).map(|line| without_stamp(line).into())
    }
}

fn lock(last: &Mutex<VecDeque<String>>) -> MutexGuard<'_, VecDeque<String>> {
    last.lock().unwrap_or_else(PoisonError::into_inner)
}

fn of_module(line: &str) -> Option<&str> {
    line.split_once(MODULE).map(|(_, words)| words)
}

/// `123:M 15 Nov 2026 10:00:00.000 # text` without what stands before the text.
fn without_stamp(line: &str) -> &str {
    [" # ", " * ", " - ", " . "]
        .iter()
        .find_map(|level| line.split_once(level))
        .filter(|(stamp, _)| stamp.starts_with(|c: char| c.is_ascii_digit()))
        .map_or(line, |(_, text)| text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_without_what_is_before_them() {
        let line = "12:M 15 Nov 2026 10:00:00.000 # Can't open the log - why";
        assert_eq!(without_stamp(line), "Can't open the log - why");
        assert_eq!(without_stamp("*** FATAL * CONFIG ***"), "*** FATAL * CONFIG ***");
        let module = "12:M 15 Nov 2026 10:00:00.000 # <module> ferrite: not loaded: x";
        assert_eq!(of_module(module), Some("not loaded: x"));
        assert_eq!(of_module("# Module /ferrite.so initialization failed"), None);
    }
}
