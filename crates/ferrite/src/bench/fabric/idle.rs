//! Many idle links, opened all at once and kept open during the measurements.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::pin::pin;
use std::time::{Duration, Instant};

use anyhow::ensure;
use ferrite_fabric::{ConnectOptions, Error, Link};
use futures_util::future::{Either, select};
use futures_util::stream::{FuturesUnordered, StreamExt as _, iter};
use serde::Serialize;

use super::protocol::{Reply, Request, Resources, send_control};
use super::side::Side;
use crate::exit::fabric_kind_name;

/// The time limit for opening all idle links.
const TIMEOUT: Duration = Duration::from_secs(600);
/// Number of links closed at a time: as many as the fabric opens at a time.
const CLOSING: usize = 64;

/// Open idle links, and their figures.
pub(super) struct Idle {
    links: Vec<Link>,
    figures: Figures,
}

/// The figures in the report.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Figures {
    pub(super) asked: u32,
    pub(super) open: usize,
    pub(super) seconds: f64,
    /// Bytes that the server has pinned in addition, on average for each idle link.
    pub(super) pinned_bytes_per_link: f64,
    /// Number of links that were still open after the measurements.
    pub(super) kept: usize,
    pub(super) close_seconds: f64,
    /// Failed links, by the kind of error.
    pub(super) failures: BTreeMap<&'static str, Failures>,
}

/// Failures of one kind.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Failures {
    pub(super) count: usize,
    /// The message of the first failure.
    pub(super) example: String,
}

fn record(failures: &mut BTreeMap<&'static str, Failures>, error: &Error) {
    let of_kind = failures.entry(fabric_kind_name(error.kind())).or_default();
    of_kind.count += 1;
    if of_kind.count == 1 {
        of_kind.example = error.to_string();
    }
}

impl Idle {
    /// Opens `count` links at once. `before` are the server's resources without them.
    pub(super) async fn open(
        side: &Side,
        count: u32,
        (peer, local): (SocketAddr, Option<SocketAddr>),
        before: Resources,
    ) -> anyhow::Result<Self> {
        send_control(side.control_link(), &Request::Idle)?;
        let started = Instant::now();
        let options = ConnectOptions::new().timeout(TIMEOUT);
        let options = local.into_iter().fold(options, ConnectOptions::local);
        let mut connecting: FuturesUnordered<_> =
            (0..count).map(|_| side.fabric.connect_with(peer, &options)).collect();
        let (mut links, mut failures) = (Vec::new(), BTreeMap::new());
        while let Some(connected) = connecting.next().await {
            match connected {
                Ok(link) => links.push(link),
                Err(error) => record(&mut failures, &error),
            }
        }
        let seconds = started.elapsed().as_secs_f64();
        let after = Self::confirm(side, &links).await?;
        links.retain(|link| match link.failure() {
            Some(error) => {
                record(&mut failures, &error);
                false
            }
            None => true,
        });
        let first_error = failures.values().next().map_or("none", |failed| failed.example.as_str());
        ensure!(!links.is_empty(), "cannot open any of the {count} idle links: {first_error}");
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

    /// Reports the number of open links to the server, and again after each lost link, until the
    /// server has as many. Returns the server's resources at that time.
    ///
    /// A server under load may give up a handshake that is complete for the client. The server then
    /// waits in vain for that link, until the client reports a smaller number.
    async fn confirm(side: &Side, links: &[Link]) -> anyhow::Result<Resources> {
        let control = side.control_link();
        let mut ends: FuturesUnordered<_> = links.iter().map(Link::ended).collect();
        let mut reply = pin!(side.receive_reply());
        loop {
            send_control(control, &Request::IdleOpen { links: ends.len() })?;
            match select(&mut reply, ends.select_next_some()).await {
                Either::Left((Ok(Reply::Holding(resources)), _)) => return Ok(resources),
                Either::Left((other, _)) => {
                    anyhow::bail!("received {:?}, expected the server's resources", other?)
                }
                Either::Right(_) => {}
            }
        }
    }

    /// Counts the links that are still open, and closes all in an orderly way.
    pub(super) async fn close(self) -> Figures {
        let Self { links, mut figures } = self;
        figures.kept = links.iter().filter(|link| link.failure().is_none()).count();
        let started = Instant::now();
        let mut closing = iter(&links).map(Link::close).buffer_unordered(CLOSING);
        while let Some(closed) = closing.next().await {
            if let Err(error) = closed {
                record(&mut figures.failures, &error);
            }
        }
        figures.close_seconds = started.elapsed().as_secs_f64();
        figures
    }
}
