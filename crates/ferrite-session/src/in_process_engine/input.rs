//! The input of a client: commands that have arrived and are not handled yet.

use std::ops::Range;

use ferrite_proto::resp::{
    Args, Command, CommandError, CommandFramer, Limits, Words, plain_command,
};

/// The limit in bytes before authentication. It applies separately to unread replies, to incomplete
/// commands, and to input that is read ahead. With all three and its other memory, a session stays
/// below 64 KiB.
pub(crate) const BEFORE_AUTH: usize = 8 << 10;
/// Commands beyond this size are streamed to the engine while they arrive, instead of being
/// gathered here.
const LARGE_COMMAND: u64 = 256 << 10;
/// The size of the first read, and the largest size of a read.
const READ_MIN: usize = 1 << 10;
pub(crate) const READ_MAX: usize = 64 << 10;

/// The longest word that can be the name of a command or subcommand.
const NAME_MAX: usize = 64;

/// The name of a command that has arrived in part, if it is known yet.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PartialCommand<'a> {
    /// The name has not arrived, or the first argument, which may name a subcommand, has not
    /// arrived.
    Unknown,
    /// An inline command, or a command whose name is too long to be looked up.
    Nameless,
    /// The name, and the first argument if there is one and it is short enough to name a
    /// subcommand.
    Named { name: &'a [u8], first: Option<&'a [u8]> },
}

/// A word of a command that has arrived in part.
enum Word<'a> {
    Missing,
    Present(&'a [u8]),
    TooLong,
}

fn word<'a>(args: &mut Args<'a>) -> Word<'a> {
    let announced = args.announced();
    match (args.next(), announced) {
        (_, Some(length)) if length > NAME_MAX => Word::TooLong,
        (Some(word), _) => Word::Present(word),
        (None, _) => Word::Missing,
    }
}

/// A complete command in the input.
#[derive(Debug, Clone)]
pub(crate) struct FoundCommand {
    /// The command's range in the buffer.
    pub(crate) range: Range<usize>,
    /// The indexes of the command's words in the `words` of the input. Empty if the command is not
    /// in the plain form ([`plain_command`]).
    words: Range<usize>,
    /// The range of the command's name, its first word, in the buffer.
    name: Range<usize>,
}

impl FoundCommand {
    /// Returns whether the command is in the plain form, so that its words are known.
    #[inline]
    pub(crate) fn is_plain(&self) -> bool {
        !self.words.is_empty()
    }
}

pub(crate) struct Input {
    /// The input, followed by room for the next read. The room holds zeros or old bytes, because
    /// memory must be initialized before it is read into.
    buffer: Vec<u8>,
    /// The end of the input in the buffer.
    filled: usize,
    /// The end of the commands that were taken.
    taken: usize,
    /// The end of the bytes that the framer has seen. It is beyond `taken` if a command has arrived
    /// in part.
    framed: usize,
    framer: CommandFramer,
    /// The ranges of the words of all commands that were found since the last
    /// [`Input::forget_found`].
    words: Vec<Range<usize>>,
    /// The size of the next read.
    read_size: usize,
}

impl Default for Input {
    fn default() -> Self {
        // The engine enforces its own limits: a command that is too large is proxied, and the
        // engine rejects it with its own error. Commands with wrong line ends are proxied as well,
        // and the engine accepts or rejects them.
        let limits = Limits {
            bulk_bytes: u64::MAX >> 1,
            multibulk_args: i32::MAX as u64,
            exact_ends: true,
            ..Limits::default()
        };
        Self {
            buffer: Vec::new(),
            filled: 0,
            taken: 0,
            framed: 0,
            framer: CommandFramer::new(limits),
            words: Vec::new(),
            read_size: READ_MIN,
        }
    }
}

impl Input {
    /// Creates an input that begins with these bytes of the client.
    pub(crate) fn from_bytes(first: &[u8]) -> Self {
        let mut input = Self::default();
        input.append(first);
        input
    }

    /// Finds the next complete command, but does not take it.
    #[inline]
    pub(crate) fn peek(&mut self) -> Result<Option<FoundCommand>, CommandError> {
        if self.taken == self.filled {
            return Ok(None); // the usual case after a command that was sent alone
        }
        let first = self.words.len();
        let end = if self.framer.is_inside() { None } else { self.find_plain() };
        let end = match end {
            Some(end) => Some(end),
            None => self.find_framed()?,
        };
        let name = self.words.get(first).cloned().unwrap_or_default();
        let words = first..self.words.len();
        Ok(end.map(|end| FoundCommand { range: self.taken..end, words, name }))
    }

    /// Returns the end of the complete command in plain form at `taken`, if there is one.
    fn find_plain(&mut self) -> Option<usize> {
        plain_command(&self.buffer[..self.filled], self.taken, &mut self.words)
    }

    /// Returns the end of the next command if it is complete, whatever its form. Continues where
    /// the last attempt ended.
    #[cold]
    fn find_framed(&mut self) -> Result<Option<usize>, CommandError> {
        let progress = self.framer.feed(&self.buffer[self.framed..self.filled])?;
        self.framed += progress.consumed;
        if !progress.complete {
            return Ok(None);
        }
        let end = std::mem::replace(&mut self.framed, self.taken);
        self.find_plain();
        Ok(Some(end))
    }

    /// Takes the command that [`Input::peek`] has found.
    pub(crate) fn take(&mut self, found: &FoundCommand) {
        (self.taken, self.framed) = (found.range.end, found.range.end);
    }

    /// Returns the words of a command. Returns no words if the command is not in the plain form.
    #[inline]
    pub(crate) fn words(&self, found: &FoundCommand) -> Words<'_> {
        Words::new(&self.buffer, self.words.get(found.words.clone()).unwrap_or_default())
    }

    /// Returns the name of a command, if it is in the plain form.
    #[inline]
    pub(crate) fn name(&self, found: &FoundCommand) -> Option<&[u8]> {
        if found.is_plain() { self.buffer.get(found.name.clone()) } else { None }
    }

    pub(crate) fn command(&self, found: &FoundCommand) -> Option<Command<'_>> {
        Command::framed(self.buffer.get(found.range.clone())?)
    }

    /// Forgets the commands that were found before. Their ranges become invalid.
    pub(crate) fn forget_found(&mut self) {
        self.words.clear();
        // A client that keeps sending while its commands are proxied never leaves the buffer empty,
        // so the buffer is compacted here. This never moves more bytes than it frees.
        if self.taken >= BEFORE_AUTH && self.taken >= self.filled - self.taken {
            self.compact();
        }
    }

    /// Returns the whole buffer, which the ranges of commands refer to.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.buffer[..self.filled]
    }

    /// Returns the bytes that have arrived and were not taken.
    pub(crate) fn pending(&self) -> &[u8] {
        &self.buffer[self.taken..self.filled]
    }

    /// Returns whether a large command has arrived in part. Before authentication the limit is much
    /// lower.
    pub(crate) fn is_large(&self, is_authenticated: bool) -> bool {
        let large = if is_authenticated { LARGE_COMMAND } else { BEFORE_AUTH as u64 };
        self.framer.is_inside()
            && self.framer.frame_bytes().saturating_add(self.framer.wanted()) > large
    }

    /// Returns whether the command that has arrived in part has more arguments than engines accept
    /// before a login.
    pub(crate) fn has_many_args(&self) -> bool {
        const BEFORE_AUTH_ARGS: usize = 10;
        let many = |command: Command<'_>| command.args().len() > BEFORE_AUTH_ARGS;
        self.framer.is_inside() && Command::framed(self.pending()).is_some_and(many)
    }

    /// Returns the name of the command that has arrived in part, if it is known yet.
    pub(crate) fn partial_command(&self) -> PartialCommand<'_> {
        let Some(command) = Command::framed(self.pending()) else { return PartialCommand::Unknown };
        if command.inline().is_some() {
            return PartialCommand::Nameless;
        }
        let mut args = command.args();
        let expected = args.len();
        match (word(&mut args), if expected > 1 { word(&mut args) } else { Word::TooLong }) {
            (Word::Missing, _) | (_, Word::Missing) => PartialCommand::Unknown,
            (Word::TooLong, _) => PartialCommand::Nameless,
            (Word::Present(name), Word::TooLong) => PartialCommand::Named { name, first: None },
            (Word::Present(name), Word::Present(first)) => {
                PartialCommand::Named { name, first: Some(first) }
            }
        }
    }

    /// Returns the memory that the input holds.
    pub(crate) fn held_bytes(&self) -> usize {
        self.buffer.capacity()
    }

    /// Replaces the contents of `out` by the arrived part of the next command, and returns whether
    /// the command is complete. Ranges of commands become invalid.
    ///
    /// # Errors
    /// Returns an error if the command is invalid. Then only the engine can tell where it ends.
    pub(crate) fn stream(&mut self, out: &mut Vec<u8>) -> Result<bool, CommandError> {
        let (end, is_whole) = match self.peek()? {
            Some(found) => (found.range.end, true),
            None => (self.framed, false),
        };
        out.clear();
        out.extend_from_slice(&self.buffer[self.taken..end]);
        (self.taken, self.framed) = (end, end);
        self.forget_found();
        self.compact();
        Ok(is_whole)
    }

    /// Returns room for the next read, at most `max` bytes. Ranges of commands become invalid.
    pub(crate) fn room(&mut self, max: usize) -> &mut [u8] {
        self.compact();
        if self.buffer.len() > 2 * LARGE_COMMAND as usize && self.filled < READ_MAX {
            // The buffer had grown because the client had sent far ahead.
            self.buffer.truncate(self.filled);
            self.buffer.shrink_to(self.filled + self.read_size);
        }
        let end = self.filled + self.read_size.min(max);
        if self.buffer.len() < end {
            self.buffer.resize(end, 0);
        }
        &mut self.buffer[self.filled..end]
    }

    /// Adds `count` bytes that were read into the room. Reads become larger if they fill the room.
    pub(crate) fn advance(&mut self, count: usize) {
        self.filled += count;
        if count >= self.read_size {
            self.read_size = (self.read_size * 4).min(READ_MAX);
        }
    }

    /// Appends bytes. Ranges of commands stay valid.
    pub(crate) fn append(&mut self, bytes: &[u8]) {
        self.buffer.truncate(self.filled);
        self.buffer.extend_from_slice(bytes);
        self.filled = self.buffer.len();
    }

    /// Moves the bytes that were not taken to the beginning of the buffer.
    fn compact(&mut self) {
        if self.taken > 0 {
            self.buffer.copy_within(self.taken..self.filled, 0);
            self.filled -= self.taken;
            self.framed -= self.taken;
            self.taken = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peek_bytes(input: &mut Input) -> Option<Vec<u8>> {
        let found = input.peek().expect("valid command")?;
        Some(input.bytes()[found.range].to_vec())
    }

    #[test]
    fn finds_commands_however_they_are_split() {
        let all = b"*1\r\n$4\r\nPING\r\n*2\r\n$3\r\nGET\r\n$1\r\nk\r\n\r\nPING\r\n";
        for piece in 1..all.len() {
            let (mut input, mut found) = (Input::default(), Vec::new());
            for bytes in all.chunks(piece) {
                input.room(READ_MAX)[..bytes.len()].copy_from_slice(bytes);
                input.advance(bytes.len());
                while let Some(command) = peek_bytes(&mut input) {
                    let same = input.peek().expect("valid command").expect("complete command");
                    assert_eq!(input.bytes()[same.range.clone()], command);
                    let words: Vec<_> = input.words(&same).iter().collect();
                    let args: Vec<_> = input.command(&same).expect("framed").args().collect();
                    assert_eq!(words, args);
                    found.push(command);
                    input.take(&same);
                }
            }
            assert_eq!(found.concat(), all);
            assert_eq!(found.len(), 4);
            assert!(input.pending().is_empty());
        }
    }

    #[test]
    fn streams_a_large_command_until_its_end() {
        let mut input = Input::default();
        input.append(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1000000\r\n");
        input.append(&[b'x'; 1000]);
        assert_eq!(peek_bytes(&mut input), None);
        assert!(input.is_large(true));
        assert_eq!(
            input.partial_command(),
            PartialCommand::Named { name: b"SET", first: Some(b"k") }
        );
        let (mut out, mut total) = (Vec::new(), 0);
        assert_eq!(input.stream(&mut out), Ok(false));
        total += out.len();
        input.append(&[b'x'; 999_000]);
        assert_eq!(input.stream(&mut out), Ok(false));
        total += out.len();
        input.append(b"\r\n*1\r\n");
        assert_eq!(input.stream(&mut out), Ok(true));
        total += out.len();
        assert_eq!(total, b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1000000\r\n\r\n".len() + 1_000_000);
        assert_eq!((input.pending(), input.is_large(true)), (&b"*1\r\n"[..], false));
    }

    /// The memory of taken commands is reused, although there are always bytes that are not taken.
    #[test]
    fn stays_small_while_a_client_keeps_sending() {
        let command = [&b"*2\r\n$4\r\nECHO\r\n$1000\r\n"[..], &[b'x'; 1000], b"\r\n"].concat();
        let mut input = Input::default();
        input.append(&command[..500]);
        for _ in 0..1000 {
            input.forget_found();
            input.append(&command[500..]);
            input.append(&command[..500]);
            let found = input.peek().expect("valid command").expect("complete command");
            assert_eq!(input.bytes()[found.range.clone()], command);
            input.take(&found);
        }
        assert!(
            input.held_bytes() <= 4 * BEFORE_AUTH,
            "the input holds {} bytes",
            input.held_bytes()
        );
    }

    /// A command is not classified before its name has arrived.
    #[test]
    fn classifies_a_large_command_only_by_its_name() {
        let mut input = Input::default();
        for (piece, expected) in [
            (&b"*60001\r\n"[..], PartialCommand::Unknown),
            (b"$11\r\nUNSUB", PartialCommand::Unknown),
            (b"SCRIBE\r\n", PartialCommand::Unknown),
            (b"$2\r\nc1\r\n", PartialCommand::Named { name: b"UNSUBSCRIBE", first: Some(b"c1") }),
        ] {
            input.append(piece);
            assert_eq!(peek_bytes(&mut input), None);
            assert!(input.is_large(true));
            assert_eq!(input.partial_command(), expected);
        }
        let mut input = Input::default();
        input.append(b"*2\r\n$100000\r\n");
        assert_eq!(input.partial_command(), PartialCommand::Nameless);
        let mut input = Input::default();
        input.append(b"*3\r\n$4\r\nECHO\r\n$1000000\r\nx");
        assert_eq!(input.partial_command(), PartialCommand::Named { name: b"ECHO", first: None });
    }
}
