//! The measurements for one failed link. This is plain data, from which `rank.rs` draws
//! conclusions.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::counters::{Increase, Meaning};
use super::snapshot::{Netdev, Snapshot};
use super::surroundings::{LocalPeer, Neighbour, Route, Surroundings};

/// The number of bytes that RoCE v2 over IPv4 adds to the payload of an RDMA write's first packet:
/// IPv4, UDP, BTH, RETH, ICRC.
pub(super) const HEADERS: u32 = 20 + 8 + 12 + 16 + 4;

/// If the baseline is this old or older, a counter's increase since then is only a possible cause,
/// because it may have happened long ago.
const RECENT: Duration = Duration::from_secs(60);

/// The measurements for one failed link.
#[derive(Debug, Clone)]
pub(super) struct Facts {
    pub(super) local: Option<IpAddr>,
    pub(super) peer: Option<IpAddr>,
    /// The current state of the port. `None` if it was not measured, because it could not explain
    /// this kind of failure.
    pub(super) now: Option<Arc<Snapshot>>,
    /// The state of the port when the link was healthy.
    pub(super) then: Option<Arc<Snapshot>>,
    pub(super) route: Route,
    /// The next host on the path: the gateway if there is one, otherwise the peer.
    pub(super) neighbour: Neighbour,
    /// The peer, if it is on this host.
    pub(super) local_peer: Option<LocalPeer>,
}

impl Facts {
    /// Returns facts without measurements, for a failure that measurements could not explain.
    pub(super) fn unmeasured(local: Option<IpAddr>, peer: Option<IpAddr>) -> Self {
        Self {
            local,
            peer,
            now: None,
            then: None,
            route: Route::Unknown,
            neighbour: Neighbour::Unknown,
            local_peer: None,
        }
    }

    /// Combines the measurements.
    pub(super) fn gather(
        now: Arc<Snapshot>,
        then: Option<Arc<Snapshot>>,
        surroundings: &Surroundings,
        (local, peer): (Option<IpAddr>, Option<IpAddr>),
    ) -> Self {
        // Ignore a baseline that is not older than the current state, because it shows no changes.
        // The current state may come from a cache.
        let then = then.filter(|then| then.taken < now.taken);
        let mut facts = Self { now: Some(now), then, ..Self::unmeasured(local, peer) };
        let Some(peer) = peer.filter(|_| !facts.is_infiniband()) else { return facts };
        if let Some(netdev) = facts.netdev().map(|netdev| netdev.name.clone()) {
            facts.route = surroundings.route(peer, &netdev);
            let next = match facts.route {
                Route::Own { gateway: Some(gateway) } => gateway.into(),
                _ => peer,
            };
            facts.neighbour = surroundings.neighbour(next, &netdev);
        }
        facts.local_peer = surroundings.local_peer(peer).cloned();
        facts
    }

    /// Returns the interface that the link uses. This is the interface that has the link's local
    /// address, or else the port's first interface.
    pub(super) fn netdev(&self) -> Option<&Netdev> {
        let now = self.now.as_ref()?;
        let of = |snapshot: &Snapshot| snapshot.address(self.local?)?.netdev.clone();
        let name = of(now).or_else(|| of(self.then.as_ref()?));
        name.and_then(|name| now.netdev(&name)).or_else(|| now.netdevs.first())
    }

    /// Returns the increase of the counter with this meaning since the link was last known to be
    /// healthy. Returns `None` if the increase is not known.
    pub(super) fn increase(&self, meaning: Meaning) -> Option<Increase> {
        self.now.as_ref()?.counters.increase_since(&self.then.as_ref()?.counters, meaning)
    }

    /// Like [`Facts::increase`], but returns `None` if the counter did not increase.
    pub(super) fn increased(&self, meaning: Meaning) -> Option<Increase> {
        self.increase(meaning).filter(|increase| increase.by > 0)
    }

    /// Returns the increase of a figure of the link's interface since the link was last known to be
    /// healthy.
    pub(super) fn netdev_increase(&self, figure: impl Fn(&Netdev) -> Option<u64>) -> Option<u64> {
        let now = self.netdev()?;
        let then = self.then.as_ref()?.netdev(&now.name)?;
        Some(figure(now)?.saturating_sub(figure(then)?))
    }

    /// Returns whether the increases are recent. With an old baseline, counters also include old
    /// problems.
    pub(super) fn is_recent(&self) -> bool {
        self.age().is_some_and(|age| age < RECENT)
    }

    /// Returns how long ago the link was last known to be healthy.
    fn age(&self) -> Option<Duration> {
        Some(self.now.as_ref()?.taken.duration_since(self.then.as_ref()?.taken))
    }

    /// Returns [`Facts::age`] in words, for example "in 1.2 s".
    pub(super) fn period(&self) -> String {
        match self.age() {
            Some(age) if age < Duration::from_secs(120) => format!("in {:.1} s", age.as_secs_f64()),
            Some(age) => format!("in {} min", age.as_secs() / 60),
            None => "so far".into(),
        }
    }

    /// Returns the peer in words.
    pub(super) fn peer_name(&self) -> String {
        self.peer.map_or_else(|| "the peer".into(), |peer| peer.to_string())
    }

    /// Returns whether the peer itself, not a gateway to it, has answered on the link's interface.
    pub(super) fn knows_peer(&self) -> bool {
        self.neighbour == Neighbour::Known && !matches!(self.route, Route::Own { gateway: Some(_) })
    }

    pub(super) fn is_infiniband(&self) -> bool {
        self.now.as_ref().is_some_and(|now| now.is_infiniband())
    }
}

impl fmt::Display for Increase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} +{}", self.name, self.by)
    }
}
