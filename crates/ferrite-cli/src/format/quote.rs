//! Quotes bytes so that people can type them again.

/// Appends `bytes` in double quotes. Bytes that are not printable ASCII become escapes such as `\n`
/// or `\xff`. Quotes and backslashes get a backslash.
pub(crate) fn quote(bytes: &[u8], out: &mut Vec<u8>) {
    out.push(b'"');
    for byte in bytes {
        match byte {
            b'\\' | b'"' => out.extend([b'\\', *byte]),
            b'\n' => out.extend(b"\\n"),
            b'\r' => out.extend(b"\\r"),
            b'\t' => out.extend(b"\\t"),
            0x07 => out.extend(b"\\a"),
            0x08 => out.extend(b"\\b"),
            b' '..=b'~' => out.push(*byte),
            other => out.extend(format!("\\x{other:02x}").bytes()),
        }
    }
    out.push(b'"');
}
