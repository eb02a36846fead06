//! What a client has sent and nobody has answered yet.

use std::ops::Range;

use ferrite_proto::resp::{Args, Command, CommandError, CommandFramer, Limits, Words, plain_command};

/// Commands beyond this go on to the engine while they come, instead of waiting here for their end.
const LARGE: u64 = 256 << 10;
/// What is read at once, at first and at most.
const READ: [usize; 2] = [1 << 10, 64 << 10];

/// A whole command.
#[derive(Debug, Clone)]
pub(super) struct Found {
    /// Where it lies.
    pub(super) place: Range<usize>,
    /// Which of the words are its own; none if it is not in the plain form.
    words: Range<usize>,
}

pub(super) struct Input {
    /// With room behind what came: zeros, or what was there before. To be read into it must have been written once.
    buffer: Vec<u8>,
    /// Up to here it came.
    filled: usize,
    /// Up to here commands were taken.
    taken: usize,
    /// Up to here the framer has looked. It is further than that if a command has begun and not ended.
    framed: usize,
    framer: CommandFramer,
    /// Where the words of commands are that were found since places were last forgotten.
    words: Vec<Range<usize>>,
    /// How much the next read asks for.
    read: usize,
}

impl Default for Input {
    fn default() -> Self {
        // The engine's limits are its own: what is too large goes there, and is refused there in its words.
        let limits =
            Limits { bulk_bytes: u64::MAX >> 1, multibulk_args: i32::MAX as u64, ..Limits::default() };
        Self {
            buffer: Vec::new(),
            filled: 0,
            taken: 0,
            framed: 0,
            framer: CommandFramer::new(limits),
            words: Vec::new(),
            read: READ[0],
        }
    }
}

impl Input {
    /// The next whole command, if there is one.
    #[inline]
    pub(super) fn peek(&mut self) -> Result<Option<Found>, CommandError> {
        let first = self.words.len();
        let end = if self.framer.is_inside() { None } else { self.plain() };
        let end = match end {
            Some(end) => Some(end),
            None => self.frame()?,
        };
        Ok(end.map(|end| Found { place: self.taken..end, words: first..self.words.len() }))
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
    pub(super) fn name(&self, found: &Found) -> Option<&[u8]> {
        self.buffer.get(self.words.get(found.words.start..found.words.end)?.first()?.clone())
    }

    pub(super) fn command(&self, found: &Found) -> Option<Command<'_>> {
        Command::framed(self.buffer.get(found.place.clone())?)
    }

    /// What was found before is no longer asked for.
    pub(super) fn forget(&mut self) {
        self.words.clear();
    }

    /// All of it, for places in it.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.buffer[..self.filled]
    }

    /// What came and was not taken.
    pub(super) fn ahead(&self) -> &[u8] {
        &self.buffer[self.taken..self.filled]
    }

    /// Whether a large command has begun.
    pub(super) fn is_large(&self) -> bool {
        self.framer.is_inside() && self.framer.frame_bytes().saturating_add(self.framer.wanted()) > LARGE
    }

    /// The arguments of the command that has begun, as far as they are there.
    pub(super) fn begun(&self) -> Option<Args<'_>> {
        Command::framed(self.ahead()).map(|command| command.args())
    }

    /// What there is of the command that has begun, to go on its way; and whether that is all of it. Nothing else may have a place
    /// in the input.
    pub(super) fn stream(&mut self, out: &mut Vec<u8>) -> bool {
        let (end, is_whole) = match self.peek() {
            Ok(Some(found)) => (found.place.end, true),
            Ok(None) => (self.framed, false),
            // The engine will find the same, and say so: it gets what there is.
            Err(_) => (self.filled, true),
        };
        out.clear();
        out.extend_from_slice(&self.buffer[self.taken..end]);
        self.forget();
        (self.taken, self.framed) = (end, end);
        self.move_up();
        is_whole
    }

    /// Room for what comes next. Places are no longer valid.
    pub(super) fn room(&mut self) -> &mut [u8] {
        self.move_up();
        if self.buffer.len() > 2 * LARGE as usize && self.filled < READ[1] {
            self.buffer.truncate(self.filled); // what a client sent far ahead is over
            self.buffer.shrink_to(self.filled + self.read);
        }
        let end = self.filled + self.read;
        if self.buffer.len() < end {
            self.buffer.resize(end, 0);
        }
        &mut self.buffer[self.filled..end]
    }

    /// So much was read into the room: who sends much is read from in larger pieces.
    pub(super) fn read(&mut self, count: usize) {
        self.filled += count;
        if count >= self.read {
            self.read = (self.read * 4).min(READ[1]);
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
                input.room()[..bytes.len()].copy_from_slice(bytes);
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
        assert!(input.is_large());
        assert_eq!(input.begun().and_then(|mut args| args.next()), Some(&b"SET"[..]));
        let (mut out, mut total) = (Vec::new(), 0);
        assert!(!input.stream(&mut out));
        total += out.len();
        input.append(&[b'x'; 999_000]);
        assert!(!input.stream(&mut out));
        total += out.len();
        input.append(b"\r\n*1\r\n");
        assert!(input.stream(&mut out));
        total += out.len();
        assert_eq!(total, b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1000000\r\n\r\n".len() + 1_000_000);
        assert_eq!((input.ahead(), input.is_large()), (&b"*1\r\n"[..], false));
    }
}
