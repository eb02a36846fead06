//! Encodes RESP and parses it again, whole and in pieces of any size.

use ferrite_proto::resp::{
    Command, CommandFramer, Limits, Progress, ReplyFramer, Value, encode_command, encode_status,
};
use proptest::collection::vec;
use proptest::prelude::*;

/// A reply that owns its strings.
#[derive(Debug, Clone)]
enum Reply {
    Simple(Vec<u8>),
    Error(Vec<u8>),
    Integer(i64),
    Bulk(Vec<u8>),
    Chunks(Vec<Vec<u8>>),
    Null,
    Boolean(bool),
    Double(f64, String),
    BigNumber(String),
    BlobError(Vec<u8>),
    Verbatim([u8; 3], Vec<u8>),
    Array(Vec<Reply>),
    Set(Vec<Reply>),
    Map(Vec<(Reply, Reply)>),
    Attributed(Vec<(Reply, Reply)>, Box<Reply>),
}

impl Reply {
    fn value(&self) -> Value<'_> {
        match self {
            Self::Simple(text) => Value::Simple(text),
            Self::Error(text) => Value::Error(text),
            Self::Integer(value) => Value::Integer(*value),
            Self::Bulk(bytes) => Value::Bulk(bytes),
            Self::Chunks(chunks) => Value::Chunks(chunks.iter().map(Vec::as_slice).collect()),
            Self::Null => Value::Null,
            Self::Boolean(value) => Value::Boolean(*value),
            Self::Double(value, text) => Value::Double { value: *value, text: text.as_bytes() },
            Self::BigNumber(digits) => Value::BigNumber(digits.as_bytes()),
            Self::BlobError(bytes) => Value::BlobError(bytes),
            Self::Verbatim(format, text) => Value::Verbatim { format, text },
            Self::Array(replies) => Value::Array(replies.iter().map(Reply::value).collect()),
            Self::Set(replies) => Value::Set(replies.iter().map(Reply::value).collect()),
            Self::Map(entries) => Value::Map(pairs(entries)),
            Self::Attributed(entries, reply) => {
                Value::Attributed { attributes: pairs(entries), value: Box::new(reply.value()) }
            }
        }
    }
}

fn pairs(pairs: &[(Reply, Reply)]) -> Vec<(Value<'_>, Value<'_>)> {
    pairs.iter().map(|(key, value)| (key.value(), value.value())).collect()
}

fn text() -> impl Strategy<Value = Vec<u8>> {
    vec(any::<u8>().prop_filter("no line end", |byte| !b"\r\n".contains(byte)), 0..12)
}

fn replies() -> impl Strategy<Value = Reply> {
    let bytes = || vec(any::<u8>(), 0..20);
    let scalar = prop_oneof![
        text().prop_map(Reply::Simple),
        text().prop_map(Reply::Error),
        any::<i64>().prop_map(Reply::Integer),
        bytes().prop_map(Reply::Bulk),
        vec(vec(any::<u8>(), 1..5), 0..4).prop_map(Reply::Chunks),
        Just(Reply::Null),
        any::<bool>().prop_map(Reply::Boolean),
        any::<f64>()
            .prop_filter("not NaN, which is not equal to itself", |value| !value.is_nan())
            .prop_map(|value| Reply::Double(value, value.to_string())),
        any::<i128>().prop_map(|value| Reply::BigNumber(value.to_string())),
        bytes().prop_map(Reply::BlobError),
        (any::<[u8; 3]>(), bytes()).prop_map(|(format, text)| Reply::Verbatim(format, text)),
    ];
    scalar.prop_recursive(5, 40, 5, |inner| {
        let pairs = vec((inner.clone(), inner.clone()), 0..4);
        let raw = inner
            .clone()
            .prop_filter("not attributed itself", |reply| !matches!(reply, Reply::Attributed(..)));
        prop_oneof![
            vec(inner.clone(), 0..5).prop_map(Reply::Array),
            vec(inner, 0..5).prop_map(Reply::Set),
            pairs.clone().prop_map(Reply::Map),
            (pairs, raw).prop_map(|(pairs, reply)| Reply::Attributed(pairs, Box::new(reply))),
        ]
    })
}

/// Feeds `bytes` in pieces whose sizes cycle through `sizes`. Returns where frames end.
fn ends<E: std::fmt::Debug>(
    bytes: &[u8],
    sizes: &[usize],
    mut feed: impl FnMut(&[u8]) -> Result<Progress, E>,
) -> Vec<usize> {
    let mut ends = Vec::new();
    let mut at = 0;
    for size in sizes.iter().cycle() {
        if at == bytes.len() {
            break;
        }
        let piece = &bytes[at..bytes.len().min(at + size)];
        let progress = feed(piece).expect("valid RESP");
        assert!(progress.complete || progress.consumed == piece.len());
        at += progress.consumed;
        if progress.complete {
            ends.push(at);
        }
    }
    ends
}

proptest! {
    #[test]
    fn replies_round_trip(
        replies in vec(replies(), 1..4),
        sizes in vec(1..40_usize, 1..10),
    ) {
        let mut bytes = Vec::new();
        let mut expected = Vec::new();
        for reply in &replies {
            reply.value().encode(&mut bytes);
            expected.push(bytes.len());
        }
        let mut framer = ReplyFramer::new(Limits::default());
        prop_assert_eq!(&ends(&bytes, &sizes, |piece| framer.feed(piece)), &expected);
        let mut from = 0;
        for (reply, end) in replies.iter().zip(expected) {
            prop_assert_eq!(Value::parse(&bytes[from..end]), Ok(reply.value()));
            from = end;
        }
    }

    #[test]
    fn commands_round_trip(
        commands in vec(vec(vec(any::<u8>(), 0..30), 0..5), 1..5),
        line in "[a-zA-Z \"]{0,20}\r?",
        sizes in vec(1..40_usize, 1..10),
    ) {
        let mut bytes = Vec::new();
        let mut expected = Vec::new();
        for command in &commands {
            encode_command(command, &mut bytes);
            expected.push(bytes.len());
        }
        bytes.extend_from_slice(line.as_bytes());
        bytes.push(b'\n');
        expected.push(bytes.len());

        let mut framer = CommandFramer::new(Limits::default());
        prop_assert_eq!(&ends(&bytes, &sizes, |piece| framer.feed(piece)), &expected);
        let mut from = 0;
        for (command, end) in commands.iter().zip(&expected) {
            let parsed = Command::parse(&bytes[from..*end]).expect("valid RESP");
            prop_assert!(parsed.args().eq(command.iter().map(Vec::as_slice)));
            from = *end;
        }
        let parsed = Command::parse(&bytes[from..]).expect("a line");
        prop_assert_eq!(parsed.inline(), Some(line.trim_end_matches('\r').as_bytes()));
    }
}

/// Parses replies like those of Redis 7.0 to `HELLO 3`, to `DEBUG PROTOCOL` with each of its types,
/// and to an invalid command.
#[test]
fn parses_replies_of_redis() {
    let replies = [
        &b"%2\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nmodules\r\n*0\r\n"[..],
        b"$11\r\nHello World\r\n",
        b":12345\r\n",
        b",3.141\r\n",
        b"_\r\n",
        b"*3\r\n:0\r\n:1\r\n:2\r\n",
        b"~3\r\n:0\r\n:1\r\n:2\r\n",
        b"%3\r\n:0\r\n#f\r\n:1\r\n#t\r\n:2\r\n#f\r\n",
        b"|1\r\n$14\r\nkey-popularity\r\n*2\r\n$7\r\nkey:123\r\n:90\r\n$39\r\nSome real reply following the attribute\r\n",
        b">2\r\n$16\r\nserver-cpu-usage\r\n:42\r\n",
        b"$40\r\nSome real reply following the push reply\r\n",
        b"=29\r\ntxt:This is a verbatim\nstring\r\n",
        b"#t\r\n",
        b"(1234567999999999999999999999999999999\r\n",
        b"-ERR Protocol error: expected '$', got '+'\r\n",
    ];
    let mut framer = ReplyFramer::new(Limits::default());
    let found = ends(&replies.concat(), &[7, 1, 30], |piece| framer.feed(piece));
    let lens = replies.iter().map(|reply| reply.len());
    let expected = lens.scan(0, |end, len| {
        *end += len;
        Some(*end)
    });
    assert!(found.into_iter().eq(expected));
    for reply in replies {
        let value = Value::parse(reply).expect("a reply");
        let mut again = Vec::new();
        value.encode(&mut again);
        assert_eq!(again, reply);
    }
}

/// Feeds the largest bulk string that Redis accepts, in pieces. The framer keeps none of it.
#[test]
fn does_not_buffer_half_a_gigabyte() {
    let mut framer = ReplyFramer::new(Limits::default());
    framer.feed(b"$536870912\r\n").expect("a string may be as long as the limit");
    let piece = vec![b'x'; 1 << 20];
    for _ in 0..512 {
        assert_eq!(framer.feed(&piece), Ok(Progress { consumed: 1 << 20, complete: false }));
    }
    assert_eq!(framer.feed(b"\r\n+"), Ok(Progress { consumed: 2, complete: true }));
    assert!(ReplyFramer::new(Limits::default()).feed(b"$536870913\r\n").is_err());
    assert!(CommandFramer::new(Limits::default()).feed(b"*1\r\n$536870913\r\n").is_err());
    assert!(CommandFramer::new(Limits::default()).feed(b"*1048577\r\n").is_err());
    assert!(CommandFramer::new(Limits::default()).feed(b"*1048576\r\n").is_ok());
}

#[test]
fn parses_an_encoded_status() {
    let mut bytes = Vec::new();
    encode_status("OK", &mut bytes);
    assert_eq!(Value::parse(&bytes), Ok(Value::Simple(b"OK")));
}
