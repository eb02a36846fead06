//! A peer: its links, and who waits for one.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use ferrite_fabric::rustls::pki_types::ServerName;
use ferrite_fabric::{Link, LogLimit};
use ferrite_proto::mux::Side;
use tokio::sync::Notify;

use super::config::{AgentPeer, PeerAddress};
use super::peer_links::{LinkId, PeerLinks, Sharing, Step};
use super::socket::LocalSocket;
use super::stats::{AgentPeerStats, PeerCounters, add};
use crate::mux::MuxHandle;

/// Opens streams on a link.
pub(super) type Handle = MuxHandle<LocalSocket>;

/// A host of the group. It is shown as its alias and the address of its agent.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) alias: Ipv4Addr,
    address: RwLock<PeerAddress>,
    /// With TLS: the address or the name that its certificate must have.
    pub(super) name: ServerName<'static>,
    pub(super) counters: Arc<PeerCounters>,
    /// Notified when an attempt to connect has ended, and when there is a new link.
    pub(super) changed: Notify,
    /// Limits the lines about attempts to connect that failed.
    pub(super) failure_lines: Arc<LogLimit>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    links: PeerLinks,
    /// All links that have not ended, also those that accept no new streams.
    live: BTreeMap<LinkId, (Link, Handle)>,
    error: Option<String>,
    refused_at_ended_links: u64,
}

/// How to get a link to a peer.
#[derive(Debug)]
pub(super) enum Way {
    /// There is a link.
    Link(LinkId, Handle),
    /// The caller must connect, and wait for a link until this time.
    Connect { until: Instant },
    /// The agent is already connecting. The caller must wait for a link until this time.
    Wait { until: Instant },
    /// There is no link, and none is expected in time.
    None,
}

impl Peer {
    /// Returns a peer without links. `sharing` is set if the agents are authenticated, so that they
    /// share one link. Peers with the same `failure_lines` together log one failure a minute.
    pub(super) fn new(
        peer: AgentPeer,
        sharing: Option<Sharing>,
        failure_lines: Arc<LogLimit>,
    ) -> Self {
        let links = PeerLinks::new(sharing);
        Self {
            alias: peer.alias,
            address: RwLock::new(peer.address),
            name: peer.name,
            counters: Arc::default(),
            changed: Notify::new(),
            failure_lines,
            state: Mutex::new(State {
                links,
                live: BTreeMap::new(),
                error: None,
                refused_at_ended_links: 0,
            }),
        }
    }

    /// Returns the address of the peer's agent.
    pub(super) fn address(&self) -> PeerAddress {
        self.address.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets the address that the name of the peer stands for. The agent may then connect at once.
    pub(super) fn set_found(&self, address: SocketAddr) {
        let mut now = self.address.write().unwrap_or_else(PoisonError::into_inner);
        if let PeerAddress::Name { found, .. } = &mut *now {
            *found = Some(address);
        }
        drop(now);
        self.lock().links.handle_moved();
    }

    /// Returns the address of the peer's host, if it is known.
    pub(super) fn ip(&self) -> Option<IpAddr> {
        self.address().known().map(|address| address.ip())
    }

    /// Decides how a new stream gets to the peer.
    pub(super) fn find_way(&self, now: Instant) -> Way {
        let mut state = self.lock();
        match state.links.next_step(now) {
            Step::Use(id) => match state.live.get(&id) {
                Some((_, handle)) => Way::Link(id, handle.clone()),
                None => Way::None,
            },
            Step::Connect { until } => Way::Connect { until },
            Step::Wait { until } => Way::Wait { until },
            Step::Unavailable => Way::None,
        }
    }

    /// Adds a link. If the peer now has two links where one is enough, returns the one that must
    /// end when its streams have ended.
    pub(super) fn add_link(
        &self,
        id: LinkId,
        side: Side,
        link: Link,
        handle: Handle,
    ) -> Option<Handle> {
        add(&self.counters.links_opened, 1);
        let mut state = self.lock();
        let retired = state.links.handle_up(id, side, link.peer_hello().instance, Instant::now());
        state.live.insert(id, (link, handle));
        if state.links.active().is_some() {
            state.error = None;
        }
        let retired = retired.and_then(|id| state.live.get(&id));
        let retired = retired.map(|(_, handle)| handle.clone());
        drop(state);
        self.changed.notify_waiters();
        retired
    }

    /// Returns the number of links that have not ended.
    pub(super) fn link_count(&self) -> usize {
        self.lock().live.len()
    }

    /// Returns whether there ever was a link.
    pub(super) fn had_link(&self) -> bool {
        self.counters.links_opened.load(Ordering::Relaxed) > 0
    }

    /// Opens no further streams on a link.
    pub(super) fn stop_using(&self, id: LinkId) {
        self.lock().links.handle_gone(id);
    }

    /// Removes a link that has ended.
    pub(super) fn remove_link(&self, id: LinkId) {
        let mut state = self.lock();
        state.links.handle_gone(id);
        if let Some((_, handle)) = state.live.remove(&id) {
            state.refused_at_ended_links += handle.state().stats.refused;
        }
    }

    /// Returns how many streams of the peer were refused because of a limit of the link.
    pub(super) fn refused_at_limits(&self) -> u64 {
        let state = self.lock();
        let now = state.live.values().map(|(_, handle)| handle.state().stats.refused);
        state.refused_at_ended_links + now.sum::<u64>()
    }

    /// Notes that the agent could not connect. Returns the pause before its next attempt.
    pub(super) fn note_failure(&self, error: String) -> Duration {
        add(&self.counters.connect_failures, 1);
        let mut state = self.lock();
        state.links.handle_failure(Instant::now());
        let pause = state.links.pause();
        state.error = Some(error).filter(|_| state.links.active().is_none());
        drop(state);
        self.changed.notify_waiters();
        pause
    }

    /// Returns the pause after the last failure.
    pub(super) fn pause(&self) -> Duration {
        self.lock().links.pause()
    }

    /// Returns why there is no link, as far as that is known.
    pub(super) fn error(&self) -> Option<String> {
        self.lock().error.clone()
    }

    /// Accepts no further streams on any link. The links end when their streams have ended.
    pub(super) fn go_away(&self) {
        for (_, handle) in self.lock().live.values() {
            handle.go_away();
        }
    }

    pub(super) fn stats(&self) -> AgentPeerStats {
        let (links, error) = {
            let state = self.lock();
            let links: Vec<_> = state.live.values().map(|(link, _)| link.transport()).collect();
            (links, state.error.clone())
        };
        AgentPeerStats { links, error, ..self.counters.stats(self.alias, self.address()) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = self.address();
        match self.ip() == Some(self.alias.into()) {
            true => write!(f, "{address}"), // transparent mode
            false => write!(f, "{} ({address})", self.alias),
        }
    }
}
