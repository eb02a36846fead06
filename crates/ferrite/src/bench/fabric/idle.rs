//! Many links that do nothing: all opened at the same time, and kept.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::ensure;
use ferrite_fabric::{ConnectOptions, Error, Link};
use futures_util::stream::{FuturesUnordered, StreamExt as _, iter};
use serde::Serialize;

use super::ends::Ends;
use super::talk::{Holding, Reply, Request, say};
use crate::exit::fabric_kind_name;

/// How long all of them together may take.
const PATIENCE: Duration = Duration::from_secs(600);
/// Closed at a time: as many as the fabric opens at a time.
const CLOSING: usize = 64;

/// Links that are open and idle, and what that took.
pub(super) struct Idle {
    links: Vec<Link>,
    figures: Figures,
}

/// What is reported of them.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Figures {
    pub(super) asked: u32,
    pub(super) open: usize,
    pub(super) seconds: f64,
    /// What the server has pinned for each.
    pub(super) pinned_bytes_per_link: f64,
    /// Those that were still open after the measurements.
    pub(super) kept: usize,
    pub(super) close_seconds: f64,
    /// What went wrong with links, by kind.
    pub(super) failures: BTreeMap<&'static str, Failures>,
}

/// Failures of one kind.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Failures {
    pub(super) count: usize,
    /// The first of them.
    pub(super) example: String,
}

fn note(failures: &mut BTreeMap<&'static str, Failures>, error: &Error) {
    let of_kind = failures.entry(fabric_kind_name(error.kind())).or_default();
    of_kind.count += 1;
    if of_kind.count == 1 {
        of_kind.example = error.to_string();
    }
}

impl Idle {
    /// Opens `count` links at once; `before` is what the server had.
    pub(super) async fn open(
        ends: &Ends,
        count: u32,
        (peer, local): (SocketAddr, Option<SocketAddr>),
        before: Holding,
    ) -> anyhow::Result<Self> {
        say(ends.talk(), &Request::Idle)?;
        let begun = Instant::now();
        let options = ConnectOptions::new().timeout(PATIENCE);
        let options = local.into_iter().fold(options, ConnectOptions::local);
        let mut connecting: FuturesUnordered<_> =
            (0..count).map(|_| ends.fabric.connect_with(peer, &options)).collect();
        let (mut links, mut failures) = (Vec::new(), BTreeMap::new());
        while let Some(connected) = connecting.next().await {
            match connected {
                Ok(link) => links.push(link),
                Err(error) => note(&mut failures, &error),
            }
        }
        let seconds = begun.elapsed().as_secs_f64();
        say(ends.talk(), &Request::IdleOpen { links: links.len() })?;
        let after = match super::client::reply(ends).await? {
            Reply::Holding(holding) => holding,
            other => anyhow::bail!("{other:?} where the server's holdings were due"),
        };
        ensure!(!links.is_empty(), "none of the idle links could be opened: {failures:?}");
        #[expect(clippy::cast_precision_loss, reason = "bytes of one process")]
        let pinned =
            (after.registered_bytes as f64 - before.registered_bytes as f64) / links.len() as f64;
        let figures = Figures {
            asked: count,
            open: links.len(),
            seconds,
            pinned_bytes_per_link: pinned,
            kept: 0,
            close_seconds: 0.0,
            failures,
        };
        Ok(Self { links, figures })
    }

    /// Counts those that are left, and closes them in good order.
    pub(super) async fn close(self) -> Figures {
        let Self { links, mut figures } = self;
        figures.kept = links.iter().filter(|link| link.failure().is_none()).count();
        let begun = Instant::now();
        let mut closing = iter(&links).map(Link::close).buffer_unordered(CLOSING);
        while let Some(closed) = closing.next().await {
            if let Err(error) = closed {
                note(&mut figures.failures, &error);
            }
        }
        figures.close_seconds = begun.elapsed().as_secs_f64();
        figures
    }
}
