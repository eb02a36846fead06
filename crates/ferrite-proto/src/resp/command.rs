//! Finds where a command ends.
//!
//! ```text
//!   *2\r\n $3\r\n GET\r\n $1\r\n k\r\n      a multibulk: the usual form
//!   GET k\r\n                               inline: a line that does not begin with `*`
//!   \r\n    *0\r\n    *-1\r\n               empty: complete commands without arguments
//! ```
//!
//! As in Redis, the framer does not check the byte after `\r`, which should be `\n`, or the two
//! bytes after a bulk string. It checks them if [`Limits::exact_ends`] is set, because Valkey 9.1
//! checks some of them. If a line can no longer be a number, Redis still waits for the rest of the
//! line. This framer reports the error at once.

use super::number::Length;
use super::{Limits, Progress};

/// Finds where commands end, in pieces of any size.
///
/// ```
/// use ferrite_proto::resp::{CommandFramer, Limits, Progress};
///
/// let mut framer = CommandFramer::new(Limits::default());
/// let piece = framer.feed(b"*2\r\n$3\r\nGET\r\n$5\r\nhel")?;
/// assert_eq!(piece, Progress { consumed: 20, complete: false });
/// let piece = framer.feed(b"lo\r\nPING\r\n")?;
/// assert_eq!(piece, Progress { consumed: 4, complete: true });
/// let piece = framer.feed(b"PING\r\n")?; // the rest is the next command
/// assert_eq!(piece, Progress { consumed: 6, complete: true });
///
/// let error = framer.feed(b"*two\r\n").unwrap_err();
/// assert_eq!(error.to_string(), "Protocol error: invalid multibulk length");
/// # Ok::<(), ferrite_proto::resp::CommandError>(())
/// ```
#[derive(Debug, Clone)]
pub struct CommandFramer {
    limits: Limits,
    state: State,
    frame_bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Start,
    Inline {
        len: u32,
    },
    /// After `*`, in the number of arguments.
    Count(Length),
    /// After the `\r` of the count. `args` is the number of arguments that follow.
    CountEnd {
        args: u64,
    },
    /// Before the `$` of an argument.
    Argument {
        args: u64,
    },
    /// After the `$` of an argument, in its size.
    Size {
        args: u64,
        size: Length,
    },
    /// After the `\r` of the size.
    SizeEnd {
        args: u64,
        size: u64,
    },
    /// In the bulk string, including the two bytes after it.
    Bulk {
        args: u64,
        left: u64,
    },
    Failed(CommandError),
}

impl CommandFramer {
    /// Creates a framer before the first command.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self { limits, state: State::Start, frame_bytes: 0 }
    }

    /// Returns whether a command has begun and not ended.
    #[must_use]
    pub fn is_inside(&self) -> bool {
        self.state != State::Start
    }

    /// Returns how many bytes of the current command were fed.
    #[must_use]
    pub fn frame_bytes(&self) -> u64 {
        self.frame_bytes
    }

    /// Returns a lower bound for the number of bytes that the current command still needs.
    #[must_use]
    pub fn wanted(&self) -> u64 {
        match self.state {
            State::Bulk { args, left } => {
                left.saturating_add(args.saturating_sub(1).saturating_mul(6))
            }
            State::Argument { args } => args.saturating_mul(6), // $0\r\n\r\n
            State::SizeEnd { size, .. } => size.saturating_add(3),
            _ => 1,
        }
    }

    /// Consumes the next bytes, up to the end of a command. Feed the bytes after that end in the
    /// next call.
    ///
    /// # Errors
    /// If the bytes are not a command. All later calls return the same error.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<Progress, CommandError> {
        let mut at = 0;
        loop {
            if let State::Failed(error) = self.state {
                return Err(error);
            }
            let Some(rest) = bytes.get(at..).filter(|rest| !rest.is_empty()) else {
                self.frame_bytes = self.frame_bytes.saturating_add(at as u64);
                return Ok(Progress { consumed: at, complete: false });
            };
            match self.step(rest) {
                Ok((taken, Some(next))) => {
                    at += taken;
                    self.state = next;
                }
                Ok((taken, None)) => {
                    self.state = State::Start;
                    self.frame_bytes = 0;
                    return Ok(Progress { consumed: at + taken, complete: true });
                }
                Err(error) => self.state = State::Failed(error),
            }
        }
    }

    /// Returns how many of the bytes are consumed, and the next state, which is `None` at the end
    /// of the command. `rest` must not be empty.
    fn step(&self, rest: &[u8]) -> Result<(usize, Option<State>), CommandError> {
        let first = rest.first().copied().unwrap_or_default();
        Ok(match self.state {
            State::Start if first == b'*' => (1, Some(State::Count(Length::default()))),
            State::Start => self.inline(0, rest)?,
            State::Inline { len } => self.inline(len, rest)?,
            State::Count(count) if first == b'\r' => {
                let count = count.finish().ok_or(CommandError::MultibulkLength)?;
                let args = u64::try_from(count).unwrap_or(0); // a negative count means none
                if args > self.limits.multibulk_args {
                    return Err(CommandError::MultibulkLength);
                }
                (1, Some(State::CountEnd { args }))
            }
            State::Count(mut count) => {
                count.push(first).ok_or(CommandError::MultibulkLength)?;
                (1, Some(State::Count(count)))
            }
            State::CountEnd { .. } | State::SizeEnd { .. }
                if self.limits.exact_ends && first != b'\n' =>
            {
                return Err(CommandError::LineEnd);
            }
            State::CountEnd { args: 0 } => (1, None),
            State::CountEnd { args } => (1, Some(State::Argument { args })),
            State::Argument { args } if first == b'$' => {
                (1, Some(State::Size { args, size: Length::default() }))
            }
            State::Argument { .. } => return Err(CommandError::ExpectedBulk { got: first }),
            State::Size { args, size } if first == b'\r' => {
                let size = size.finish().and_then(|size| u64::try_from(size).ok());
                let size = size.filter(|size| *size <= self.limits.bulk_bytes);
                (1, Some(State::SizeEnd { args, size: size.ok_or(CommandError::BulkLength)? }))
            }
            State::Size { args, mut size } => {
                size.push(first).ok_or(CommandError::BulkLength)?;
                (1, Some(State::Size { args, size }))
            }
            State::SizeEnd { args, size } => {
                (1, Some(State::Bulk { args, left: size.saturating_add(2) }))
            }
            State::Bulk { args, left } => {
                let taken = usize::try_from(left).unwrap_or(usize::MAX).min(rest.len());
                if self.limits.exact_ends && !ends_exactly(rest.get(..taken).unwrap_or(rest), left)
                {
                    return Err(CommandError::LineEnd);
                }
                match left.saturating_sub(taken as u64) {
                    0 if args <= 1 => (taken, None),
                    0 => (taken, Some(State::Argument { args: args - 1 })),
                    left => (taken, Some(State::Bulk { args, left })),
                }
            }
            State::Failed(error) => return Err(error),
        })
    }

    /// Consumes the line of an inline command up to its end. `before` is the number of its bytes
    /// that were consumed earlier.
    fn inline(&self, before: u32, rest: &[u8]) -> Result<(usize, Option<State>), CommandError> {
        let room = (self.limits.inline_bytes.saturating_sub(before) as usize).saturating_add(1);
        let within = rest.get(..room).unwrap_or(rest);
        // Redis searches for the end of the line as in a C string. So it would not find a line end
        // after a zero byte.
        match within.iter().position(|byte| matches!(byte, b'\n' | 0)) {
            Some(at) if within.get(at) == Some(&0) => Err(CommandError::InlineZero),
            Some(at) => Ok((at + 1, None)),
            None if within.len() == room => Err(CommandError::InlineTooBig),
            None => {
                let len = u32::try_from(within.len()).unwrap_or(u32::MAX).saturating_add(before);
                Ok((within.len(), Some(State::Inline { len })))
            }
        }
    }
}

/// Returns whether the next bytes of a bulk string are compatible with an end in `\r\n`. `left`
/// bytes of the string remain, including `bytes` and the line end.
fn ends_exactly(bytes: &[u8], left: u64) -> bool {
    let from_end =
        |count| usize::try_from(left.checked_sub(count)?).ok().and_then(|at| bytes.get(at));
    from_end(2).is_none_or(|byte| *byte == b'\r') && from_end(1).is_none_or(|byte| *byte == b'\n')
}

/// Why bytes are not a command. The texts are those of Redis where Redis has the same error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// The count is not a number, or exceeds the limit.
    #[error("Protocol error: invalid multibulk length")]
    MultibulkLength,
    /// The length is not a number, is negative, or exceeds the limit.
    #[error("Protocol error: invalid bulk length")]
    BulkLength,
    /// An argument is not a bulk string.
    #[error("Protocol error: expected '$', got '{}'", .got.escape_ascii())]
    ExpectedBulk {
        /// The byte in place of `$`.
        got: u8,
    },
    /// A line or a bulk string does not end in `\r\n`. Occurs only with [`Limits::exact_ends`].
    #[error("Protocol error: expected CRLF")]
    LineEnd,
    /// An inline command exceeds the limit.
    #[error("Protocol error: too big inline request")]
    InlineTooBig,
    /// An inline command contains a zero byte, so that Redis would not find its end.
    #[error("Protocol error: zero byte in inline request")]
    InlineZero,
    /// The command is not complete. Only [`Command::parse`](super::Command::parse) and
    /// [`Command::parse_within`](super::Command::parse_within) return this.
    #[error("Protocol error: incomplete command")]
    Incomplete,
    /// There is more than one command. Only [`Command::parse`](super::Command::parse) and
    /// [`Command::parse_within`](super::Command::parse_within) return this.
    #[error("Protocol error: unexpected bytes after the command")]
    Trailing,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits { bulk_bytes: 10, multibulk_args: 3, inline_bytes: 8, ..Limits::default() }
    }

    /// Feeds all bytes at once and byte by byte, and checks that the results are the same.
    fn feed(bytes: &[u8]) -> Result<Progress, CommandError> {
        let at_once = CommandFramer::new(limits()).feed(bytes);
        let mut framer = CommandFramer::new(limits());
        for (at, byte) in bytes.iter().enumerate() {
            let progress = framer.feed(&[*byte]);
            match (progress, at_once) {
                (Err(error), at_once) => {
                    assert_eq!(at_once, Err(error));
                    return at_once;
                }
                (Ok(Progress { complete: true, consumed }), at_once) => {
                    assert_eq!(at_once, Ok(Progress { consumed: at + 1, complete: true }));
                    assert_eq!((consumed, framer.is_inside()), (1, false));
                    return at_once;
                }
                (Ok(_), _) => assert_eq!(framer.frame_bytes(), at as u64 + 1),
            }
        }
        assert_eq!(at_once, Ok(Progress { consumed: bytes.len(), complete: false }));
        at_once
    }

    #[test]
    fn finds_the_end_of_commands() {
        for command in [
            &b"*1\r\n$4\r\nPING\r\n"[..],
            b"*2\r\n$0\r\n\r\n$10\r\n0123456789\r\n",
            b"*0\r\n",
            b"*-1\r\n",
            b"*-77\r\n",
            b"\r\n",
            b"\n",
            b"PING\r\n",
            b"PING\n",
            b"12345678\n",
            b"$4\r\n",
            // Redis accepts these wrong line ends, too.
            b"*1\rx$4\ryPINGzz",
        ] {
            let complete = Ok(Progress { consumed: command.len(), complete: true });
            assert_eq!(feed(command), complete, "{}", command.escape_ascii());
            assert_eq!(feed(&[command, b"*1\r\n"].concat()), complete);
            for len in 0..command.len() {
                assert_eq!(feed(&command[..len]), Ok(Progress { consumed: len, complete: false }));
            }
        }
    }

    #[test]
    fn reports_wrong_line_ends_at_once() {
        let limits = Limits { exact_ends: true, ..Limits::default() };
        let whole = b"*2\r\n$3\r\nGET\r\n$0\r\n\r\n";
        for piece in 1..=whole.len() {
            let mut framer = CommandFramer::new(limits);
            let fed = whole
                .chunks(piece)
                .map(|bytes| framer.feed(bytes).map(|progress| progress.complete));
            assert_eq!(fed.last(), Some(Ok(true)));
        }
        for at in [3, 7, 11, 12, 16, 17, 18] {
            let mut wrong = whole.to_vec();
            wrong[at] = b'x';
            let feed = |len: usize| CommandFramer::new(limits).feed(&wrong[..len]);
            assert_eq!(feed(at + 1), Err(CommandError::LineEnd), "{at}");
            assert!(feed(at).is_ok());
            assert!(
                CommandFramer::new(Limits::default()).feed(&wrong).is_ok(),
                "as lenient as Redis"
            );
        }
    }

    #[test]
    fn rejects_invalid_commands() {
        for (bytes, error) in [
            (&b"*x\r\n"[..], CommandError::MultibulkLength),
            (b"*\r\n", CommandError::MultibulkLength),
            (b"*4\r\n", CommandError::MultibulkLength),
            (b"*01\r\n", CommandError::MultibulkLength),
            (b"*1\n", CommandError::MultibulkLength),
            (b"*99999999999999999999\r\n", CommandError::MultibulkLength),
            (b"*1\r\n+OK\r\n", CommandError::ExpectedBulk { got: b'+' }),
            (b"*1\r\n$-1\r\n", CommandError::BulkLength),
            (b"*1\r\n$11\r\n", CommandError::BulkLength),
            (b"*1\r\n$\r\n", CommandError::BulkLength),
            (b"*1\r\n$+1\r\n", CommandError::BulkLength),
            (b"123456789\n", CommandError::InlineTooBig),
            (b"12345678\r\n", CommandError::InlineTooBig),
            (b"GET \0\n", CommandError::InlineZero),
        ] {
            assert_eq!(feed(bytes), Err(error), "{}", bytes.escape_ascii());
        }
        let got = CommandError::ExpectedBulk { got: b'\n' };
        assert_eq!(got.to_string(), "Protocol error: expected '$', got '\\n'");
    }

    #[test]
    fn failure_is_permanent() {
        let mut framer = CommandFramer::new(limits());
        assert_eq!(framer.feed(b"*x"), Err(CommandError::MultibulkLength));
        assert_eq!(framer.feed(b"PING\r\n"), Err(CommandError::MultibulkLength));
        assert_eq!(framer.feed(b""), Err(CommandError::MultibulkLength));
    }

    #[test]
    fn wanted_never_exceeds_the_rest_of_the_command() {
        let command = b"*3\r\n$1\r\nx\r\n$0\r\n\r\n$10\r\n0123456789\r\n";
        let mut framer = CommandFramer::new(limits());
        for at in 0..command.len() {
            let left = (command.len() - at) as u64;
            assert!((1..=left).contains(&framer.wanted()), "at {at}");
            framer.feed(&command[at..=at]).expect("a command");
        }
    }
}
