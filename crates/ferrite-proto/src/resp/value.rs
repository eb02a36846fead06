//! A view of a complete reply. Strings stay where they were received. Only the lists of values and
//! chunks are allocated, and the boxes of attributed values.

use super::encode::{blob, header, line};
use super::number::Integer;
use super::{Limits, Progress, ReplyError, ReplyFramer};

/// A complete reply. Lists grow with the values that were received, never with a stated length.
/// Each value takes 40 bytes, however short its encoding is.
///
/// ```
/// use ferrite_proto::resp::Value;
///
/// let reply = Value::parse(b"*3\r\n$1\r\na\r\n:7\r\n_\r\n")?;
/// let Value::Array(values) = reply else { panic!("the reply is not an array") };
/// assert_eq!(values, [Value::Bulk(b"a"), Value::Integer(7), Value::Null]);
/// # Ok::<(), ferrite_proto::resp::ReplyError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub enum Value<'a> {
    /// A status.
    Simple(&'a [u8]),
    /// An error of one line.
    Error(&'a [u8]),
    /// An integer.
    Integer(i64),
    /// A bulk string.
    Bulk(&'a [u8]),
    /// A string in chunks.
    Chunks(Vec<&'a [u8]>),
    /// Null: the null of RESP3, or one of the two nulls of RESP2.
    Null,
    /// A boolean.
    Boolean(bool),
    /// A floating-point number, which may be infinite or not a number.
    Double {
        /// The number.
        value: f64,
        /// The text as received, because servers differ in how many digits they write.
        text: &'a [u8],
    },
    /// An integer of any size, in decimal digits.
    BigNumber(&'a [u8]),
    /// An error that may contain any bytes.
    BlobError(&'a [u8]),
    /// A string with a display format.
    Verbatim {
        /// The format, such as `txt` or `mkd`.
        format: &'a [u8],
        /// The string.
        text: &'a [u8],
    },
    /// Values in order. Their number was stated, or they were streamed. Sets and maps may be
    /// streamed, too.
    Array(Vec<Self>),
    /// Values without an order. Duplicates are not removed.
    Set(Vec<Self>),
    /// Pairs of keys and values.
    Map(Vec<(Self, Self)>),
    /// A message that the server sends without a request.
    Push(Vec<Self>),
    /// A value with attributes.
    Attributed {
        /// All attributes that precede the value.
        attributes: Vec<(Self, Self)>,
        /// The value, which is not itself attributed.
        value: Box<Self>,
    },
}

impl<'a> Value<'a> {
    /// The maximum depth that is parsed, whatever the limits say, because each level is a recursive
    /// call.
    pub const MAX_DEPTH: u32 = 128;

    /// Parses exactly one reply, within the default limits.
    ///
    /// # Errors
    /// If the bytes are not a reply, are an incomplete reply, or are more than one reply.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, ReplyError> {
        Self::parse_within(bytes, Limits::default())
    }

    /// Parses exactly one reply.
    ///
    /// # Errors
    /// If the bytes are not a reply, are an incomplete reply, or are more than one reply.
    pub fn parse_within(bytes: &'a [u8], limits: Limits) -> Result<Self, ReplyError> {
        let limits = Limits { depth: limits.depth.min(Self::MAX_DEPTH), ..limits };
        match ReplyFramer::new(limits).feed(bytes)? {
            Progress { complete: false, .. } => return Err(ReplyError::Incomplete),
            Progress { consumed, .. } if consumed < bytes.len() => {
                return Err(ReplyError::Trailing);
            }
            _ => {}
        }
        Reader { rest: bytes }.value()
    }

    /// Appends the value in RESP3. Nulls get the form of RESP3, and streamed aggregates get their
    /// length. A string in chunks stays in chunks.
    pub fn encode(&self, into: &mut Vec<u8>) {
        match self {
            Self::Simple(text) => line(b'+', text, into),
            Self::Error(text) => line(b'-', text, into),
            Self::Integer(value) => line(b':', value.to_string().as_bytes(), into),
            Self::Bulk(bytes) => blob(b'$', bytes, into),
            Self::Chunks(chunks) => {
                line(b'$', b"?", into);
                // An empty chunk would mark the end of the string.
                chunks
                    .iter()
                    .filter(|chunk| !chunk.is_empty())
                    .for_each(|chunk| blob(b';', chunk, into));
                line(b';', b"0", into);
            }
            Self::Null => line(b'_', b"", into),
            Self::Boolean(value) => line(b'#', if *value { b"t" } else { b"f" }, into),
            Self::Double { text, .. } => line(b',', text, into),
            Self::BigNumber(digits) => line(b'(', digits, into),
            Self::BlobError(bytes) => blob(b'!', bytes, into),
            Self::Verbatim { format, text } => {
                blob(b'=', &[format, &b":"[..], text].concat(), into);
            }
            Self::Array(values) => aggregate(b'*', values, into),
            Self::Set(values) => aggregate(b'~', values, into),
            Self::Push(values) => aggregate(b'>', values, into),
            Self::Map(pairs) => map(b'%', pairs, into),
            Self::Attributed { attributes, value } => {
                map(b'|', attributes, into);
                value.encode(into);
            }
        }
    }
}

fn aggregate(kind: u8, values: &[Value<'_>], into: &mut Vec<u8>) {
    header(kind, values.len(), into);
    values.iter().for_each(|value| value.encode(into));
}

fn map(kind: u8, pairs: &[(Value<'_>, Value<'_>)], into: &mut Vec<u8>) {
    header(kind, pairs.len(), into);
    for (key, value) in pairs {
        key.encode(into);
        value.encode(into);
    }
}

/// The length of a string or an aggregate.
#[derive(Clone, Copy)]
enum Count {
    Null,
    Values(u64),
    Stream,
}

/// Reads bytes that a framer has found to be a whole reply. If they end early, that is a bug in
/// this crate. The reader then returns an error and does not panic.
struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Reads a value. Recurses only as deep as the framer allowed, because attributes before a
    /// value are read in a loop.
    fn value(&mut self) -> Result<Value<'a>, ReplyError> {
        let mut attributes = None;
        while let Some(rest) = self.rest.strip_prefix(b"|") {
            self.rest = rest;
            attributes.get_or_insert_with(Vec::new).append(&mut self.pairs()?.unwrap_or_default());
        }
        let value = self.raw_value()?;
        Ok(match attributes {
            Some(attributes) => Value::Attributed { attributes, value: Box::new(value) },
            None => value,
        })
    }

    fn raw_value(&mut self) -> Result<Value<'a>, ReplyError> {
        let (kind, rest) = self.rest.split_first().ok_or(ReplyError::Incomplete)?;
        self.rest = rest;
        Ok(match kind {
            b'+' => Value::Simple(self.line()?),
            b'-' => Value::Error(self.line()?),
            b':' => Value::Integer(Integer::parse(self.line()?).ok_or(ReplyError::Number)?),
            b',' => {
                let text = self.line()?;
                Value::Double { value: double(text).ok_or(ReplyError::Double)?, text }
            }
            b'(' => Value::BigNumber(self.line()?),
            b'#' => Value::Boolean(self.line()? == b"t"),
            b'_' => {
                self.line()?;
                Value::Null
            }
            b'$' => match self.count()? {
                Count::Null => Value::Null,
                Count::Values(len) => Value::Bulk(self.blob(len)?),
                Count::Stream => Value::Chunks(self.chunks()?),
            },
            b'!' => Value::BlobError(self.sized_blob()?),
            b'=' => {
                let blob = self.sized_blob()?;
                let (format, text) = blob.split_at_checked(4).ok_or(ReplyError::Verbatim)?;
                Value::Verbatim {
                    format: format.strip_suffix(b":").ok_or(ReplyError::Verbatim)?,
                    text,
                }
            }
            b'*' => self.values()?.map_or(Value::Null, Value::Array),
            b'~' => self.values()?.map_or(Value::Null, Value::Set),
            b'>' => self.values()?.map_or(Value::Null, Value::Push),
            b'%' => self.pairs()?.map_or(Value::Null, Value::Map),
            got => return Err(ReplyError::Type { got: *got }),
        })
    }

    fn line(&mut self) -> Result<&'a [u8], ReplyError> {
        let end = self.rest.iter().position(|byte| *byte == b'\r').ok_or(ReplyError::Incomplete)?;
        let (line, rest) = self.rest.split_at_checked(end).ok_or(ReplyError::Incomplete)?;
        self.rest = rest.strip_prefix(b"\r\n").ok_or(ReplyError::LineEnd)?;
        Ok(line)
    }

    fn count(&mut self) -> Result<Count, ReplyError> {
        Ok(match self.line()? {
            b"?" => Count::Stream,
            b"-1" => Count::Null,
            number => {
                let number = Integer::parse(number).and_then(|number| u64::try_from(number).ok());
                Count::Values(number.ok_or(ReplyError::Length)?)
            }
        })
    }

    fn blob(&mut self, len: u64) -> Result<&'a [u8], ReplyError> {
        let len = usize::try_from(len).map_err(|_| ReplyError::BulkLength)?;
        let (blob, rest) = self.rest.split_at_checked(len).ok_or(ReplyError::Incomplete)?;
        self.rest = rest.strip_prefix(b"\r\n").ok_or(ReplyError::BlobEnd)?;
        Ok(blob)
    }

    fn sized_blob(&mut self) -> Result<&'a [u8], ReplyError> {
        match self.count()? {
            Count::Values(len) => self.blob(len),
            Count::Null | Count::Stream => Err(ReplyError::BulkLength),
        }
    }

    fn chunks(&mut self) -> Result<Vec<&'a [u8]>, ReplyError> {
        let mut chunks = Vec::new();
        loop {
            self.rest = self.rest.strip_prefix(b";").ok_or(ReplyError::Incomplete)?;
            match self.count()? {
                Count::Values(0) => return Ok(chunks),
                Count::Values(len) => chunks.push(self.blob(len)?),
                Count::Null | Count::Stream => return Err(ReplyError::BulkLength),
            }
        }
    }

    /// Reads the values of an aggregate. Returns `None` for a null.
    fn values(&mut self) -> Result<Option<Vec<Value<'a>>>, ReplyError> {
        self.each(Self::value)
    }

    fn pairs(&mut self) -> Result<Option<Vec<(Value<'a>, Value<'a>)>>, ReplyError> {
        self.each(|reader| Ok((reader.value()?, reader.value()?)))
    }

    fn each<T>(
        &mut self,
        read: impl Fn(&mut Self) -> Result<T, ReplyError>,
    ) -> Result<Option<Vec<T>>, ReplyError> {
        let count = self.count()?;
        let mut all = Vec::new();
        loop {
            match count {
                Count::Null => return Ok(None),
                Count::Values(count) if all.len() as u64 == count => return Ok(Some(all)),
                Count::Stream if self.rest.first() == Some(&b'.') => {
                    self.line()?;
                    return Ok(Some(all));
                }
                Count::Values(_) | Count::Stream => all.push(read(self)?),
            }
        }
    }
}

/// Parses a double as Rust does. Rust accepts all forms of RESP3, including `inf`, `-inf` and
/// `nan`.
fn double(text: &[u8]) -> Option<f64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_pointer_width = "64")]
    fn has_the_documented_size() {
        assert_eq!(size_of::<Value<'_>>(), 40);
    }

    #[test]
    fn parses_every_type() {
        for (bytes, value) in [
            (&b"+OK\r\n"[..], Value::Simple(b"OK")),
            (b"-ERR no\r\n", Value::Error(b"ERR no")),
            (b":-7\r\n", Value::Integer(-7)),
            (b"$3\r\n\r\n!\r\n", Value::Bulk(b"\r\n!")),
            (b"$?\r\n;1\r\na\r\n;2\r\nbc\r\n;0\r\n", Value::Chunks(vec![b"a", b"bc"])),
            (b"_\r\n", Value::Null),
            (b"$-1\r\n", Value::Null),
            (b"*-1\r\n", Value::Null),
            (b"#t\r\n", Value::Boolean(true)),
            (b"#f\r\n", Value::Boolean(false)),
            (b",1.25e3\r\n", Value::Double { value: 1250.0, text: b"1.25e3" }),
            (b",-inf\r\n", Value::Double { value: f64::NEG_INFINITY, text: b"-inf" }),
            (b"(-12\r\n", Value::BigNumber(b"-12")),
            (b"!5\r\nERR x\r\n", Value::BlobError(b"ERR x")),
            (b"=5\r\ntxt:a\r\n", Value::Verbatim { format: b"txt", text: b"a" }),
            (b"*?\r\n:1\r\n.\r\n", Value::Array(vec![Value::Integer(1)])),
            (b"~1\r\n:1\r\n", Value::Set(vec![Value::Integer(1)])),
            (b">1\r\n:1\r\n", Value::Push(vec![Value::Integer(1)])),
            (b"%1\r\n:1\r\n_\r\n", Value::Map(vec![(Value::Integer(1), Value::Null)])),
        ] {
            assert_eq!(Value::parse(bytes), Ok(value), "{}", bytes.escape_ascii());
        }
    }

    #[test]
    fn merges_attributes_of_one_value() {
        let mut bytes = b"|1\r\n+a\r\n:1\r\n".repeat(2);
        bytes.extend_from_slice(b"*0\r\n");
        let pair = (Value::Simple(b"a"), Value::Integer(1));
        let value = Box::new(Value::Array(Vec::new()));
        let attributes = vec![pair.clone(), pair];
        assert_eq!(Value::parse(&bytes), Ok(Value::Attributed { attributes, value }));
        // Many attributes before one value must not cause recursion, because the stack would
        // overflow.
        let mut many = b"|0\r\n".repeat(100_000);
        many.extend_from_slice(b"_\r\n");
        assert!(Value::parse(&many).is_ok());
    }

    #[test]
    fn parses_exactly_one_reply() {
        assert_eq!(Value::parse(b"*1\r\n"), Err(ReplyError::Incomplete));
        assert_eq!(Value::parse(b"_\r\n_\r\n"), Err(ReplyError::Trailing));
        assert_eq!(Value::parse(b",one\r\n"), Err(ReplyError::Double));
        let shallow = Limits { depth: 1, ..Limits::default() };
        assert_eq!(
            Value::parse_within(b"*1\r\n*1\r\n", shallow),
            Err(ReplyError::TooDeep { limit: 1 })
        );
        let unlimited = Limits { depth: u32::MAX, ..Limits::default() };
        let too_deep = Err(ReplyError::TooDeep { limit: 128 });
        assert_eq!(Value::parse_within(&b"*1\r\n".repeat(129), unlimited), too_deep);
    }
}
