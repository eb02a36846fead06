//! Two hosts with traffic between them, both in this process; and how a fault of the link is
//! judged.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferrite_fabric::{Config, ConnectOptions, Error, ErrorKind, Fabric, Link};
use futures_channel::oneshot;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;

use crate::harness::{
    Clean, Host, OWN, PEER, TEST_TIMEOUT, any_port, join, pace, stalled_after, within,
};
use crate::traffic::{Failed, Traffic, serve};

/// How the links of a peer ended: messages sent back, or the error.
pub(crate) type Ends = Vec<Result<u64, Error>>;

/// A peer that takes any number of links and serves them.
pub(crate) struct Peer {
    pub(crate) host: Host,
    pub(crate) addr: SocketAddr,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<Ends>,
}

/// Longer than any test lets a peer run.
const LIFE: Duration = Duration::from_secs(300);

impl Peer {
    pub(crate) fn start(config: Config) -> Self {
        let host = Host::new(&[PEER.0], config);
        let fabric = host.fabric.clone();
        let (stop, stopped) = oneshot::channel();
        let (addr, listening) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let tell = |event: Event<'_>| match event {
                Event::Listening(local) => drop(addr.send(local)),
                Event::ListenerLost(error) => show("  the peer's listener", error),
            };
            within(LIFE, "the peer", serve_all(fabric, any_port(PEER), stopped, tell))
        });
        let addr = listening.recv_timeout(TEST_TIMEOUT).expect("the peer listens");
        Self { host, addr, stop, thread }
    }

    /// Takes no more links. Those that there are end by themselves in time; nothing of them is
    /// left.
    #[track_caller]
    pub(crate) fn finish(self) -> Ends {
        let Self { host, stop, thread, .. } = self;
        let _ = stop.send(());
        let ends = join(
            thread,
            stalled_after(host.fabric.config()) + TEST_TIMEOUT,
            "the peer's links end",
        );
        host.finish();
        ends
    }
}

/// What [`serve_all`] tells.
pub(crate) enum Event<'a> {
    Listening(SocketAddr),
    ListenerLost(&'a Error),
}

/// Listens, and serves what links come until it is told to stop and all have ended.
pub(crate) async fn serve_all(
    fabric: Fabric,
    at: SocketAddr,
    mut stopped: oneshot::Receiver<()>,
    mut tell: impl FnMut(Event<'_>),
) -> Ends {
    let listener = fabric.listen(at).expect("a listener");
    tell(Event::Listening(listener.local_addr()));
    let mut listener = Some(listener);
    let mut serving = FuturesUnordered::new();
    let mut ends = Ends::new();
    std::future::poll_fn(|cx| {
        if Pin::new(&mut stopped).poll(cx).is_ready() {
            listener = None;
        }
        while let Some(Poll::Ready(link)) =
            listener.as_mut().map(|open| Pin::new(&mut open.accept()).poll(cx))
        {
            match link {
                Ok(link) => serving.push(serve(link)),
                Err(error) => {
                    tell(Event::ListenerLost(&error));
                    listener = None;
                }
            }
        }
        while let Poll::Ready(Some(end)) = serving.poll_next_unpin(cx) {
            if let Err(error) = &end {
                show("  at the peer", error);
            }
            ends.push(end);
        }
        if listener.is_none() && serving.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    ends
}

pub(crate) fn connect(own: &Host, peer: SocketAddr) -> Result<Link, Error> {
    let options = ConnectOptions::new().local(any_port(OWN));
    within(TEST_TIMEOUT, "a connect", own.fabric.connect_with(peer, &options))
}

/// A link from the own host to a peer, with traffic.
pub(crate) struct Pair {
    pub(crate) own: Host,
    pub(crate) peer: Peer,
    pub(crate) link: Link,
    pub(crate) traffic: Traffic,
    clean: Clean,
}

impl Pair {
    pub(crate) fn start(own: Config, peer: Config) -> Self {
        Self::with(own, peer, Traffic::start)
    }

    /// With other traffic.
    pub(crate) fn with(own: Config, peer: Config, traffic: impl FnOnce(&Link) -> Traffic) -> Self {
        let clean = Clean::begin();
        let (own, peer) = (Host::new(&[OWN.0], own), Peer::start(peer));
        let link = connect(&own, peer.addr).expect("a link");
        let traffic = traffic(&link);
        Self { own, peer, link, traffic, clean }
    }

    pub(crate) fn into_parts(self) -> (Host, Peer, Link, Traffic, Clean) {
        let Self { own, peer, link, traffic, clean } = self;
        (own, peer, link, traffic, clean)
    }

    /// The fault is over: everything goes on, closes in good order, and leaves nothing.
    #[track_caller]
    pub(crate) fn survives(self, fault: &str) {
        let Self { own, peer, link, traffic, clean } = self;
        traffic.flows("after the fault");
        traffic.stop();
        within(TEST_TIMEOUT, "closing", link.close()).expect("closed in good order");
        drop(link);
        for end in peer.finish() {
            assert!(end.is_ok_and(|echoed| echoed > 0), "the peer's end");
        }
        own.finish();
        clean.end();
        println!("{fault}: survives");
    }

    /// All traffic ends by the same error within `limit` of `since`: the link is down. Then `mend`;
    /// both sides let go of everything.
    #[track_caller]
    pub(crate) fn fails_during(
        self,
        fault: &str,
        since: Instant,
        limit: Duration,
        mend: impl FnOnce(),
    ) -> Error {
        let Self { own, peer, link, traffic, clean } = self;
        let kinds = [ErrorKind::LinkDown, ErrorKind::PeerStalled];
        let error = judge(fault, &link, traffic, since, &kinds, limit);
        assert!(!error.causes().is_empty(), "{error}");
        mend();
        drop(link);
        let ends = peer.finish();
        assert!(!ends.is_empty(), "the peer had links");
        own.finish();
        clean.end();
        error
    }
}

/// All traffic ends by the same error, the first; see [`Pair::fails_during`].
#[track_caller]
pub(crate) fn judge(
    fault: &str,
    link: &Link,
    traffic: Traffic,
    since: Instant,
    kinds: &[ErrorKind],
    limit: Duration,
) -> Error {
    let limit = limit * pace();
    let failures = traffic.failures(limit + TEST_TIMEOUT);
    let first = link.failure().expect("the link is down");
    assert_eq!(failures.len(), 3, "each kind of traffic has failed: {failures:?}");
    for Failed { kind, error, at } in &failures {
        let after = at.saturating_duration_since(since);
        assert!(kinds.contains(&error.kind()), "{kind} after {after:?}: {error:?}");
        assert_eq!(format!("{error:?}"), format!("{first:?}"), "{kind} are told the first failure");
        assert!(after <= limit, "{kind} failed after {after:?}, {limit:?} allowed: {error}");
    }
    let after =
        failures.iter().map(|failed| failed.at).max().map(|at| at.saturating_duration_since(since));
    show(&format!("{fault}, after {:.0?}", after.unwrap_or_default()), &first);
    first
}

/// Prints an error as a person would see it.
pub(crate) fn show(what: &str, error: &Error) {
    println!("{what}: {error:?}");
    for cause in error.causes() {
        println!("    {cause}");
    }
    if let Some(remedy) = error.remedy() {
        println!("    remedy: {remedy}");
    }
}
