//! Splits lines that people type into arguments. White space separates arguments, except inside
//! quotes.
//!
//! In double quotes, `\n \r \t \b \a` and `\xff` stand for one byte each, and any other byte after
//! a backslash stands for itself. In single quotes only `\'` is special. A closing quote ends the
//! argument, so white space or the end of the line must follow it.

/// The error for a quote that is not closed, or that is followed by something other than white
/// space. [`unquote`] also returns it if there is not exactly one argument.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("unbalanced quotes")]
pub struct Unbalanced;

/// Splits a line into its arguments, as redis-cli does.
///
/// # Errors
/// If a quote is not closed, or a closing quote is followed by something other than white space.
pub fn split_line(line: &[u8]) -> Result<Vec<Vec<u8>>, Unbalanced> {
    let mut arguments = Vec::new();
    let mut rest = line;
    loop {
        let blanks = rest.iter().take_while(|byte| is_space(**byte)).count();
        rest = rest.get(blanks..).unwrap_or_default();
        if rest.is_empty() {
            return Ok(arguments);
        }
        let (argument, behind) = next(rest)?;
        arguments.push(argument);
        rest = behind;
    }
}

/// Parses exactly one argument, quoted or not.
///
/// # Errors
/// Like [`split_line`], and if there is not exactly one argument.
pub fn unquote(text: &[u8]) -> Result<Vec<u8>, Unbalanced> {
    let mut arguments = split_line(text)?;
    match (arguments.pop(), arguments.is_empty()) {
        (Some(argument), true) => Ok(argument),
        _ => Err(Unbalanced),
    }
}

/// Returns the first argument and the rest of the line.
fn next(line: &[u8]) -> Result<(Vec<u8>, &[u8]), Unbalanced> {
    let mut argument = Vec::new();
    let mut rest = line;
    while let Some((byte, behind)) = rest.split_first() {
        match byte {
            // As in redis-cli, a vertical tab or a form feed does not end an argument, although it
            // is skipped between arguments.
            b' ' | b'\n' | b'\r' | b'\t' => break,
            b'"' => return double_quoted(argument, behind),
            b'\'' => return single_quoted(argument, behind),
            byte => argument.push(*byte),
        }
        rest = behind;
    }
    Ok((argument, rest))
}

fn double_quoted(mut argument: Vec<u8>, mut rest: &[u8]) -> Result<(Vec<u8>, &[u8]), Unbalanced> {
    loop {
        let (byte, behind) = rest.split_first().ok_or(Unbalanced)?;
        rest = behind;
        match byte {
            b'"' => return end_quoted(argument, rest),
            b'\\' => {
                if let [b'x', high, low, behind @ ..] = rest
                    && let (Some(high), Some(low)) = (hex(*high), hex(*low))
                {
                    argument.push(high * 16 + low);
                    rest = behind;
                    continue;
                }
                let (escaped, behind) = rest.split_first().ok_or(Unbalanced)?;
                rest = behind;
                argument.push(match escaped {
                    b'n' => b'\n',
                    b'r' => b'\r',
                    b't' => b'\t',
                    b'b' => 0x08,
                    b'a' => 0x07,
                    other => *other,
                });
            }
            byte => argument.push(*byte),
        }
    }
}

fn single_quoted(mut argument: Vec<u8>, mut rest: &[u8]) -> Result<(Vec<u8>, &[u8]), Unbalanced> {
    loop {
        if let Some(behind) = rest.strip_prefix(b"\\'") {
            argument.push(b'\'');
            rest = behind;
            continue;
        }
        let (byte, behind) = rest.split_first().ok_or(Unbalanced)?;
        rest = behind;
        match byte {
            b'\'' => return end_quoted(argument, rest),
            byte => argument.push(*byte),
        }
    }
}

/// Ends an argument after its closing quote. White space or the end of the line must follow.
fn end_quoted(argument: Vec<u8>, rest: &[u8]) -> Result<(Vec<u8>, &[u8]), Unbalanced> {
    match rest.first() {
        Some(byte) if !is_space(*byte) => Err(Unbalanced),
        _ => Ok((argument, rest)),
    }
}

/// Returns whether a byte is white space for C's `isspace`, which includes the vertical tab.
fn is_space(byte: u8) -> bool {
    byte.is_ascii_whitespace() || byte == 0x0b
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(line: &str) -> Vec<Vec<u8>> {
        split_line(line.as_bytes()).expect("balanced quotes")
    }

    #[test]
    fn splits_at_white_space() {
        assert_eq!(parts("  SET  a\tb \r\n"), [b"SET", &b"a"[..], b"b"]);
        assert_eq!(parts(""), [b""; 0]);
        assert_eq!(parts("   "), [b""; 0]);
    }

    #[test]
    fn interprets_escapes_in_double_quotes() {
        assert_eq!(
            parts(r#""a b" "\x00\xFF\n\r\t\b\a\\\"\q""#),
            [&b"a b"[..], b"\x00\xff\n\r\t\x08\x07\\\"q"]
        );
        assert_eq!(parts(r#""\xg1""#), [b"xg1"]);
        assert_eq!(parts(r#""""#), [b""]);
    }

    #[test]
    fn interprets_one_escape_in_single_quotes() {
        assert_eq!(parts(r"'a\n\'b' c"), [&br"a\n'b"[..], b"c"]);
    }

    #[test]
    fn allows_quotes_to_begin_inside_a_word_but_not_to_end_there() {
        assert_eq!(parts(r#"pre"fix ed""#), [b"prefix ed"]);
        for wrong in [r#""a"b"#, r#"'a'b"#, r#""a"#, "'a", r#""a\"#, r#""a\""#] {
            assert_eq!(split_line(wrong.as_bytes()), Err(Unbalanced), "{wrong}");
        }
    }

    #[test]
    fn unquotes_exactly_one_argument() {
        assert_eq!(unquote(br#""\x01""#), Ok(vec![1]));
        assert_eq!(unquote(b"a b"), Err(Unbalanced));
        assert_eq!(unquote(b""), Err(Unbalanced));
    }
}
