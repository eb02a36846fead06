//! Links to peers: connects and accepts them, and runs each until it ends.

use std::fmt;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ferrite_fabric::rustls::pki_types::CertificateDer;
use ferrite_fabric::wire::RefusalCode;
use ferrite_fabric::{
    ConnectOptions, Error, Link, LinkRequest, Listener, LogLimit, Rdma, Transport,
};
use ferrite_proto::mux::{Config, Side};
use tokio::net::lookup_host;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout, timeout_at};

use super::config::PeerAddress;
use super::delivery::deliver;
use super::peer::{Handle, Peer, Way};
use super::peer_links::{FIRST_PAUSE, LinkId};
use super::stats::{LinkRefused, add};
use super::{Shared, Task, identity};
use crate::mux::{Multiplexer, MuxFailure, multiplex};

/// How often to check whether a link has changed its transport, or the peer is going away.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// How often to check whether a new link has been upgraded to RDMA, if RDMA is required.
const UPGRADE_INTERVAL: Duration = Duration::from_millis(5);
/// If both agents connect at the same time, there are two links, of which one must end. It still
/// accepts streams for this long, because the peer may not know the other link yet.
const RETIRE_AFTER: Duration = Duration::from_secs(1);
/// Maximum number of links to a peer. Usually there are one or two, and as many again for some
/// seconds after a restart. The limits of streams and of their memory are for each link.
const LINKS_MAX: usize = 16;
/// A link of this agent that fails within this time counts as an attempt to connect that failed.
/// Most peers that do not accept a link refuse it in the handshake. Others end it: those that
/// require RDMA, and agents of earlier versions.
const EARLY: Duration = Duration::from_secs(1);
/// The probable cause if the peer ends a link that this agent has just opened.
const NOT_ACCEPTED: &str = "the peer closed the link right after the handshake; it may require \
                            RDMA, or not have this host in its `peers`: see the log of the peer";

/// Returns a link to a peer. Connects if there is none, and waits for a short time.
pub(super) async fn link_to(shared: &Arc<Shared>, peer: &Arc<Peer>) -> Option<(LinkId, Handle)> {
    let mut changed = pin!(peer.changed.notified());
    loop {
        // Waits for changes from now on, before it reads the state: a change in between is noticed.
        changed.as_mut().enable();
        let until = match peer.find_way(Instant::now()) {
            Way::Link(id, handle) => return Some((id, handle)),
            Way::Connect { until } => {
                shared.spawn(connect(Arc::clone(shared), Arc::clone(peer)));
                until
            }
            Way::Wait { until } => until,
            Way::None => return None,
        };
        let _ = timeout_at(until.into(), changed.as_mut()).await; // then reads the state again
        changed.set(peer.changed.notified());
    }
}

/// Opens a link to a peer if this agent has none.
fn open_own(shared: Arc<Shared>, peer: Arc<Peer>) -> Task {
    Box::pin(async move {
        let _ = link_to(&shared, &peer).await;
    })
}

async fn connect(shared: Arc<Shared>, peer: Arc<Peer>) {
    let options = ConnectOptions::new();
    let options = match shared.local {
        Some(local) => options.local(local),
        None => options,
    };
    let options = match &shared.tls {
        Some(tls) => tls.connect(options, peer.name.clone()),
        None => options,
    };
    let address = match address_of(&shared, &peer).await {
        Ok(address) => address,
        Err(why) => return note_failure(&peer, &why),
    };
    match shared.fabric.connect_with(address, &options).await {
        Ok(link) => run(shared, peer, link, Side::Caller).await,
        Err(error) => note_failure(&peer, &error.to_string()),
    }
}

/// While there is no link to a peer, looks again and again for the address that its name stands
/// for, and connects. The first answer may be wrong, and a peer may move. Without its address, the
/// peer's links are not accepted if there is no TLS, even if no program of this host connects to
/// the peer. While there is a link, the address stays.
pub(super) async fn follow_name(shared: Arc<Shared>, peer: Arc<Peer>) {
    loop {
        sleep(peer.pause().max(FIRST_PAUSE)).await;
        if peer.link_count() > 0 {
            continue;
        }
        // If the address is not known, connecting looks for it.
        if peer.address().known().is_some()
            && let Err(why) = look_up(&shared, &peer).await
        {
            static LINES: LogLimit = LogLimit::new();
            if let Some(others) = LINES.pass() {
                tracing::warn!("the address of {peer} stays as it is: {why}{others}");
            }
        }
        let _ = link_to(&shared, &peer).await;
    }
}

/// Returns the address of a peer. Looks for it if only its name is known.
async fn address_of(shared: &Shared, peer: &Arc<Peer>) -> Result<SocketAddr, String> {
    match peer.address().known() {
        Some(address) => Ok(address),
        None => look_up(shared, peer).await,
    }
}

/// Looks for the address that the name of a peer stands for, which is the peer's from then on.
async fn look_up(shared: &Shared, peer: &Arc<Peer>) -> Result<SocketAddr, String> {
    let (name, port, last) = match peer.address() {
        PeerAddress::Known(address) => return Ok(address),
        PeerAddress::Name { host, port, found } => (host, port, found),
    };
    let failed = |why: &dyn fmt::Display| format!("cannot resolve {name}: {why}");
    let found = lookup_host((name.as_str(), port)).await.map_err(|error| failed(&error))?;
    let found: Vec<_> = found.collect();
    // A name may have several addresses, in any order.
    if let Some(last) = last.filter(|last| found.contains(last)) {
        return Ok(last);
    }
    // Prefers IPv4 for the same reason as the settings do.
    let address = found.into_iter().min_by_key(SocketAddr::is_ipv6);
    let address = address.ok_or_else(|| failed(&"no address"))?;
    shared.config().check_found(address.ip()).map_err(|why| failed(&why))?;
    // A peer without TLS is recognised by its address.
    if let Some(other) = shared.peers.at(address.ip()).filter(|other| !Arc::ptr_eq(other, peer)) {
        return Err(format!("{name} has the address of another peer, {other}"));
    }
    if let Some(last) = last.filter(|_| peer.link_count() > 0) {
        return Ok(last); // the peer has connected meanwhile
    }
    peer.set_found(address);
    tracing::info!("the address of {name} is {address}");
    Ok(address)
}

fn note_failure(peer: &Peer, why: &str) {
    let pause = peer.note_failure(why.to_owned());
    if let Some(others) = peer.failure_lines.pass() {
        tracing::warn!(
            "cannot open a link to {peer}: {why}; trying again after {pause:?} at the \
             earliest{others}"
        );
    }
}

/// Lets a listener refuse, with the cause, the links that this agent does not accept.
pub(super) fn check_requests(shared: &Arc<Shared>, listener: &Listener) {
    let shared = Arc::downgrade(shared);
    listener.admit_if(move |request| {
        let Some(shared) = shared.upgrade() else {
            return Err((RefusalCode::SHUTDOWN, "the agent has ended".to_owned()));
        };
        admit(&shared, request).map_err(|(cause, why)| {
            note_refusal(&shared, request.peer, cause, &why);
            let code = match cause {
                LinkRefused::TooMany => RefusalCode::LIMIT,
                _ => RefusalCode::POLICY,
            };
            // The rest is advice for the operator of this agent.
            (code, why.split(';').next().unwrap_or_default().to_owned())
        })
    });
}

/// Decides whether this agent accepts a link.
fn admit(shared: &Shared, request: &LinkRequest<'_>) -> Result<(), (LinkRefused, String)> {
    let ip = request.peer.map(|address| address.ip().to_canonical());
    // Without TLS, the address of a request may be forged, so it adds no host to the peers.
    if shared.tls.is_none() && ip.is_some_and(|ip| shared.peers.may_add(ip)) {
        return Ok(());
    }
    check_count(&*identify(shared, request.peer, request.certificates)?)
}

fn check_count(peer: &Peer) -> Result<(), (LinkRefused, String)> {
    if peer.link_count() < LINKS_MAX {
        return Ok(());
    }
    Err((LinkRefused::TooMany, format!("there are {LINKS_MAX} links from {peer} already")))
}

/// Accepts links of peers until the listener fails.
pub(super) async fn accept(shared: Arc<Shared>, mut listener: Listener) -> Error {
    loop {
        let link = match listener.accept().await {
            Ok(link) => link,
            Err(error) => return error,
        };
        // The links have passed `admit`, except for the first ones and hosts that are no peers yet.
        match identify(&shared, link.peer_addr(), link.peer_certificates()) {
            Ok(peer) => shared.spawn(run_accepted(Arc::clone(&shared), peer, link)),
            Err(refused) => refuse(&shared, &link, refused),
        }
    }
}

/// Returns the peer that a link belongs to. With TLS, the link's certificate decides; without TLS,
/// its address.
fn identify(
    shared: &Shared,
    from: Option<SocketAddr>,
    certificates: &[CertificateDer<'_>],
) -> Result<Arc<Peer>, (LinkRefused, String)> {
    let ip = from.map(|address| address.ip().to_canonical());
    // In transparent mode, this may add the host to the peers.
    let at_address = ip.and_then(|ip| shared.peers.at(ip));
    let has_no_room = || ip.is_some_and(|ip| shared.peers.has_no_room_for(ip));
    let no_room = || "this agent has too many hosts as peers already".to_owned();
    if shared.tls.is_none() {
        let why = || match ip {
            _ if has_no_room() => no_room(),
            Some(ip) => format!("{ip} is the address of no peer"),
            None => "its address is unknown".to_owned(),
        };
        return at_address.ok_or_else(|| (LinkRefused::Address, why()));
    }
    let peers = shared.peers.all();
    let peers = peers.iter().map(|peer| (&peer.name, peer.ip(), Arc::clone(peer)));
    identity::find(certificates.first(), ip, peers)
        .map_err(|why| (LinkRefused::Certificate, if has_no_room() { no_room() } else { why }))
}

fn note_refusal(shared: &Shared, from: Option<SocketAddr>, cause: LinkRefused, why: &str) {
    shared.counters.count_refused_link(cause);
    static LINES: LogLimit = LogLimit::new();
    if let Some(others) = LINES.pass() {
        let from = from.map_or("unknown".to_owned(), |address| address.to_string());
        tracing::warn!("refused a link from {from}: {why}{others}");
    }
}

/// Refuses a link after its handshake.
fn refuse(shared: &Shared, link: &Link, (cause, why): (LinkRefused, String)) {
    note_refusal(shared, link.peer_addr(), cause, &why);
    link.abort();
}

/// Runs a link that a peer has opened.
async fn run_accepted(shared: Arc<Shared>, peer: Arc<Peer>, link: Link) {
    // Others may have been accepted meanwhile.
    if let Err(refused) = check_count(&peer) {
        return refuse(&shared, &link, refused);
    }
    if shared.fabric.config().rdma == Rdma::Require {
        // With TLS, a link begins over TCP.
        let upgraded = async {
            while link.transport() != Transport::Rdma && link.failure().is_none() {
                sleep(UPGRADE_INTERVAL).await;
            }
        };
        let limit = shared.fabric.config().connection_timeout;
        if timeout(limit, upgraded).await.is_err() {
            let why = format!("this agent requires RDMA, but the link uses {}", link.transport());
            return refuse(&shared, &link, (LinkRefused::Transport, why));
        }
        if let Err(refused) = check_count(&peer) {
            return refuse(&shared, &link, refused);
        }
    }
    run(shared, peer, link, Side::Called).await;
}

/// Runs a link until it ends.
async fn run(shared: Arc<Shared>, peer: Arc<Peer>, link: Link, side: Side) {
    let refuse = |why: &str| {
        link.abort();
        match side {
            Side::Caller => note_failure(&peer, why),
            Side::Called => tracing::warn!("refused a link of {peer}: {why}"),
        }
    };
    if link.peer_hello().instance == shared.fabric.instance() {
        return refuse("the address of this peer leads to this agent");
    }
    let up_at = Instant::now();
    let Multiplexer { handle, mut incoming, driver } =
        match multiplex(link.clone(), side, &Config::default()) {
            Ok(multiplexer) => multiplexer,
            Err(error) => return refuse(&error.to_string()),
        };
    let id = LinkId(shared.next_link.fetch_add(1, Ordering::Relaxed));
    let mut transport = link.transport();
    let retired = peer.add_link(id, side, link.clone(), handle.clone());
    let by = if side == Side::Caller { "this agent" } else { "the peer" };
    tracing::info!("link to {peer} is up over {transport}, opened by {by}");
    if let Some(retired) = retired {
        shared.spawn(retire(Arc::clone(&peer), retired));
    }
    if shared.is_ending() {
        handle.go_away();
    } else if side == Side::Called && shared.tls.is_none() {
        // The peer has started again or can be reached again, so this agent opens a link, too,
        // without waiting for the end of the pause.
        shared.spawn(open_own(Arc::clone(&shared), Arc::clone(&peer)));
    }
    // Runs the link and its streams in a separate task. A wake-up of one of them then polls nothing
    // else.
    let mut driving = JoinSet::new();
    driving.spawn(driver.run());
    let mut looks = interval(LOOK_INTERVAL);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut is_peer_going_away = false;
    let ended = loop {
        tokio::select! {
            ended = driving.join_next() => break ended,
            Some(stream) = incoming.next() => {
                shared.spawn(deliver(Arc::clone(&shared), Arc::clone(&peer), stream));
            }
            _ = looks.tick() => {
                if transport != link.transport() {
                    transport = link.transport();
                    tracing::info!("link to {peer} now uses {transport}");
                    if transport != Transport::Rdma
                        && shared.fabric.config().rdma == Rdma::Require
                    {
                        link.abort(); // the driver then fails
                    }
                }
                if !is_peer_going_away && handle.state().is_peer_going_away {
                    is_peer_going_away = true;
                    peer.stop_using(id);
                    tracing::info!("{peer} accepts no new streams; the link ends with its streams");
                }
            }
        }
    };
    let state = handle.state();
    peer.remove_link(id);
    match ended {
        Some(Ok(Ok(()))) => tracing::info!("link to {peer} has ended"),
        Some(Ok(Err(failure))) => {
            note_loss(&peer, &failure, state.streams);
            // A peer that requires RDMA waits for the upgrade before it refuses a link.
            let is_unused = state.stats.bytes_received == 0 && state.stats.accepted == 0;
            let upgrade = shared.fabric.config().connection_timeout;
            let early = if is_unused { EARLY + upgrade } else { EARLY };
            if side == Side::Caller && up_at.elapsed() < early {
                note_failure(&peer, NOT_ACCEPTED);
            }
        }
        // The driver has panicked. Its streams were reset when it was dropped.
        Some(Err(_)) | None => add(&peer.counters.links_lost, 1),
    }
}

async fn retire(peer: Arc<Peer>, handle: Handle) {
    tracing::info!("there are two links to {peer}; one of them ends when its streams have ended");
    sleep(RETIRE_AFTER).await;
    handle.go_away();
}

fn note_loss(peer: &Peer, failure: &MuxFailure, streams: usize) {
    add(&peer.counters.links_lost, 1);
    tracing::warn!("link to {peer} was lost: {failure}; connections reset: {streams}");
}
