//! Commands and the simplest replies, as bytes.

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

/// Appends a status such as `OK`. Line ends in it become blanks.
pub fn encode_status(text: &str, into: &mut Vec<u8>) {
    line(b'+', text.as_bytes(), into);
}

/// Appends an error such as `ERR no such key`. Line ends in it become blanks.
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
    line(kind, len.to_string().as_bytes(), into);
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
    fn golden_bytes() {
        let mut bytes = Vec::new();
        encode_status("OK", &mut bytes);
        encode_error("ERR two\r\nlines", &mut bytes);
        encode_integer(-5, &mut bytes);
        encode_bulk(b"a\r\nb", &mut bytes);
        encode_null(&mut bytes);
        encode_command([b""; 0], &mut bytes);
        assert_eq!(bytes, b"+OK\r\n-ERR two  lines\r\n:-5\r\n$4\r\na\r\nb\r\n$-1\r\n*0\r\n");
    }
}
