//! The agent inside this process, over TCP on loopback: what it refuses to a peer that breaks the
//! rules, and two agents that connect to each other at once.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use ferrite_config::ports::PortSet;
use ferrite_fabric::{Config, ConnectOptions, Fabric, Listener, Rdma};
use ferrite_session::agent::{Agent, AgentConfig, AgentHandle, AgentPeer};
use ferrite_session::mux::protocol::{self, Class, Route};
use ferrite_session::mux::{Multiplexer, MuxHandle, Side, multiplex};
use ferrite_testkit::wait::until_async;
use ferrite_testkit::{TIMEOUT, free_port};
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
}

/// An agent, and a peer of it that opens whatever the test wants.
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
        config.peers = vec![AgentPeer { alias, address: (peer_ip, free_port()).into() }];
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
        let opened = self.handle.open(Class::Interactive, route, socket).await;
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
    // The stream that keeps the rules is connected, from the peer's own address.
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
    let link = other.connect(address).await.expect("a link");
    assert!(link.ended().await.is_err() || link.failure().is_some(), "it ends");
    until_async("it is counted", async || agent.handle.stats().unknown_peers == 1).await;
    agent.finish().await;
}

/// Both agents connect at once. One of the two links remains, the same one on both sides.
#[tokio::test]
async fn agents_that_connect_at_once_keep_one_link() {
    for _ in 0..5 {
        let fabrics = [fabric(), fabric()];
        let aliases = [ip(1), ip(2)];
        let ips = [ip(3), ip(4)];
        let listeners = [0, 1].map(|at| fabrics[at].listen((ips[at], 0).into()).expect("listen"));
        let addresses = [0, 1].map(|at: usize| listeners[at].local_addr());
        let mut agents = Vec::new();
        for (at, listener) in listeners.into_iter().enumerate() {
            let mut config = AgentConfig::new(aliases[at]);
            config.peers = vec![AgentPeer { alias: aliases[1 - at], address: addresses[1 - at] }];
            config.ports = PortSet::parse([free_port().to_string()]).expect("a port");
            config.local = Some((ips[at], 0).into());
            agents.push(start(&fabrics[at], config, vec![listener]));
        }
        let links = |agent: &Running| agent.handle.stats().peers[0].links.len();
        let lost = |agent: &Running| agent.handle.stats().peers[0].links_lost;
        let opened = |agent: &Running| agent.handle.stats().peers[0].links_opened;
        until_async("a link", async || agents.iter().all(|agent| links(agent) > 0)).await;
        // Every link that was opened is known to both. Then one remains.
        until_async("one link", async || {
            opened(&agents[0]) == opened(&agents[1]) && agents.iter().all(|agent| links(agent) == 1)
        })
        .await;
        assert!(agents.iter().all(|agent| lost(agent) == 0), "the other one has ended in order");
        assert!(agents[0].handle.check_links().await.is_ok());
        for agent in agents {
            agent.finish().await;
        }
    }
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
    config.peers = vec![AgentPeer { alias, address }];
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
