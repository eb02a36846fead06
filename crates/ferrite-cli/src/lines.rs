//! Runs commands from stdin, one per line. After a failure, continues with the next line.

use std::io::BufRead as _;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use ferrite_proto::resp::split_line;
use tokio::runtime::Runtime;

use crate::command_source::CommandSource;
use crate::docs::Docs;
use crate::format::Style;
use crate::issue;
use crate::server::Server;
use crate::{exit, output};

/// The shortest duration that is printed after a command, in the human style.
const SLOW_COMMAND: Duration = Duration::from_millis(500);

/// A parsed line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line {
    Empty,
    /// `quit` or `exit`.
    Exit,
    /// A command of the prompt itself, such as `:set …`.
    PromptCommand(Vec<Vec<u8>>),
    /// `connect HOST PORT`.
    Connect(String, u16),
    Clear,
    Help(Vec<Vec<u8>>),
    /// A command, and the number of times to run it.
    Command(i64, Vec<Vec<u8>>),
    /// An invalid line, and the reason.
    Invalid(&'static str),
}

impl Line {
    pub(crate) fn parse(line: &[u8]) -> Self {
        let Ok(mut words) = split_line(line) else { return Self::Invalid("Invalid argument(s)") };
        let Some(first) = words.first() else { return Self::Empty };
        let name = first.to_ascii_lowercase();
        match (name.as_slice(), words.len()) {
            (b"quit" | b"exit", _) => Self::Exit,
            ([b':', ..], _) => Self::PromptCommand(words),
            (b"clear", 1) => Self::Clear,
            (b"help" | b"?", _) => Self::Help(words.split_off(1)),
            (b"connect", 3) => {
                let text = |at: usize| String::from_utf8_lossy(&words[at]).into_owned();
                match text(2).parse() {
                    Ok(port) => Self::Connect(text(1), port),
                    Err(_) => Self::Invalid("connect HOST PORT: expected a port number"),
                }
            }
            (_, 1) => Self::Command(1, words),
            _ => match number(&name) {
                Some(Some(repeat)) if repeat > 0 => Self::Command(repeat, words.split_off(1)),
                Some(_) => Self::Invalid("Invalid redis-cli repeat command option value."),
                None => Self::Command(1, words),
            },
        }
    }
}

/// Parses a whole number. Returns `None` if the word is no number, and `Some(None)` if the number
/// is out of range.
fn number(word: &[u8]) -> Option<Option<i64>> {
    let text = std::str::from_utf8(word).ok()?;
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().ok())
}

/// Runs all commands until the end of stdin, or until `quit` or `exit`.
pub(crate) fn run(runtime: &Runtime, server: &mut Server) -> anyhow::Result<()> {
    connect(runtime, server);
    crate::report_transport(server);
    for line in std::io::stdin().lock().split(b'\n') {
        match Line::parse(&line.context("cannot read stdin")?) {
            Line::Empty | Line::Clear => {}
            Line::Exit => break,
            Line::Invalid(why) => output::write(&server.settings.format.usage_error(why))?,
            Line::PromptCommand(words) => {
                let name = words.join(&b' ');
                output::write_stderr(format_args!(
                    "{} works only at the prompt",
                    name.escape_ascii()
                ));
            }
            Line::Connect(host, port) => {
                server.switch_to(host, port);
                connect(runtime, server);
            }
            Line::Help(words) => {
                let docs = runtime.block_on(Docs::fetch(server));
                output::write(docs.help(&words, false).as_bytes())?;
            }
            Line::Command(repeat, words) => runtime.block_on(command(server, &words, repeat))?,
        }
    }
    Ok(())
}

fn connect(runtime: &Runtime, server: &mut Server) {
    if let Err(error) = runtime.block_on(async { issue::report_refusal(server.connect().await) }) {
        output::write_stderr(exit::line(&error)); // each command tries to connect again
    }
}

/// Runs a command. After a failure, reports it and disconnects. In the human style, prints the
/// duration of a slow command.
///
/// # Errors
/// Returns an error if stdout is closed.
pub(crate) async fn command(
    server: &mut Server,
    words: &[Vec<u8>],
    repeat: i64,
) -> anyhow::Result<()> {
    let begun = Instant::now();
    if let Err(error) = issue::run(server, words, repeat, CommandSource::Lines).await {
        if error.is::<output::OutputClosed>() {
            return Err(error);
        }
        output::write_stderr(exit::line(&error));
        server.disconnect();
    }
    let took = begun.elapsed();
    if took >= SLOW_COMMAND && server.settings.format.style == Style::Human {
        output::write(format!("({:.2}s)\n", took.as_secs_f64()).as_bytes())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<Vec<u8>> {
        text.split(' ').map(|word| word.as_bytes().to_vec()).collect()
    }

    #[test]
    fn parses_lines() {
        for (line, expected) in [
            ("", Line::Empty),
            ("GET a", Line::Command(1, words("GET a"))),
            ("5 INCR a", Line::Command(5, words("INCR a"))),
            ("5", Line::Command(1, words("5"))),
            ("5x INCR", Line::Command(1, words("5x INCR"))),
            ("0 PING", Line::Invalid("Invalid redis-cli repeat command option value.")),
            (
                "99999999999999999999 PING",
                Line::Invalid("Invalid redis-cli repeat command option value."),
            ),
            ("GET 'a", Line::Invalid("Invalid argument(s)")),
            ("Quit", Line::Exit),
            ("exit now", Line::Exit),
            ("clear", Line::Clear),
            (":set hints", Line::PromptCommand(words(":set hints"))),
            ("help get", Line::Help(words("get"))),
            ("?", Line::Help(vec![])),
            ("connect host 7000", Line::Connect("host".into(), 7000)),
            ("connect host x", Line::Invalid("connect HOST PORT: expected a port number")),
            ("connect", Line::Command(1, words("connect"))),
        ] {
            assert_eq!(Line::parse(line.as_bytes()), expected, "{line}");
        }
    }
}
