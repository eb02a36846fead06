//! Cases written by hand: commands that change the connection or the engine, that have no reply or
//! cause messages without a request, and input that is not a command.
//!
//! They are in `scripts.txt`, each after a line with its name. A line is a command in the syntax of
//! redis-cli, or `raw` and the bytes to send. Two things may stand before the command:
//!
//! - `2:`: the line is for a second connection.
//! - Brackets with what is received after the command: a number of replies (1 by default), `end`
//!   (everything until the connection is closed) or `quiet` (nothing). With `~` only the types of
//!   the replies are compared.
//!
//! A line without a command receives messages that an earlier line has caused.

pub(crate) struct Script {
    pub(crate) name: &'static str,
    lines: Vec<&'static str>,
}

/// Returns the scripts in the order of the file.
pub(crate) fn scripts() -> Vec<Script> {
    let mut scripts: Vec<Script> = Vec::new();
    for line in include_str!("scripts.txt").lines().filter(|line| !line.is_empty()) {
        match (line.strip_prefix("# "), scripts.last_mut()) {
            (Some(name), _) => scripts.push(Script { name, lines: Vec::new() }),
            (None, script) => script.expect("a name before the lines").lines.push(line),
        }
    }
    scripts
}

/// A parsed line.
pub(crate) struct Line {
    pub(crate) second: bool,
    pub(crate) expect: Expect,
    pub(crate) by_type: bool,
    pub(crate) sent: Option<Sent>,
}

#[derive(Clone, Copy)]
pub(crate) enum Expect {
    Replies(usize),
    End,
    Quiet,
}

pub(crate) enum Sent {
    Words(Vec<Vec<u8>>),
    Raw(Vec<u8>),
}

impl Script {
    pub(crate) fn lines(&self) -> impl Iterator<Item = (&'static str, Line)> {
        self.lines.iter().map(|line| (*line, parse(line)))
    }

    /// Returns whether the script sends this command.
    pub(crate) fn mentions(&self, name: &str) -> bool {
        let wanted = name.replace('|', " ");
        self.lines().any(|(_, line)| match line.sent {
            Some(Sent::Words(words)) => {
                let typed: Vec<_> =
                    words.iter().map(|word| String::from_utf8_lossy(word).to_lowercase()).collect();
                typed.join(" ").starts_with(&wanted)
            }
            Some(Sent::Raw(bytes)) => {
                String::from_utf8_lossy(&bytes).to_lowercase().contains(&wanted)
            }
            None => false,
        })
    }
}

fn parse(line: &str) -> Line {
    let (second, mut rest) = match line.strip_prefix("2:") {
        Some(rest) => (true, rest.trim_start()),
        None => (false, line),
    };
    let (mut expect, mut by_type) = (Expect::Replies(1), false);
    if let Some((wanted, after)) = rest.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        by_type = wanted.starts_with('~');
        expect = match wanted.trim_start_matches('~') {
            "end" => Expect::End,
            "quiet" => Expect::Quiet,
            count => Expect::Replies(count.parse().expect("a number of replies")),
        };
        rest = after.trim_start();
    }
    let words = split(rest);
    let sent = match words.first() {
        None => None,
        Some(first) if first == b"raw" => Some(Sent::Raw(words[1..].concat())),
        Some(_) => Some(Sent::Words(words)),
    };
    Line { second, expect, by_type, sent }
}

/// Splits a line into words, which may be in quotes and have the escapes `\r`, `\n`, `\t`, `\"`,
/// `\\` and `\x00`.
fn split(line: &str) -> Vec<Vec<u8>> {
    let (mut words, mut word, mut quoted) = (Vec::new(), None::<Vec<u8>>, false);
    let mut bytes = line.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b' ' if !quoted => words.extend(word.take()),
            b'"' => {
                quoted = !quoted;
                word.get_or_insert_default();
            }
            b'\\' => {
                let escaped = match bytes.next() {
                    Some(b'r') => b'\r',
                    Some(b'n') => b'\n',
                    Some(b't') => b'\t',
                    Some(b'x') => {
                        let digits =
                            [bytes.next(), bytes.next()].map(|digit| digit.map_or('0', char::from));
                        u8::from_str_radix(&String::from_iter(digits), 16).expect("two digits")
                    }
                    other => other.expect("a character after the backslash"),
                };
                word.get_or_insert_default().push(escaped);
            }
            byte => word.get_or_insert_default().push(byte),
        }
    }
    words.extend(word);
    words
}
