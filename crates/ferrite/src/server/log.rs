//! Writes the engine's log lines to stderr, as they are or as JSON. Hides the passwords that the
//! engine quotes.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::task::JoinHandle;

use super::secret;
use crate::log;

/// Number of lines kept to explain why an engine ended. An error in the engine's
/// configuration takes four lines.
const LINES_KEPT: usize = 4;
/// How long to wait for more output of an engine that has ended. A child process of the engine that
/// saves data may hold the output open.
const OUTPUT_TIMEOUT: Duration = Duration::from_millis(500);
/// Markers of the level, between the stamp of a line (process id, role and time) and its text:
/// warning, notice, verbose, debug.
const LEVELS: [&str; 4] = [" # ", " * ", " - ", " . "];
/// Precedes the module's text in the log of any engine.
const MODULE: &str = "> ferrite: ";

/// Passes the output of one engine on, and keeps its last lines.
pub(super) struct EngineLog {
    tail: Arc<Mutex<LogTail>>,
    readers: Vec<JoinHandle<()>>,
}

/// The last lines of an engine's output.
#[derive(Default)]
struct LogTail {
    last: VecDeque<String>,
    by_module: Option<String>,
}

impl LogTail {
    fn add(&mut self, line: &str) {
        if line.is_empty() {
            return;
        }
        if let Some((_, text)) = line.split_once(MODULE) {
            self.by_module = Some(text.into());
        }
        if self.last.len() == LINES_KEPT {
            self.last.pop_front();
        }
        self.last.push_back(line.into());
    }

    /// Returns the last log line. If lines without a stamp follow it, returns those instead: they
    /// are errors.
    fn last_message(&self) -> Option<String> {
        let unstamped: Vec<_> =
            self.last.iter().rev().take_while(|line| text_after_stamp(line).is_none()).collect();
        match (unstamped.is_empty(), self.last.back()) {
            (true, last) => last.and_then(|line| text_after_stamp(line)).map(Into::into),
            (false, _) => {
                let lines: Vec<_> = unstamped.into_iter().rev().map(String::as_str).collect();
                Some(lines.join("; "))
            }
        }
    }
}

impl EngineLog {
    pub(super) fn new() -> Self {
        Self { tail: Arc::default(), readers: Vec::new() }
    }

    /// Starts a task that passes `output` on until it ends.
    pub(super) fn follow(&mut self, output: impl AsyncRead + Unpin + Send + 'static) {
        let tail = Arc::clone(&self.tail);
        self.readers.push(tokio::spawn(async move {
            let (mut output, mut line) = (BufReader::new(output), Vec::new());
            while matches!(output.read_until(b'\n', &mut line).await, Ok(read) if read > 0) {
                if line.last() != Some(&b'\n') {
                    line.push(b'\n');
                }
                if let Some(redacted) = secret::redact_quoted(&line) {
                    line = redacted.into_bytes();
                }
                let text = String::from_utf8_lossy(&line);
                let (level, message) = level_and_text(text.trim());
                log::pass_on("engine", level, message, &line);
                lock(&tail).add(text.trim());
                line.clear();
            }
        }));
    }

    /// Waits until all output has been passed on, but at most for [`OUTPUT_TIMEOUT`] for stdout and
    /// for stderr each.
    pub(super) async fn end(&mut self) {
        // Removes each task right after waiting for it: a finished task must not be polled again,
        // even if this call is cancelled and repeated.
        while let Some(reader) = self.readers.last_mut() {
            let _ = tokio::time::timeout(OUTPUT_TIMEOUT, reader).await;
            self.readers.pop();
        }
    }

    /// Returns the last message of the module.
    pub(super) fn last_of_module(&self) -> Option<String> {
        lock(&self.tail).by_module.clone()
    }

    /// Returns the last message of the engine.
    pub(super) fn last(&self) -> Option<String> {
        lock(&self.tail).last_message()
    }
}

fn lock(tail: &Mutex<LogTail>) -> MutexGuard<'_, LogTail> {
    tail.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the level of an engine's line, as our log names it, and the text of the line. A line
/// without a stamp is an error.
fn level_and_text(line: &str) -> (&'static str, &str) {
    let Some(text) = text_after_stamp(line) else { return ("ERROR", line) };
    let level = match line[..line.len() - text.len()].trim_end().chars().last() {
        Some('#') => "WARN",
        Some('*') => "INFO",
        _ => "DEBUG",
    };
    (level, text)
}

/// Returns the text of a log line such as `123:M 15 Nov 2026 10:00:00.000 # text`.
fn text_after_stamp(line: &str) -> Option<&str> {
    let (stamp, text) = LEVELS
        .iter()
        .filter_map(|level| line.split_once(level))
        .min_by_key(|(stamp, _)| stamp.len())?;
    stamp.starts_with(|c: char| c.is_ascii_digit()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tail_of(lines: &[&str]) -> LogTail {
        let mut tail = LogTail::default();
        lines.iter().for_each(|line| tail.add(line));
        tail
    }

    #[test]
    fn last_message_is_the_last_line_or_the_error_after_it() {
        let log = "12:M 15 Nov 2026 10:00:00.000 # Can't open the log - why";
        assert_eq!(tail_of(&[log, ""]).last_message().as_deref(), Some("Can't open the log - why"));
        let error = ["*** FATAL * CONFIG ***", "Reading it, at line 9", ">>> 'x'", "Bad directive"];
        let joined = "*** FATAL * CONFIG ***; Reading it, at line 9; >>> 'x'; Bad directive";
        let tail = tail_of(&[&[log], &error[..]].concat());
        assert_eq!(tail.last_message().as_deref(), Some(joined));
        assert_eq!(tail_of(&[]).last_message(), None);
    }

    #[test]
    fn levels_are_those_of_our_own_log() {
        let line = |marker: &str| format!("12:M 15 Nov 2026 10:00:00.000 {marker} text # more");
        for (marker, level) in [("#", "WARN"), ("*", "INFO"), ("-", "DEBUG"), (".", "DEBUG")] {
            assert_eq!(level_and_text(&line(marker)), (level, "text # more"));
        }
        assert_eq!(level_and_text("Bad directive"), ("ERROR", "Bad directive"));
    }

    #[test]
    fn keeps_the_modules_message_after_later_lines() {
        let module = "12:M 15 Nov 2026 10:00:00.000 # <module> ferrite: not loaded: x";
        let tail =
            tail_of(&[module, "# Module /ferrite.so initialization failed", "1", "2", "3", "4"]);
        assert_eq!(tail.by_module.as_deref(), Some("not loaded: x"));
    }
}
