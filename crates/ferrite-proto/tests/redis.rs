//! Compares the framer with a real `redis-server`. Both must see the same commands in the same
//! bytes, valid or not. Otherwise a client could make a gateway forward a command that the gateway
//! did not check.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use ferrite_proto::resp::{Command, CommandError, CommandFramer, Limits, ReplyFramer};
use ferrite_testkit::Engine;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::TestRunner;

/// Pieces of valid and invalid commands.
const PIECES: &[&str] = &[
    "*1\r\n",
    "*2\r\n",
    "*0\r\n",
    "*-1\r\n",
    "*",
    "$4\r\nPING\r\n",
    "$4\r\nPING",
    "$1\r\n",
    "$0\r\n\r\n",
    "$",
    "$2\rzab..",
    "$3\r\nabc\r\n",
    "*3\r\nxx",
    "PING\r\n",
    "PING\n",
    "PING",
    "\r\n",
    "\n",
    "\r",
    "1",
    "-",
    "0",
    "x",
    "a b",
    " ",
    "\0",
];

#[test]
fn redis_sees_the_same_commands() {
    let server = Engine::redis(&[]);
    let streams =
        proptest::collection::vec(select(PIECES), 1..12).prop_map(|pieces| pieces.concat());
    let config =
        ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() };
    let compare = |stream: String| {
        let (commands, error) = ours(stream.as_bytes());
        let (replies, refusal) = replies(&server, stream.as_bytes());
        match (error, refusal) {
            (None, None) => prop_assert_eq!(replies, commands),
            (None, Some(refusal)) => prop_assert!(false, "only Redis refuses: {}", refusal),
            // Redis still waits for the end of a line that can no longer be a number, so it has not
            // replied.
            (Some(_), None) => prop_assert_eq!(replies, commands),
            (Some(error), Some(refusal)) => {
                prop_assert_eq!(replies, commands + 1);
                // For `ExpectedBulk` the texts differ, because Redis prints the wrong byte
                // unescaped.
                let same = refusal == format!("-ERR {error}\r\n");
                prop_assert!(
                    same || matches!(error, CommandError::ExpectedBulk { .. }),
                    "{}",
                    refusal
                );
            }
        }
        Ok(())
    };
    TestRunner::new(config)
        .run(&streams, compare)
        .expect("Redis and the framer see the same commands");
}

/// Returns how many commands with arguments the framer finds, and its error.
fn ours(bytes: &[u8]) -> (usize, Option<CommandError>) {
    let mut framer = CommandFramer::new(Limits::default());
    let (mut rest, mut commands) = (bytes, 0);
    while !rest.is_empty() {
        let progress = match framer.feed(rest) {
            Ok(progress) => progress,
            Err(error) => return (commands, Some(error)),
        };
        let (frame, behind) = rest.split_at(progress.consumed);
        rest = behind;
        if progress.complete {
            let command = Command::parse(frame).expect("a complete command");
            let line = command.inline().unwrap_or_default();
            let blank = line.iter().all(u8::is_ascii_whitespace);
            commands += usize::from(!blank || command.args().len() > 0);
        }
    }
    (commands, None)
}

/// Returns how many replies Redis sends to these bytes, and the last one if it is a protocol error.
fn replies(server: &Engine, bytes: &[u8]) -> (usize, Option<String>) {
    let mut stream = UnixStream::connect(server.socket()).expect("a listening server");
    stream.write_all(bytes).expect("a short message");
    stream.shutdown(Shutdown::Write).expect("an open stream");
    let mut answer = Vec::new();
    // The server may close the connection before it has read everything, if it refuses a command.
    let _ = stream.read_to_end(&mut answer);
    let mut framer = ReplyFramer::new(Limits::default());
    let (mut rest, mut replies, mut refusal) = (&answer[..], 0, None);
    while !rest.is_empty() {
        let progress = framer.feed(rest).expect("a reply");
        assert!(progress.complete, "{}", rest.escape_ascii());
        let (frame, behind) = rest.split_at(progress.consumed);
        rest = behind;
        replies += 1;
        let refused = frame.starts_with(b"-ERR Protocol error");
        refusal = refused.then(|| String::from_utf8_lossy(frame).into_owned());
    }
    (replies, refusal)
}
