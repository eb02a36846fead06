//! What was measured about one failed link: plain data, from which `rank.rs` draws its conclusions.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::counters::{Meaning, Moved};
use super::snapshot::{Netdev, Snapshot};
use super::surroundings::{Neighbour, Route, Surroundings, Twin};

/// What happened longer ago than this is no longer a likely cause.
const RECENT: Duration = Duration::from_secs(60);

/// See the head of this file.
#[derive(Debug, Clone)]
pub(super) struct Facts {
    pub(super) local: Option<IpAddr>,
    pub(super) peer: Option<IpAddr>,
    /// The port now; `None` if it was not looked at, because the failure is not of a kind that it
    /// could explain.
    pub(super) now: Option<Arc<Snapshot>>,
    /// The port when the link was well.
    pub(super) then: Option<Arc<Snapshot>>,
    pub(super) route: Route,
    /// The next host on the way: the gateway if there is one, else the peer.
    pub(super) neighbour: Neighbour,
    /// The peer, if it is on this host.
    pub(super) twin: Option<Twin>,
}

impl Facts {
    /// Of a failure that the addresses alone can tell nothing about.
    pub(super) fn unmeasured(local: Option<IpAddr>, peer: Option<IpAddr>) -> Self {
        Self {
            local,
            peer,
            now: None,
            then: None,
            route: Route::Unknown,
            neighbour: Neighbour::Unknown,
            twin: None,
        }
    }

    /// Puts together what was seen.
    pub(super) fn gather(
        now: Arc<Snapshot>,
        then: Option<Arc<Snapshot>>,
        surroundings: &Surroundings,
        (local, peer): (Option<IpAddr>, Option<IpAddr>),
    ) -> Self {
        // One snapshot can serve a link's begin and its end, if both are milliseconds apart.
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
        facts.twin = surroundings.twin(peer).cloned();
        facts
    }

    /// The interface that the link uses: that of its address, else that of the port's first.
    pub(super) fn netdev(&self) -> Option<&Netdev> {
        let now = self.now.as_ref()?;
        let of = |snapshot: &Snapshot| snapshot.address(self.local?)?.netdev.clone();
        let name = of(now).or_else(|| of(self.then.as_ref()?));
        name.and_then(|name| now.netdev(&name)).or_else(|| now.netdevs.first())
    }

    /// How far the counter of this meaning went while the link was up; `None` if that is not known.
    pub(super) fn moved(&self, meaning: Meaning) -> Option<Moved> {
        self.now.as_ref()?.counters.moved_since(&self.then.as_ref()?.counters, meaning)
    }

    /// As [`Facts::moved`], if it moved at all.
    pub(super) fn did_move(&self, meaning: Meaning) -> Option<Moved> {
        self.moved(meaning).filter(|moved| moved.by > 0)
    }

    /// A figure of the link's interface, and what it was.
    pub(super) fn netdev_moved(&self, figure: impl Fn(&Netdev) -> Option<u64>) -> Option<u64> {
        let now = self.netdev()?;
        let then = self.then.as_ref()?.netdev(&now.name)?;
        Some(figure(now)?.saturating_sub(figure(then)?))
    }

    /// Whether what moved moved lately: counters of an old baseline tell of old troubles too.
    pub(super) fn is_recent(&self) -> bool {
        self.age().is_some_and(|age| age < RECENT)
    }

    /// How long ago the link was known to be well.
    fn age(&self) -> Option<Duration> {
        Some(self.now.as_ref()?.taken.duration_since(self.then.as_ref()?.taken))
    }

    /// The same in words: "in 1.2 s".
    pub(super) fn within(&self) -> String {
        match self.age() {
            Some(age) if age < Duration::from_secs(120) => format!("in {:.1} s", age.as_secs_f64()),
            Some(age) => format!("in {} min", age.as_secs() / 60),
            None => "so far".into(),
        }
    }

    /// The peer in words.
    pub(super) fn peer_name(&self) -> String {
        self.peer.map_or_else(|| "the peer".into(), |peer| peer.to_string())
    }

    /// Whether the peer itself, not a gateway to it, once answered on the link's interface.
    pub(super) fn knows_peer(&self) -> bool {
        self.neighbour == Neighbour::Known && !matches!(self.route, Route::Own { gateway: Some(_) })
    }

    pub(super) fn is_infiniband(&self) -> bool {
        self.now.as_ref().is_some_and(|now| now.is_infiniband())
    }
}

impl fmt::Display for Moved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} +{}", self.name, self.by)
    }
}
