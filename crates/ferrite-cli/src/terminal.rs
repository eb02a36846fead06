//! Makes text from a server safe for a terminal. The text must not move the cursor, change the
//! title, or type for the user.
//!
//! Replaces control characters, invisible ones, and those that change the order of the text, by
//! readable escapes. Keeps line ends, tabs and all other UTF-8 characters. Files and pipes get the
//! original bytes (see `output.rs`).

use std::borrow::Cow;
use std::fmt::Write as _;

use ferrite_fabric::is_deceptive;

/// Returns the bytes in a form that is safe for a terminal.
pub(crate) fn escape(bytes: &[u8]) -> Cow<'_, [u8]> {
    // In the usual case there are no characters to escape.
    if bytes.iter().all(|byte| matches!(byte, b' '..=b'~' | b'\n' | b'\t')) {
        return Cow::Borrowed(bytes);
    }
    let mut out = String::with_capacity(bytes.len() + 16);
    for chunk in bytes.utf8_chunks() {
        let mut chars = chunk.valid().chars().peekable();
        while let Some(char) = chars.next() {
            match char {
                // This is a part of a line end. Alone, it would move the cursor to the start of the
                // line.
                '\r' if chars.peek() == Some(&'\n') => out.push(char),
                '\n' | '\t' => out.push(char),
                '\r' => out.push_str("\\r"),
                '\0'..='\x1f' | '\x7f' => push(&mut out, format_args!("\\x{:02x}", char as u32)),
                char if is_deceptive(char) => {
                    push(&mut out, format_args!("\\u{:04x}", char as u32));
                }
                other => out.push(other),
            }
        }
        // These bytes are not UTF-8. A terminal may take one for the start of an escape sequence.
        for byte in chunk.invalid() {
            push(&mut out, format_args!("\\x{byte:02x}"));
        }
    }
    Cow::Owned(out.into_bytes())
}

/// Returns the text in a form that is safe for a terminal.
pub(crate) fn escape_text(text: &str) -> String {
    String::from_utf8_lossy(&escape(text.as_bytes())).into_owned()
}

fn push(out: &mut String, what: std::fmt::Arguments<'_>) {
    let _ = out.write_fmt(what); // writing to a string never fails
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_control_characters() {
        for (bytes, text) in [
            (&b"\x1b]0;title\x07OK"[..], "\\x1b]0;title\\x07OK"),
            (b"a\x08b\x7f\0", "a\\x08b\\x7f\\x00"),
            (b"one\rtwo", "one\\rtwo"),
            (b"\x9b2J", "\\x9b2J"),
            ("\u{9b}2J".as_bytes(), "\\u009b2J"),
            ("user\u{202e}nimda".as_bytes(), "user\\u202enimda"),
            ("one\u{2028}two".as_bytes(), "one\\u2028two"),
        ] {
            assert_eq!(String::from_utf8_lossy(&escape(bytes)), text);
        }
    }

    #[test]
    fn leaves_ordinary_text_unchanged() {
        for text in ["OK\n", "# Server\r\nredis_version:7\r\n", "\tgrüße 日本 🚀\n", ""] {
            assert_eq!(escape(text.as_bytes()), text.as_bytes());
        }
    }
}
