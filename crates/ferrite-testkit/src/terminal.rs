//! A program on a terminal: a test types keys, and waits for text on the screen.

use std::io::{Read as _, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::time::Instant;

use crate::process::exit_within;
use crate::wait::TIMEOUT;

/// A program on a terminal of its own. Drop kills it.
#[derive(Debug)]
pub struct Terminal {
    child: Child,
    keys: ChildStdin,
    shown: mpsc::Receiver<Vec<u8>>,
    /// What was shown after the last expected text.
    text: String,
}

impl Terminal {
    /// Starts a line of a shell on a terminal, by `script`, which every Debian has. `set` can
    /// change its environment.
    ///
    /// # Panics
    /// If it cannot be started.
    #[must_use]
    pub fn start(line: &str, set: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new("script");
        command.args(["-qefc", line, "/dev/null"]).env("TERM", "xterm");
        set(&mut command);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("start script (package bsdutils)");
        let keys = child.stdin.take().expect("piped stdin");
        let mut screen = child.stdout.take().expect("piped stdout");
        let (sender, shown) = mpsc::channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = screen.read(&mut bytes) {
                if sender.send(bytes[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self { child, keys, shown, text: String::new() }
    }

    /// Types keys.
    ///
    /// # Panics
    /// If the program has ended.
    pub fn type_keys(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).expect("type keys");
    }

    /// Waits for a text on the screen, after the text that was expected last. Returns what was
    /// shown until then.
    ///
    /// # Panics
    /// If it does not appear in time.
    #[track_caller]
    pub fn expect(&mut self, wanted: &str) -> String {
        let begun = Instant::now();
        loop {
            if let Some(at) = self.text.find(wanted) {
                let rest = self.text.split_off(at + wanted.len());
                return std::mem::replace(&mut self.text, rest);
            }
            let left = TIMEOUT.saturating_sub(begun.elapsed());
            match self.shown.recv_timeout(left) {
                Ok(bytes) => self.text += &String::from_utf8_lossy(&bytes),
                Err(error) => panic!("{wanted:?}: {error}: {:?}", self.text),
            }
        }
    }

    /// Waits until the program has ended.
    ///
    /// # Panics
    /// If it does not end in time.
    #[track_caller]
    pub fn end(mut self) {
        let status = exit_within(&mut self.child, TIMEOUT);
        assert!(status.is_some(), "the program did not exit: {:?}", self.text);
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_keys_and_reads_the_screen() {
        let mut terminal = Terminal::start("test -t 0 && read word && echo \"<$word>\"", |_| {});
        terminal.type_keys("hello\r");
        assert!(terminal.expect("<hello>").contains("hello"), "the terminal echoes keys");
        terminal.end();
    }
}
