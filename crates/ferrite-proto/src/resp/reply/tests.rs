//! Complete, incomplete and invalid replies.

use super::*;

fn limits() -> Limits {
    Limits { bulk_bytes: 20, inline_bytes: 40, elements: 5, depth: 3, ..Limits::default() }
}

/// Feeds all bytes at once and byte by byte, and checks that the results are the same.
fn feed(bytes: &[u8]) -> Result<Progress, ReplyError> {
    let at_once = ReplyFramer::new(limits()).feed(bytes);
    let mut framer = ReplyFramer::new(limits());
    for (at, byte) in bytes.iter().enumerate() {
        match framer.feed(&[*byte]) {
            Err(error) => {
                assert_eq!(at_once, Err(error));
                return at_once;
            }
            Ok(Progress { complete: true, .. }) => {
                assert_eq!(at_once, Ok(Progress { consumed: at + 1, complete: true }));
                assert!(!framer.is_inside() && framer.levels.is_empty() && !framer.attributed);
                return at_once;
            }
            Ok(_) => assert_eq!(framer.frame_bytes(), at as u64 + 1),
        }
    }
    assert_eq!(at_once, Ok(Progress { consumed: bytes.len(), complete: false }));
    at_once
}

#[test]
fn finds_the_end_of_replies() {
    for reply in [
        &b"+OK\r\n"[..],
        b"+\r\n",
        b"-ERR no\r\n",
        b":-12\r\n",
        b":+12\r\n",
        b"_\r\n",
        b"#t\r\n",
        b"#f\r\n",
        b",1.5\r\n",
        b",-inf\r\n",
        b"(-3492890328409238\r\n",
        b"$-1\r\n",
        b"*-1\r\n",
        b"$0\r\n\r\n",
        b"$5\r\na\r\nbc\r\n",
        b"!5\r\nERR x\r\n",
        b"=7\r\ntxt:abc\r\n",
        b"=4\r\nmkd:\r\n",
        b"*0\r\n",
        b"*2\r\n:1\r\n*1\r\n_\r\n",
        b"~1\r\n#t\r\n",
        b">2\r\n+message\r\n$1\r\nx\r\n",
        b"%1\r\n+k\r\n+v\r\n",
        b"%0\r\n",
        // Attributes before a value and inside one, without pairs, and several in a row.
        b"|1\r\n+ttl\r\n:3\r\n*1\r\n|0\r\n|1\r\n+a\r\n+b\r\n:1\r\n",
        b"|0\r\n>1\r\n+x\r\n",
        b"|1\r\n+k\r\n|0\r\n+v\r\n+OK\r\n",
        // Streams.
        b"$?\r\n;4\r\nHell\r\n;1\r\no\r\n;0\r\n",
        b"$?\r\n;0\r\n",
        b"*?\r\n.\r\n",
        b"*?\r\n:1\r\n*?\r\n:2\r\n.\r\n~?\r\n:3\r\n.\r\n.\r\n",
        b"%?\r\n+k\r\n*1\r\n+v\r\n.\r\n",
        b"*?\r\n|0\r\n:1\r\n.\r\n",
        b"*1\r\n*1\r\n*1\r\n:1\r\n",
    ] {
        let complete = Ok(Progress { consumed: reply.len(), complete: true });
        assert_eq!(feed(reply), complete, "{}", reply.escape_ascii());
        assert_eq!(feed(&[reply, b"+next"].concat()), complete);
        for len in 0..reply.len() {
            assert_eq!(feed(&reply[..len]), Ok(Progress { consumed: len, complete: false }));
        }
    }
}

#[test]
fn rejects_invalid_replies() {
    for (bytes, error) in [
        (&b"OK\r\n"[..], ReplyError::Type { got: b'O' }),
        (b"\r\n", ReplyError::Type { got: b'\r' }),
        (b";4\r\n", ReplyError::Type { got: b';' }),
        (b".\r\n", ReplyError::Type { got: b'.' }),
        (b"*1\r\n.\r\n", ReplyError::Type { got: b'.' }),
        (b"%?\r\n+k\r\n.\r\n", ReplyError::Type { got: b'.' }),
        (b"*?\r\n|0\r\n.\r\n", ReplyError::Type { got: b'.' }),
        (b"*?\r\n|1\r\n+k\r\n+v\r\n.\r\n", ReplyError::Type { got: b'.' }),
        (b"$?\r\n+x\r\n", ReplyError::Type { got: b'+' }),
        (b"*1\r\n>1\r\n", ReplyError::NestedPush),
        (b"|1\r\n>1\r\n", ReplyError::NestedPush),
        (b">?\r\n", ReplyError::AggregateLength),
        (b"|?\r\n", ReplyError::AggregateLength),
        (b"!?\r\n", ReplyError::BulkLength),
        (b"$-2\r\n", ReplyError::BulkLength),
        (b"!-1\r\n", ReplyError::BulkLength),
        (b"$21\r\n", ReplyError::BulkLength),
        (b"$?\r\n;21\r\n", ReplyError::BulkLength),
        (b"%-1\r\n", ReplyError::AggregateLength),
        (b"*6\r\n", ReplyError::AggregateLength),
        (b"%6\r\n", ReplyError::AggregateLength),
        (b"*\r\n", ReplyError::AggregateLength),
        (b"$01\r\n", ReplyError::Length),
        (b"*1?\r\n", ReplyError::Length),
        (b"*??\r\n", ReplyError::Length),
        (b"*1\r\n*1\r\n*1\r\n*1\r\n", ReplyError::TooDeep { limit: 3 }),
        (b":\r\n", ReplyError::Number),
        (b":1.5\r\n", ReplyError::Number),
        (b"(-\r\n", ReplyError::Number),
        (b"(1-\r\n", ReplyError::Number),
        (b"#\r\n", ReplyError::Boolean),
        (b"#true\r\n", ReplyError::Boolean),
        (b"#x\r\n", ReplyError::Boolean),
        (b"_x\r\n", ReplyError::LineEnd),
        (b"*?\r\n.x\r\n", ReplyError::LineEnd),
        (b"+a\nb\r\n", ReplyError::LineEnd),
        (b"+a\rb\r\n", ReplyError::LineEnd),
        (b"=3\r\ntxt\r\n", ReplyError::Verbatim),
        (b"=4\r\ntxtx\r\n", ReplyError::Verbatim),
        (b"$1\r\nxx\r\n", ReplyError::BlobEnd),
        (b"$1\r\nx\rx", ReplyError::BlobEnd),
    ] {
        assert_eq!(feed(bytes), Err(error), "{}", bytes.escape_ascii());
    }
    let type_ = ReplyError::Type { got: 0 };
    assert_eq!(type_.to_string(), "Protocol error, got \"\\x00\" as reply type byte");
}

#[test]
fn limits_the_length_of_lines() {
    for kind in ["+", ":", "("] {
        let digits = "0".repeat(40);
        let longest = format!("{kind}{digits}\r\n");
        let complete = Ok(Progress { consumed: longest.len(), complete: true });
        assert_eq!(feed(longest.as_bytes()), complete);
        assert_eq!(feed(format!("{kind}{digits}0").as_bytes()), Err(ReplyError::LineTooLong));
    }
}

#[test]
fn empty_aggregates_do_not_count_as_levels() {
    let bytes = b"*1\r\n*1\r\n*1\r\n*0\r\n";
    assert_eq!(feed(bytes), Ok(Progress { consumed: bytes.len(), complete: true }));
}

#[test]
fn limits_the_bytes_and_values_of_a_reply() {
    let limits = Limits { reply_bytes: 40, reply_values: 6, ..Limits::default() };
    let (large, many) = (ReplyError::TooLarge { limit: 40 }, ReplyError::TooMany { limit: 6 });
    let largest = [b"$33\r\n", &[b'x'; 33][..], b"\r\n"].concat();
    for (bytes, expected) in [
        (&largest[..], Ok(Progress { consumed: 40, complete: true })),
        (&[b"*1\r\n", &largest[..]].concat(), Err(large)),
        (b"$?\r\n;20\r\n01234567890123456789\r\n;10\r\n01234", Err(large)),
        (b"*5\r\n_\r\n_\r\n_\r\n_\r\n_\r\n", Ok(Progress { consumed: 19, complete: true })),
        (b"*?\r\n_\r\n_\r\n_\r\n_\r\n_\r\n_", Err(many)),
        (b"*1\r\n*1\r\n*4\r\n_\r\n_\r\n_\r\n_", Err(many)),
    ] {
        let mut framer = ReplyFramer::new(limits);
        assert_eq!(framer.feed(bytes), expected, "{}", bytes.escape_ascii());
        let mut in_pieces = ReplyFramer::new(limits);
        let error = bytes.iter().find_map(|byte| in_pieces.feed(&[*byte]).err());
        assert_eq!(error, expected.err(), "{}", bytes.escape_ascii());
        if expected.is_ok() {
            // The limits apply anew to the next reply.
            assert_eq!(framer.feed(bytes), expected);
        }
    }
}
