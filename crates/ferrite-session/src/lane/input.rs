//! What a client has sent and nobody has answered yet.

use std::ops::Range;

use ferrite_proto::resp::{Args, Command, CommandError, CommandFramer, Limits};

/// Commands beyond this go on to the engine while they come, instead of waiting here for their end.
const LARGE: u64 = 256 << 10;
/// What is read at once, at first and at most.
const READ: [usize; 2] = [1 << 10, 64 << 10];

pub(super) struct Input {
    bytes: Vec<u8>,
    /// Up to here commands were taken.
    taken: usize,
    /// Up to here the framer has looked.
    framed: usize,
    /// The command that lies whole at `taken`.
    next: Option<Range<usize>>,
    framer: CommandFramer,
    /// How much the next read asks for.
    read: usize,
}

impl Default for Input {
    fn default() -> Self {
        // The engine's limits are its own: what is too large goes there, and is refused there in its words.
        let limits =
            Limits { bulk_bytes: u64::MAX >> 1, multibulk_args: i32::MAX as u64, ..Limits::default() };
        Self {
            bytes: Vec::new(),
            taken: 0,
            framed: 0,
            next: None,
            framer: CommandFramer::new(limits),
            read: READ[0],
        }
    }
}

impl Input {
    /// Where the next whole command lies, if there is one.
    pub(super) fn peek(&mut self) -> Result<Option<Range<usize>>, CommandError> {
        if self.next.is_none() && self.framed < self.bytes.len() {
            let progress = self.framer.feed(&self.bytes[self.framed..])?;
            self.framed += progress.consumed;
            self.next = progress.complete.then_some(self.taken..self.framed);
        }
        Ok(self.next.clone())
    }

    /// The command that [`Input::peek`] has shown is taken.
    pub(super) fn take(&mut self) {
        if let Some(command) = self.next.take() {
            self.taken = command.end;
        }
    }

    pub(super) fn command(&self, place: &Range<usize>) -> Option<Command<'_>> {
        Command::framed(&self.bytes[place.clone()])
    }

    /// All of it, for places in it.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// What came and was not taken.
    pub(super) fn ahead(&self) -> &[u8] {
        &self.bytes[self.taken..]
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
        let is_whole = match self.peek() {
            Ok(place) => place.is_some(),
            // The engine will find the same, and say so: it gets what there is.
            Err(_) => {
                self.framed = self.bytes.len();
                true
            }
        };
        out.clear();
        out.extend_from_slice(&self.bytes[self.taken..self.framed]);
        self.next = None;
        self.bytes.drain(..self.framed);
        (self.taken, self.framed) = (0, 0);
        is_whole
    }

    /// Room for what comes next. Places are no longer valid.
    pub(super) fn room(&mut self) -> &mut Vec<u8> {
        if self.taken > 0 {
            self.bytes.drain(..self.taken);
            self.framed -= self.taken;
            self.next = self.next.take().map(|next| next.start - self.taken..next.end - self.taken);
            self.taken = 0;
        }
        self.bytes.reserve(self.read);
        &mut self.bytes
    }

    /// So much was read into the room: who sends much is read from in larger pieces.
    pub(super) fn read(&mut self, count: usize) {
        if count >= self.read {
            self.read = (self.read * 4).min(READ[1]);
        }
    }

    /// More, while places are in use.
    pub(super) fn append(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peeked(input: &mut Input) -> Option<Vec<u8>> {
        let place = input.peek().expect("no error")?;
        Some(input.bytes()[place].to_vec())
    }

    #[test]
    fn commands_are_found_whatever_the_pieces() {
        let all = b"*1\r\n$4\r\nPING\r\n*2\r\n$3\r\nGET\r\n$1\r\nk\r\n\r\nPING\r\n";
        for piece in 1..all.len() {
            let (mut input, mut found) = (Input::default(), Vec::new());
            for bytes in all.chunks(piece) {
                input.room().extend_from_slice(bytes);
                while let Some(command) = peeked(&mut input) {
                    assert_eq!(peeked(&mut input).as_ref(), Some(&command), "still there");
                    found.push(command);
                    input.take();
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
