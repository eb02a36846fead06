//! Encodes commands and the simplest replies.

/// Appends a command.
///
/// ```
/// let mut bytes = Vec::new();
/// ferrite_proto::resp::encode_command(["GET", "k"], &mut bytes);
/// assert_eq!(bytes, b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n");
/// ```
pub fn encode_command<I>(args: I, into: &mut Vec<u8>)
where
    I: IntoIterator<Item: AsRef<[u8]>, IntoIter: ExactSizeIterator>,
{
    let args = args.into_iter();
    header(b'*', args.len(), into);
    for arg in args {
        encode_bulk(arg.as_ref(), into);
    }
}

/// Appends a bulk string.
pub fn encode_bulk(bytes: &[u8], into: &mut Vec<u8>) {
    blob(b'$', bytes, into);
}

/// Appends a status such as `OK`. Line ends in the text become spaces.
pub fn encode_status(text: &str, into: &mut Vec<u8>) {
    line(b'+', text.as_bytes(), into);
}

/// Appends an error such as `ERR no such key`. Line ends in the text become spaces.
pub fn encode_error(text: &str, into: &mut Vec<u8>) {
    line(b'-', text.as_bytes(), into);
}

/// Appends an integer.
pub fn encode_integer(value: i64, into: &mut Vec<u8>) {
    line(b':', value.to_string().as_bytes(), into);
}

/// Appends the null of RESP2, which clients of both versions understand.
pub fn encode_null(into: &mut Vec<u8>) {
    into.extend_from_slice(b"$-1\r\n");
}

pub(super) fn blob(kind: u8, bytes: &[u8], into: &mut Vec<u8>) {
    header(kind, bytes.len(), into);
    into.extend_from_slice(bytes);
    into.extend_from_slice(b"\r\n");
}

pub(super) fn header(kind: u8, len: usize, into: &mut Vec<u8>) {
    into.extend_from_slice(&Head::new(kind, len));
}

/// The header of a string or an aggregate: its type and its length.
///
/// ```
/// assert_eq!(*ferrite_proto::resp::Head::new(b'$', 65536), *b"$65536\r\n");
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Head {
    bytes: [u8; 23],
    from: usize,
}

impl Head {
    /// Creates a header. It does not use the formatting of the standard library, which takes as
    /// long as copying a small value.
    #[must_use]
    pub fn new(kind: u8, len: usize) -> Self {
        let mut bytes = *b"000000000000000000000\r\n";
        let (mut from, mut rest) = (bytes.len() - 2, len);
        loop {
            from -= 1;
            bytes[from] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        from -= 1;
        bytes[from] = kind;
        Self { bytes, from }
    }
}

impl std::ops::Deref for Head {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.from..]
    }
}

pub(super) fn line(kind: u8, text: &[u8], into: &mut Vec<u8>) {
    into.push(kind);
    into.extend(text.iter().map(|byte| if matches!(byte, b'\r' | b'\n') { b' ' } else { *byte }));
    into.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodes_golden_bytes() {
        let mut bytes = Vec::new();
        encode_status("OK", &mut bytes);
        encode_error("ERR two\r\nlines", &mut bytes);
        encode_integer(-5, &mut bytes);
        encode_bulk(b"a\r\nb", &mut bytes);
        encode_null(&mut bytes);
        encode_command([b""; 0], &mut bytes);
        assert_eq!(bytes, b"+OK\r\n-ERR two  lines\r\n:-5\r\n$4\r\na\r\nb\r\n$-1\r\n*0\r\n");
    }

    #[test]
    fn encodes_heads_of_all_lengths() {
        for len in [0, 9, 10, 12_345, usize::MAX] {
            assert_eq!(*Head::new(b'~', len), *format!("~{len}\r\n").as_bytes());
        }
    }
}
