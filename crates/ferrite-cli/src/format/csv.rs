//! Formats a reply as one line of comma-separated values. Nested values are flattened.

use ferrite_proto::resp::Value;

use super::quote;

/// Appends a reply, without a newline.
pub(super) fn write(reply: &Value<'_>, out: &mut Vec<u8>) {
    match reply {
        Value::Error(text) | Value::BlobError(text) => {
            out.extend(b"ERROR,");
            quote(text, out);
        }
        Value::Simple(text) | Value::Bulk(text) | Value::Verbatim { text, .. } => quote(text, out),
        Value::Chunks(chunks) => quote(&chunks.concat(), out),
        Value::Null => out.extend(b"NULL"),
        Value::Boolean(value) => out.extend_from_slice(if *value { b"true" } else { b"false" }),
        Value::Integer(value) => out.extend(value.to_string().bytes()),
        Value::Double { text, .. } | Value::BigNumber(text) => out.extend_from_slice(text),
        Value::Array(values) | Value::Set(values) | Value::Push(values) => flat(values.iter(), out),
        Value::Map(pairs) => flat(pairs.iter().flat_map(|(key, value)| [key, value]), out),
        Value::Attributed { value, .. } => write(value, out),
    }
}

fn flat<'a, 'b: 'a>(values: impl Iterator<Item = &'a Value<'b>>, out: &mut Vec<u8>) {
    for (at, value) in values.enumerate() {
        if at > 0 {
            out.push(b',');
        }
        write(value, out);
    }
}
