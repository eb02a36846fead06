//! Tests of the styles, with replies of every type.

use super::*;

fn shown(style: Style, bytes: &[u8]) -> String {
    let reply = Value::parse(bytes).expect("valid reply");
    String::from_utf8(Format::new(style).reply(&reply, false)).expect("UTF-8")
}

/// Each case is a reply and its four formats: for people, raw, CSV and JSON.
#[test]
fn formats_every_type() {
    for (bytes, human, raw, csv, json) in [
        (&b"+OK\r\n"[..], "OK\n", "OK\n", "\"OK\"\n", "\"OK\"\n"),
        (
            b"-ERR no\r\n",
            "(error) ERR no\n",
            "ERR no\n\n",
            "ERROR,\"ERR no\"\n",
            "{\"error\":\"ERR no\"}\n",
        ),
        (
            b"!6\r\nERR no\r\n",
            "(error) ERR no\n",
            "ERR no\n\n",
            "ERROR,\"ERR no\"\n",
            "{\"error\":\"ERR no\"}\n",
        ),
        (b":-7\r\n", "(integer) -7\n", "-7\n", "-7\n", "-7\n"),
        (b"$3\r\na\"b\r\n", "\"a\\\"b\"\n", "a\"b\n", "\"a\\\"b\"\n", "\"a\\\"b\"\n"),
        (b"$?\r\n;1\r\na\r\n;1\r\nb\r\n;0\r\n", "\"ab\"\n", "ab\n", "\"ab\"\n", "\"ab\"\n"),
        (b"$-1\r\n", "(nil)\n", "\n", "NULL\n", "null\n"),
        (b"_\r\n", "(nil)\n", "\n", "NULL\n", "null\n"),
        (b"#t\r\n", "(true)\n", "(true)\n", "true\n", "true\n"),
        (b",0.10\r\n", "(double) 0.10\n", "0.10\n", "0.10\n", "0.10\n"),
        (b",inf\r\n", "(double) inf\n", "inf\n", "inf\n", "\"inf\"\n"),
        (b"(123\r\n", "(big number) 123\n", "123\n", "123\n", "123\n"),
        (b"=6\r\ntxt:a\n\r\n", "a\n\n", "a\n\n", "\"a\\n\"\n", "\"a\\n\"\n"),
        (b"*0\r\n", "(empty array)\n", "\n", "\n", "[]\n"),
        (b"~0\r\n", "(empty set)\n", "\n", "\n", "[]\n"),
        (b"%0\r\n", "(empty hash)\n", "\n", "\n", "{}\n"),
        (b"~2\r\n:1\r\n:2\r\n", "1~ (integer) 1\n2~ (integer) 2\n", "1\n2\n", "1,2\n", "[1,2]\n"),
        (
            b"%2\r\n+a\r\n:1\r\n:2\r\n*2\r\n:3\r\n_\r\n",
            "1# a => (integer) 1\n2# (integer) 2 => \n   1) (integer) 3\n   2) (nil)\n",
            "a 1\n2 3\n\n",
            "\"a\",1,2,3,NULL\n",
            "{\"a\":1,\"2\":[3,null]}\n",
        ),
        (
            b"|1\r\n+ttl\r\n:9\r\n*1\r\n:1\r\n",
            "1| ttl => (integer) 9\n1) (integer) 1\n",
            "1\n",
            "1\n",
            "[1]\n",
        ),
    ] {
        let name = String::from_utf8_lossy(bytes);
        assert_eq!(shown(Style::Human, bytes), human, "{name:?}");
        assert_eq!(shown(Style::Raw, bytes), raw, "{name:?}");
        assert_eq!(shown(Style::Csv, bytes), csv, "{name:?}");
        assert_eq!(shown(Style::Json, bytes), json, "{name:?}");
    }
}

#[test]
fn aligns_element_numbers() {
    let mut bytes = b"*10\r\n*2\r\n:1\r\n:2\r\n".to_vec();
    (0..9).for_each(|_| bytes.extend(b"_\r\n"));
    let human = shown(Style::Human, &bytes);
    assert!(human.starts_with(" 1) 1) (integer) 1\n    2) (integer) 2\n 2) (nil)\n"), "{human}");
    assert!(human.ends_with("\n10) (nil)\n"), "{human}");
}

#[test]
fn uses_the_delimiters_of_raw_replies() {
    let format = Format {
        element_delimiter: b";".to_vec(),
        reply_delimiter: b"--".to_vec(),
        ..Format::new(Style::Raw)
    };
    let reply = Value::parse(b"*2\r\n:1\r\n:2\r\n").expect("valid reply");
    assert_eq!(format.reply(&reply, false), b"1;2--");
    assert_eq!(format.reply(&reply, true), b"1;2");
}

#[test]
fn escapes_bytes_that_are_not_text() {
    let bytes = b"$5\r\n\xff\xc3\xa9\x01\"\r\n";
    assert_eq!(shown(Style::Json, bytes), "\"\u{ff}é\\u0001\\\"\"\n");
    assert_eq!(shown(Style::QuotedJson, bytes), "\"\\\\xff\\\\xc3\\\\xa9\\\\x01\\\\\\\"\"\n");
    assert_eq!(shown(Style::Human, bytes), "\"\\xff\\xc3\\xa9\\x01\\\"\"\n");
}

#[test]
fn formats_invalidations_as_one_line() {
    let push = b">2\r\n$10\r\ninvalidate\r\n*2\r\n$1\r\na\r\n$1\r\nb\r\n";
    let push = Value::parse(push).expect("valid push message");
    assert_eq!(Format::new(Style::Human).push(&push), b"-> invalidate: 'a', 'b'\n");
    assert_eq!(Format::new(Style::Csv).push(&push), b"\"invalidate\",\"a\",\"b\"\n");
}
