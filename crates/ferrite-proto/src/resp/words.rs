//! A fast path for commands in the plain form that clients send. It finds the end of a command and
//! its words in one pass.

use std::ops::Range;

/// The maximum number of words in a plain command.
const WORDS_MAX: usize = 33;
/// The maximum number of digits in the length of a plain word.
const DIGITS_MAX: usize = 7;

/// Finds the whole command at `at` in `bytes`, and appends the ranges of its words to `places`.
/// Returns where the command ends.
///
/// Returns `None` if the command is not whole or not in the plain form: a multibulk of few words,
/// with lengths of few digits and exact line ends. A [`CommandFramer`](super::CommandFramer) must
/// then parse the command.
///
/// ```
/// use ferrite_proto::resp::{Words, plain_command};
///
/// let (input, mut places) = (b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n*1\r\n", Vec::new());
/// assert_eq!(plain_command(input, 0, &mut places), Some(20));
/// assert_eq!(Words::new(input, &places).iter().collect::<Vec<_>>(), [&b"GET"[..], b"k"]);
/// assert_eq!(plain_command(input, 20, &mut places), None); // not whole
/// ```
#[must_use]
#[inline]
pub fn plain_command(bytes: &[u8], at: usize, places: &mut Vec<Range<usize>>) -> Option<usize> {
    let before = places.len();
    let end = find(bytes, at, places);
    if end.is_none() {
        places.truncate(before);
    }
    end
}

#[inline]
fn find(bytes: &[u8], at: usize, places: &mut Vec<Range<usize>>) -> Option<usize> {
    let (count, mut at) = line(bytes, at, b'*')?;
    if count == 0 || count > WORDS_MAX {
        return None;
    }
    for _ in 0..count {
        let (size, start) = line(bytes, at, b'$')?;
        let end = start + size; // the sum cannot overflow, because a length has few digits
        if bytes.get(end..)?.first_chunk() != Some(b"\r\n") {
            return None;
        }
        places.push(start..end);
        at = end + 2;
    }
    Some(at)
}

/// Parses the number after `kind` at `at`. Returns the number and the start of the next line.
#[inline]
fn line(bytes: &[u8], at: usize, kind: u8) -> Option<(usize, usize)> {
    let digit = |byte: u8| usize::from(byte.wrapping_sub(b'0'));
    let [mark, first, second, third] = *bytes.get(at..)?.first_chunk()?;
    if mark != kind {
        return None;
    }
    // Most numbers have one or two digits.
    if [second, third] == *b"\r\n" && digit(first) < 10 {
        return Some((digit(first), at + 4));
    }
    if !(1..10).contains(&digit(first)) {
        return None;
    }
    if third == b'\r' && digit(second) < 10 && bytes.get(at + 4) == Some(&b'\n') {
        return Some((digit(first) * 10 + digit(second), at + 5));
    }
    long_line(bytes, at + 1)
}

/// Parses the number at `at`, which does not begin with a zero. Returns the number and the start of
/// the next line.
fn long_line(bytes: &[u8], at: usize) -> Option<(usize, usize)> {
    let mut number = 0;
    for (index, byte) in bytes.get(at..)?.iter().take(DIGITS_MAX + 1).enumerate() {
        match byte {
            b'0'..=b'9' => number = number * 10 + usize::from(byte - b'0'),
            b'\r' if bytes.get(at + index + 1) == Some(&b'\n') => {
                return Some((number, at + index + 2));
            }
            _ => return None,
        }
    }
    None
}

/// The words of a command, as slices of its bytes.
#[derive(Debug, Clone, Copy)]
pub struct Words<'a> {
    bytes: &'a [u8],
    places: &'a [Range<usize>],
}

impl<'a> Words<'a> {
    /// Creates the words from their ranges in `bytes`.
    #[must_use]
    #[inline]
    pub fn new(bytes: &'a [u8], places: &'a [Range<usize>]) -> Self {
        Self { bytes, places }
    }

    /// Returns the number of words.
    #[must_use]
    #[inline]
    pub fn len(self) -> usize {
        self.places.len()
    }

    /// Returns whether there are no words.
    #[must_use]
    #[inline]
    pub fn is_empty(self) -> bool {
        self.places.is_empty()
    }

    /// Returns the word at `index`, if there is one.
    #[must_use]
    #[inline]
    pub fn get(self, index: usize) -> Option<&'a [u8]> {
        self.bytes.get(self.places.get(index)?.clone())
    }

    /// Returns the words after the first.
    #[must_use]
    #[inline]
    pub fn args(self) -> Self {
        Self { places: self.places.get(1..).unwrap_or_default(), ..self }
    }

    /// Iterates over all words.
    pub fn iter(self) -> impl ExactSizeIterator<Item = &'a [u8]> + Clone {
        self.places.iter().map(move |place| self.bytes.get(place.clone()).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Command, CommandFramer, Limits, Progress, encode_command};
    use super::*;

    #[test]
    fn finds_plain_commands() {
        for (input, words) in [
            (&b"*1\r\n$4\r\nPING\r\n"[..], &[&b"PING"[..]][..]),
            (b"*2\r\n$3\r\nGET\r\n$0\r\n\r\n*1", &[b"GET", b""]),
            (b"*2\r\n$4\r\nECHO\r\n$12\r\n$4\r\nECHO\r\n*1\r\n", &[b"ECHO", b"$4\r\nECHO\r\n*1"]),
        ] {
            let mut places = Vec::new();
            assert!(plain_command(input, 0, &mut places).is_some(), "{input:?}");
            assert_eq!(Words::new(input, &places).iter().collect::<Vec<_>>(), words);
        }
    }

    #[test]
    fn leaves_other_commands_to_the_framer() {
        let many = format!("*34\r\n{}", "$1\r\nx\r\n".repeat(34));
        for input in [
            "",
            "*",
            "*1",
            "*1\r",
            "*1\r\n",
            "*1\r\n$4\r\nPING",
            "*1\r\n$4\r\nPING\r",
            "*0\r\n",
            "*-1\r\n",
            "PING\r\n",
            "\r\n",
            "*01\r\n$4\r\nPING\r\n",
            "*1\r\n$04\r\nPING\r\n",
            "*1\rx$4\r\nPING\r\n",
            "*1\r\n$4\rxPING\r\n",
            "*1\r\n$4\r\nPINGxx",
            "*\r\n",
            "*1\r\n$\r\n\r\n",
            "*1\r\n+OK\r\n",
            "*1\r\n$12345678\r\nPING\r\n",
            &many,
        ] {
            let before = 7..8;
            let mut places = vec![before.clone()];
            assert_eq!(plain_command(input.as_bytes(), 0, &mut places), None, "{input:?}");
            assert_eq!(places, [before], "the places are unchanged");
        }
    }

    proptest! {
        /// Checks that the framer finds the same command, with the same end.
        #[test]
        fn agrees_with_the_framer(
            words in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 1..4),
            changed in prop::option::of((any::<prop::sample::Index>(), any::<u8>())),
            more in prop::collection::vec(any::<u8>(), 0..4),
        ) {
            let mut input = Vec::new();
            encode_command(words.iter().map(Vec::as_slice), &mut input);
            let is_changed = changed.is_some();
            if let Some((at, byte)) = changed {
                let at = at.index(input.len());
                input[at] = byte;
            }
            input.extend(more);
            let mut places = Vec::new();
            match plain_command(&input, 0, &mut places) {
                Some(end) => {
                    let framed = CommandFramer::new(Limits::default()).feed(&input);
                    prop_assert_eq!(framed, Ok(Progress { consumed: end, complete: true }));
                    let command = Command::framed(&input[..end]);
                    let command = command.expect("the framer has found the command");
                    let found: Vec<_> = Words::new(&input, &places).iter().collect();
                    prop_assert_eq!(command.args().collect::<Vec<_>>(), found);
                }
                None => prop_assert!(is_changed),
            }
        }
    }
}
