//! Sessions that lose their RDMA path, continue over TCP, and return to RDMA. On the fake provider
//! and this host's TCP, with a real `redis-server` behind the gateway.
#![expect(clippy::print_stdout, reason = "people judge how long each loss took")]

use std::time::Duration;

use ferrite_fabric::{Config, Fabric, FallbackCause, ListenOptions};
use ferrite_session::{
    Connector, EngineAddress, Gateway, GatewayConfig, Session, SessionTransport, TransportObserver,
    client_config, server_config,
};
use ferrite_testkit::numbered::{Gaps, NumberedCommands};
use ferrite_testkit::wait::until_async;
use ferrite_testkit::{Engine, Random};
use ferrite_verbs::fake::{DeviceSpec, World};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Device and address of the server and of the client.
const HOSTS: [(&str, &str); 2] = [("fake1", "127.0.0.1"), ("fake2", "127.0.0.2")];

/// A gateway on the first host, and a fabric on the second host for its clients.
struct Hosts {
    world: World,
    redis: Engine,
    fabrics: [Fabric; 2],
    gateway: Gateway,
    connector: Connector,
    server: std::net::SocketAddr,
    end: oneshot::Sender<()>,
    serving: JoinHandle<Result<(), ferrite_fabric::Error>>,
}

fn spec(host: usize) -> DeviceSpec {
    DeviceSpec::new(HOSTS[host].0, HOSTS[host].1.parse().expect("an address"))
}

impl Hosts {
    fn start() -> Self {
        let world = World::new();
        (0..2).for_each(|host| world.add_device(spec(host)));
        let verbs = world.verbs();
        let fabrics = [server_config(), client_config()].map(|config| Config {
            busy_poll_us: 0,
            upgrade_after: Duration::from_millis(100),
            // So long that the client must notice a lost path without the keepalive. Often only the
            // gateway's device has something to send, but only the client can reconnect.
            keepalive: Duration::from_secs(60),
            ..config
        });
        let mut host = 0;
        let fabrics = fabrics.map(|config| {
            let builder = Fabric::builder(&verbs).device(HOSTS[host].0).config(config);
            host += 1;
            let fabric = builder.command_threads().build().expect("a fabric");
            tokio::spawn(fabric.drive());
            fabric
        });
        let at = |host: usize| format!("{}:0", HOSTS[host].1).parse().expect("an address");
        let options = ListenOptions::new().accept_foreign_peers();
        let listener = fabrics[0].listen_with(at(0), &options).expect("listen");
        let server = listener.local_addr();
        let redis = Engine::redis(&[]);
        let config = GatewayConfig {
            protected_mode: false,
            ..GatewayConfig::new(EngineAddress::Unix(redis.socket()))
        };
        let gateway = Gateway::new(config);
        let (end, ended) = oneshot::channel();
        let serving = tokio::spawn({
            let gateway = gateway.clone();
            async move { gateway.serve(listener, async { drop(ended.await) }).await }
        });
        let connector = Connector::new(&fabrics[1]).local(at(1));
        Self { world, redis, fabrics, gateway, connector, server, end, serving }
    }

    async fn session(&self) -> Session {
        let session = self.connector.connect(self.server).await.expect("a session");
        assert_eq!(session.transport(), SessionTransport::FerriteRdma);
        session
    }

    /// Waits until both ends of all sessions use `transport`.
    async fn wait_until_on(&self, observers: &[TransportObserver], transport: SessionTransport) {
        until_async(&format!("all sessions on {transport}"), async || {
            let ours = observers.iter().all(|observer| observer.transport() == transport);
            ours && self.gateway.sessions().iter().all(|session| session.transport == transport)
        })
        .await;
    }

    async fn end(mut self) {
        let _ = self.end.send(());
        self.serving.await.expect("no panic").expect("the gateway ends");
        self.redis.assert_healthy();
        drop((self.fabrics, self.connector, self.world));
    }
}

fn run(test: impl AsyncFnOnce(Hosts)) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(async { test(Hosts::start()).await });
}

/// A fault that a session must survive, on one of the hosts.
#[derive(Debug, Clone, Copy)]
enum Fault {
    PathCut,
    PortDown,
    DeviceRemoved,
}

impl Hosts {
    fn cause(&self, fault: Fault, host: usize) {
        match fault {
            Fault::PathCut => self.world.black_hole(HOSTS[0].0, HOSTS[1].0),
            Fault::PortDown => self.world.device_down(HOSTS[host].0),
            Fault::DeviceRemoved => self.world.remove_device(HOSTS[host].0),
        }
    }

    fn repair(&self, fault: Fault, host: usize) {
        match fault {
            Fault::PathCut => self.world.heal(HOSTS[0].0, HOSTS[1].0),
            Fault::PortDown => self.world.device_up(HOSTS[host].0),
            Fault::DeviceRemoved => self.world.add_device(spec(host)),
        }
    }
}

/// Several sessions lose their path several times, by different faults, under numbered commands.
/// Set `FERRITE_LOSSES` for more losses.
#[test]
fn sessions_continue_over_tcp_and_return_to_rdma() {
    let losses = std::env::var("FERRITE_LOSSES").ok().and_then(|losses| losses.parse().ok());
    run(async |hosts| lose_paths(hosts, 4, losses.unwrap_or(12)).await);
}

/// More sessions than one source may have handshakes under way at the same time.
#[test]
fn many_sessions_move_at_the_same_time() {
    run(async |hosts| lose_paths(hosts, 100, 3).await);
}

/// Sends `commands`, reads the `first` bytes of the replies, cuts the path, and reads the `rest`
/// within 8 s. The server sends the rest after the cut.
async fn cut_between_replies(hosts: &Hosts, session: &mut Session, commands: &[u8], first: usize) {
    session.write_all(commands).await.expect("write");
    session.flush().await.expect("flush");
    let mut replies = vec![0; first];
    session.read_exact(&mut replies).await.expect("read");
    hosts.cause(Fault::PathCut, 0);
    let mut null = [0; 5];
    let read = tokio::time::timeout(Duration::from_secs(8), session.read_exact(&mut null)).await;
    read.expect("the reply comes without the keepalive").expect("the session continues");
    assert_eq!(&null, b"*-1\r\n");
}

/// The keepalive is 60 s here, so only a probe notices the loss in time.
#[test]
fn the_second_of_two_pipelined_replies_does_not_wait_for_the_keepalive() {
    run(async |hosts| {
        let mut session = hosts.session().await;
        cut_between_replies(&hosts, &mut session, b"PING\r\nBLPOP none 1\r\n", 7).await;
        drop(session);
        hosts.end().await;
    });
}

/// The reply before the cut has several frames.
#[test]
fn a_reply_after_a_long_reply_does_not_wait_for_the_keepalive() {
    run(async |hosts| {
        let mut session = hosts.session().await;
        let long = 300_000;
        let set = format!("SETRANGE long {} x\r\n", long - 1);
        session.write_all(set.as_bytes()).await.expect("write");
        session.flush().await.expect("flush");
        let mut length = [0; 9];
        session.read_exact(&mut length).await.expect("read");
        assert_eq!(&length, b":300000\r\n");
        let bytes = "$300000\r\n".len() + long + 2;
        cut_between_replies(&hosts, &mut session, b"GET long\r\nBLPOP none 1\r\n", bytes).await;
        drop(session);
        hosts.end().await;
    });
}

async fn lose_paths(hosts: Hosts, count: usize, losses: usize) {
    let mut sessions = Vec::new();
    for _ in 0..count {
        sessions.push(hosts.session().await);
    }
    let observers: Vec<_> = sessions.iter().map(Session::observer).collect();
    let commands = NumberedCommands::start(sessions, "number");
    commands.wait_for(50, "at first").await;
    let (mut to_tcp, mut back) = (Gaps::default(), Gaps::default());
    let mut random = Random::new(losses as u64);
    for loss in 0..losses {
        let fault = [Fault::PathCut, Fault::PortDown, Fault::DeviceRemoved][loss % 3];
        let host = random.below(2) as usize;
        let what = format!("loss {loss}: {fault:?} on host {host}");
        let _ = commands.take_longest_gap();
        hosts.cause(fault, host);
        hosts.wait_until_on(&observers, SessionTransport::Tcp).await;
        commands.wait_for(20, &what).await;
        to_tcp.add(commands.take_longest_gap());
        let fallback = observers[0].fallback().expect("the reason is reported");
        assert_ne!(fallback.cause, FallbackCause::Other, "{fallback}");
        hosts.repair(fault, host);
        hosts.wait_until_on(&observers, SessionTransport::FerriteRdma).await;
        commands.wait_for(20, &what).await;
        back.add(commands.take_longest_gap());
        assert!(observers[0].fallback().is_none() && observers[0].device().is_some());
    }
    let replies = commands.stop().await;
    println!(
        "{losses} losses, {count} sessions, {replies} replies, each once and in order; without a \
         reply: to TCP median {:.0?}, longest {:.0?}; back median {:.0?}, longest {:.0?}",
        to_tcp.median(),
        to_tcp.longest(),
        back.median(),
        back.longest()
    );
    // On a machine with nothing else to do, the limit is 2 s; `.ci/long` checks that in the lab.
    // Without probes the gap is as long as the keepalive.
    let limit = Duration::from_secs(10);
    assert!(to_tcp.longest() <= limit, "no reply on the way to TCP for {:?}", to_tcp.longest());
    assert!(back.longest() <= limit, "no reply on the way back to RDMA for {:?}", back.longest());
    hosts.end().await;
}
