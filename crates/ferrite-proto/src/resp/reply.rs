//! Where a reply ends.
//!
//! ```text
//!   +OK  -ERR …  :1  _  #t  ,1.5  (123        one line
//!   $3 …  !3 …  =7 txt:…                      a length, then that many bytes and a line end
//!   *2  ~2  >2  %2                            that many values follow, of a map twice as many
//!   |1                                        attributes: pairs follow, then the value that they belong to
//!   $?  ;4 …  ;0                              a string in chunks
//!   *?  ~?  %?  …  .                          values until the end
//!   $-1  *-1                                  the nulls of RESP2
//! ```
//!
//! Attributes belong to the frame of their value. A push is a frame of its own, never inside
//! another.

mod error;
mod state;
#[cfg(test)]
mod tests;

pub use error::ReplyError;

use super::number::{Integer, Length};
use super::{Limits, Progress};
use state::{Counted, Left, Level, Scalar, Size, State, Then};

/// Finds where replies and pushes end, whatever the pieces in which they come.
///
/// ```
/// use ferrite_proto::resp::{Limits, Progress, ReplyFramer};
///
/// let mut framer = ReplyFramer::new(Limits::default());
/// let piece = framer.feed(b"*2\r\n:1\r\n$5\r\nhel")?;
/// assert_eq!(piece, Progress { consumed: 15, complete: false });
/// let piece = framer.feed(b"lo\r\n+OK\r\n")?;
/// assert_eq!(piece, Progress { consumed: 4, complete: true });
/// # Ok::<(), ferrite_proto::resp::ReplyError>(())
/// ```
#[derive(Debug, Clone)]
pub struct ReplyFramer {
    limits: Limits,
    state: State,
    /// Aggregates that have begun and not ended.
    levels: Vec<Level>,
    /// Attributes came, their value did not begin yet.
    attributed: bool,
    frame_bytes: u64,
    /// Values of the reply that has begun.
    values: u64,
}

impl ReplyFramer {
    /// Before the first reply.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        let (levels, state) = (Vec::new(), State::Start);
        Self { limits, state, levels, attributed: false, frame_bytes: 0, values: 0 }
    }

    /// Whether a reply has begun and not ended.
    #[must_use]
    pub fn is_inside(&self) -> bool {
        self.state != State::Start
    }

    /// How many bytes of the reply that has begun were fed.
    #[must_use]
    pub fn frame_bytes(&self) -> u64 {
        self.frame_bytes
    }

    /// Takes the next bytes, up to the end of a reply. Feed the rest again.
    ///
    /// # Errors
    /// They are no reply. All later calls have the same error.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<Progress, ReplyError> {
        let mut at = 0;
        loop {
            if let State::Failed(error) = self.state {
                return Err(error);
            }
            let Some(rest) = bytes.get(at..).filter(|rest| !rest.is_empty()) else {
                self.frame_bytes = self.frame_bytes.saturating_add(at as u64);
                return Ok(Progress { consumed: at, complete: false });
            };
            let room =
                self.limits.reply_bytes.saturating_sub(self.frame_bytes).saturating_sub(at as u64);
            if room == 0 {
                self.state = State::Failed(ReplyError::TooLarge { limit: self.limits.reply_bytes });
                continue;
            }
            let room = usize::try_from(room).unwrap_or(usize::MAX);
            match self.step(rest.get(..room).unwrap_or(rest)) {
                Ok((taken, next)) => {
                    at += taken;
                    self.state = next;
                    if next == State::Start {
                        (self.frame_bytes, self.values) = (0, 0);
                        return Ok(Progress { consumed: at, complete: true });
                    }
                }
                Err(error) => self.state = State::Failed(error),
            }
        }
    }

    /// How many of the bytes, of which there is at least one, are taken, and what comes after.
    fn step(&mut self, rest: &[u8]) -> Result<(usize, State), ReplyError> {
        let first = rest.first().copied().unwrap_or_default();
        let next = match self.state {
            State::Start | State::Type => self.value_begins(first)?,
            State::Chunk if first == b';' => sized(Counted::Chunk),
            State::Chunk => return Err(ReplyError::Type { got: first }),
            State::Line { kind: Scalar::Text, len } => return self.text(len, rest),
            State::Line { kind, .. } if first == b'\r' => State::LineEnd(self.scalar_ends(kind)?),
            State::Line { kind, len } => {
                let kind = self.scalar(kind, len, first)?;
                State::Line { kind, len: len.saturating_add(1) }
            }
            State::Size { kind, size } if first == b'\r' => {
                State::LineEnd(self.size_ends(kind, size)?)
            }
            State::Size { kind, size } => State::Size { kind, size: next_of_size(size, first)? },
            State::LineEnd(then) if first == b'\n' => self.then(then)?,
            State::LineEnd(_) => return Err(ReplyError::LineEnd),
            State::Blob { left, format, chunk } => return blob(left, format, chunk, rest),
            State::BlobEnd { feed: false, chunk } if first == b'\r' => {
                State::BlobEnd { feed: true, chunk }
            }
            State::BlobEnd { feed: true, chunk: true } if first == b'\n' => State::Chunk,
            State::BlobEnd { feed: true, chunk: false } if first == b'\n' => self.value_ends(),
            State::BlobEnd { .. } => return Err(ReplyError::BlobEnd),
            State::Failed(error) => return Err(error),
        };
        Ok((1, next))
    }

    fn value_begins(&mut self, kind: u8) -> Result<State, ReplyError> {
        self.values = self.values.saturating_add(1);
        if self.values > self.limits.reply_values {
            return Err(ReplyError::TooMany { limit: self.limits.reply_values });
        }
        let line = |kind| State::Line { kind, len: 0 };
        let state = match kind {
            b'+' | b'-' | b',' => line(Scalar::Text),
            b':' => line(Scalar::Integer(Integer::default())),
            b'(' => line(Scalar::BigNumber { digits: false }),
            b'#' => line(Scalar::Boolean { seen: false }),
            b'_' => line(Scalar::Null),
            b'$' => sized(Counted::Bulk),
            b'!' => sized(Counted::BlobError),
            b'=' => sized(Counted::Verbatim),
            b'*' => sized(Counted::Array),
            b'~' => sized(Counted::Set),
            b'%' => sized(Counted::Map),
            b'|' => sized(Counted::Attribute),
            b'>' if self.levels.is_empty() => sized(Counted::Push),
            b'>' => return Err(ReplyError::NestedPush),
            b'.' if self.stream_may_end() => line(Scalar::End),
            got => return Err(ReplyError::Type { got }),
        };
        // Attributes may follow attributes; the value that they wait for is the next other one.
        self.attributed &= matches!(kind, b'|');
        Ok(state)
    }

    fn stream_may_end(&self) -> bool {
        let stream = self.levels.last().map(|level| level.left);
        !self.attributed && matches!(stream, Some(Left::Stream { odd: false, .. }))
    }

    /// The line of a text up to its end, of which `before` bytes came before.
    fn text(&self, before: u32, rest: &[u8]) -> Result<(usize, State), ReplyError> {
        let room = (self.limits.inline_bytes.saturating_sub(before) as usize).saturating_add(1);
        let within = rest.get(..room).unwrap_or(rest);
        match within.iter().position(|byte| matches!(byte, b'\r' | b'\n')) {
            Some(at) if within.get(at) == Some(&b'\n') => Err(ReplyError::LineEnd),
            Some(at) => Ok((at + 1, State::LineEnd(Then::Value))),
            None if within.len() == room => Err(ReplyError::LineTooLong),
            None => {
                let len = u32::try_from(within.len()).unwrap_or(u32::MAX).saturating_add(before);
                Ok((within.len(), State::Line { kind: Scalar::Text, len }))
            }
        }
    }

    /// The next byte of a scalar's line.
    fn scalar(&self, kind: Scalar, len: u32, byte: u8) -> Result<Scalar, ReplyError> {
        if len >= self.limits.inline_bytes {
            return Err(ReplyError::LineTooLong);
        }
        match kind {
            Scalar::Integer(mut number) => {
                number.push(byte).ok_or(ReplyError::Number)?;
                Ok(Scalar::Integer(number))
            }
            Scalar::BigNumber { digits } => match byte {
                b'0'..=b'9' => Ok(Scalar::BigNumber { digits: true }),
                b'+' | b'-' if len == 0 => Ok(Scalar::BigNumber { digits }),
                _ => Err(ReplyError::Number),
            },
            Scalar::Boolean { seen: false } if matches!(byte, b't' | b'f') => {
                Ok(Scalar::Boolean { seen: true })
            }
            Scalar::Boolean { .. } => Err(ReplyError::Boolean),
            Scalar::Null | Scalar::End | Scalar::Text => Err(ReplyError::LineEnd),
        }
    }

    fn scalar_ends(&self, kind: Scalar) -> Result<Then, ReplyError> {
        match kind {
            Scalar::Integer(number) => {
                number.finish().map(|_| Then::Value).ok_or(ReplyError::Number)
            }
            Scalar::BigNumber { digits: false } => Err(ReplyError::Number),
            Scalar::Boolean { seen: false } => Err(ReplyError::Boolean),
            Scalar::End => Ok(Then::EndOfStream),
            Scalar::BigNumber { .. } | Scalar::Boolean { .. } | Scalar::Null | Scalar::Text => {
                Ok(Then::Value)
            }
        }
    }

    fn size_ends(&self, kind: Counted, size: Size) -> Result<Then, ReplyError> {
        let is_blob =
            matches!(kind, Counted::Bulk | Counted::BlobError | Counted::Verbatim | Counted::Chunk);
        let wrong = if is_blob { ReplyError::BulkLength } else { ReplyError::AggregateLength };
        let size = match (size, kind) {
            (Size::Open, Counted::Bulk) => return Ok(Then::Chunks),
            (Size::Open, Counted::Array | Counted::Set | Counted::Map) => {
                let left = Left::Stream { map: kind == Counted::Map, odd: false };
                return Ok(Then::Level(Level { left, attribute: false }));
            }
            (Size::Open, _) => return Err(wrong),
            (Size::Number(number), _) => number.finish().ok_or(wrong)?,
        };
        if size == -1 && matches!(kind, Counted::Bulk | Counted::Array) {
            return Ok(Then::Value);
        }
        let limit = if is_blob { self.limits.bulk_bytes } else { self.limits.elements };
        let size = u64::try_from(size).ok().filter(|size| *size <= limit).ok_or(wrong)?;
        let level = |values, attribute| match values {
            0 if attribute => Then::Attributed,
            0 => Then::Value,
            values => Then::Level(Level { left: Left::Values(values), attribute }),
        };
        Ok(match kind {
            Counted::Verbatim if size < 4 => return Err(ReplyError::Verbatim),
            Counted::Verbatim => Then::Blob { len: size, verbatim: true, chunk: false },
            Counted::Bulk | Counted::BlobError => {
                Then::Blob { len: size, verbatim: false, chunk: false }
            }
            Counted::Chunk if size == 0 => Then::Value,
            Counted::Chunk => Then::Blob { len: size, verbatim: false, chunk: true },
            Counted::Array | Counted::Set | Counted::Push => level(size, false),
            Counted::Map | Counted::Attribute => {
                level(size.checked_mul(2).ok_or(wrong)?, kind == Counted::Attribute)
            }
        })
    }

    fn then(&mut self, then: Then) -> Result<State, ReplyError> {
        Ok(match then {
            Then::Value => self.value_ends(),
            Then::Blob { len, verbatim, chunk } => {
                State::Blob { left: len, format: verbatim.then_some(0), chunk }
            }
            Then::Chunks => State::Chunk,
            Then::Attributed => {
                self.attributed = true;
                State::Type
            }
            Then::Level(level) => {
                if self.levels.len() >= self.limits.depth as usize {
                    return Err(ReplyError::TooDeep { limit: self.limits.depth });
                }
                self.levels.push(level);
                // The attributes before attributes wait with them for the value.
                self.attributed = false;
                State::Type
            }
            Then::EndOfStream => {
                self.levels.pop();
                self.value_ends()
            }
        })
    }

    /// A value has ended, and with it all that end with it.
    fn value_ends(&mut self) -> State {
        while let Some(level) = self.levels.last_mut() {
            match &mut level.left {
                Left::Stream { map, odd } => {
                    *odd = *map && !*odd;
                    return State::Type;
                }
                Left::Values(left) => {
                    *left = left.saturating_sub(1);
                    if *left > 0 {
                        return State::Type;
                    }
                    if level.attribute {
                        self.levels.pop();
                        self.attributed = true;
                        return State::Type;
                    }
                    self.levels.pop();
                }
            }
        }
        State::Start
    }
}

fn sized(kind: Counted) -> State {
    State::Size { kind, size: Size::Number(Length::default()) }
}

/// The next byte of a length.
fn next_of_size(size: Size, byte: u8) -> Result<Size, ReplyError> {
    match size {
        Size::Number(number) if byte == b'?' && number == Length::default() => Ok(Size::Open),
        Size::Number(mut number) => {
            number.push(byte).ok_or(ReplyError::Length)?;
            Ok(Size::Number(number))
        }
        Size::Open => Err(ReplyError::Length),
    }
}

/// The bytes of a string. The first four of a verbatim string, which it has, are its format and a
/// colon.
fn blob(
    left: u64,
    format: Option<u8>,
    chunk: bool,
    rest: &[u8],
) -> Result<(usize, State), ReplyError> {
    let end = State::BlobEnd { feed: false, chunk };
    let behind = |left, format| if left == 0 { end } else { State::Blob { left, format, chunk } };
    match (format, rest.first()) {
        (Some(3), Some(byte)) if *byte != b':' => Err(ReplyError::Verbatim),
        (Some(at), _) => Ok((1, behind(left.saturating_sub(1), (at < 3).then_some(at + 1)))),
        (None, _) if left == 0 => Ok((0, end)),
        (None, _) => {
            let taken = usize::try_from(left).unwrap_or(usize::MAX).min(rest.len());
            Ok((taken, behind(left.saturating_sub(taken as u64), None)))
        }
    }
}
