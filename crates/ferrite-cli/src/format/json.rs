//! Formats a reply as one line of valid JSON. redis-cli's output is not always valid. The
//! differences:
//!
//! - an error is `{"error":"ERR …"}`, not `error:"ERR …"`;
//! - `inf`, `-inf` and `nan` are strings, since JSON has no such numbers;
//! - bytes that are not UTF-8 become the characters U+0080 to U+00FF (`--quoted-json` loses no
//!   byte);
//! - replies that are text, such as INFO's, are strings like all others.

use ferrite_proto::resp::Value;

use super::quote;

/// How strings are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Strings {
    /// As plain text.
    Text,
    /// With the escapes of the human format.
    Quoted,
}

/// Appends a reply, without a newline.
pub(super) fn write(reply: &Value<'_>, strings: Strings, out: &mut Vec<u8>) {
    match reply {
        Value::Error(text) | Value::BlobError(text) => {
            out.extend(b"{\"error\":");
            string(text, strings, out);
            out.push(b'}');
        }
        Value::Simple(text) | Value::Bulk(text) | Value::Verbatim { text, .. } => {
            string(text, strings, out);
        }
        Value::Chunks(chunks) => string(&chunks.concat(), strings, out),
        Value::Null => out.extend(b"null"),
        Value::Boolean(value) => out.extend_from_slice(if *value { b"true" } else { b"false" }),
        Value::Integer(value) => out.extend(value.to_string().bytes()),
        Value::Double { text, .. } | Value::BigNumber(text) if is_number(text) => {
            out.extend_from_slice(text);
        }
        Value::Double { text, .. } | Value::BigNumber(text) => string(text, strings, out),
        Value::Array(values) | Value::Set(values) | Value::Push(values) => {
            out.push(b'[');
            for (at, value) in values.iter().enumerate() {
                if at > 0 {
                    out.push(b',');
                }
                write(value, strings, out);
            }
            out.push(b']');
        }
        Value::Map(pairs) => {
            out.push(b'{');
            for (at, (key, value)) in pairs.iter().enumerate() {
                if at > 0 {
                    out.push(b',');
                }
                write_key(key, strings, out);
                out.push(b':');
                write(value, strings, out);
            }
            out.push(b'}');
        }
        Value::Attributed { value, .. } => write(value, strings, out),
    }
}

/// Appends a key. JSON keys must be strings, so a key of another type becomes a string that
/// contains its JSON.
fn write_key(key: &Value<'_>, strings: Strings, out: &mut Vec<u8>) {
    let mut text = Vec::new();
    write(key, strings, &mut text);
    if text.starts_with(b"\"") {
        out.append(&mut text);
    } else {
        string(&text, Strings::Text, out);
    }
}

/// Returns whether a text is a valid JSON number (RFC 8259, section 6), with any number of digits.
fn is_number(text: &[u8]) -> bool {
    let digits = |text: &[u8]| !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    let text = text.strip_prefix(b"-").unwrap_or(text);
    let exponent = text.iter().position(|byte| matches!(byte, b'e' | b'E'));
    let (mantissa, exponent) = match exponent.and_then(|at| text.split_at_checked(at)) {
        Some((mantissa, exponent)) => (mantissa, Some(&exponent[1..])),
        None => (text, None),
    };
    let exponent_is_right = exponent.is_none_or(|exponent| {
        digits(exponent.strip_prefix(b"+").or(exponent.strip_prefix(b"-")).unwrap_or(exponent))
    });
    let (whole, fraction) = match mantissa.iter().position(|byte| *byte == b'.') {
        Some(at) => (&mantissa[..at], Some(&mantissa[at + 1..])),
        None => (mantissa, None),
    };
    let whole_is_right = digits(whole) && (whole == b"0" || !whole.starts_with(b"0"));
    exponent_is_right && whole_is_right && fraction.is_none_or(digits)
}

fn string(bytes: &[u8], strings: Strings, out: &mut Vec<u8>) {
    match strings {
        Strings::Quoted => {
            let mut quoted = Vec::new();
            quote(bytes, &mut quoted);
            // redis-cli doubles the backslashes but not the quotes: it prints `"` in a string as
            // `\\"`, which ends the JSON string too early.
            let inner = quoted.get(1..quoted.len().saturating_sub(1)).unwrap_or_default();
            text(inner, out);
        }
        Strings::Text => text(bytes, out),
    }
}

fn text(bytes: &[u8], out: &mut Vec<u8>) {
    out.push(b'"');
    for chunk in bytes.utf8_chunks() {
        for byte in chunk.valid().bytes() {
            match byte {
                b'\\' | b'"' => out.extend([b'\\', byte]),
                b'\n' => out.extend(b"\\n"),
                0x0c => out.extend(b"\\f"),
                b'\r' => out.extend(b"\\r"),
                b'\t' => out.extend(b"\\t"),
                0x08 => out.extend(b"\\b"),
                0..=0x1f => out.extend(format!("\\u{byte:04x}").bytes()),
                byte => out.push(byte),
            }
        }
        for byte in chunk.invalid() {
            out.extend(char::from(*byte).to_string().bytes());
        }
    }
    out.push(b'"');
}
