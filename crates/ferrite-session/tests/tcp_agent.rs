//! The agent inside this process, over TCP on loopback: what it refuses to a peer that breaks the
//! rules, and two agents that connect to each other at once.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use ferrite_config::ports::PortSet;
use ferrite_fabric::rustls::crypto::ring;
use ferrite_fabric::wire::RefusalCode;
use ferrite_fabric::{Config, ConnectOptions, Fabric, ListenOptions, Listener, Rdma, Transport};
use ferrite_session::agent::{Agent, AgentConfig, AgentHandle, AgentPeer, AgentTls};
use ferrite_session::mux::protocol::{self, Class, Route};
use ferrite_session::mux::{Multiplexer, MuxHandle, Side, multiplex};
use ferrite_testkit::wait::until_async;
use ferrite_testkit::{Ca, TIMEOUT, TempDir, free_port};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Returns an address of this host that no other test uses: 127.x.y.n.
fn ip(number: u8) -> Ipv4Addr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let [high, low] = (std::process::id() as u16).to_be_bytes();
    let test = NEXT.fetch_add(1, Ordering::Relaxed);
    Ipv4Addr::new(127, 100 | high & 1, low, (number << 5) | test & 31)
}

fn fabric() -> Fabric {
    let config = Config { busy_poll_us: 0, ..ferrite_session::client_config() };
    let fabric = Fabric::system().rdma(Rdma::Forbid).config(config).build().expect("a fabric");
    tokio::spawn(fabric.drive());
    fabric
}

/// An agent that runs.
struct Running {
    handle: AgentHandle,
    stop: oneshot::Sender<()>,
    served: JoinHandle<Result<(), ferrite_fabric::Error>>,
}

fn start(fabric: &Fabric, config: AgentConfig, listeners: Vec<Listener>) -> Running {
    let agent = Agent::new(fabric.clone(), config).expect("valid settings");
    let aliases = agent.listen().expect("free addresses");
    let (handle, (stop, stopped)) = (agent.handle(), oneshot::channel());
    let served = tokio::spawn(agent.serve(aliases, listeners, async {
        let _ = stopped.await;
    }));
    Running { handle, stop, served }
}

impl Running {
    async fn finish(self) {
        drop(self.stop);
        let served = tokio::time::timeout(TIMEOUT, self.served).await.expect("it ends in time");
        served.expect("no panic").expect("no failure");
    }

    fn refused(&self, cause: &str) -> u64 {
        let refused = self.handle.stats().refused;
        refused.into_iter().find(|(label, _)| *label == cause).expect(cause).1
    }

    fn links_refused(&self, cause: &str) -> u64 {
        let refused = self.handle.stats().links_refused;
        refused.into_iter().find(|(label, _)| *label == cause).expect(cause).1
    }
}

/// An agent, and a peer that opens any stream that the test wants.
struct Hostile {
    agent: Running,
    handle: MuxHandle<TcpStream>,
    own: Ipv4Addr,
    alias: Ipv4Addr,
    engine: TcpListener,
    /// The port where the agent listens for links.
    agent_port: u16,
}

impl Hostile {
    async fn start() -> Self {
        let (own, alias, peer_ip) = (ip(1), ip(2), ip(3));
        let engine = TcpListener::bind((own, 0)).await.expect("listen");
        let port = engine.local_addr().expect("an address").port();
        let (fabric, other) = (fabric(), fabric());
        let listener = fabric.listen("127.0.0.1:0".parse().expect("an address")).expect("listen");
        let address = listener.local_addr();
        let mut config = AgentConfig::new(own);
        // Nothing listens there, so the agent does not connect.
        config.peers = vec![AgentPeer::new(alias, (peer_ip, free_port()).into())];
        config.ports = PortSet::parse([free_port().to_string()]).expect("a port");
        config.deliver =
            PortSet::parse([port.to_string(), address.port().to_string()]).expect("ports");
        config.own = vec![SocketAddr::from(([0, 0, 0, 0], address.port()))];
        config.protected_mode = false;
        let agent = start(&fabric, config, vec![listener]);
        let options = ConnectOptions::new().local((peer_ip, 0).into());
        let link = other.connect_with(address, &options).await.expect("a link");
        let multiplexer = multiplex(link, Side::Caller, &protocol::Config::default());
        let Multiplexer { handle, driver, .. } = multiplexer.expect("a multiplexer");
        tokio::spawn(driver.run());
        Self { agent, handle, own, alias, engine, agent_port: address.port() }
    }

    /// Opens a stream, and returns the program's end of it.
    async fn open(&self, source: SocketAddr, destination: SocketAddr) -> TcpStream {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("listen");
        let connecting = TcpStream::connect(listener.local_addr().expect("an address"));
        let (program, accepted) = tokio::join!(connecting, listener.accept());
        let socket = accepted.expect("accept").0;
        let route = Route { destination, source };
        // The port is that of an engine, so this class has no effect on the agent.
        let opened = self.handle.open(Class::Bus, route, socket).await;
        opened.map_err(|(_, error)| error).expect("a stream");
        program.expect("connect")
    }

    async fn assert_refused(&self, source: SocketAddr, destination: SocketAddr, cause: &str) {
        let before = self.agent.refused(cause);
        let mut program = self.open(source, destination).await;
        let error = program.read(&mut [0]).await.expect_err("a reset, and not the end");
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
        assert_eq!(self.agent.refused(cause), before + 1, "{cause}");
    }
}

#[tokio::test]
async fn peer_reaches_only_engines_of_this_host_and_only_as_itself() {
    let hostile = Hostile::start().await;
    let engine = hostile.engine.local_addr().expect("an address");
    let (own, source) = (hostile.own, SocketAddr::from((hostile.alias, 40_000)));
    let at = |ip: Ipv4Addr, port: u16| SocketAddr::from((ip, port));
    hostile.assert_refused(at(own, 40_000), engine, "source").await;
    hostile.assert_refused(at(Ipv4Addr::LOCALHOST, 40_000), engine, "source").await;
    hostile.assert_refused(source, at(Ipv4Addr::LOCALHOST, engine.port()), "destination").await;
    hostile.assert_refused(source, at(hostile.alias, engine.port()), "destination").await;
    hostile.assert_refused(source, at(own, 22), "port").await;
    assert_eq!(hostile.agent.handle.stats().peers[0].links.len(), 1, "the link stays");
    // A stream that obeys the rules is connected, from the peer's alias.
    let mut program = hostile.open(source, engine).await;
    let (mut accepted, from) = hostile.engine.accept().await.expect("accept");
    assert_eq!(from, source);
    program.write_all(b"PING").await.expect("sent");
    let mut received = [0; 4];
    accepted.read_exact(&mut received).await.expect("received");
    assert_eq!(&received, b"PING");
    let stats = hostile.agent.handle.stats();
    assert_eq!((stats.peers[0].accepted, stats.peers[0].open), ([0, 1, 0], [0, 1, 0]));
    drop((program, accepted));
    until_async("the stream ends", async || hostile.agent.handle.stats().peers[0].open == [0; 3])
        .await;
    hostile.agent.finish().await;
}

#[tokio::test]
async fn peer_does_not_reach_the_agent_itself() {
    let hostile = Hostile::start().await;
    let source = SocketAddr::from((hostile.alias, 40_000));
    // `deliver` has this port, too.
    let agent = SocketAddr::from((hostile.own, hostile.agent_port));
    hostile.assert_refused(source, agent, "agent").await;
    hostile.agent.finish().await;
}

#[tokio::test]
async fn link_from_an_unknown_address_is_refused() {
    let (fabric, other) = (fabric(), fabric());
    let listener = fabric.listen("127.0.0.1:0".parse().expect("an address")).expect("listen");
    let address = listener.local_addr();
    let agent = start(&fabric, AgentConfig::new(ip(1)), vec![listener]);
    let error = other.connect(address).await.map(drop).expect_err("a refusal");
    let refusal = error.refusal().expect("a refusal of the agent");
    assert_eq!(refusal.code, RefusalCode::POLICY);
    assert_eq!(refusal.text, "127.0.0.1 is the address of no peer");
    assert_eq!(agent.links_refused("address"), 1);
    agent.finish().await;
}

#[tokio::test]
async fn links_of_a_peer_beyond_the_limit_are_refused() {
    const LINKS_MAX: usize = 16;
    let (fabric, other) = (fabric(), fabric());
    let listener = fabric.listen("127.0.0.1:0".parse().expect("an address")).expect("listen");
    let address = listener.local_addr();
    let mut config = AgentConfig::new(ip(1));
    let peer_ip = ip(2);
    // Nothing listens there, so the agent does not connect.
    config.peers = vec![AgentPeer::new(peer_ip, (peer_ip, free_port()).into())];
    config.ports = PortSet::parse([free_port().to_string()]).expect("a port");
    let agent = start(&fabric, config, vec![listener]);
    let options = ConnectOptions::new().local((peer_ip, 0).into());
    let mut links = Vec::new();
    for count in 1..=LINKS_MAX {
        links.push(other.connect_with(address, &options).await.expect("a link"));
        until_async("the link", async || agent.handle.stats().peers[0].links.len() == count).await;
    }
    let error = other.connect_with(address, &options).await.map(drop).expect_err("a refusal");
    let refusal = error.refusal().expect("a refusal of the agent");
    assert_eq!(refusal.code, RefusalCode::LIMIT);
    assert!(refusal.text.starts_with("there are 16 links from "), "{refusal}");
    assert_eq!(agent.links_refused("too_many"), 1);
    drop(links);
    agent.finish().await;
}

/// Two agents that are peers of each other. They deliver no streams: both are on this host, so the
/// first agent listens at the address where an engine of the second host would listen.
struct Pair {
    agents: [Running; 2],
    /// The addresses where the agents listen for links.
    addresses: [SocketAddr; 2],
    /// The addresses from which the agents open links.
    ips: [Ipv4Addr; 2],
    /// Where programs of the first host reach the second one.
    destination: SocketAddr,
    /// The alias of the first host.
    own_alias: Ipv4Addr,
}

/// The certificates of agents, and the authority that has issued them.
struct Certificates {
    ca: Ca,
    files: TempDir,
}

impl Certificates {
    fn new() -> Self {
        Self { ca: Ca::new(), files: TempDir::new("agent-tls") }
    }

    fn of(&self, ip: Ipv4Addr) -> AgentTls {
        let ip = ip.to_string();
        let [certificate, key, ca] = self.ca.files(&self.files, &ip, &self.ca.issue(&[&ip]));
        let provider = std::sync::Arc::new(ring::default_provider());
        AgentTls::read(&certificate, &key, &ca, &provider).expect("files that can be used")
    }
}

impl Pair {
    async fn start() -> Self {
        let pair = Self::connect([None, None]).await;
        until_async("a link of each side", async || {
            pair.agents.iter().all(|agent| agent.handle.stats().peers[0].links.len() == 2)
        })
        .await;
        pair
    }

    /// Starts both agents, with certificates of these addresses if there are some.
    async fn connect(tls: [Option<(&Certificates, Option<Ipv4Addr>)>; 2]) -> Self {
        let fabrics = [fabric(), fabric()];
        let aliases = [ip(1), ip(2)];
        let ips = [ip(3), ip(4)];
        let port = free_port();
        let tls = [0, 1].map(|at: usize| {
            tls[at].map(|(certificates, ip)| certificates.of(ip.unwrap_or(ips[at])))
        });
        let listeners = [0, 1].map(|at: usize| {
            let options = ListenOptions::new();
            let options = match &tls[at] {
                Some(tls) => tls.listen(options),
                None => options,
            };
            fabrics[at].listen_with((ips[at], 0).into(), &options).expect("listen")
        });
        let addresses = [0, 1].map(|at: usize| listeners[at].local_addr());
        let mut listeners = listeners.into_iter();
        let agents = [0, 1].map(|at: usize| {
            let mut config = AgentConfig::new(aliases[at]);
            config.peers = vec![AgentPeer::new(aliases[1 - at], addresses[1 - at])];
            config.ports = PortSet::parse([port.to_string()]).expect("a port");
            config.local = Some((ips[at], 0).into());
            config.tls = tls[at].clone();
            start(&fabrics[at], config, listeners.next().into_iter().collect())
        });
        let destination = (aliases[1], port).into();
        Self { agents, addresses, ips, destination, own_alias: aliases[0] }
    }

    async fn finish(self) {
        for agent in self.agents {
            agent.finish().await;
        }
    }
}

/// Each agent uses the link that it has opened, so both links remain.
#[tokio::test]
async fn agents_that_connect_at_once_keep_a_link_for_each_direction() {
    for _ in 0..5 {
        let pair = Pair::start().await;
        for agent in &pair.agents {
            assert!(agent.handle.check_links().await.is_ok());
            let stats = agent.handle.stats().peers.remove(0);
            assert_eq!((stats.links.len(), stats.links_opened, stats.links_lost), (2, 2, 0));
        }
        pair.finish().await;
    }
}

/// Both agents connect when they start.
#[tokio::test]
async fn agents_with_tls_that_connect_at_once_keep_one_link() {
    let certificates = Certificates::new();
    let tls = Some((&certificates, None));
    for _ in 0..5 {
        let pair = Pair::connect([tls, tls]).await;
        for agent in &pair.agents {
            until_async("a link", async || agent.handle.check_links().await.is_ok()).await;
        }
        // If there were two links, one of them ends after a second.
        until_async("one link", async || {
            pair.agents.iter().all(|agent| {
                let peer = agent.handle.stats().peers.remove(0);
                peer.links == [Transport::TcpTls]
            })
        })
        .await;
        let before = pair.agents[1].refused("port");
        let mut program = TcpStream::connect(pair.destination).await.expect("connect");
        assert!(program.read(&mut [0]).await.is_err(), "the second agent delivers nothing");
        assert_eq!(pair.agents[1].refused("port"), before + 1, "but it got the stream");
        for agent in &pair.agents {
            let stats = agent.handle.stats();
            assert_eq!(stats.peers[0].links_lost, 0);
            assert_eq!(stats.peers[0].links.len(), 1, "no link was opened for the stream");
            assert!(stats.links_refused.iter().all(|(_, count)| *count == 0), "{stats:?}");
        }
        pair.finish().await;
    }
}

/// A link that one side has opened carries the streams of both.
#[tokio::test]
async fn link_with_tls_carries_the_streams_of_both_sides() {
    let certificates = Certificates::new();
    let tls = Some((&certificates, None));
    let pair = Pair::connect([tls, tls]).await;
    until_async("one link", async || {
        pair.agents.iter().all(|agent| agent.handle.stats().peers[0].links.len() == 1)
    })
    .await;
    let back = SocketAddr::new(pair.own_alias.into(), pair.destination.port());
    for (to, agent) in [(pair.destination, &pair.agents[1]), (back, &pair.agents[0])] {
        let mut program = TcpStream::connect(to).await.expect("connect");
        assert!(program.read(&mut [0]).await.is_err(), "nothing is delivered");
        until_async("a stream", async || agent.refused("port") == 1).await;
    }
    pair.finish().await;
}

/// The second agent has the certificate of a third host, which the CA has issued, too.
#[tokio::test]
async fn certificate_of_another_host_gives_no_link_in_either_direction() {
    let certificates = Certificates::new();
    let third = ip(5);
    let pair = Pair::connect([Some((&certificates, None)), Some((&certificates, Some(third)))]);
    let pair = pair.await;
    until_async("a link that is refused", async || pair.agents[0].links_refused("certificate") > 0)
        .await;
    until_async("an error", async || pair.agents[0].handle.stats().peers[0].error.is_some()).await;
    let why = pair.agents[0].handle.check_links().await.expect_err("no link");
    assert!(why.contains("certificate") && why.contains("subjectAltName"), "{why}");
    assert_eq!(pair.agents[0].handle.stats().peers[0].links.len(), 0);
    // The first agent tells the second one.
    until_async("an error", async || pair.agents[1].handle.stats().peers[0].error.is_some()).await;
    let why = pair.agents[1].handle.check_links().await.expect_err("no link");
    assert!(why.contains(&third.to_string()) && why.contains("has the name of no peer"), "{why}");
    pair.finish().await;
}

/// The second agent does not have the first one in its `peers`.
#[tokio::test]
async fn peer_that_refuses_the_link_is_like_a_host_without_an_agent() {
    let fabrics = [fabric(), fabric()];
    let (alias, peer_ip) = (ip(2), ip(3));
    let listener = fabrics[1].listen((peer_ip, 0).into()).expect("listen");
    let address = listener.local_addr();
    let other = start(&fabrics[1], AgentConfig::new(alias), vec![listener]);
    let engine = TcpListener::bind((peer_ip, 0)).await.expect("listen");
    let port = engine.local_addr().expect("an address").port();
    let mut config = AgentConfig::new(ip(1));
    config.peers = vec![AgentPeer::new(alias, address)];
    config.ports = PortSet::parse([port.to_string()]).expect("a port");
    config.direct = true;
    let agent = start(&fabrics[0], config, Vec::new());
    until_async("an error", async || agent.handle.stats().peers[0].error.is_some()).await;
    for _ in 0..3 {
        let mut program = TcpStream::connect((alias, port)).await.expect("connect");
        program.write_all(b"PING").await.expect("sent");
        let accepted = tokio::time::timeout(TIMEOUT, engine.accept()).await.expect("in time");
        let (mut received, mut accepted) = ([0; 4], accepted.expect("accept").0);
        accepted.read_exact(&mut received).await.expect("received");
        assert_eq!(&received, b"PING");
    }
    let why = agent.handle.check_links().await.expect_err("no link");
    assert!(why.contains("is the address of no peer"), "{why}");
    let stats = agent.handle.stats();
    assert_eq!((stats.direct, stats.without_link), (3, 0));
    assert_eq!(stats.peers[0].links_opened, 0);
    assert_eq!(other.links_refused("address"), stats.peers[0].connect_failures);
    agent.finish().await;
    other.finish().await;
}

/// The certificate decides which peer a link belongs to. Only the alias of that peer is a valid
/// source of the link's streams.
#[tokio::test]
async fn peer_with_tls_speaks_for_its_own_alias_alone() {
    let certificates = Certificates::new();
    let (own, peer_ips, aliases) = (ip(1), [ip(2), ip(3)], [ip(4), ip(5)]);
    let (fabric, other) = (fabric(), fabric());
    let options = certificates.of(own).listen(ListenOptions::new());
    let listener = fabric.listen_with((own, 0).into(), &options).expect("listen");
    let address = listener.local_addr();
    let mut config = AgentConfig::new(own);
    // Nothing listens there, so the agent does not connect.
    let peer = |at: usize| AgentPeer::new(aliases[at], (peer_ips[at], free_port()).into());
    config.peers = vec![peer(0), peer(1)];
    config.ports = PortSet::parse([free_port().to_string()]).expect("a port");
    config.tls = Some(certificates.of(own));
    let agent = start(&fabric, config, vec![listener]);
    // The second peer connects from the address of the first.
    let tls = certificates.of(peer_ips[1]);
    let name = own.to_string().try_into().expect("a name");
    let options = tls.connect(ConnectOptions::new().local((peer_ips[0], 0).into()), name);
    let link = other.connect_with(address, &options).await.expect("a link");
    let multiplexer = multiplex(link, Side::Caller, &protocol::Config::default());
    let Multiplexer { handle, driver, .. } = multiplexer.expect("a multiplexer");
    tokio::spawn(driver.run());
    until_async("a link of the second peer", async || {
        agent.handle.stats().peers.iter().map(|peer| peer.links.len()).eq([0, 1])
    })
    .await;
    // Port 1 is not in `deliver`. The agent checks the port after the source.
    for (alias, cause) in [(aliases[0], "source"), (aliases[1], "port")] {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("listen");
        let socket = TcpStream::connect(listener.local_addr().expect("an address"));
        let socket = socket.await.expect("connect");
        let route = Route { destination: (own, 1).into(), source: (alias, 40_000).into() };
        let opened = handle.open(Class::Interactive, route, socket).await;
        opened.map_err(|(_, error)| error).expect("a stream");
        until_async(cause, async || agent.refused(cause) == 1).await;
    }
    agent.finish().await;
}

/// Any user of the second host can open a link from its address.
#[tokio::test]
async fn link_of_another_program_of_the_peers_host_gets_no_connections() {
    let pair = Pair::start().await;
    let rogue = fabric();
    let options = ConnectOptions::new().local((pair.ips[1], 0).into());
    let link = rogue.connect_with(pair.addresses[0], &options).await.expect("a link");
    let multiplexer = multiplex(link, Side::Caller, &protocol::Config::default());
    let multiplexer: Multiplexer<TcpStream> = multiplexer.expect("a multiplexer");
    let Multiplexer { handle: _handle, mut incoming, driver } = multiplexer;
    tokio::spawn(driver.run());
    until_async("the link", async || pair.agents[0].handle.stats().peers[0].links_opened == 3)
        .await;
    for count in 1..=3 {
        let mut program = TcpStream::connect(pair.destination).await.expect("connect");
        let mut byte = [0];
        let received = tokio::select! {
            stream = incoming.next() => panic!("a connection of the peer: {stream:?}"),
            received = program.read(&mut byte) => received,
        };
        assert!(received.is_err(), "the second agent delivers nothing");
        assert_eq!(pair.agents[1].refused("port"), count);
    }
    assert_eq!(pair.agents[0].handle.stats().peers[0].links_lost, 0);
    pair.finish().await;
}

#[tokio::test]
async fn connection_is_reset_soon_if_the_peer_does_not_answer() {
    let fabric = fabric();
    let alias = ip(2);
    // Accepts connections, and never answers.
    let silent = TcpListener::bind((ip(3), 0)).await.expect("listen");
    let address = silent.local_addr().expect("an address");
    let port = free_port();
    let mut config = AgentConfig::new(ip(1));
    config.peers = vec![AgentPeer::new(alias, address)];
    config.ports = PortSet::parse([port.to_string()]).expect("a port");
    let agent = start(&fabric, config, Vec::new());
    let begun = std::time::Instant::now();
    let mut program = TcpStream::connect((alias, port)).await.expect("connect");
    let error = program.read(&mut [0]).await.expect_err("a reset");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    // The handshake itself may take 5 s.
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    assert_eq!(agent.handle.stats().without_link, 1);
    let why = agent.handle.check_links().await.expect_err("no link");
    assert!(why.contains(&format!("no link to {alias} ({address})")), "{why}");
    drop((agent.stop, agent.served));
}
