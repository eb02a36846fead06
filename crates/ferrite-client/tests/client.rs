//! The client against a gateway with a real `redis-server` behind it: `fake_client` anywhere,
//! `lab_client` in the lab.

#[path = "../../ferrite-session/tests/redis_server.rs"]
mod redis_server;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_client::redis::AsyncCommands as _;
use ferrite_client::redis::{self, AsyncConnectionConfig, ProtocolVersion, RedisConnectionInfo};
use ferrite_client::{Client, ClientBuilder, Pool};
use ferrite_fabric::rustls::{ClientConfig, RootCertStore};
use ferrite_fabric::{Config, Fabric, FallbackCause, ListenOptions, Rdma};
use ferrite_session::{EngineAddress, Gateway, GatewayConfig, SessionTransport};
use ferrite_verbs::Verbs;
use redis_server::Redis;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) const HOSTS: [&str; 2] = ["10.0.0.1", "10.0.0.2"];

/// Runs a test, which must end in time.
pub(crate) fn run(verbs: &Verbs, test: impl AsyncFnOnce(&Verbs)) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    runtime.block_on(async { tokio::time::timeout(PATIENCE, test(verbs)).await.expect("in time") });
    let begun = Instant::now();
    while runtime.metrics().num_alive_tasks() > 0 {
        assert!(begun.elapsed() < PATIENCE, "fabrics that do not end");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn fabric(verbs: &Verbs, host: usize) -> Fabric {
    let builder = Fabric::builder(verbs).rdma(Rdma::Require).config(Config::default());
    let fabric = builder.device(["rxe1", "rxe2"][host]).build().expect("a fabric");
    tokio::spawn(fabric.drive());
    fabric
}

fn any_port(host: usize) -> SocketAddr {
    SocketAddr::new(HOSTS[host].parse().expect("an address"), 0)
}

/// A gateway on the first host.
struct Served {
    at: SocketAddr,
    gateway: Gateway,
    end: oneshot::Sender<()>,
    serving: JoinHandle<()>,
}

impl Served {
    fn start(verbs: &Verbs, redis: &Redis) -> Self {
        let listener = fabric(verbs, 0)
            .listen_with(any_port(0), &ListenOptions::new().accept_foreign_peers())
            .expect("listen");
        let at = listener.local_addr();
        let address = EngineAddress::Unix(redis.socket.clone());
        let gateway =
            Gateway::new(GatewayConfig { protected_mode: false, ..GatewayConfig::new(address) });
        let (end, ended) = oneshot::channel();
        let serves = gateway.clone();
        let serving = tokio::spawn(async move {
            serves.serve(listener, async { drop(ended.await) }).await.expect("it served");
        });
        Self { at, gateway, end, serving }
    }

    /// Sessions that were ever begun.
    fn sessions(&self) -> u64 {
        self.gateway.stats().ferrite_sessions
    }

    async fn end(self) {
        let _ = self.end.send(());
        self.serving.await.expect("no panic");
    }
}

fn builder(verbs: &Verbs, at: SocketAddr) -> ClientBuilder {
    let config = AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(30)));
    Client::builder(&fabric(verbs, 1), at).local(any_port(1)).config(config)
}

/// Typed commands, pipelines, RESP3, several tasks on one connection.
pub(crate) async fn commands(verbs: &Verbs) {
    let redis = Redis::start("client", &[]).await;
    let served = Served::start(verbs, &redis);
    let info = RedisConnectionInfo::default().set_protocol(ProtocolVersion::RESP3).set_db(3);
    let client = builder(verbs, served.at).info(info).build();
    let mut connection = client.connect().await.expect("a connection");
    assert_eq!(connection.transport_info().transport, SessionTransport::FerriteRdma);
    assert!(
        connection.transport_info().device.is_some()
            && connection.transport_info().fallback.is_none()
    );
    let () = connection.hset_multiple("hash", &[("a", 1), ("b", 2)]).await.expect("HSET");
    let all: std::collections::BTreeMap<String, i64> =
        connection.hgetall("hash").await.expect("HGETALL");
    assert_eq!(all, [("a".to_owned(), 1), ("b".to_owned(), 2)].into());
    let adding = (0..50).map(|_| {
        let mut connection = connection.clone();
        tokio::spawn(async move { connection.incr::<_, _, i64>("counter", 1).await })
    });
    for adding in adding.collect::<Vec<_>>() {
        adding.await.expect("no panic").expect("INCR");
    }
    let (counter, name): (i64, String) = redis::pipe()
        .get("counter")
        .cmd("CLIENT")
        .arg("INFO")
        .query_async(&mut connection)
        .await
        .expect("a pipeline");
    assert_eq!(counter, 50);
    assert!(name.contains("db=3") && name.contains("resp=3"), "{name}");
    drop(connection);
    served.end().await;
}

/// The engine goes and comes back: one command fails, the next is answered.
pub(crate) async fn reconnects(verbs: &Verbs) {
    let redis = Redis::start("reconnects", &[]).await;
    let served = Served::start(verbs, &redis);
    let mut connection = builder(verbs, served.at).build().connect().await.expect("a connection");
    let () = connection.set("a", 1).await.expect("SET");
    drop(redis);
    let begun = Instant::now();
    while connection.get::<_, Option<i64>>("a").await.is_ok() {
        assert!(begun.elapsed() < PATIENCE, "it never notices");
    }
    let redis = Redis::start("reconnects", &[]).await;
    let begun = Instant::now();
    let answer = loop {
        match connection.get::<_, Option<i64>>("a").await {
            Ok(answer) => break answer,
            Err(error) => assert!(begun.elapsed() < PATIENCE, "{error}"),
        }
    };
    assert_eq!(answer, None, "another engine");
    assert!(connection.reconnects() >= 1);
    drop((connection, redis));
    served.end().await;
}

/// No RDMA to the server: required, that is an error that says so; preferred, TCP and why.
pub(crate) async fn falls_back(verbs: &Verbs) {
    let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|bound| bound.local_addr());
    let at = free.expect("a free port");
    let redis =
        Redis::start("falls", &["--bind", "127.0.0.1", "--port", &at.port().to_string()]).await;
    let fabric = fabric(verbs, 1);
    let client = Client::builder(&fabric, at).connect_timeout(Duration::from_secs(1));
    let error = client.rdma(Rdma::Require).reconnect(1, Duration::ZERO).build().connect().await;
    let error = error.expect_err("no RDMA there");
    assert!(error.is_io_error(), "{error}");
    let client =
        Client::builder(&fabric, at).connect_timeout(Duration::from_secs(1)).rdma(Rdma::Prefer);
    let mut connection = client.build().connect().await.expect("over TCP");
    let transport_info = connection.transport_info();
    assert_eq!(transport_info.transport, SessionTransport::Tcp);
    assert!(transport_info.fallback.is_some());
    let () = connection.set("a", "b").await.expect("SET");
    drop((connection, redis));
}

/// A pool opens what it needs and no more than it may; one command that waits in the server does
/// not hold up the others.
pub(crate) async fn pool_shares(verbs: &Verbs) {
    let redis = Redis::start("pool", &[]).await;
    let served = Served::start(verbs, &redis);
    let mut pool = builder(verbs, served.at).build().pool(3);
    assert_eq!((served.sessions(), pool.transports().len()), (0, 0), "before it is needed");
    for expected in 1..=10 {
        assert_eq!(pool.incr::<_, _, i64>("counter", 1).await.expect("INCR"), expected);
    }
    assert_eq!(served.sessions(), 1, "one at a time needs one");
    let mut blocked = pool.clone();
    let blocked =
        tokio::spawn(async move { blocked.blpop::<_, (String, i64)>("list", 25.0).await });
    while connections_that_wait(&mut pool).await == 0 {}
    for expected in 11..=20 {
        assert_eq!(pool.incr::<_, _, i64>("counter", 1).await.expect("INCR"), expected);
    }
    assert!(!blocked.is_finished());
    let () = pool.rpush("list", 7).await.expect("RPUSH");
    assert_eq!(blocked.await.expect("no panic").expect("BLPOP"), ("list".to_owned(), 7));
    assert_eq!(served.sessions(), 2, "one that waits, one for the others");
    let adding = (0..100).map(|_| {
        let mut pool = pool.clone();
        tokio::spawn(async move { pool.incr::<_, _, i64>("counter", 1).await })
    });
    for adding in adding.collect::<Vec<_>>() {
        adding.await.expect("no panic").expect("INCR");
    }
    assert_eq!(pool.get::<_, i64>("counter").await.expect("GET"), 120);
    let open = pool.transports().len();
    assert!((2..=3).contains(&open) && served.sessions() == open as u64, "{open} connections");
    assert!(
        pool.transports()
            .iter()
            .all(|transport_info| transport_info.transport == SessionTransport::FerriteRdma)
    );
    drop(pool);
    served.end().await;
}

/// How many clients of the engine are in a command that waits.
async fn connections_that_wait(pool: &mut Pool) -> u64 {
    let all: String = redis::cmd("INFO").arg("clients").query_async(pool).await.expect("INFO");
    let line = all.lines().find_map(|line| line.strip_prefix("blocked_clients:")).expect("a count");
    line.trim().parse().expect("a number")
}

/// A dedicated connection is its holder's alone, comes back, and does not when its command was
/// given up.
pub(crate) async fn pool_dedicates(verbs: &Verbs) {
    let redis = Redis::start("dedicated", &[]).await;
    let served = Served::start(verbs, &redis);
    // No answer may take that long, but for dedicated ones.
    let config = AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(5)));
    let mut pool = builder(verbs, served.at).config(config).build().pool(1);
    let mut dedicated = pool.dedicated().await.expect("a connection");
    let waits = tokio::spawn(async move {
        let answer = dedicated.blpop::<_, (String, i64)>("list", 0.0).await;
        (answer, dedicated)
    });
    while connections_that_wait(&mut pool).await == 0 {}
    tokio::time::timeout(Duration::from_millis(50), pool.dedicated())
        .await
        .expect_err("there is one");
    tokio::time::sleep(Duration::from_secs(6)).await;
    let () = pool.rpush("list", 7).await.expect("RPUSH");
    let (answer, dedicated) = waits.await.expect("no panic");
    assert_eq!(answer.expect("BLPOP"), ("list".to_owned(), 7));
    drop(dedicated);
    assert_eq!(served.sessions(), 2);

    let mut dedicated = pool.dedicated().await.expect("the same");
    let given_up = dedicated.blpop::<_, (String, i64)>("list", 0.0);
    tokio::time::timeout(Duration::from_millis(200), given_up).await.expect_err("nothing there");
    assert_eq!(served.sessions(), 2, "it came back");
    drop(dedicated);
    let begun = Instant::now();
    while connections_that_wait(&mut pool).await > 0 {
        assert!(begun.elapsed() < PATIENCE, "the command that was given up is still there");
    }
    let mut dedicated = pool.dedicated().await.expect("another");
    let () = redis::cmd("PING").query_async(&mut dedicated).await.expect("PING");
    assert_eq!(served.sessions(), 3, "it was closed");
    dedicated.discard();
    let () = redis::cmd("PING")
        .query_async(&mut pool.dedicated().await.expect("another"))
        .await
        .expect("PING");
    assert_eq!(served.sessions(), 4, "it was discarded");
    drop(pool);
    served.end().await;
}

/// Connections of a pool that the engine ends are opened again.
pub(crate) async fn pool_reconnects(verbs: &Verbs) {
    let redis = Redis::start("pool-lost", &[]).await;
    let served = Served::start(verbs, &redis);
    let mut pool = builder(verbs, served.at).build().pool(2);
    let mut blocked = pool.clone();
    let blocked =
        tokio::spawn(async move { blocked.blpop::<_, (String, i64)>("list", 25.0).await });
    while connections_that_wait(&mut pool).await == 0 {}
    assert_eq!(served.sessions(), 2);
    let kill = redis::cmd("CLIENT").arg(&["KILL", "TYPE", "normal", "SKIPME", "no"]).clone();
    let _ = kill.query_async::<i64>(&mut pool).await; // it may hear the answer, or not
    blocked.await.expect("no panic").expect_err("killed");
    let begun = Instant::now();
    while served.sessions() < 4 {
        let (mut one, mut other) = (pool.clone(), pool.clone());
        let _ = tokio::join!(
            one.incr::<_, _, i64>("counter", 1),
            other.incr::<_, _, i64>("counter", 1)
        );
        assert!(begun.elapsed() < PATIENCE, "{} sessions", served.sessions());
    }
    for _ in 0..10 {
        let _: i64 = pool.incr("counter", 1).await.expect("INCR");
    }
    assert_eq!((served.sessions(), pool.transports().len()), (4, 2));
    drop(pool);
    served.end().await;
}

/// A certificate for this host, and who trusts it.
fn certified() -> (rcgen::CertifiedKey<rcgen::KeyPair>, Arc<ClientConfig>) {
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).expect("a certificate");
    let mut roots = RootCertStore::empty();
    roots.add(made.cert.der().clone()).expect("a root");
    let config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    (made, Arc::new(config))
}

/// As redis-server reads it. rcgen's own needs a second version of a crate that is here already.
fn pem(label: &str, der: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = format!("-----BEGIN {label}-----");
    for (number, group) in der.chunks(3).enumerate() {
        if number % 16 == 0 {
            text.push('\n');
        }
        let bits =
            (0..3).fold(0, |bits, at| bits << 8 | usize::from(group.get(at).copied().unwrap_or(0)));
        for digit in 0..4 {
            let is_padding = digit > group.len();
            text.push(if is_padding { '=' } else { DIGITS[bits >> (18 - 6 * digit) & 63].into() });
        }
    }
    format!("{text}\n-----END {label}-----\n")
}

/// TLS on TCP: with who is trusted, and with nobody else; RDMA beside it only if that is said.
pub(crate) async fn tls(verbs: &Verbs) {
    let (made, config) = certified();
    let files = std::env::temp_dir().join(format!("ferrite-client-tls-{}", std::process::id()));
    let [cert, key] = ["cert", "key"].map(|end| format!("{}.{end}", files.display()));
    std::fs::write(&cert, pem("CERTIFICATE", made.cert.der())).expect("a file");
    std::fs::write(&key, pem("PRIVATE KEY", &made.signing_key.serialize_der())).expect("a file");
    let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|bound| bound.local_addr());
    let at = free.expect("a free port");
    let port = at.port().to_string();
    let listens = ["--bind", "127.0.0.1", "--tls-port", &port, "--tls-auth-clients", "no"];
    let shows = ["--tls-cert-file", &cert, "--tls-key-file", &key];
    let redis = Redis::start("tls", &[&listens[..], &shows[..]].concat()).await;
    let name = || "127.0.0.1".try_into().expect("a name");

    let fabric = fabric(verbs, 1);
    let patient = AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(30)));
    let client = Client::builder(&fabric, at).config(patient).tls(Arc::clone(&config), name());
    let mut connection = client.rdma(Rdma::Prefer).build().connect().await.expect("a connection");
    let transport_info = connection.transport_info();
    assert_eq!(transport_info.transport, SessionTransport::Tls);
    let fallback =
        transport_info.fallback.expect("RDMA was preferred, and it is said why it is not");
    assert_eq!(fallback.cause, FallbackCause::Encryption);
    assert!(
        fallback.to_string().contains("to do: allow RDMA beside TLS (plain_rdma_beside_tls)"),
        "{fallback}"
    );
    let counted =
        |fabric: &Fabric| fabric.stats().fallbacks.map(|(_, count)| count).iter().sum::<u64>();
    assert_eq!(counted(&fabric), 1);
    assert!(fabric.stats().fallbacks.contains(&(FallbackCause::Encryption, 1)));
    let forbidden =
        Client::builder(&fabric, at).rdma(Rdma::Forbid).tls(Arc::clone(&config), name());
    let forbidden = forbidden.build().connect().await.expect("a connection");
    assert!(
        forbidden.transport_info().fallback.is_none() && counted(&fabric) == 1,
        "as it was wanted"
    );
    let value = vec![7; 3 << 20];
    let () = connection.set("a", &value).await.expect("SET");
    assert!(connection.get::<_, Vec<u8>>("a").await.expect("GET") == value, "another value");

    let foreign_peer = builder(verbs, at).rdma(Rdma::Forbid).tls(certified().1, name()).build();
    let error = foreign_peer.connect().await.expect_err("nobody it trusts").to_string();
    assert!(
        error.contains("TLS handshake with 127.0.0.1")
            && error.contains("invalid peer certificate"),
        "{error}"
    );

    let served = Served::start(verbs, &redis);
    let required =
        || builder(verbs, served.at).rdma(Rdma::Require).tls(Arc::clone(&config), name());
    let error = required().build().connect().await.expect_err("a contradiction").to_string();
    assert!(error.contains("RDMA is not encrypted"), "{error}");
    let beside = required().plain_rdma_beside_tls().build().connect().await.expect("allowed");
    assert_eq!(beside.transport_info().transport, SessionTransport::FerriteRdma);
    assert!(beside.transport_info().fallback.is_none());
    drop((connection, forbidden, beside));
    served.end().await;
    for file in [cert, key] {
        std::fs::remove_file(file).expect("removed");
    }
}

/// Makes every test a test of the calling target.
macro_rules! run_suite {
    ($run:path) => {
        #[test]
        fn commands() {
            $run(crate::client::commands);
        }
        #[test]
        fn reconnects() {
            $run(crate::client::reconnects);
        }
        #[test]
        fn falls_back() {
            $run(crate::client::falls_back);
        }
        #[test]
        fn tls() {
            $run(crate::client::tls);
        }
        #[test]
        fn pool_shares() {
            $run(crate::client::pool_shares);
        }
        #[test]
        fn pool_dedicates() {
            $run(crate::client::pool_dedicates);
        }
        #[test]
        fn pool_reconnects() {
            $run(crate::client::pool_reconnects);
        }
    };
}
pub(crate) use run_suite;
