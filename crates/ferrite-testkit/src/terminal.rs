//! Programs on a pseudo-terminal, as a person uses them.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use crate::process::exit_within;
use crate::wait::{TIMEOUT, until_or};

/// The user's end of a pseudo-terminal. It records the output of programs, and sends keys to them.
#[derive(Debug)]
pub struct Screen {
    keys: File,
    output: Arc<Mutex<Vec<u8>>>,
    reader: Option<JoinHandle<()>>,
    /// Offset in the output: the end of the text that [`Screen::expect_next`] found last.
    seen: usize,
}

impl Screen {
    /// Opens a terminal of this size. Returns the user's end and the end for programs.
    ///
    /// # Panics
    /// If a pseudo-terminal cannot be opened.
    #[must_use]
    pub fn open(columns: u16, rows: u16) -> (Self, OwnedFd) {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let person = openpt(flags).expect("a pseudo-terminal");
        grantpt(&person).and_then(|()| unlockpt(&person)).expect("a usable pseudo-terminal");
        let program = ioctl_tiocgptpeer(&person, flags).expect("the program's end of the terminal");
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&program, size).expect("a size");
        let keys = File::from(person);
        let output = Arc::new(Mutex::new(Vec::new()));
        let (mut screen, all) = (keys.try_clone().expect("a descriptor"), Arc::clone(&output));
        let reader = std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // When no program has the terminal open any more, Linux reports an error instead of the
            // end of the file.
            while let Ok(count @ 1..) = screen.read(&mut bytes) {
                all.lock().unwrap_or_else(PoisonError::into_inner).extend(&bytes[..count]);
            }
        });
        (Self { keys, output, reader: Some(reader), seen: 0 }, program)
    }

    /// Returns all output so far, with escape sequences.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        self.output.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns all output so far as text, with escape sequences.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes()).into_owned()
    }

    /// Waits until the output contains this text.
    ///
    /// # Panics
    /// If the text does not appear in time.
    #[track_caller]
    pub fn expect(&self, text: &str) {
        until_or(TIMEOUT, text, || self.text().contains(text), || self.text());
    }

    /// Waits for a text after the text that the previous call of this function found.
    ///
    /// # Panics
    /// If the text does not appear in time.
    #[track_caller]
    pub fn expect_next(&mut self, text: &str) {
        let end = || {
            let bytes = self.bytes();
            let mut places = bytes[self.seen..].windows(text.len().max(1));
            let at = places.position(|place| place == text.as_bytes());
            if text.is_empty() { Some(self.seen) } else { at.map(|at| self.seen + at + text.len()) }
        };
        until_or(TIMEOUT, text, || end().is_some(), || self.text());
        self.seen = end().unwrap_or(self.seen);
    }

    /// Types keys on the terminal.
    ///
    /// # Panics
    /// If no program has the terminal open any more.
    pub fn type_keys(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).expect("a program that has the terminal open");
    }
}

/// A program on a terminal of its own. Drop kills it.
#[derive(Debug)]
pub struct Terminal {
    child: Child,
    /// The program's terminal.
    pub screen: Screen,
}

impl Terminal {
    /// Starts a program with stdin, stdout and stderr on a terminal of this size. This is the
    /// program's controlling terminal, so Ctrl-C interrupts it.
    ///
    /// # Panics
    /// If a pseudo-terminal cannot be opened, or the program cannot be started.
    #[must_use]
    pub fn start(command: &Command, columns: u16, rows: u16) -> Self {
        let (screen, program) = Screen::open(columns, rows);
        let end = || program.try_clone().expect("a descriptor");
        let mut command = with_controlling_terminal(command);
        command.stdin(end()).stdout(end()).stderr(end()).env("TERM", "xterm-256color");
        // The command with its end of the terminal is dropped here, because the output ends only
        // when all copies of this end are closed.
        Self { child: command.spawn().expect("the program starts"), screen }
    }

    /// Returns the process.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Waits until the program exits. Returns its status and everything that it has written.
    ///
    /// # Panics
    /// If the program does not exit in time.
    #[track_caller]
    pub fn finish(mut self) -> (ExitStatus, String) {
        let status = exit_within(&mut self.child, TIMEOUT);
        let status =
            status.unwrap_or_else(|| panic!("the program still runs: {}", self.screen.text()));
        if let Some(reader) = self.screen.reader.take() {
            let _ = reader.join();
        }
        (status, self.screen.text())
    }
}

/// Returns a command that makes stdin the controlling terminal and then runs `program`.
fn with_controlling_terminal(program: &Command) -> Command {
    let mut command = Command::new("setsid"); // of util-linux, which every Debian has
    command.arg("--ctty").arg(program.get_program()).args(program.get_args());
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    if let Some(directory) = program.get_current_dir() {
        command.current_dir(directory);
    }
    command
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
    fn program_sees_a_terminal_and_its_size() {
        let mut command = Command::new("sh");
        command.args(["-c", "test -t 2 && stty size && read line && echo got $line"]);
        let mut terminal = Terminal::start(&command, 91, 33);
        terminal.screen.expect("33 91");
        terminal.screen.type_keys("hello\n");
        let (status, output) = terminal.finish();
        assert!(status.success() && output.contains("got hello"), "{output}");
    }
}
