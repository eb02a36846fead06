//! Finds where a reply ends.
//!
//! ```text
//!   +OK  -ERR …  :1  _  #t  ,1.5  (123        one line
//!   $3 …  !3 …  =7 txt:…                      a length, then that many bytes and a line end
//!   *2  ~2  >2  %2                            that many values follow, twice as many in a map
//!   |1                                        attributes: pairs, then the value they belong to
//!   $?  ;4 …  ;0                              a string in chunks
//!   *?  ~?  %?  …  .                          values until the end marker
//!   $-1  *-1                                  the nulls of RESP2
//! ```
//!
//! Attributes belong to the frame of their value. A push is a frame of its own, and is never inside
//! another value.

mod error;
mod state;
#[cfg(test)]
mod tests;

pub use error::ReplyError;

use super::number::{Integer, Length};
use super::{Limits, Progress};
use state::{AfterLine, Level, Remaining, Scalar, Size, SizedKind, State};

/// Finds where replies and pushes end, in pieces of any size.
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
    /// Whether attributes were received and their value has not begun yet.
    attributed: bool,
    frame_bytes: u64,
    /// Number of values in the current reply.
    values: u64,
}

impl ReplyFramer {
    /// Creates a framer before the first reply.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        let (levels, state) = (Vec::new(), State::Start);
        Self { limits, state, levels, attributed: false, frame_bytes: 0, values: 0 }
    }

    /// Returns whether a reply has begun and not ended.
    #[must_use]
    pub fn is_inside(&self) -> bool {
        self.state != State::Start
    }

    /// Returns how many bytes of the current reply were fed.
    #[must_use]
    pub fn frame_bytes(&self) -> u64 {
        self.frame_bytes
    }

    /// Consumes the next bytes, up to the end of a reply. Feed the bytes after that end in the next
    /// call.
    ///
    /// # Errors
    /// If the bytes are not a reply. All later calls return the same error.
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

    /// Returns how many of the bytes are consumed, and the next state. `rest` must not be empty.
    fn step(&mut self, rest: &[u8]) -> Result<(usize, State), ReplyError> {
        let first = rest.first().copied().unwrap_or_default();
        let next = match self.state {
            State::Start | State::Type => self.value_begins(first)?,
            State::Chunk if first == b';' => sized(SizedKind::Chunk),
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
            State::Size { kind, size } => State::Size { kind, size: push_size_byte(size, first)? },
            State::LineEnd(then) if first == b'\n' => self.after_line(then)?,
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
            b'$' => sized(SizedKind::Bulk),
            b'!' => sized(SizedKind::BlobError),
            b'=' => sized(SizedKind::Verbatim),
            b'*' => sized(SizedKind::Array),
            b'~' => sized(SizedKind::Set),
            b'%' => sized(SizedKind::Map),
            b'|' => sized(SizedKind::Attribute),
            b'>' if self.levels.is_empty() => sized(SizedKind::Push),
            b'>' => return Err(ReplyError::NestedPush),
            b'.' if self.stream_may_end() => line(Scalar::End),
            got => return Err(ReplyError::Type { got }),
        };
        // Attributes may follow attributes. All of them belong to the next value that is not an
        // attribute.
        self.attributed &= matches!(kind, b'|');
        Ok(state)
    }

    fn stream_may_end(&self) -> bool {
        let stream = self.levels.last().map(|level| level.left);
        !self.attributed && matches!(stream, Some(Remaining::Stream { odd: false, .. }))
    }

    /// Consumes a line of text up to its end. `before` is the number of its bytes that were
    /// consumed earlier.
    fn text(&self, before: u32, rest: &[u8]) -> Result<(usize, State), ReplyError> {
        let room = (self.limits.inline_bytes.saturating_sub(before) as usize).saturating_add(1);
        let within = rest.get(..room).unwrap_or(rest);
        match within.iter().position(|byte| matches!(byte, b'\r' | b'\n')) {
            Some(at) if within.get(at) == Some(&b'\n') => Err(ReplyError::LineEnd),
            Some(at) => Ok((at + 1, State::LineEnd(AfterLine::Value))),
            None if within.len() == room => Err(ReplyError::LineTooLong),
            None => {
                let len = u32::try_from(within.len()).unwrap_or(u32::MAX).saturating_add(before);
                Ok((within.len(), State::Line { kind: Scalar::Text, len }))
            }
        }
    }

    /// Checks the next byte of a scalar's line.
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

    fn scalar_ends(&self, kind: Scalar) -> Result<AfterLine, ReplyError> {
        match kind {
            Scalar::Integer(number) => {
                number.finish().map(|_| AfterLine::Value).ok_or(ReplyError::Number)
            }
            Scalar::BigNumber { digits: false } => Err(ReplyError::Number),
            Scalar::Boolean { seen: false } => Err(ReplyError::Boolean),
            Scalar::End => Ok(AfterLine::EndOfStream),
            Scalar::BigNumber { .. } | Scalar::Boolean { .. } | Scalar::Null | Scalar::Text => {
                Ok(AfterLine::Value)
            }
        }
    }

    fn size_ends(&self, kind: SizedKind, size: Size) -> Result<AfterLine, ReplyError> {
        let is_blob = matches!(
            kind,
            SizedKind::Bulk | SizedKind::BlobError | SizedKind::Verbatim | SizedKind::Chunk
        );
        let wrong = if is_blob { ReplyError::BulkLength } else { ReplyError::AggregateLength };
        let size = match (size, kind) {
            (Size::Open, SizedKind::Bulk) => return Ok(AfterLine::Chunks),
            (Size::Open, SizedKind::Array | SizedKind::Set | SizedKind::Map) => {
                let left = Remaining::Stream { map: kind == SizedKind::Map, odd: false };
                return Ok(AfterLine::Level(Level { left, attribute: false }));
            }
            (Size::Open, _) => return Err(wrong),
            (Size::Number(number), _) => number.finish().ok_or(wrong)?,
        };
        if size == -1 && matches!(kind, SizedKind::Bulk | SizedKind::Array) {
            return Ok(AfterLine::Value);
        }
        let limit = if is_blob { self.limits.bulk_bytes } else { self.limits.elements };
        let size = u64::try_from(size).ok().filter(|size| *size <= limit).ok_or(wrong)?;
        let level = |values, attribute| match values {
            0 if attribute => AfterLine::Attributed,
            0 => AfterLine::Value,
            values => AfterLine::Level(Level { left: Remaining::Values(values), attribute }),
        };
        Ok(match kind {
            SizedKind::Verbatim if size < 4 => return Err(ReplyError::Verbatim),
            SizedKind::Verbatim => AfterLine::Blob { len: size, verbatim: true, chunk: false },
            SizedKind::Bulk | SizedKind::BlobError => {
                AfterLine::Blob { len: size, verbatim: false, chunk: false }
            }
            SizedKind::Chunk if size == 0 => AfterLine::Value,
            SizedKind::Chunk => AfterLine::Blob { len: size, verbatim: false, chunk: true },
            SizedKind::Array | SizedKind::Set | SizedKind::Push => level(size, false),
            SizedKind::Map | SizedKind::Attribute => {
                level(size.checked_mul(2).ok_or(wrong)?, kind == SizedKind::Attribute)
            }
        })
    }

    fn after_line(&mut self, then: AfterLine) -> Result<State, ReplyError> {
        Ok(match then {
            AfterLine::Value => self.value_ends(),
            AfterLine::Blob { len, verbatim, chunk } => {
                State::Blob { left: len, format: verbatim.then_some(0), chunk }
            }
            AfterLine::Chunks => State::Chunk,
            AfterLine::Attributed => {
                self.attributed = true;
                State::Type
            }
            AfterLine::Level(level) => {
                if self.levels.len() >= self.limits.depth as usize {
                    return Err(ReplyError::TooDeep { limit: self.limits.depth });
                }
                self.levels.push(level);
                // Earlier attributes belong to the same value as these attributes. The flag is set
                // again when these end.
                self.attributed = false;
                State::Type
            }
            AfterLine::EndOfStream => {
                self.levels.pop();
                self.value_ends()
            }
        })
    }

    /// Ends a value, and all aggregates that end with it.
    fn value_ends(&mut self) -> State {
        while let Some(level) = self.levels.last_mut() {
            match &mut level.left {
                Remaining::Stream { map, odd } => {
                    *odd = *map && !*odd;
                    return State::Type;
                }
                Remaining::Values(left) => {
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

fn sized(kind: SizedKind) -> State {
    State::Size { kind, size: Size::Number(Length::default()) }
}

/// Adds the next byte of a length.
fn push_size_byte(size: Size, byte: u8) -> Result<Size, ReplyError> {
    match size {
        Size::Number(number) if byte == b'?' && number == Length::default() => Ok(Size::Open),
        Size::Number(mut number) => {
            number.push(byte).ok_or(ReplyError::Length)?;
            Ok(Size::Number(number))
        }
        Size::Open => Err(ReplyError::Length),
    }
}

/// Consumes the bytes of a string. A verbatim string has at least four bytes: three for its format,
/// and a colon.
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
