//! Text that others wrote, on a terminal: a server's replies, errors and names must not move the
//! cursor, change the title, or type for the user.
//!
//! Control characters are written as people can read them, and so is what looks like text and
//! reorders it. Line ends and tabs stay, and every other character of UTF-8. Files and pipes get
//! the bytes as they are: see `output.rs`.

use std::borrow::Cow;
use std::fmt::Write as _;

/// The bytes as a terminal may have them.
pub(crate) fn shown(bytes: &[u8]) -> Cow<'_, [u8]> {
    // The usual case costs one look.
    if bytes.iter().all(|byte| matches!(byte, b' '..=b'~' | b'\n' | b'\t')) {
        return Cow::Borrowed(bytes);
    }
    let mut out = String::with_capacity(bytes.len() + 16);
    for chunk in bytes.utf8_chunks() {
        let mut chars = chunk.valid().chars().peekable();
        while let Some(char) = chars.next() {
            match char {
                // As text of servers has it: alone it would go back to the begin of the line.
                '\r' if chars.peek() == Some(&'\n') => out.push(char),
                '\n' | '\t' => out.push(char),
                '\r' => out.push_str("\\r"),
                '\0'..='\x1f' | '\x7f' => push(&mut out, format_args!("\\x{:02x}", char as u32)),
                '\u{80}'..='\u{9f}' => push(&mut out, format_args!("\\u{:04x}", char as u32)),
                '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                    push(&mut out, format_args!("\\u{:04x}", char as u32));
                }
                other => out.push(other),
            }
        }
        // No UTF-8: a terminal may take one of these for the begin of a sequence.
        for byte in chunk.invalid() {
            push(&mut out, format_args!("\\x{byte:02x}"));
        }
    }
    Cow::Owned(out.into_bytes())
}

/// The same for text.
pub(crate) fn shown_text(text: &str) -> String {
    String::from_utf8_lossy(&shown(text.as_bytes())).into_owned()
}

fn push(out: &mut String, what: std::fmt::Arguments<'_>) {
    let _ = out.write_fmt(what); // a string takes everything
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_written_out() {
        for (bytes, text) in [
            (&b"\x1b]0;title\x07OK"[..], "\\x1b]0;title\\x07OK"),
            (b"a\x08b\x7f\0", "a\\x08b\\x7f\\x00"),
            (b"one\rtwo", "one\\rtwo"),
            (b"\x9b2J", "\\x9b2J"),
            ("\u{9b}2J".as_bytes(), "\\u009b2J"),
            ("user\u{202e}nimda".as_bytes(), "user\\u202enimda"),
        ] {
            assert_eq!(String::from_utf8_lossy(&shown(bytes)), text);
        }
    }

    #[test]
    fn text_stays_as_it_is() {
        for text in ["OK\n", "# Server\r\nredis_version:7\r\n", "\tgrüße 日本 🚀\n", ""] {
            assert_eq!(shown(text.as_bytes()), text.as_bytes());
        }
    }
}
