//! Splits commands of the table into words, to pass them as arguments. It does not use
//! ferrite-cli's own splitter, because that is under test.

/// Splits a command into its words; `None` if a quote is not closed.
pub(crate) fn words(line: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut words = Vec::new();
    let mut bytes = line.iter().copied().peekable();
    loop {
        while bytes.next_if(u8::is_ascii_whitespace).is_some() {}
        let Some(quote) = bytes.peek().copied() else { return Some(words) };
        let mut word = Vec::new();
        if matches!(quote, b'"' | b'\'') {
            bytes.next();
            loop {
                match bytes.next()? {
                    byte if byte == quote => break,
                    b'\\' if quote == b'"' => word.push(escaped(&mut bytes)?),
                    b'\\' if bytes.peek() == Some(&quote) => word.extend(bytes.next()),
                    byte => word.push(byte),
                }
            }
            if bytes.peek().is_some_and(|byte| !byte.is_ascii_whitespace()) {
                return None;
            }
        } else {
            word.extend(std::iter::from_fn(|| bytes.next_if(|byte| !byte.is_ascii_whitespace())));
        }
        words.push(word);
    }
}

/// Returns the byte for the characters after a backslash.
fn escaped(bytes: &mut impl Iterator<Item = u8>) -> Option<u8> {
    Some(match bytes.next()? {
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'b' => 0x08,
        b'a' => 0x07,
        b'x' => {
            let digits = [bytes.next()?, bytes.next()?];
            u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?
        }
        other => other,
    })
}
