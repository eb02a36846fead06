//! Two hosts with traffic between them, both in this process, and the checks of how links fail.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferrite_fabric::{Config, ConnectOptions, Error, ErrorKind, Fabric, Link};
use ferrite_testkit::lab::{
    Host, LeakCheck, OWN, PEER, TEST_TIMEOUT, any_port, slowdown, stalled_after,
};
use ferrite_testkit::{join, within};
use futures_channel::oneshot;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;

use crate::traffic::{Failed, Traffic, serve};

/// How the links of a peer ended: the number of echoed messages, or the error.
pub(crate) type Ends = Vec<Result<u64, Error>>;

/// A peer that accepts any number of links and serves them.
pub(crate) struct Peer {
    pub(crate) host: Host,
    pub(crate) addr: SocketAddr,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<Ends>,
}

/// The time limit of a peer: longer than any test.
const LIFETIME: Duration = Duration::from_secs(300);

impl Peer {
    pub(crate) fn start(config: Config) -> Self {
        let host = Host::new(&[PEER.0], config);
        let fabric = host.fabric.clone();
        let (stop, stopped) = oneshot::channel();
        let (addr, listening) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let report = |event: Event<'_>| match event {
                Event::Listening(local) => drop(addr.send(local)),
                Event::ListenerLost(error) => show("  at the peer's listener", error),
            };
            within(LIFETIME, "the peer", serve_all(fabric, any_port(PEER), stopped, report))
        });
        let addr = listening.recv_timeout(TEST_TIMEOUT).expect("the peer listens");
        Self { host, addr, stop, thread }
    }

    /// Stops accepting. Checks that the existing links end in time and that nothing is left of
    /// them.
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

/// What [`serve_all`] reports.
pub(crate) enum Event<'a> {
    Listening(SocketAddr),
    ListenerLost(&'a Error),
}

/// Listens and serves links until it is stopped and all links have ended.
pub(crate) async fn serve_all(
    fabric: Fabric,
    at: SocketAddr,
    mut stopped: oneshot::Receiver<()>,
    mut report: impl FnMut(Event<'_>),
) -> Ends {
    let listener = fabric.listen(at).expect("a listener");
    report(Event::Listening(listener.local_addr()));
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
                    report(Event::ListenerLost(&error));
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

/// A link from the local host to a peer, with traffic.
pub(crate) struct Pair {
    pub(crate) own: Host,
    pub(crate) peer: Peer,
    pub(crate) link: Link,
    pub(crate) traffic: Traffic,
    leak_check: LeakCheck,
}

impl Pair {
    pub(crate) fn start(own: Config, peer: Config) -> Self {
        Self::with(own, peer, Traffic::start)
    }

    /// Starts both hosts, the link and the given traffic.
    pub(crate) fn with(own: Config, peer: Config, traffic: impl FnOnce(&Link) -> Traffic) -> Self {
        let leak_check = LeakCheck::begin();
        let (own, peer) = (Host::new(&[OWN.0], own), Peer::start(peer));
        let link = connect(&own, peer.addr).expect("a link");
        let traffic = traffic(&link);
        Self { own, peer, link, traffic, leak_check }
    }

    pub(crate) fn into_parts(self) -> (Host, Peer, Link, Traffic, LeakCheck) {
        let Self { own, peer, link, traffic, leak_check } = self;
        (own, peer, link, traffic, leak_check)
    }

    /// Checks that everything continues after the fault, closes cleanly, and leaves nothing behind.
    #[track_caller]
    pub(crate) fn survives(self, fault: &str) {
        let Self { own, peer, link, traffic, leak_check } = self;
        traffic.check_progress("after the fault");
        traffic.stop();
        within(TEST_TIMEOUT, "closing", link.close()).expect("closed cleanly");
        drop(link);
        for end in peer.finish() {
            assert!(end.is_ok_and(|echoed| echoed > 0), "the peer's link failed");
        }
        own.finish();
        leak_check.end();
        println!("{fault}: survives");
    }

    /// Checks that the link is down and all traffic fails with the same error within `limit` of
    /// `since`. Then calls `restore`, and checks that both sides release everything.
    #[track_caller]
    pub(crate) fn fails_during(
        self,
        fault: &str,
        since: Instant,
        limit: Duration,
        restore: impl FnOnce(),
    ) -> Error {
        let Self { own, peer, link, traffic, leak_check } = self;
        let kinds = [ErrorKind::LinkDown, ErrorKind::PeerStalled];
        let error = check_all_traffic_fails(fault, &link, traffic, since, &kinds, limit);
        assert!(!error.causes().is_empty(), "{error}");
        restore();
        drop(link);
        let ends = peer.finish();
        assert!(!ends.is_empty(), "the peer had no links");
        own.finish();
        leak_check.end();
        error
    }
}

/// Checks that all traffic fails within `limit` of `since`, and that it fails with the link's first
/// error. The error must have one of these kinds. Returns the error.
#[track_caller]
pub(crate) fn check_all_traffic_fails(
    fault: &str,
    link: &Link,
    traffic: Traffic,
    since: Instant,
    kinds: &[ErrorKind],
    limit: Duration,
) -> Error {
    let limit = limit * slowdown();
    let failures = traffic.failures(limit + TEST_TIMEOUT);
    let first = link.failure().expect("link is down");
    assert_eq!(failures.len(), 3, "each kind of traffic must fail: {failures:?}");
    for Failed { kind, error, at } in &failures {
        let after = at.saturating_duration_since(since);
        assert!(kinds.contains(&error.kind()), "{kind} after {after:?}: {error:?}");
        assert_eq!(
            format!("{error:?}"),
            format!("{first:?}"),
            "{kind} must report the first failure"
        );
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
