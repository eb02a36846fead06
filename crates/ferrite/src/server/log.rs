//! The log: the engine's lines as they come, and ours in the same form.

use std::collections::VecDeque;
use std::io::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::task::JoinHandle;

use super::secret;

/// Lines that are remembered, for the last words of an engine that does not come up: a complaint
/// about its configuration has four.
const REMEMBERED: usize = 4;
/// A child of the engine (one that saves) may hold its output open when the engine has ended.
const REST: Duration = Duration::from_millis(500);
/// Between the stamp of a line and its text: warning, notice, verbose, debug.
const LEVELS: [&str; 4] = [" # ", " * ", " - ", " . "];
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
    said: Arc<Mutex<Said>>,
    readers: Vec<JoinHandle<()>>,
}

/// What is remembered of it.
#[derive(Default)]
struct Said {
    last: VecDeque<String>,
    by_module: Option<String>,
}

impl Said {
    fn add(&mut self, line: &str) {
        if line.is_empty() {
            return;
        }
        if let Some((_, words)) = line.split_once(MODULE) {
            self.by_module = Some(words.into());
        }
        if self.last.len() == REMEMBERED {
            self.last.pop_front();
        }
        self.last.push_back(line.into());
    }

    /// The last line of its log; or what was said after that without being one, which are
    /// complaints.
    fn last_words(&self) -> Option<String> {
        let complaints: Vec<_> =
            self.last.iter().rev().take_while(|line| stamped(line).is_none()).collect();
        match (complaints.is_empty(), self.last.back()) {
            (true, last) => last.and_then(|line| stamped(line)).map(Into::into),
            (false, _) => {
                let lines: Vec<_> = complaints.into_iter().rev().map(String::as_str).collect();
                Some(lines.join("; "))
            }
        }
    }
}

impl Words {
    pub(super) fn new() -> Self {
        Self { said: Arc::default(), readers: Vec::new() }
    }

    /// Passes on what comes, until its end.
    pub(super) fn follow(&mut self, output: impl AsyncRead + Unpin + Send + 'static) {
        let said = Arc::clone(&self.said);
        self.readers.push(tokio::spawn(async move {
            let (mut output, mut line) = (BufReader::new(output), Vec::new());
            while matches!(output.read_until(b'\n', &mut line).await, Ok(read) if read > 0) {
                if line.last() != Some(&b'\n') {
                    line.push(b'\n');
                }
                if let Some(shown) = secret::passed_on(&line) {
                    line = shown.into_bytes();
                }
                let _ = std::io::stderr().lock().write_all(&line);
                lock(&said).add(String::from_utf8_lossy(&line).trim());
                line.clear();
            }
        }));
    }

    /// Until everything was passed on, or long enough.
    pub(super) async fn end(&mut self) {
        // One that has ended must not be asked again, also when this is called again after it was
        // cancelled.
        while let Some(reader) = self.readers.last_mut() {
            let _ = tokio::time::timeout(REST, reader).await;
            self.readers.pop();
        }
    }

    /// What the module said last.
    pub(super) fn of_module(&self) -> Option<String> {
        lock(&self.said).by_module.clone()
    }

    /// What the engine said last.
    pub(super) fn last(&self) -> Option<String> {
        lock(&self.said).last_words()
    }
}

fn lock(said: &Mutex<Said>) -> MutexGuard<'_, Said> {
    said.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The text of `123:M 15 Nov 2026 10:00:00.000 # text`, or of any line that is one of a log.
fn stamped(line: &str) -> Option<&str> {
    let (stamp, text) = LEVELS
        .iter()
        .filter_map(|level| line.split_once(level))
        .min_by_key(|(stamp, _)| stamp.len())?;
    stamp.starts_with(|c: char| c.is_ascii_digit()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(lines: &[&str]) -> Said {
        let mut said = Said::default();
        lines.iter().for_each(|line| said.add(line));
        said
    }

    #[test]
    fn last_words_are_the_last_line_or_the_complaint_after_it() {
        let log = "12:M 15 Nov 2026 10:00:00.000 # Can't open the log - why";
        assert_eq!(said(&[log, ""]).last_words().as_deref(), Some("Can't open the log - why"));
        let complaint =
            ["*** FATAL * CONFIG ***", "Reading it, at line 9", ">>> 'x'", "Bad directive"];
        let words = "*** FATAL * CONFIG ***; Reading it, at line 9; >>> 'x'; Bad directive";
        assert_eq!(said(&[&[log], &complaint[..]].concat()).last_words().as_deref(), Some(words));
        assert_eq!(said(&[]).last_words(), None);
    }

    #[test]
    fn the_modules_words_outlast_the_engines() {
        let module = "12:M 15 Nov 2026 10:00:00.000 # <module> ferrite: not loaded: x";
        let said =
            said(&[module, "# Module /ferrite.so initialization failed", "1", "2", "3", "4"]);
        assert_eq!(said.by_module.as_deref(), Some("not loaded: x"));
    }
}
