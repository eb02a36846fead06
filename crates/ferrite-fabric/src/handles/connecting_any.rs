//! Connects to a peer with several addresses: the likeliest first, the next soon after, and the
//! first that answers wins.

use std::fmt;
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use ferrite_verbs::GidType;

use super::connecting::{ConnectOptions, Connecting};
use super::link::Link;
use crate::error::{Error, ErrorKind};
use crate::fabric::Fabric;
use crate::fabric::timers::Timer;

/// The delay between two addresses: long enough for one that works, too short to be noticed.
const STAGGER: Duration = Duration::from_millis(250);

/// A link that is being opened to a peer with several addresses.
#[must_use = "futures do nothing unless awaited"]
pub struct ConnectingAny {
    fabric: Fabric,
    options: ConnectOptions,
    /// All addresses; `left` are those that were not tried yet, the likeliest last.
    all: Vec<SocketAddr>,
    left: Vec<SocketAddr>,
    under_way: Vec<(SocketAddr, Connecting)>,
    next_at: Instant,
    failures: Vec<(SocketAddr, Error)>,
}

impl Fabric {
    /// Opens a link to a peer with several addresses.
    ///
    /// Addresses on the subnet of one of our RDMA devices rank first, RoCE v2 before v1; the others
    /// follow in the given order. The first is tried at once, the next after 250 ms or when one has
    /// failed. The first link that opens is used. If it loses its path, it searches for the peer at
    /// all of the addresses.
    ///
    /// # Errors
    /// The error says how each address failed, and has the kind of the first.
    pub fn connect_any(&self, peers: &[SocketAddr], options: &ConnectOptions) -> ConnectingAny {
        let mut left = self.rank(peers);
        left.reverse();
        ConnectingAny {
            fabric: self.clone(),
            options: options.clone(),
            all: peers.to_vec(),
            left,
            under_way: Vec::new(),
            next_at: Instant::now(),
            failures: Vec::new(),
        }
    }

    /// Sorts the addresses, the likeliest first.
    fn rank(&self, peers: &[SocketAddr]) -> Vec<SocketAddr> {
        let mut own: Vec<(IpAddr, bool)> = Vec::new();
        for device in self.shared().devices.iter().filter(|device| !device.is_gone()) {
            let context = device.context().filter(|context| context.active_port().is_ok());
            let gids = context.and_then(|context| context.gids().ok()).unwrap_or_default();
            own.extend(gids.iter().map(|entry| (entry.gid.ip(), entry.kind == GidType::ROCE_V2)));
        }
        let rank = |peer: &SocketAddr| {
            let near =
                own.iter().filter(|(ip, _)| common_prefix(*ip, peer.ip()) >= near_bits(peer.ip()));
            near.map(|(_, routable)| if *routable { 2 } else { 1 }).max().unwrap_or(0)
        };
        let mut ranked = peers.to_vec();
        ranked.sort_by_key(|peer| std::cmp::Reverse(rank(peer))); // a stable sort
        ranked
    }
}

/// A guess of the subnet's prefix length, instead of asking the kernel.
fn near_bits(ip: IpAddr) -> u32 {
    if ip.is_ipv4() { 24 } else { 64 }
}

fn common_prefix(one: IpAddr, other: IpAddr) -> u32 {
    match (one, other) {
        (IpAddr::V4(one), IpAddr::V4(other)) => (one.to_bits() ^ other.to_bits()).leading_zeros(),
        (IpAddr::V6(one), IpAddr::V6(other)) => (one.to_bits() ^ other.to_bits()).leading_zeros(),
        _ => 0,
    }
}

impl Future for ConnectingAny {
    type Output = Result<Link, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        loop {
            let mut at = 0;
            while at < this.under_way.len() {
                let (peer, connecting) = &mut this.under_way[at];
                match Pin::new(connecting).poll(cx) {
                    Poll::Ready(Ok(link)) => {
                        let others = this.all.iter().filter(|other| *other != peer).copied();
                        link.shared().set_addresses(std::iter::once(*peer).chain(others).collect());
                        return Poll::Ready(Ok(link));
                    }
                    Poll::Ready(Err(error)) => {
                        let (peer, _) = this.under_way.remove(at);
                        this.failures.push((peer, error));
                        this.next_at = Instant::now();
                    }
                    Poll::Pending => at += 1,
                }
            }
            let now = Instant::now();
            if now >= this.next_at
                && let Some(peer) = this.left.pop()
            {
                this.under_way.push((peer, this.fabric.connect_with(peer, &this.options)));
                this.next_at = now + STAGGER;
                continue;
            }
            if this.under_way.is_empty() {
                return Poll::Ready(Err(all_failed(&this.failures)));
            }
            if !this.left.is_empty() {
                let (at, waker) = (this.next_at, cx.waker().clone());
                this.fabric.shared().with_poller(|poller, _| {
                    let id = poller.sleepers.keys().next_back().map_or(0, |last| last + 1);
                    poller.sleepers.insert(id, waker);
                    poller.timers.add(at, Timer::Wake(id));
                });
            }
            return Poll::Pending;
        }
    }
}

fn all_failed(failures: &[(SocketAddr, Error)]) -> Error {
    let Some((_, first)) = failures.first() else {
        return Error::new(ErrorKind::Misuse, "no address was given");
    };
    let each: Vec<String> =
        failures.iter().map(|(peer, error)| format!("{peer}: {error}")).collect();
    let what = format!("none of {} addresses works: {}", failures.len(), each.join("; "));
    Error::new(first.kind(), what).with_causes(first.causes().to_vec())
}

impl fmt::Debug for ConnectingAny {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectingAny").field("peers", &self.all).finish_non_exhaustive()
    }
}
