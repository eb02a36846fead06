//! A look into a complete command, without a copy.

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
/// assert_eq!(inline.inline(), Some(&b"SET k \"a b\""[..])); // quotes are the server's to read
/// assert_eq!(inline.args().len(), 0);
/// # Ok::<(), ferrite_proto::resp::CommandError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Command<'a> {
    /// How many arguments a multibulk says that it has.
    count: usize,
    /// What follows the count of a multibulk, or the line of an inline command.
    body: &'a [u8],
    inline: bool,
}

impl<'a> Command<'a> {
    /// Looks into exactly one command, within the default limits.
    ///
    /// # Errors
    /// It is none, not a whole one, or more than one.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, CommandError> {
        Self::parse_within(bytes, Limits::default())
    }

    /// Looks into exactly one command.
    ///
    /// # Errors
    /// It is none, not a whole one, or more than one.
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

    /// Looks into what a [`CommandFramer`] has found to be one command, without doing so again. Of
    /// other bytes there may be fewer arguments than the count says.
    #[must_use]
    pub fn framed(bytes: &'a [u8]) -> Option<Self> {
        if let Some(rest) = bytes.strip_prefix(b"*") {
            let (count, body) = header(rest)?;
            return Some(Self { count, body, inline: false });
        }
        let line = bytes.strip_suffix(b"\n").unwrap_or(bytes);
        Some(Self { count: 0, body: line.strip_suffix(b"\r").unwrap_or(line), inline: true })
    }

    /// The line of an inline command, without its end. `None` for a multibulk.
    #[must_use]
    pub fn inline(&self) -> Option<&'a [u8]> {
        self.inline.then_some(self.body)
    }

    /// The arguments of a multibulk. None for an inline command.
    #[must_use]
    pub fn args(&self) -> Args<'a> {
        Args { count: self.count, rest: if self.inline { &[] } else { self.body } }
    }
}

/// The arguments of a [`Command`], each where it lies.
#[derive(Debug, Clone)]
pub struct Args<'a> {
    count: usize,
    rest: &'a [u8],
}

impl Args<'_> {
    /// Returns how long the next argument says that it is, also if it has not arrived. `None`:
    /// there is no next one, or its length has not arrived.
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

/// A count with the two bytes after it, and what follows. Less than none is none.
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
    fn arguments_lie_where_they_came() {
        assert_eq!(args(b"*2\r\n$4\r\nECHO\r\n$6\r\na\r\n\0*b\r\n"), [&b"ECHO"[..], b"a\r\n\0*b"]);
        assert_eq!(args(b"*1\r\n$0\r\n\r\n"), [b""]);
        for nothing in [&b"*0\r\n"[..], b"*-1\r\n", b"*-5\r\n", b"\r\n"] {
            assert!(args(nothing).is_empty());
        }
    }

    #[test]
    fn lines_without_their_end() {
        for (bytes, line) in [(&b"PING\r\n"[..], &b"PING"[..]), (b"PING\n", b"PING"), (b"\n", b"")]
        {
            assert_eq!(Command::parse(bytes).map(|command| command.inline()), Ok(Some(line)));
        }
        assert_eq!(Command::parse(b"*0\r\n").map(|command| command.inline()), Ok(None));
    }

    #[test]
    fn exactly_one() {
        assert_eq!(Command::parse(b""), Err(CommandError::Incomplete));
        assert_eq!(Command::parse(b"*1\r\n$4\r\nPIN"), Err(CommandError::Incomplete));
        assert_eq!(Command::parse(b"PING\r\nPING\r\n"), Err(CommandError::Trailing));
        let limits = Limits { multibulk_args: 0, ..Limits::default() };
        assert_eq!(Command::parse_within(b"*1\r\n", limits), Err(CommandError::MultibulkLength));
    }
}
