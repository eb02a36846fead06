//! The control messages between the two sides: lines of JSON on channel 0. Measured data uses
//! channel 1.
//!
//! Each message ends with a newline, in case the server is Redis or Valkey. They read the line as a
//! command and answer with an error, which the client reports. Without the newline, they would wait
//! for the rest of the command.
//!
//! ```text
//!   client                                     server
//!   first link:  begin {format, links}    ──►
//!   further links: join {link}            ──►
//!                                         ◄──  holding {…}     or refused {why}, at any time
//!   idle; opens links; idle_open {links}  ──►
//!                                         ◄──  holding {…}
//!   test {op, measure, size_bytes, mode}  ──►
//!                                         ◄──  ready, then the grants if the test needs them
//!   … the test, which the client ends …
//!                                         ◄──  done {messages, bytes, work}
//!   end, and closes
//! ```
//!
//! For the latency of write, the client sends grants, too. Each grant is sent as plain bytes on
//! channel 0, over the link to which it belongs.

use anyhow::{Context as _, ensure};
use ferrite_fabric::wire::GrantToken;
use ferrite_fabric::{Fabric, Link, Message};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{LINKS_MAX, Measure, SIZE_MAX};
use crate::choice::{Mode, Op};

/// The channel of control messages.
pub(super) const CONTROL: u16 = 0;
/// The channel of measured data.
pub(super) const DATA: u16 = 1;

const FORMAT: u32 = 1;
/// How many characters of a foreign peer's message an error shows.
const LINE_SHOWN: usize = 80;

/// A message from the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Request {
    Begin { format: u32, links: u32 },
    Join { link: u32 },
    Idle,
    IdleOpen { links: usize },
    Test(Test),
    Stop,
    End,
}

/// The parameters of a case that the server needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Test {
    pub(super) op: Op,
    pub(super) measure: Measure,
    pub(super) size_bytes: u32,
    pub(super) mode: Mode,
}

/// A message from the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Reply {
    Holding(Resources),
    Ready,
    Done { messages: u64, bytes: u64, work: Work },
    Refused { why: String },
}

/// The resources that a fabric holds at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Resources {
    pub(super) links: u64,
    pub(super) registered_bytes: u64,
    pub(super) receives_posted: u64,
}

/// Counters of a fabric's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Work {
    passes: u64,
    completions: u64,
    sleeps: u64,
}

impl Request {
    /// Returns the first request of a session.
    pub(super) fn begin(links: u32) -> Self {
        Self::Begin { format: FORMAT, links }
    }

    /// Parses the first request of a session. Returns the number of links.
    pub(super) fn parse_begin(message: &Message) -> anyhow::Result<u32> {
        match parse(message)? {
            Self::Begin { format: FORMAT, links } => {
                ensure!(
                    (1..=LINKS_MAX).contains(&links),
                    "{links} links requested, expected 1 to {LINKS_MAX}"
                );
                Ok(links)
            }
            Self::Begin { format, .. } => {
                anyhow::bail!(
                    "the client uses protocol version {format}, the server {FORMAT}; run the same \
                     version of ferrite on both hosts"
                )
            }
            other => anyhow::bail!("received {other:?}, expected Begin"),
        }
    }
}

impl Test {
    /// Checks that the test is possible: a client may send anything.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        let Self { op, measure, size_bytes, mode } = *self;
        ensure!(
            (1..=SIZE_MAX).contains(&size_bytes),
            "messages of {size_bytes} bytes requested, expected 1 to {SIZE_MAX}"
        );
        let is_asleep = (op, measure, mode) == (Op::Write, Measure::Latency, Mode::Event);
        ensure!(
            !is_asleep,
            "cannot measure the latency of write in event mode: nothing wakes its receiver"
        );
        Ok(())
    }
}

impl Resources {
    pub(super) fn of(fabric: &Fabric) -> Self {
        let stats = fabric.stats();
        Self {
            links: stats.links,
            registered_bytes: stats.memory.registered_bytes,
            receives_posted: stats.receives_posted,
        }
    }
}

impl Work {
    /// Returns the counters since the fabric was built.
    pub(super) fn of(fabric: &Fabric) -> Self {
        let stats = fabric.stats();
        Self { passes: stats.passes, completions: stats.completions, sleeps: stats.sleeps }
    }

    pub(super) fn since(self, before: Self) -> Self {
        Self {
            passes: self.passes - before.passes,
            completions: self.completions - before.completions,
            sleeps: self.sleeps - before.sleeps,
        }
    }
}

pub(super) fn send_control(link: &Link, message: &impl Serialize) -> anyhow::Result<()> {
    Ok(link.post_bytes(CONTROL, &encode(message)?)?)
}

fn encode(message: &impl Serialize) -> anyhow::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    Ok(line)
}

pub(super) async fn receive_control<T: DeserializeOwned>(link: &Link) -> anyhow::Result<T> {
    parse(&link.recv().await?)
}

pub(super) fn parse<T: DeserializeOwned>(message: &Message) -> anyhow::Result<T> {
    ensure!(
        message.channel() == CONTROL && message.notice().is_none(),
        "the peer sent data, expected a control message"
    );
    decode(&message.to_vec())
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> anyhow::Result<T> {
    let line = bytes.split(|byte| b"\r\n".contains(byte)).next().unwrap_or_default();
    let line: String = String::from_utf8_lossy(line).chars().take(LINE_SHOWN).collect();
    ensure!(
        !bytes.starts_with(b"-"),
        "the peer is a Redis or Valkey server, not `ferrite bench fabric`: it answered {line:?}; \
         start `ferrite bench fabric --listen` on another port there, or measure this server with \
         `ferrite bench kv`"
    );
    serde_json::from_slice(bytes).with_context(|| {
        format!("the peer does not use the protocol of ferrite bench: it sent {line:?}")
    })
}

pub(super) async fn receive_grant(link: &Link) -> anyhow::Result<GrantToken> {
    let message = link.recv().await?;
    ensure!(message.channel() == CONTROL, "the peer sent data, expected a grant");
    Ok(GrantToken::decode(&message.to_vec())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEST: Test =
        Test { op: Op::Read, measure: Measure::Latency, size_bytes: 64, mode: Mode::Poll };

    #[test]
    fn encoding_is_stable() {
        let encode = |request: Request| {
            let line = encode(&request).expect("JSON");
            assert_eq!(decode::<Request>(&line).expect("a request"), request);
            String::from_utf8(line).expect("text")
        };
        assert_eq!(encode(Request::begin(3)), "{\"begin\":{\"format\":1,\"links\":3}}\n");
        assert_eq!(
            encode(Request::Test(TEST)).trim_end(),
            r#"{"test":{"op":"read","measure":"latency","size_bytes":64,"mode":"poll"}}"#
        );
        assert_eq!(
            encode(Request::IdleOpen { links: 9 }).trim_end(),
            r#"{"idle_open":{"links":9}}"#
        );
    }

    #[test]
    fn names_a_server_of_another_protocol() {
        let error = decode::<Reply>(b"-ERR unknown command\r\n").expect_err("an error of Redis");
        let text = error.to_string();
        assert!(text.contains("Redis or Valkey server") && text.contains("bench kv"), "{text}");
        assert!(text.contains("\"-ERR unknown command\""), "{text}");
        let error = decode::<Reply>(b"hello\0").expect_err("a text of another protocol");
        assert!(error.to_string().contains(r#"it sent "hello\0""#), "{error}");
    }

    #[test]
    fn rejects_impossible_tests() {
        assert!(TEST.check().is_ok());
        assert!(Test { size_bytes: 0, ..TEST }.check().is_err());
        assert!(Test { size_bytes: SIZE_MAX + 1, ..TEST }.check().is_err());
        assert!(Test { op: Op::Write, mode: Mode::Event, ..TEST }.check().is_err());
        assert!(serde_json::from_str::<Request>(r#"{"test":{"op":"read"}}"#).is_err());
    }
}
