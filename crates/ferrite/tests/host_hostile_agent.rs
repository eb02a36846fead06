//! One of three hosts attacks the agents of the other two: instead of an agent, it runs a test that
//! opens links and sends records by hand. On hosts in network namespaces, over TCP. Needs root.
//!
//! `FERRITE_HOSTILE_AGENT=measured` also limits how long clients of the other hosts wait during the
//! attack. This check needs a quiet machine.

mod agent {
    pub(crate) mod harness;
    pub(crate) mod wire;
}
mod metrics {
    pub(crate) mod harness;
}

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use agent::harness::{Group, PASSWORD, WITHOUT_CAPABILITIES, alias, sum};
use ferrite_fabric::rustls::crypto::ring;
use ferrite_fabric::{Config, ConnectOptions, Error, Fabric, Link, Rdma};
use ferrite_proto::mux::{Cause, Class, Control, HEAD_BYTES, Route, Side, StreamId};
use ferrite_session::agent::AgentTls;
use ferrite_testkit::ca::Issued;
use ferrite_testkit::netns::Hosts;
use ferrite_testkit::resp::Client;
use ferrite_testkit::{Ca, TIMEOUT, until};

/// The host whose agent breaks the rules.
const HOSTILE: usize = 3;
/// The number of streams of a flood.
const FLOOD: u32 = 100_000;
/// The number of OPEN records in a message: 52 bytes each, and at most 64 KiB.
const BATCH: u32 = 1000;

/// Starts three hosts whose agents authenticate each other, and stops the agent of the third.
#[expect(clippy::print_stderr, reason = "reports that the test is skipped")]
fn group() -> Option<Group> {
    let hosts = Hosts::start(3)
        .inspect_err(|why| eprintln!("SKIPPED: this test needs network namespaces: {why}"))
        .ok()?;
    let mut group = Group::start_with_tls(hosts, 3, &["--rdma", "forbid"], WITHOUT_CAPABILITIES);
    drop(group.agents.pop());
    until(TIMEOUT, "the loss of the third agent", || {
        [1, 2].iter().all(|host| links(&group, *host) == 0.0)
    });
    Some(group)
}

/// Returns the number of links of a host to the third one.
fn links(group: &Group, host: usize) -> f64 {
    sum(&group.scrape(host), "agent_links{", &alias(HOSTILE))
}

fn refused(group: &Group, cause: &str) -> f64 {
    let name = format!("agent_opens_refused_total{{cause=\"{cause}\"");
    sum(&group.scrape(1), &name, "")
}

fn links_refused(group: &Group, cause: &str) -> f64 {
    let name = format!("agent_links_refused_total{{cause=\"{cause}\"");
    sum(&group.scrape(1), &name, "")
}

/// A link of the third host to the agent of the first one.
struct Hostile {
    fabric: Fabric,
    link: Link,
    next: u32,
    /// The resets that the agent has sent, by cause.
    resets: BTreeMap<u32, u32>,
}

impl Hostile {
    fn connect(group: &Group) -> Self {
        let issued = group.certificates.as_ref().expect("TLS").ca.issue(&[&group.hosts.ip(3)]);
        let ca = &group.certificates.as_ref().expect("TLS").ca;
        Self::connect_with(group, ca, &issued).expect("a link")
    }

    /// Connects with a certificate. `ca` is the authority that this side trusts.
    fn connect_with(group: &Group, ca: &Ca, issued: &Issued) -> Result<Self, Error> {
        let files = &group.certificates.as_ref().expect("TLS").files;
        let [certificate, key, authority] = ca.files(files, "hostile", issued);
        let provider = Arc::new(ring::default_provider());
        let tls = AgentTls::read(&certificate, &key, &authority, &provider).expect("valid files");
        let name = group.hosts.ip(1).try_into().expect("an address");
        Self::connect_by(group, &tls.connect(ConnectOptions::new(), name))
    }

    fn connect_by(group: &Group, options: &ConnectOptions) -> Result<Self, Error> {
        let agent: SocketAddr = format!("{}:7470", group.hosts.ip(1)).parse().expect("an address");
        group.hosts.within(HOSTILE, || {
            let config = Config { busy_poll_us: 0, ..ferrite_session::client_config() };
            let fabric = Fabric::system().rdma(Rdma::Forbid).config(config).build()?;
            fabric.spawn_thread().expect("a thread");
            let link = fabric.block_on(fabric.connect_with(agent, options))?;
            Ok(Self { fabric, link, next: 1, resets: BTreeMap::new() })
        })
    }

    /// Sends an OPEN for each route, in one message.
    fn open(&mut self, routes: impl IntoIterator<Item = Route>) -> Result<(), Error> {
        let class = Class::Interactive;
        let mut message = Vec::new();
        for route in routes {
            let stream = StreamId::new(Side::Caller, class, self.next).expect("a free name");
            self.next += 1;
            message.extend_from_slice(&Control::Open { stream, route }.encode());
        }
        self.fabric.block_on(self.link.send_bytes(class.channel(), &message))
    }

    /// Takes what the agent has sent, and counts the resets.
    fn receive(&mut self) -> Result<(), Error> {
        while let Some(message) = self.link.try_recv()? {
            let message = message.to_vec();
            let mut rest = &message[..];
            while let Some((head, body)) = rest.split_at_checked(HEAD_BYTES) {
                let number = |at: usize| {
                    let bytes = rest[at..at + 4].try_into().expect("four bytes");
                    u32::from_le_bytes(bytes)
                };
                if head[0] == 5 {
                    *self.resets.entry(number(HEAD_BYTES)).or_default() += 1;
                }
                rest = &body[number(8) as usize..];
            }
        }
        Ok(())
    }

    #[track_caller]
    fn wait_for_resets(&mut self, cause: Cause, count: u32) {
        until(TIMEOUT, "resets", || {
            self.receive().expect("the link goes on");
            self.resets.get(&cause.to_wire()).is_some_and(|resets| *resets >= count)
        });
    }
}

fn route(source: &str, destination: &str) -> Route {
    let at = |text: &str| text.parse().expect("an address");
    Route { destination: at(destination), source: at(source) }
}

/// An agent refuses streams with a source address that the peer does not have, streams to other
/// hosts, and streams to ports that it does not carry.
#[test]
fn foreign_sources_foreign_destinations_and_loops_are_refused_and_counted() {
    let Some(group) = group() else { return };
    let _engine = group.start_engine(1, 7001, &["--requirepass", PASSWORD]);
    let mut hostile = Hostile::connect(&group);
    let sources = ["127.1.0.1:1", "127.1.0.2:1", "127.0.0.1:1", "10.77.0.3:1", "[::1]:1"];
    let sources = sources.map(|source| route(source, "127.1.0.1:7001"));
    // The agent of host 1 must not connect to itself: it listens at the second and at the third of
    // these addresses.
    let destinations =
        ["10.77.0.2:7001", "127.1.0.2:7001", "10.77.0.1:7470", "127.0.0.1:22", "[::1]:7001"];
    let destinations = destinations.map(|destination| route("127.1.0.3:1", destination));
    let ports = ["127.1.0.1:22", "127.1.0.1:7470", "127.1.0.1:1"];
    let ports = ports.map(|port| route("127.1.0.3:1", port));
    let all = sources.into_iter().chain(destinations).chain(ports);
    hostile.open(all).expect("sent");
    hostile.wait_for_resets(Cause::FORBIDDEN, 13);
    let counts = ["source", "destination", "port"].map(|cause| refused(&group, cause));
    assert_eq!(counts, [5.0, 5.0, 3.0]);
    assert_eq!(hostile.resets.len(), 1, "{:?}", hostile.resets);
    assert_eq!(links(&group, 1), 1.0, "the link stays");
}

#[test]
fn wrong_certificates_are_refused_and_counted() {
    let Some(group) = group() else { return };
    let ca = &group.certificates.as_ref().expect("TLS").ca;
    let own = group.hosts.ip(HOSTILE);
    let other_ca = Ca::new();
    let attempt =
        |known: &Ca, issued: &Issued| Hostile::connect_with(&group, known, issued).map(drop);
    assert!(attempt(ca, &other_ca.issue(&[&own])).is_err());
    assert!(attempt(ca, &ca.issue_expired(&[&own])).is_err());
    assert!(attempt(&other_ca, &ca.issue(&[&own])).is_err());
    assert!(Hostile::connect_by(&group, &ConnectOptions::new()).is_err(), "no TLS");
    until(TIMEOUT, "refusals that are counted", || links_refused(&group, "tls") == 4.0);
    // The agent checks the names in a certificate after the TLS handshake.
    let error = attempt(ca, &ca.issue(&["10.77.0.9"])).expect_err("a refusal");
    let refusal = error.refusal().expect("a refusal of the agent");
    assert!(refusal.text.contains("has the name of no peer"), "{refusal}");
    assert_eq!(links_refused(&group, "certificate"), 1.0);
    assert_eq!(links(&group, 1), 0.0);
    assert_eq!(group.get(1, "/live").0, 200);
}

/// Sends PINGs from the second host to an engine of the first host. Returns the time of each reply.
fn ping(client: &mut Client, is_enough: impl Fn(usize) -> bool) -> Vec<Duration> {
    let mut times = Vec::new();
    while !is_enough(times.len()) {
        let begun = Instant::now();
        assert_eq!(client.ask(&["PING"]), "+PONG");
        times.push(begun.elapsed());
    }
    times.sort_unstable();
    times
}

fn p99(times: &[Duration]) -> Duration {
    times[times.len() * 99 / 100]
}

/// Opens streams as fast as the agent takes them, to an engine and to a forbidden destination.
#[test]
#[expect(clippy::print_stderr, reason = "reports figures")]
fn flood_of_streams_is_limited_and_others_are_served() {
    let Some(group) = group() else { return };
    let _engine = group.start_engine(1, 7001, &["--requirepass", PASSWORD]);
    let mut client = group.client(2, 1, 7001);
    let before = ping(&mut client, |count| count >= 2000);
    let mut hostile = Hostile::connect(&group);
    let is_over = AtomicBool::new(false);
    let (beside, rounds) = std::thread::scope(|scope| {
        let pinging = scope.spawn(|| {
            let is_enough = |count| count >= 2000 && is_over.load(Ordering::Relaxed);
            ping(&mut client, is_enough)
        });
        let mut sent = 0;
        // At least 100,000 streams, for at least 2 s.
        let begun = Instant::now();
        while sent < FLOOD || begun.elapsed() < Duration::from_secs(2) {
            let ports = (0..BATCH).map(|port| 1024 + port as u16);
            let routes = ports.map(|port| {
                let to = if port % 2 == 0 { "127.1.0.1:7001" } else { "127.1.0.2:7001" };
                route(&format!("127.1.0.3:{port}"), to)
            });
            hostile.open(routes).expect("the link goes on");
            hostile.receive().expect("the link goes on");
            sent += BATCH;
        }
        is_over.store(true, Ordering::Relaxed);
        (pinging.join().expect("pings are answered"), sent)
    });
    until(TIMEOUT, "an answer to every stream", || {
        hostile.receive().expect("the link goes on");
        let at_limits = refused(&group, "limit") as u32;
        let forbidden = refused(&group, "destination") as u32;
        let samples = group.scrape(1);
        let accepted = sum(&samples, "agent_streams_opened_total{", "by=\"peer\"") as u32
            + ["engine_refused", "engine_unreachable"]
                .map(|cause| refused(&group, cause) as u32)
                .iter()
                .sum::<u32>();
        at_limits > 0 && forbidden > 0 && at_limits + forbidden + accepted >= rounds
    });
    assert!(hostile.resets.contains_key(&Cause::TOO_MANY_OPENS.to_wire()), "{:?}", hostile.resets);
    let (quiet, busy) = (p99(&before), p99(&beside));
    eprintln!(
        "{rounds} streams opened; PING of another host p50 {:?}, p99 {quiet:?} before, p50 {:?}, \
         p99 {busy:?} beside ({} answers)",
        before[before.len() / 2],
        beside[beside.len() / 2],
        beside.len()
    );
    if std::env::var_os("FERRITE_HOSTILE_AGENT").is_some() {
        assert!(busy <= quiet * 2, "PING p99 {quiet:?} before and {busy:?} beside the flood");
    }
    // A peer that does not read its refusals loses the link, and others keep theirs.
    drop(hostile);
    let mut silent = Hostile::connect(&group);
    let open = || (0..BATCH).map(|_| route("127.1.0.3:1", "127.1.0.2:7001"));
    until(TIMEOUT, "the loss of the link", || {
        silent.open(open()).is_err() || silent.link.failure().is_some()
    });
    assert_eq!(client.ask(&["PING"]), "+PONG");
    assert!(sum(&group.scrape(1), "agent_links_lost_total{", &alias(2)) == 0.0);
}
