//! Formats a reply for people at a terminal.
//!
//! ```text
//!   1) "a"                   1# "field" => "value"            1~ (integer) 1
//!   2) 1) (integer) 1        2# "list" =>                     2~ (nil)
//!      2) (double) 0.5          1) "nested values are"
//!                               2) "indented"
//! ```

use ferrite_proto::resp::Value;

use super::{quote, without_attributes};

/// Appends a reply. Each of its lines ends with a newline.
pub(super) fn write(reply: &Value<'_>, out: &mut Vec<u8>) {
    write_indented(reply, 0, out);
}

/// Appends a reply. All lines except the first begin with `indent` spaces: the caller has indented
/// the first line.
fn write_indented(reply: &Value<'_>, indent: usize, out: &mut Vec<u8>) {
    match reply {
        Value::Error(text) | Value::BlobError(text) => line(b"(error) ", text, out),
        Value::Simple(text) | Value::Verbatim { text, .. } => line(b"", text, out),
        Value::Integer(value) => line(b"(integer) ", value.to_string().as_bytes(), out),
        Value::Double { text, .. } => line(b"(double) ", text, out),
        Value::BigNumber(digits) => line(b"(big number) ", digits, out),
        Value::Bulk(bytes) => quoted(bytes, out),
        Value::Chunks(chunks) => quoted(&chunks.concat(), out),
        Value::Null => line(b"", b"(nil)", out),
        Value::Boolean(value) => line(b"", if *value { b"(true)" } else { b"(false)" }, out),
        Value::Array(values) => list(values, ')', b"(empty array)", indent, out),
        Value::Push(values) => list(values, ')', b"(empty push)", indent, out),
        Value::Set(values) => list(values, '~', b"(empty set)", indent, out),
        Value::Map(pairs) => map(pairs, '#', b"(empty hash)", indent, out),
        Value::Attributed { attributes, value } => {
            map(attributes, '|', b"(no attributes)", indent, out);
            blanks(indent, out);
            write_indented(value, indent, out);
        }
    }
}

/// Formats an invalidation push message as `-> invalidate: 'key'`. Returns `None` for others.
pub(super) fn invalidation(push: &Value<'_>) -> Option<Vec<u8>> {
    let Value::Push(values) = push else { return None };
    let [Value::Bulk(b"invalidate"), Value::Array(keys)] = values.as_slice() else { return None };
    let mut out = b"-> invalidate: ".to_vec();
    for (at, key) in keys.iter().enumerate() {
        let Value::Bulk(key) = key else { return None };
        out.extend_from_slice(if at > 0 { b", '" } else { b"'" });
        out.extend_from_slice(key);
        out.push(b'\'');
    }
    out.push(b'\n');
    Some(out)
}

fn line(kind: &[u8], text: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(kind);
    out.extend_from_slice(text);
    out.push(b'\n');
}

fn quoted(bytes: &[u8], out: &mut Vec<u8>) {
    quote(bytes, out);
    out.push(b'\n');
}

fn blanks(count: usize, out: &mut Vec<u8>) {
    out.resize(out.len() + count, b' ');
}

fn list(values: &[Value<'_>], sign: char, empty: &[u8], indent: usize, out: &mut Vec<u8>) {
    if values.is_empty() {
        return line(b"", empty, out);
    }
    let width = digits(values.len());
    for (at, value) in values.iter().enumerate() {
        number(at, width, sign, indent, out);
        write_indented(value, indent + width + 2, out);
    }
}

fn map(
    pairs: &[(Value<'_>, Value<'_>)],
    sign: char,
    empty: &[u8],
    indent: usize,
    out: &mut Vec<u8>,
) {
    if pairs.is_empty() {
        return line(b"", empty, out);
    }
    let width = digits(pairs.len());
    let inner = indent + width + 2;
    for (at, (key, value)) in pairs.iter().enumerate() {
        number(at, width, sign, indent, out);
        write_indented(key, inner, out);
        out.pop(); // the value follows on the same line
        out.extend_from_slice(b" => ");
        if has_lines(value) {
            out.push(b'\n');
            blanks(inner, out);
        }
        write_indented(value, inner, out);
    }
}

fn number(at: usize, width: usize, sign: char, indent: usize, out: &mut Vec<u8>) {
    if at > 0 {
        blanks(indent, out);
    }
    out.extend(format!("{:width$}{sign} ", at + 1).bytes());
}

fn digits(number: usize) -> usize {
    number.to_string().len()
}

/// Returns whether a value takes more than one line.
fn has_lines(value: &Value<'_>) -> bool {
    match without_attributes(value) {
        Value::Array(values) | Value::Set(values) | Value::Push(values) => {
            match values.as_slice() {
                [] => false,
                [only] => has_lines(only),
                _ => true,
            }
        }
        Value::Map(pairs) => match pairs.as_slice() {
            [] => false,
            [(_, only)] => has_lines(only),
            _ => true,
        },
        _ => false,
    }
}
