//! Compares our reply decoder with another one, the crate redis-protocol. If both accept the bytes,
//! they must agree on the value and on its end. If only one accepts them, the reason must be one of
//! these:
//!
//! | accepted only by redis-protocol | because |
//! |---|---|
//! | lengths such as `+5` and `007` | Redis never writes them, and refuses them in commands |
//! | line ends within lines, anything after `_` | RESP does not allow them |
//! | other bytes in place of the line end after a string | they contradict the length |
//! | big numbers that are not numbers, verbatim strings without a colon | they are invalid |
//! | a push within a value | RESP3 forbids it |
//! | nesting without limit | it costs memory |
//! | `HELLO`, `;` and `.` as frames of their own | they are requests, and parts of streams |
//!
//! | accepted only by ours | because redis-protocol |
//! |---|---|
//! | streamed strings and aggregates | leaves their assembly to its user |
//! | nulls of RESP2 among RESP3, and the reverse | accepts one version at a time |
//! | aggregates as keys and in sets | uses hash maps |
//! | errors that are not UTF-8 | uses strings |
//! | verbatim strings of other formats than `txt` and `mkd` | uses an enum |
//! | attributes of a null, attributes after attributes | cannot store them |

use ferrite_proto::resp::{Limits, ReplyError, ReplyFramer, Value};
use redis_protocol::resp2::types::OwnedFrame as Frame2;
use redis_protocol::resp3::types::{OwnedFrame as Frame3, Resp3Frame as _, VerbatimStringFormat};

/// Maximum number of bytes to compare. The other decoder has no depth limit, so more bytes could
/// overflow the stack.
const BYTES_MAX: usize = 4096;

/// Compares all replies in the bytes. The first byte is skipped, because it is a seed for another
/// check.
pub fn replies(bytes: &[u8]) {
    let Some((_, mut rest)) = bytes.split_first() else { return };
    if rest.len() > BYTES_MAX {
        return;
    }
    while !rest.is_empty() {
        let ours = ReplyFramer::new(Limits::default()).feed(rest);
        let end = ours.as_ref().map_or(0, |progress| progress.consumed);
        let frame = &rest[..end];
        match ours {
            Ok(progress) if progress.complete => complete(frame, rest),
            Ok(_) => {
                assert!(!matches!(redis_protocol::resp2::decode::decode(rest), Ok(Some(_))));
                assert!(!matches!(
                    redis_protocol::resp3::decode::complete::decode(rest),
                    Ok(Some(_))
                ));
            }
            Err(error) => {
                refused(
                    error,
                    redis_protocol::resp2::decode::decode(rest).ok().flatten().is_some(),
                );
                let decoded = redis_protocol::resp3::decode::complete::decode(rest);
                refused(error, decoded.ok().flatten().is_some());
                return;
            }
        }
        rest = &rest[end..];
    }
}

/// Checks that only our stricter rules refuse bytes that the other decoder accepts.
fn refused(error: ReplyError, taken: bool) {
    let strict = match error {
        ReplyError::Length
        | ReplyError::LineEnd
        | ReplyError::BlobEnd
        | ReplyError::Number
        | ReplyError::Verbatim
        | ReplyError::NestedPush
        | ReplyError::TooDeep { .. } => true,
        ReplyError::Type { got } => matches!(got, b'H' | b';' | b'.'),
        _ => false,
    };
    assert!(!taken || strict, "refused by our decoder only: {error}");
}

fn complete(frame: &[u8], rest: &[u8]) {
    let two = redis_protocol::resp2::decode::decode(rest);
    let three = redis_protocol::resp3::decode::complete::decode(rest);
    let value = match Value::parse(frame) {
        Ok(value) => value,
        Err(error) => {
            assert_eq!(error, ReplyError::Double);
            return assert!(two.is_err() && three.is_err());
        }
    };
    match two {
        Ok(Some((theirs, end))) => {
            assert_eq!(end, frame.len());
            assert!(same2(&theirs, &value), "{theirs:?} {value:?}");
        }
        Ok(None) => panic!("redis-protocol expects more bytes of {value:?}"),
        Err(_) => {
            assert!(
                has(frame, &[b"?\r\n", b"_\r\n"]) || any(&value, &unsupported_in_resp2),
                "{value:?}"
            )
        }
    }
    match three {
        Ok(Some((theirs, end))) => {
            assert_eq!(end, frame.len());
            assert!(same3(&theirs, &value), "{theirs:?} {value:?}");
        }
        Ok(None) => panic!("redis-protocol expects more bytes of {value:?}"),
        Err(_) => {
            let twice = frame.iter().filter(|byte| **byte == b'|').count() > 1;
            let other = has(frame, &[b"?\r\n", b"$-1\r\n", b"*-1\r\n"]) || twice;
            assert!(other || any(&value, &unsupported_in_resp3), "{value:?}");
        }
    }
}

fn has(bytes: &[u8], needles: &[&[u8]]) -> bool {
    needles.iter().any(|needle| bytes.windows(needle.len()).any(|window| window == *needle))
}

/// Returns whether `holds` is true for the value or for a value inside it.
fn any(value: &Value<'_>, holds: &dyn Fn(&Value<'_>) -> bool) -> bool {
    let in_pairs = |pairs: &[(Value<'_>, Value<'_>)]| {
        pairs.iter().any(|(key, value)| any(key, holds) || any(value, holds))
    };
    holds(value)
        || match value {
            Value::Array(values) | Value::Set(values) | Value::Push(values) => {
                values.iter().any(|value| any(value, holds))
            }
            Value::Map(pairs) => in_pairs(pairs),
            Value::Attributed { attributes, value } => in_pairs(attributes) || any(value, holds),
            _ => false,
        }
}

fn unsupported_in_resp2(value: &Value<'_>) -> bool {
    match value {
        Value::Simple(_) | Value::Integer(_) | Value::Bulk(_) | Value::Null | Value::Array(_) => {
            false
        }
        Value::Error(text) => std::str::from_utf8(text).is_err(),
        _ => true,
    }
}

fn unsupported_in_resp3(value: &Value<'_>) -> bool {
    let raw = |value: &Value<'_>| match value {
        Value::Attributed { value, .. } => is_aggregate(value),
        value => is_aggregate(value),
    };
    match value {
        Value::Error(text) => std::str::from_utf8(text).is_err(),
        Value::Verbatim { format, .. } => !matches!(*format, b"txt" | b"mkd"),
        Value::Set(values) => values.iter().any(raw),
        Value::Map(pairs) => pairs.iter().any(|(key, _)| raw(key)),
        Value::Attributed { attributes, value } => {
            **value == Value::Null || attributes.iter().any(|(key, _)| raw(key))
        }
        _ => false,
    }
}

fn is_aggregate(value: &Value<'_>) -> bool {
    matches!(value, Value::Array(_) | Value::Set(_) | Value::Map(_) | Value::Push(_))
}

fn same2(theirs: &Frame2, ours: &Value<'_>) -> bool {
    match (theirs, ours) {
        (Frame2::SimpleString(theirs), Value::Simple(ours))
        | (Frame2::BulkString(theirs), Value::Bulk(ours)) => theirs == ours,
        (Frame2::Error(theirs), Value::Error(ours)) => theirs.as_bytes() == *ours,
        (Frame2::Integer(theirs), Value::Integer(ours)) => theirs == ours,
        (Frame2::Null, Value::Null) => true,
        (Frame2::Array(theirs), Value::Array(ours)) => {
            theirs.len() == ours.len()
                && theirs.iter().zip(ours).all(|(theirs, ours)| same2(theirs, ours))
        }
        _ => false,
    }
}

fn same3(theirs: &Frame3, ours: &Value<'_>) -> bool {
    let (attributes, ours) = match ours {
        Value::Attributed { attributes, value } => (Some(attributes), &**value),
        ours => (None, ours),
    };
    let same_attributes = match (theirs.attributes(), attributes) {
        (None, None) => true,
        (Some(theirs), Some(ours)) => same_pairs(theirs.iter(), ours),
        _ => false,
    };
    let all = |theirs: &[Frame3], ours: &[Value<'_>]| {
        theirs.len() == ours.len()
            && theirs.iter().zip(ours).all(|(theirs, ours)| same3(theirs, ours))
    };
    same_attributes
        && match (theirs, ours) {
            (Frame3::SimpleString { data, .. }, Value::Simple(ours))
            | (Frame3::BlobString { data, .. }, Value::Bulk(ours))
            | (Frame3::BlobError { data, .. }, Value::BlobError(ours))
            | (Frame3::BigNumber { data, .. }, Value::BigNumber(ours)) => data == ours,
            (Frame3::SimpleError { data, .. }, Value::Error(ours)) => data.as_bytes() == *ours,
            (Frame3::Number { data, .. }, Value::Integer(ours)) => data == ours,
            (Frame3::Double { data, .. }, Value::Double { value: ours, .. }) => {
                data.to_bits() == ours.to_bits()
            }
            (Frame3::Boolean { data, .. }, Value::Boolean(ours)) => data == ours,
            (Frame3::Null, Value::Null) => true,
            (
                Frame3::VerbatimString { data, format, .. },
                Value::Verbatim { format: word, text },
            ) => {
                let theirs: &[u8] = match format {
                    VerbatimStringFormat::Text => b"txt",
                    VerbatimStringFormat::Markdown => b"mkd",
                };
                theirs == *word && data == text
            }
            (Frame3::Array { data, .. }, Value::Array(ours))
            | (Frame3::Push { data, .. }, Value::Push(ours)) => all(data, ours),
            // Compares in both directions, because a set keeps a repeated value only once.
            (Frame3::Set { data, .. }, Value::Set(ours)) => {
                data.iter().all(|theirs| ours.iter().any(|ours| same3(theirs, ours)))
                    && ours.iter().all(|ours| data.iter().any(|theirs| same_raw(theirs, ours)))
            }
            (Frame3::Map { data, .. }, Value::Map(ours)) => same_pairs(data.iter(), ours),
            _ => false,
        }
}

/// Returns whether the other decoder's keys and values are among ours, and our keys among its keys.
/// Does not compare pair by pair, because a map keeps only one of several pairs with the same key.
fn same_pairs<'a>(
    theirs: impl Iterator<Item = (&'a Frame3, &'a Frame3)> + Clone,
    ours: &[(Value<'_>, Value<'_>)],
) -> bool {
    let known = |(key, value): (&Frame3, &Frame3)| {
        ours.iter().any(|(our_key, _)| same_raw(key, our_key))
            && ours.iter().any(|(_, our_value)| same3(value, our_value))
    };
    theirs.clone().all(known)
        && ours.iter().all(|(key, _)| theirs.clone().any(|(other, _)| same_raw(other, key)))
}

/// Compares without attributes, because the other decoder ignores them when it compares keys.
/// Treats all NaNs as equal.
fn same_raw(theirs: &Frame3, ours: &Value<'_>) -> bool {
    let ours = match ours {
        Value::Attributed { value, .. } => &**value,
        ours => ours,
    };
    if let (Frame3::Double { data, .. }, Value::Double { value: ours, .. }) = (theirs, ours) {
        return data == ours || data.is_nan() && ours.is_nan();
    }
    let mut raw = theirs.clone();
    raw.take_attributes();
    same3(&raw, ours)
}
