//! What a client has sent and nobody has answered yet.

use std::ops::Range;

use super::limits::BEFORE_AUTH;
use ferrite_proto::resp::{
    Args, Command, CommandError, CommandFramer, Limits, Words, plain_command,
};

/// Commands beyond this go on to the engine while they come, instead of waiting here for their end.
const LARGE: u64 = 256 << 10;
/// What is read at once, at first and at most.
const READ: usize = 1 << 10;
pub(super) const READ_MAX: usize = 64 << 10;

/// The longest word that can be a command's or a subcommand's name.
const NAME_MAX: usize = 64;

/// What is known of a command that has begun and not ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Begun<'a> {
    /// Its name, or the first argument that may be a part of it, has not arrived.
    Unknown,
    /// A line typed by hand, or a command whose name is too long to be looked up.
    Nameless,
    /// Its name, and its first argument unless that is too long to be a subcommand.
    Named { name: &'a [u8], first: Option<&'a [u8]> },
}

/// A word of a command that has begun.
enum Word<'a> {
    Missing,
    Is(&'a [u8]),
    TooLong,
}

fn word<'a>(args: &mut Args<'a>) -> Word<'a> {
    let announced = args.announced();
    match (args.next(), announced) {
        (_, Some(length)) if length > NAME_MAX => Word::TooLong,
        (Some(word), _) => Word::Is(word),
        (None, _) => Word::Missing,
    }
}

/// A whole command.
#[derive(Debug, Clone)]
pub(super) struct Found {
    /// Where it lies.
    pub(super) place: Range<usize>,
    /// Which of the words are its own; none if it is not in the plain form.
    words: Range<usize>,
    /// Where the first of them lies.
    name: Range<usize>,
}

impl Found {
    /// Whether it is in the plain form, and its words are known.
    #[inline]
    pub(super) fn is_plain(&self) -> bool {
        !self.words.is_empty()
    }
}

pub(super) struct Input {
    /// With room behind what came: zeros, or what was there before. To be read into it must have
    /// been written once.
    buffer: Vec<u8>,
    /// Up to here it came.
    filled: usize,
    /// Up to here commands were taken.
    taken: usize,
    /// Up to here the framer has looked. It is further than that if a command has begun and not
    /// ended.
    framed: usize,
    framer: CommandFramer,
    /// Where the words of commands are that were found since places were last forgotten.
    words: Vec<Range<usize>>,
    /// How much the next read asks for.
    read: usize,
}

impl Default for Input {
    fn default() -> Self {
        // The engine's limits are its own: what is too large goes there, and is refused there in
        // its words. So does what ends in another way than it should, for the engine to take or to
        // refuse.
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
            read: READ,
        }
    }
}

impl Input {
    /// With what a client has sent before.
    pub(super) fn with(first: &[u8]) -> Self {
        let mut input = Self::default();
        input.append(first);
        input
    }

    /// The next whole command, if there is one.
    #[inline]
    pub(super) fn peek(&mut self) -> Result<Option<Found>, CommandError> {
        let first = self.words.len();
        let end = if self.framer.is_inside() { None } else { self.plain() };
        let end = match end {
            Some(end) => Some(end),
            None => self.frame()?,
        };
        let name = self.words.get(first).cloned().unwrap_or_default();
        Ok(end.map(|end| Found { place: self.taken..end, words: first..self.words.len(), name }))
    }

    /// Where the command in plain form ends that lies whole at `taken`.
    fn plain(&mut self) -> Option<usize> {
        plain_command(&self.buffer[..self.filled], self.taken, &mut self.words)
    }

    /// The same of any command, piece by piece.
    #[cold]
    fn frame(&mut self) -> Result<Option<usize>, CommandError> {
        let progress = self.framer.feed(&self.buffer[self.framed..self.filled])?;
        self.framed += progress.consumed;
        if !progress.complete {
            return Ok(None);
        }
        let end = std::mem::replace(&mut self.framed, self.taken);
        self.plain();
        Ok(Some(end))
    }

    /// The command that [`Input::peek`] has shown is taken.
    pub(super) fn take(&mut self, found: &Found) {
        (self.taken, self.framed) = (found.place.end, found.place.end);
    }

    /// The words of a command; none if it is not in the plain form.
    #[inline]
    pub(super) fn words(&self, found: &Found) -> Words<'_> {
        Words::new(&self.buffer, self.words.get(found.words.clone()).unwrap_or_default())
    }

    /// Its name, if it is in the plain form.
    #[inline]
    pub(super) fn name(&self, found: &Found) -> Option<&[u8]> {
        if found.is_plain() { self.buffer.get(found.name.clone()) } else { None }
    }

    pub(super) fn command(&self, found: &Found) -> Option<Command<'_>> {
        Command::framed(self.buffer.get(found.place.clone())?)
    }

    /// What was found before is no longer asked for.
    pub(super) fn forget(&mut self) {
        self.words.clear();
        // A client that sends on while its commands are proxied never leaves the buffer empty. No
        // more is moved than is given up.
        if self.taken >= BEFORE_AUTH && self.taken >= self.filled - self.taken {
            self.move_up();
        }
    }

    /// All of it, for places in it.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.buffer[..self.filled]
    }

    /// What came and was not taken.
    pub(super) fn ahead(&self) -> &[u8] {
        &self.buffer[self.taken..self.filled]
    }

    /// Returns whether a large command has begun. Before authentication a small one is large.
    pub(super) fn is_large(&self, is_authenticated: bool) -> bool {
        let large = if is_authenticated { LARGE } else { BEFORE_AUTH as u64 };
        self.framer.is_inside()
            && self.framer.frame_bytes().saturating_add(self.framer.wanted()) > large
    }

    /// Returns whether a command has begun that has more arguments than engines take before a
    /// login.
    pub(super) fn has_many_args(&self) -> bool {
        const BEFORE_AUTH_ARGS: usize = 10;
        let many = |command: Command<'_>| command.args().len() > BEFORE_AUTH_ARGS;
        self.framer.is_inside() && Command::framed(self.ahead()).is_some_and(many)
    }

    /// What is known of the command that has begun.
    pub(super) fn begun(&self) -> Begun<'_> {
        let Some(command) = Command::framed(self.ahead()) else { return Begun::Unknown };
        if command.inline().is_some() {
            return Begun::Nameless;
        }
        let mut args = command.args();
        let expected = args.len();
        match (word(&mut args), if expected > 1 { word(&mut args) } else { Word::TooLong }) {
            (Word::Missing, _) | (_, Word::Missing) => Begun::Unknown,
            (Word::TooLong, _) => Begun::Nameless,
            (Word::Is(name), Word::TooLong) => Begun::Named { name, first: None },
            (Word::Is(name), Word::Is(first)) => Begun::Named { name, first: Some(first) },
        }
    }

    /// Returns the memory that it takes.
    pub(super) fn held_bytes(&self) -> usize {
        self.buffer.capacity()
    }

    /// What there is of the command that has begun, to go on its way; and whether that is all of
    /// it. Nothing else may have a place in the input. An error if it is no command: where it ends
    /// is for the engine to say.
    pub(super) fn stream(&mut self, out: &mut Vec<u8>) -> Result<bool, CommandError> {
        let (end, is_whole) = match self.peek()? {
            Some(found) => (found.place.end, true),
            None => (self.framed, false),
        };
        out.clear();
        out.extend_from_slice(&self.buffer[self.taken..end]);
        (self.taken, self.framed) = (end, end);
        self.forget();
        self.move_up();
        Ok(is_whole)
    }

    /// Room for what comes next, at most so much. Places are no longer valid.
    pub(super) fn room(&mut self, max: usize) -> &mut [u8] {
        self.move_up();
        if self.buffer.len() > 2 * LARGE as usize && self.filled < READ_MAX {
            self.buffer.truncate(self.filled); // what a client sent far ahead is over
            self.buffer.shrink_to(self.filled + self.read);
        }
        let end = self.filled + self.read.min(max);
        if self.buffer.len() < end {
            self.buffer.resize(end, 0);
        }
        &mut self.buffer[self.filled..end]
    }

    /// So much was read into the room: who sends much is read from in larger pieces.
    pub(super) fn read(&mut self, count: usize) {
        self.filled += count;
        if count >= self.read {
            self.read = (self.read * 4).min(READ_MAX);
        }
    }

    /// More, while places are in use.
    pub(super) fn append(&mut self, bytes: &[u8]) {
        self.buffer.truncate(self.filled);
        self.buffer.extend_from_slice(bytes);
        self.filled = self.buffer.len();
    }

    /// What was not taken to the beginning.
    fn move_up(&mut self) {
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

    fn peeked(input: &mut Input) -> Option<Vec<u8>> {
        let found = input.peek().expect("no error")?;
        Some(input.bytes()[found.place].to_vec())
    }

    #[test]
    fn commands_are_found_whatever_the_pieces() {
        let all = b"*1\r\n$4\r\nPING\r\n*2\r\n$3\r\nGET\r\n$1\r\nk\r\n\r\nPING\r\n";
        for piece in 1..all.len() {
            let (mut input, mut found) = (Input::default(), Vec::new());
            for bytes in all.chunks(piece) {
                input.room(READ_MAX)[..bytes.len()].copy_from_slice(bytes);
                input.read(bytes.len());
                while let Some(command) = peeked(&mut input) {
                    let again = input.peek().expect("no error").expect("still there");
                    assert_eq!(input.bytes()[again.place.clone()], command);
                    let words: Vec<_> = input.words(&again).iter().collect();
                    let args: Vec<_> = input.command(&again).expect("framed").args().collect();
                    assert_eq!(words, args);
                    found.push(command);
                    input.take(&again);
                }
            }
            assert_eq!(found.concat(), all);
            assert_eq!(found.len(), 4);
            assert!(input.ahead().is_empty());
        }
    }

    #[test]
    fn a_large_command_streams_to_its_end() {
        let mut input = Input::default();
        input.append(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1000000\r\n");
        input.append(&[b'x'; 1000]);
        assert_eq!(peeked(&mut input), None);
        assert!(input.is_large(true));
        assert_eq!(input.begun(), Begun::Named { name: b"SET", first: Some(b"k") });
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
        assert_eq!((input.ahead(), input.is_large(true)), (&b"*1\r\n"[..], false));
    }

    /// What was taken is given up, though there is always something ahead.
    #[test]
    fn stays_small_while_a_client_sends_on() {
        let command = [&b"*2\r\n$4\r\nECHO\r\n$1000\r\n"[..], &[b'x'; 1000], b"\r\n"].concat();
        let mut input = Input::default();
        input.append(&command[..500]);
        for _ in 0..1000 {
            input.forget();
            input.append(&command[500..]);
            input.append(&command[..500]);
            let found = input.peek().expect("no error").expect("a command");
            assert_eq!(input.bytes()[found.place.clone()], command);
            input.take(&found);
        }
        assert!(input.held_bytes() <= 4 * BEFORE_AUTH, "{} bytes", input.held_bytes());
    }

    /// S1: a command is not classified before its name has arrived.
    #[test]
    fn knows_a_large_command_by_its_name_only() {
        let mut input = Input::default();
        for (piece, expected) in [
            (&b"*60001\r\n"[..], Begun::Unknown),
            (b"$11\r\nUNSUB", Begun::Unknown),
            (b"SCRIBE\r\n", Begun::Unknown),
            (b"$2\r\nc1\r\n", Begun::Named { name: b"UNSUBSCRIBE", first: Some(b"c1") }),
        ] {
            input.append(piece);
            assert_eq!(peeked(&mut input), None);
            assert!(input.is_large(true));
            assert_eq!(input.begun(), expected);
        }
        let mut input = Input::default();
        input.append(b"*2\r\n$100000\r\n");
        assert_eq!(input.begun(), Begun::Nameless);
        let mut input = Input::default();
        input.append(b"*3\r\n$4\r\nECHO\r\n$1000000\r\nx");
        assert_eq!(input.begun(), Begun::Named { name: b"ECHO", first: None });
    }
}
