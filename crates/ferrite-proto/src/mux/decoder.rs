//! Decodes the records of messages that arrive in pieces of any size.
//!
//! A message has whole records. The decoder keeps at most one record that is not DATA, which has a
//! fixed size, and never the bytes of a stream.

use super::record::{
    CONTROL_BYTES, Control, DataHead, HEAD_BYTES, Head, RecordError, decode_control, decode_head,
};

/// What [`Decoder::next`] has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decoded<'a> {
    /// A record that is not DATA.
    Control(Control),
    /// The head of a DATA record. Its bytes follow.
    Data(DataHead),
    /// The next bytes of the DATA record.
    Bytes(&'a [u8]),
}

/// Finds the records of messages.
///
/// ```
/// use ferrite_proto::mux::{Class, Control, Decoded, Decoder, RecordError, Side, StreamId};
///
/// let stream = StreamId::new(Side::Caller, Class::Interactive, 1).unwrap();
/// let record = Control::Fin { stream };
/// let (mut decoder, encoded) = (Decoder::default(), record.encode());
/// let (mut first, mut second) = encoded.split_at(5);
/// assert_eq!(decoder.next(&mut first), Ok(None));
/// assert_eq!(decoder.end_message(), Err(RecordError::Truncated));
/// assert_eq!(decoder.next(&mut second), Ok(Some(Decoded::Control(record))));
/// assert_eq!(decoder.end_message(), Ok(()));
/// ```
#[derive(Debug)]
pub struct Decoder {
    state: State,
    /// The start of a record.
    record: [u8; CONTROL_BYTES],
    filled: usize,
}

#[derive(Debug, Clone, Copy)]
enum State {
    /// The decoder gathers the head of a record.
    Head,
    /// The decoder gathers a record of this size, whose head is complete.
    Control { size: usize },
    /// The decoder passes on the bytes of a DATA record; this number of them has not arrived.
    Data { missing: u32 },
}

impl Default for Decoder {
    fn default() -> Self {
        Self { state: State::Head, record: [0; CONTROL_BYTES], filled: 0 }
    }
}

impl Decoder {
    /// Decodes until there is something to return, and removes the decoded bytes from the front of
    /// `piece`. Returns `None` when the piece is used up.
    ///
    /// # Errors
    /// If the bytes are no valid record. The decoder must not be used again.
    pub fn next<'a>(&mut self, piece: &mut &'a [u8]) -> Result<Option<Decoded<'a>>, RecordError> {
        loop {
            match self.state {
                State::Data { missing } => {
                    let taken = piece.len().min(missing as usize);
                    if taken == 0 {
                        return Ok(None);
                    }
                    let (bytes, rest) = piece.split_at(taken);
                    *piece = rest;
                    let missing = missing - taken as u32;
                    self.state = if missing == 0 { State::Head } else { State::Data { missing } };
                    return Ok(Some(Decoded::Bytes(bytes)));
                }
                State::Head => {
                    if !self.gather(HEAD_BYTES, piece) {
                        return Ok(None);
                    }
                    let head = std::array::from_fn(|index| self.record[index]);
                    match decode_head(&head)? {
                        Head::Data(head) => {
                            self.filled = 0;
                            self.state = State::Data { missing: head.length };
                            return Ok(Some(Decoded::Data(head)));
                        }
                        Head::Control { length } => {
                            self.state = State::Control { size: HEAD_BYTES + length };
                        }
                    }
                }
                State::Control { size } => {
                    if !self.gather(size, piece) {
                        return Ok(None);
                    }
                    self.filled = 0;
                    self.state = State::Head;
                    return decode_control(&self.record).map(|it| Some(Decoded::Control(it)));
                }
            }
        }
    }

    /// Checks that the message ends after a whole record.
    ///
    /// # Errors
    /// [`RecordError::Truncated`] if it ends within one.
    pub fn end_message(&self) -> Result<(), RecordError> {
        match self.state {
            State::Head if self.filled == 0 => Ok(()),
            _ => Err(RecordError::Truncated),
        }
    }

    /// Moves bytes from `piece` to the record until the record has `size` bytes. Returns whether it
    /// has them all.
    fn gather(&mut self, size: usize, piece: &mut &[u8]) -> bool {
        let taken = piece.len().min(size - self.filled);
        let (bytes, rest) = piece.split_at(taken);
        self.record[self.filled..self.filled + taken].copy_from_slice(bytes);
        self.filled += taken;
        *piece = rest;
        self.filled == size
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::mux::cause::Cause;
    use crate::mux::id::{Class, Side, StreamId};
    use crate::mux::record::Route;

    fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<_> = text.chars().filter_map(|c| c.to_digit(16)).collect();
        digits.chunks(2).map(|pair| u8::try_from(pair[0] << 4 | pair[1]).expect("a byte")).collect()
    }

    fn id(side: Side, class: Class, number: u32) -> StreamId {
        StreamId::new(side, class, number).expect("a valid name")
    }

    fn route(destination: &str, source: &str) -> Route {
        let address = |text: &str| text.parse().expect("an address");
        Route { destination: address(destination), source: address(source) }
    }

    fn records() -> Vec<(Control, &'static str)> {
        let caller = id(Side::Caller, Class::Interactive, 1);
        let called = id(Side::Called, Class::Bulk, 0x0010_2030);
        let four = route("10.0.0.2:7001", "10.0.0.1:38808");
        let six = route("[2001:db8::1]:6379", "[2001:db8::2]:65535");
        vec![
            (
                Control::Open { stream: caller, route: four },
                "01000000 0b000000 28000000 \
                 0400591b 0a000002 00000000 00000000 00000000 \
                 04009897 0a000001 00000000 00000000 00000000",
            ),
            (
                Control::Open { stream: called, route: six },
                "01000000 84018100 28000000 \
                 0600eb18 20010db8 00000000 00000000 00000001 \
                 0600ffff 20010db8 00000000 00000000 00000002",
            ),
            (
                Control::Grant { stream: caller, bytes: 0x20000, answers_move: false },
                "03000000 0b000000 04000000 00000200",
            ),
            (
                Control::Grant { stream: caller, bytes: 0, answers_move: true },
                "03010000 0b000000 04000000 00000000",
            ),
            (Control::Fin { stream: called }, "04000000 84018100 00000000"),
            (
                Control::Reset { stream: caller, cause: Cause::REFUSED },
                "05000000 0b000000 04000000 02000000",
            ),
            (Control::GoAway { last: None }, "06000000 00000000 00000000"),
            (Control::GoAway { last: Some(caller) }, "06000000 0b000000 00000000"),
        ]
    }

    /// A record, or the head and the bytes of a DATA record.
    type Found = (Option<Control>, Option<DataHead>, Vec<u8>);

    /// Decodes a message in pieces of these sizes, and joins the bytes of each DATA record.
    fn decode(bytes: &[u8], sizes: &[usize]) -> Result<Vec<Found>, RecordError> {
        let (mut decoder, mut found, mut rest) = (Decoder::default(), Vec::new(), bytes);
        let mut sizes = sizes.iter().copied().chain(std::iter::repeat(usize::MAX));
        while !rest.is_empty() {
            let size = sizes.next().unwrap_or(usize::MAX).clamp(1, rest.len());
            let (mut piece, after) = rest.split_at(size);
            rest = after;
            while let Some(next) = decoder.next(&mut piece)? {
                match next {
                    Decoded::Control(control) => found.push((Some(control), None, Vec::new())),
                    Decoded::Data(head) => found.push((None, Some(head), Vec::new())),
                    Decoded::Bytes(bytes) => {
                        assert!(!bytes.is_empty());
                        found
                            .last_mut()
                            .expect("the bytes follow a head")
                            .2
                            .extend_from_slice(bytes);
                    }
                }
            }
            assert!(piece.is_empty());
        }
        decoder.end_message().map(|()| found)
    }

    #[test]
    fn encodes_and_decodes_golden_bytes() {
        for (record, golden) in records() {
            let golden = hex(golden);
            assert_eq!(record.encode()[..], golden, "{record:?}");
            assert_eq!(decode(&golden, &[]), Ok(vec![(Some(record), None, Vec::new())]));
        }
        let stream = id(Side::Caller, Class::Interactive, 1);
        for (next_class, golden) in [
            (None, "02000000 0b000000 03000000"),
            (Some(Class::Bus), "02010000 0b000000 03000000"),
            (Some(Class::Bulk), "02050000 0b000000 03000000"),
        ] {
            let head = DataHead { stream, length: 3, next_class };
            assert_eq!(head.encode()[..], hex(golden));
            let message = [&head.encode()[..], b"abc"].concat();
            assert_eq!(decode(&message, &[]), Ok(vec![(None, Some(head), b"abc".to_vec())]));
        }
    }

    #[test]
    fn ignores_reserved_bytes_and_unknown_flags() {
        let mut bytes = records()[4].0.encode().to_vec();
        bytes[1..4].fill(0xFF);
        assert_eq!(decode(&bytes, &[]), Ok(vec![(Some(records()[4].0), None, Vec::new())]));
    }

    #[test]
    fn rejects_invalid_records() {
        for (bytes, error) in [
            ("00000000 0b000000 00000000", RecordError::Type { kind: 0 }),
            ("07000000 0b000000 00000000", RecordError::Type { kind: 7 }),
            ("01000000 0b000000 27000000", RecordError::Length { kind: 1, length: 39 }),
            ("02000000 0b000000 00000000", RecordError::Length { kind: 2, length: 0 }),
            ("03000000 0b000000 ffffffff", RecordError::Length { kind: 3, length: u32::MAX }),
            ("04000000 0b000000 01000000", RecordError::Length { kind: 4, length: 1 }),
            ("05000000 0b000000 00000000", RecordError::Length { kind: 5, length: 0 }),
            ("06000000 0b000000 04000000", RecordError::Length { kind: 6, length: 4 }),
            ("04000000 0f000000 00000000", RecordError::Stream { kind: 4, value: 15 }),
            ("02000000 01000000 01000000", RecordError::Stream { kind: 2, value: 1 }),
            ("06000000 01000000 00000000", RecordError::Stream { kind: 6, value: 1 }),
            ("02070000 0b000000 01000000", RecordError::Class { value: 3 }),
            ("03000000 0b000000 04000000 00000000", RecordError::EmptyGrant),
            ("04000000 0b000000 000000", RecordError::Truncated),
            ("03000000 0b000000 04000000 0000", RecordError::Truncated),
            ("02000000 0b000000 02000000 00", RecordError::Truncated),
        ] {
            assert_eq!(decode(&hex(bytes), &[]), Err(error), "{bytes}");
            assert!(!error.to_string().is_empty());
        }
        let mut open = records()[0].0.encode().to_vec();
        open[32] = 5;
        assert_eq!(decode(&open, &[]), Err(RecordError::Family { family: 5 }));
    }

    proptest! {
        #[test]
        fn pieces_of_any_size_give_the_same_records(
            order in vec((0_usize..9, 1_usize..40), 1..20),
            sizes in vec(1_usize..30, 0..60),
        ) {
            let mut message = Vec::new();
            for (which, length) in order {
                match records().get(which) {
                    Some((record, _)) => message.extend_from_slice(&record.encode()),
                    None => {
                        let stream = id(Side::Called, Class::Bus, length as u32);
                        let head = DataHead { stream, length: length as u32, next_class: None };
                        message.extend_from_slice(&head.encode());
                        message.extend((0..length).map(|at| at as u8));
                    }
                }
            }
            prop_assert_eq!(decode(&message, &sizes), decode(&message, &[]));
            prop_assert!(decode(&message, &[]).is_ok());
        }

        #[test]
        fn any_bytes_end_in_records_or_an_error(bytes in vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes, &[7, 1, 30]);
        }
    }
}
