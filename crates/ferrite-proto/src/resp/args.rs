//! A view of a complete command, without a copy.

use super::number::Length;
use super::{CommandError, CommandFramer, Limits, Progress};

/// A complete command in one piece.
///
/// ```
/// use ferrite_proto::resp::Command;
///
/// let command = Command::parse(b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n")?;
/// assert_eq!(command.args().collect::<Vec<_>>(), [&b"GET"[..], b"k"]);
///
/// let inline = Command::parse(b"SET k \"a b\"\r\n")?;
/// assert_eq!(inline.inline(), Some(&b"SET k \"a b\""[..])); // the server parses the quotes
/// assert_eq!(inline.args().len(), 0);
/// # Ok::<(), ferrite_proto::resp::CommandError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Command<'a> {
    /// The number of arguments that a multibulk states.
    count: usize,
    /// The bytes after the count of a multibulk, or the line of an inline command.
    body: &'a [u8],
    inline: bool,
}

impl<'a> Command<'a> {
    /// Parses exactly one command, within the default limits.
    ///
    /// # Errors
    /// If the bytes are not a command, are an incomplete command, or are more than one command.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, CommandError> {
        Self::parse_within(bytes, Limits::default())
    }

    /// Parses exactly one command.
    ///
    /// # Errors
    /// If the bytes are not a command, are an incomplete command, or are more than one command.
    pub fn parse_within(bytes: &'a [u8], limits: Limits) -> Result<Self, CommandError> {
        match CommandFramer::new(limits).feed(bytes)? {
            Progress { complete: false, .. } => return Err(CommandError::Incomplete),
            Progress { consumed, .. } if consumed < bytes.len() => {
                return Err(CommandError::Trailing);
            }
            _ => {}
        }
        Self::framed(bytes).ok_or(CommandError::MultibulkLength)
    }

    /// Parses bytes that a [`CommandFramer`] has found to be one command, without framing them
    /// again. For other bytes, [`args`](Self::args) may return fewer arguments than the command
    /// states.
    #[must_use]
    pub fn framed(bytes: &'a [u8]) -> Option<Self> {
        if let Some(rest) = bytes.strip_prefix(b"*") {
            let (count, body) = header(rest)?;
            return Some(Self { count, body, inline: false });
        }
        let line = bytes.strip_suffix(b"\n").unwrap_or(bytes);
        Some(Self { count: 0, body: line.strip_suffix(b"\r").unwrap_or(line), inline: true })
    }

    /// Returns the line of an inline command, without its line end. Returns `None` for a multibulk.
    #[must_use]
    pub fn inline(&self) -> Option<&'a [u8]> {
        self.inline.then_some(self.body)
    }

    /// Returns the arguments of a multibulk. An inline command has none.
    #[must_use]
    pub fn args(&self) -> Args<'a> {
        Args { count: self.count, rest: if self.inline { &[] } else { self.body } }
    }
}

/// The arguments of a [`Command`], as slices of its bytes.
#[derive(Debug, Clone)]
pub struct Args<'a> {
    count: usize,
    rest: &'a [u8],
}

impl Args<'_> {
    /// Returns the stated length of the next argument, even if the argument has not arrived.
    /// Returns `None` if there is no next argument, or if its length has not arrived.
    #[must_use]
    pub fn announced(&self) -> Option<usize> {
        self.count.checked_sub(1)?;
        header(self.rest.strip_prefix(b"$")?).map(|(size, _)| size)
    }
}

impl<'a> Iterator for Args<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        self.count = self.count.checked_sub(1)?;
        let (size, body) = header(self.rest.strip_prefix(b"$")?)?;
        let (arg, rest) = body.split_at_checked(size)?;
        self.rest = rest.get(2..)?;
        Some(arg)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.count, Some(self.count))
    }
}

impl ExactSizeIterator for Args<'_> {}

/// Parses a count and the two bytes after it. Returns the count and the rest. A negative count
/// gives 0.
fn header(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let end = bytes.iter().position(|byte| *byte == b'\r')?;
    let mut number = Length::default();
    bytes.get(..end)?.iter().try_for_each(|byte| number.push(*byte))?;
    let number = usize::try_from(number.finish()?).unwrap_or(0);
    Some((number, bytes.get(end.checked_add(2)?..)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(bytes: &[u8]) -> Vec<&[u8]> {
        let command = Command::parse(bytes).expect("a command");
        assert_eq!(command.args().len(), command.args().count());
        command.args().collect()
    }

    #[test]
    fn yields_arguments_as_slices() {
        assert_eq!(args(b"*2\r\n$4\r\nECHO\r\n$6\r\na\r\n\0*b\r\n"), [&b"ECHO"[..], b"a\r\n\0*b"]);
        assert_eq!(args(b"*1\r\n$0\r\n\r\n"), [b""]);
        for nothing in [&b"*0\r\n"[..], b"*-1\r\n", b"*-5\r\n", b"\r\n"] {
            assert!(args(nothing).is_empty());
        }
    }

    #[test]
    fn inline_omits_the_line_end() {
        for (bytes, line) in [(&b"PING\r\n"[..], &b"PING"[..]), (b"PING\n", b"PING"), (b"\n", b"")]
        {
            assert_eq!(Command::parse(bytes).map(|command| command.inline()), Ok(Some(line)));
        }
        assert_eq!(Command::parse(b"*0\r\n").map(|command| command.inline()), Ok(None));
    }

    #[test]
    fn parses_exactly_one_command() {
        assert_eq!(Command::parse(b""), Err(CommandError::Incomplete));
        assert_eq!(Command::parse(b"*1\r\n$4\r\nPIN"), Err(CommandError::Incomplete));
        assert_eq!(Command::parse(b"PING\r\nPING\r\n"), Err(CommandError::Trailing));
        let limits = Limits { multibulk_args: 0, ..Limits::default() };
        assert_eq!(Command::parse_within(b"*1\r\n", limits), Err(CommandError::MultibulkLength));
    }
}
