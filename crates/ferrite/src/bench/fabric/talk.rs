//! What the two sides say to each other: JSON on channel 0, while what is measured goes on channel
//! 1.
//!
//! ```text
//!   client                                     server
//!   first link:  begin {format, links}    ──►
//!   further links: join {link}            ──►
//!                                         ◄──  holding {…}            or refused {why}, at any time
//!   idle; opens links; idle_open {links}  ──►
//!                                         ◄──  holding {…}
//!   test {op, measure, size_bytes, mode}  ──►
//!                                         ◄──  ready, then what the test begins with
//!   … the test, which the client ends …
//!                                         ◄──  done {messages, bytes, work}
//!   end, and closes
//! ```
//!
//! A grant is sent as its bytes on the link that it is for.

use anyhow::{Context as _, ensure};
use ferrite_fabric::wire::GrantToken;
use ferrite_fabric::{Fabric, Link, Message};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{LINKS_MAX, Measure, SIZE_MAX};
use crate::choice::{Mode, Op};

/// The channel of what is said.
pub(super) const TALK: u16 = 0;
/// The channel of what is measured.
pub(super) const DATA: u16 = 1;

const FORMAT: u32 = 1;

/// What a client says.
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

/// What the server has to know of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Test {
    pub(super) op: Op,
    pub(super) measure: Measure,
    pub(super) size_bytes: u32,
    pub(super) mode: Mode,
}

/// What the server answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Reply {
    Holding(Holding),
    Ready,
    Done { messages: u64, bytes: u64, work: Work },
    Refused { why: String },
}

/// What a fabric has at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Holding {
    pub(super) links: u64,
    pub(super) registered_bytes: u64,
    pub(super) receives_posted: u64,
}

/// What a fabric has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Work {
    passes: u64,
    completions: u64,
    sleeps: u64,
}

impl Request {
    /// The first word on a link.
    pub(super) fn begin(links: u32) -> Self {
        Self::Begin { format: FORMAT, links }
    }

    /// The number of links that a client begins with, if it may.
    pub(super) fn begun(message: &Message) -> anyhow::Result<u32> {
        match parse(message)? {
            Self::Begin { format: FORMAT, links } => {
                ensure!((1..=LINKS_MAX).contains(&links), "{links} links: 1 to {LINKS_MAX}");
                Ok(links)
            }
            Self::Begin { format, .. } => {
                anyhow::bail!(
                    "the client speaks version {format}, we speak {FORMAT}: use the same ferrite on both"
                )
            }
            other => anyhow::bail!("{other:?} is no way to begin"),
        }
    }
}

impl Test {
    /// Whether it can be done: a client may send anything.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        let Self { op, measure, size_bytes, mode } = *self;
        ensure!(
            (1..=SIZE_MAX).contains(&size_bytes),
            "messages of {size_bytes} bytes: 1 to {SIZE_MAX}"
        );
        let asleep = (op, measure, mode) == (Op::Write, Measure::Latency, Mode::Event);
        ensure!(!asleep, "the latency of write by event: nothing wakes its receiver");
        Ok(())
    }
}

impl Holding {
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
    /// Since the fabric was made.
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

pub(super) fn say(link: &Link, what: &impl Serialize) -> anyhow::Result<()> {
    Ok(link.post_bytes(TALK, &serde_json::to_vec(what)?)?)
}

pub(super) async fn hear<T: DeserializeOwned>(link: &Link) -> anyhow::Result<T> {
    parse(&link.recv().await?)
}

pub(super) fn parse<T: DeserializeOwned>(message: &Message) -> anyhow::Result<T> {
    ensure!(
        message.channel() == TALK && message.notice().is_none(),
        "the peer sent data where words were due"
    );
    serde_json::from_slice(&message.to_vec())
        .context("the peer does not speak as a ferrite bench does")
}

pub(super) async fn hear_grant(link: &Link) -> anyhow::Result<GrantToken> {
    let message = link.recv().await?;
    ensure!(message.channel() == TALK, "the peer sent data where a grant was due");
    Ok(GrantToken::decode(&message.to_vec())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEST: Test =
        Test { op: Op::Read, measure: Measure::Latency, size_bytes: 64, mode: Mode::Poll };

    #[test]
    fn words_are_stable() {
        let said = |request: Request| serde_json::to_string(&request).expect("JSON");
        assert_eq!(said(Request::begin(3)), r#"{"begin":{"format":1,"links":3}}"#);
        assert_eq!(
            said(Request::Test(TEST)),
            r#"{"test":{"op":"read","measure":"latency","size_bytes":64,"mode":"poll"}}"#
        );
        assert_eq!(said(Request::IdleOpen { links: 9 }), r#"{"idle_open":{"links":9}}"#);
    }

    #[test]
    fn impossible_tests_are_refused() {
        assert!(TEST.check().is_ok());
        assert!(Test { size_bytes: 0, ..TEST }.check().is_err());
        assert!(Test { size_bytes: SIZE_MAX + 1, ..TEST }.check().is_err());
        assert!(Test { op: Op::Write, mode: Mode::Event, ..TEST }.check().is_err());
        assert!(serde_json::from_str::<Request>(r#"{"test":{"op":"read"}}"#).is_err());
    }
}
