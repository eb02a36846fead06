//! Formats a reply as its bytes.

use ferrite_proto::resp::Value;

/// Appends a reply, with `delimiter` between its elements.
pub(super) fn write(reply: &Value<'_>, delimiter: &[u8], out: &mut Vec<u8>) {
    match reply {
        Value::Null => {}
        // As in redis-cli, an error ends with a newline, even inside an array.
        Value::Error(text) | Value::BlobError(text) => {
            out.extend_from_slice(text);
            out.push(b'\n');
        }
        Value::Simple(text)
        | Value::Bulk(text)
        | Value::Verbatim { text, .. }
        | Value::BigNumber(text) => {
            out.extend_from_slice(text);
        }
        Value::Chunks(chunks) => chunks.iter().for_each(|chunk| out.extend_from_slice(chunk)),
        Value::Boolean(value) => out.extend_from_slice(if *value { b"(true)" } else { b"(false)" }),
        Value::Integer(value) => out.extend(value.to_string().bytes()),
        Value::Double { text, .. } => out.extend_from_slice(text),
        Value::Array(values) | Value::Set(values) | Value::Push(values) => {
            for (at, value) in values.iter().enumerate() {
                if at > 0 {
                    out.extend_from_slice(delimiter);
                }
                write(value, delimiter, out);
            }
        }
        Value::Map(pairs) => {
            for (at, (key, value)) in pairs.iter().enumerate() {
                if at > 0 {
                    out.extend_from_slice(delimiter);
                }
                write(key, delimiter, out);
                out.push(b' ');
                write(value, delimiter, out);
            }
        }
        Value::Attributed { value, .. } => write(value, delimiter, out),
    }
}
