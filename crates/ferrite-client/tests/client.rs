//! Tests of the client against a gateway with a real `redis-server` behind it: `fake_client` runs
//! anywhere, `lab_client` in the lab.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_client::redis::AsyncCommands as _;
use ferrite_client::redis::{self, AsyncConnectionConfig, ProtocolVersion, RedisConnectionInfo};
use ferrite_client::{Client, ClientBuilder, Fabric, FallbackCause, Pool, Rdma, SessionTransport};
use ferrite_fabric::rustls::{ClientConfig, RootCertStore};
use ferrite_fabric::{Config, ListenOptions};
use ferrite_session::{EngineAddress, Gateway, GatewayConfig};
use ferrite_testkit::{Engine, TIMEOUT, TempDir, free_port, pem, until};
use ferrite_verbs::Verbs;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

pub(crate) const HOSTS: [&str; 2] = ["10.0.0.1", "10.0.0.2"];

/// Longer than a test with large values takes on a busy machine. nextest usually ends a hanging
/// test earlier (`slow-timeout` in .config/nextest.toml).
const LONG: Duration = Duration::from_secs(600);

/// Runs a test, which must end in time.
pub(crate) fn run(verbs: &Verbs, test: impl AsyncFnOnce(&Verbs)) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("build the runtime");
    runtime.block_on(async {
        tokio::time::timeout(LONG, test(verbs)).await.expect("the test ends in time");
    });
    until(TIMEOUT, "the end of all fabric drivers", || runtime.metrics().num_alive_tasks() == 0);
}

fn fabric(verbs: &Verbs, host: usize) -> Fabric {
    let builder = Fabric::builder(verbs).rdma(Rdma::Require).config(Config::default());
    let fabric = builder.device(["rxe1", "rxe2"][host]).build().expect("build the fabric");
    tokio::spawn(fabric.drive());
    fabric
}

pub(crate) fn any_port(host: usize) -> SocketAddr {
    SocketAddr::new(HOSTS[host].parse().expect("valid address"), 0)
}

/// A gateway on the first host.
pub(crate) struct TestServer {
    pub(crate) address: SocketAddr,
    gateway: Gateway,
    end: oneshot::Sender<()>,
    serving: JoinHandle<()>,
}

impl TestServer {
    pub(crate) fn start(verbs: &Verbs, redis: &Engine) -> Self {
        let listener = fabric(verbs, 0)
            .listen_with(any_port(0), &ListenOptions::new().accept_foreign_peers())
            .expect("listen");
        let address = listener.local_addr();
        let engine = EngineAddress::Unix(redis.socket());
        let gateway =
            Gateway::new(GatewayConfig { protected_mode: false, ..GatewayConfig::new(engine) });
        let (end, ended) = oneshot::channel();
        let running = gateway.clone();
        let serving = tokio::spawn(async move {
            let served = running.serve(listener, async { drop(ended.await) }).await;
            served.expect("gateway ends without an error");
        });
        Self { address, gateway, end, serving }
    }

    /// Returns the number of sessions that Ferrite peers have opened so far.
    fn sessions(&self) -> u64 {
        self.gateway.stats().ferrite_sessions
    }

    pub(crate) async fn end(self) {
        let _ = self.end.send(());
        self.serving.await.expect("gateway does not panic");
    }
}

fn builder(verbs: &Verbs, server: SocketAddr) -> ClientBuilder {
    Client::builder(&fabric(verbs, 1), server).local(any_port(1))
}

/// Runs typed commands, a pipeline, RESP3 commands, and several tasks on one connection.
pub(crate) async fn runs_commands(verbs: &Verbs) {
    let redis = Engine::redis(&[]);
    let server = TestServer::start(verbs, &redis);
    let info = RedisConnectionInfo::default().set_protocol(ProtocolVersion::RESP3).set_db(3);
    let client = builder(verbs, server.address).info(info).build();
    let mut connection = client.connect().await.expect("connect");
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
        adding.await.expect("task does not panic").expect("INCR");
    }
    let (counter, name): (i64, String) = redis::pipe()
        .get("counter")
        .cmd("CLIENT")
        .arg("INFO")
        .query_async(&mut connection)
        .await
        .expect("run the pipeline");
    assert_eq!(counter, 50);
    assert!(name.contains("db=3") && name.contains("resp=3"), "{name}");
    drop(connection);
    server.end().await;
}

/// While the engine is down, commands fail. After its restart, the connection works again.
pub(crate) async fn reconnects_after_an_engine_restart(verbs: &Verbs) {
    let mut redis = Engine::redis(&[]);
    let server = TestServer::start(verbs, &redis);
    let mut connection = builder(verbs, server.address).build().connect().await.expect("connect");
    let () = connection.set("a", 1).await.expect("SET");
    redis.kill();
    let begun = Instant::now();
    while connection.get::<_, Option<i64>>("a").await.is_ok() {
        assert!(begun.elapsed() < TIMEOUT, "commands succeed although the engine is down");
    }
    redis.restart();
    let begun = Instant::now();
    let value = loop {
        match connection.get::<_, Option<i64>>("a").await {
            Ok(value) => break value,
            Err(error) => assert!(begun.elapsed() < TIMEOUT, "{error}"),
        }
    };
    assert_eq!(value, None, "the new engine is empty");
    assert!(connection.reconnects() >= 1);
    drop((connection, redis));
    server.end().await;
}

/// The server has no RDMA. If RDMA is required, connecting fails. If RDMA is preferred, the client
/// uses TCP and reports the cause.
pub(crate) async fn falls_back_to_tcp(verbs: &Verbs) {
    let at = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let redis = Engine::redis(&["--bind", "127.0.0.1", "--port", &at.port().to_string()]);
    let fabric = fabric(verbs, 1);
    let client = Client::builder(&fabric, at).connect_timeout(Duration::from_secs(1));
    let error = client.rdma(Rdma::Require).reconnect(1, Duration::ZERO).build().connect().await;
    let error = error.expect_err("the server has no RDMA");
    assert!(error.is_io_error(), "{error}");
    let client =
        Client::builder(&fabric, at).connect_timeout(Duration::from_secs(1)).rdma(Rdma::Prefer);
    let mut connection = client.build().connect().await.expect("connect over TCP");
    let transport_info = connection.transport_info();
    assert_eq!(transport_info.transport, SessionTransport::Tcp);
    assert!(transport_info.fallback.is_some());
    let () = connection.set("a", "b").await.expect("SET");
    drop((connection, redis));
}

/// A pool opens connections only when it needs them, and at most as many as its size. A command
/// that blocks in the server does not delay the others.
pub(crate) async fn pool_opens_connections_on_demand(verbs: &Verbs) {
    let redis = Engine::redis(&[]);
    let server = TestServer::start(verbs, &redis);
    let mut pool = builder(verbs, server.address).build().pool(3);
    assert_eq!((server.sessions(), pool.transports().len()), (0, 0), "before the first command");
    for expected in 1..=10 {
        assert_eq!(pool.incr::<_, _, i64>("counter", 1).await.expect("INCR"), expected);
    }
    assert_eq!(server.sessions(), 1, "one command at a time needs one connection");
    let mut blocked = pool.clone();
    let blocked =
        tokio::spawn(async move { blocked.blpop::<_, (String, i64)>("list", 25.0).await });
    while blocked_clients(&mut pool).await == 0 {}
    for expected in 11..=20 {
        assert_eq!(pool.incr::<_, _, i64>("counter", 1).await.expect("INCR"), expected);
    }
    assert!(!blocked.is_finished());
    let () = pool.rpush("list", 7).await.expect("RPUSH");
    assert_eq!(blocked.await.expect("task does not panic").expect("BLPOP"), ("list".to_owned(), 7));
    assert_eq!(server.sessions(), 2, "one connection was blocked, one served the others");
    let adding = (0..100).map(|_| {
        let mut pool = pool.clone();
        tokio::spawn(async move { pool.incr::<_, _, i64>("counter", 1).await })
    });
    for adding in adding.collect::<Vec<_>>() {
        adding.await.expect("task does not panic").expect("INCR");
    }
    assert_eq!(pool.get::<_, i64>("counter").await.expect("GET"), 120);
    let open = pool.transports().len();
    assert!((2..=3).contains(&open) && server.sessions() == open as u64, "{open} connections");
    assert!(
        pool.transports()
            .iter()
            .all(|transport_info| transport_info.transport == SessionTransport::FerriteRdma)
    );
    drop(pool);
    server.end().await;
}

/// Returns how many clients of the engine are blocked in a command.
async fn blocked_clients(pool: &mut Pool) -> u64 {
    let info: String = redis::cmd("INFO").arg("clients").query_async(pool).await.expect("INFO");
    let count = info.lines().find_map(|line| line.strip_prefix("blocked_clients:"));
    count.expect("INFO has blocked_clients").trim().parse().expect("a number")
}

/// A dedicated connection is exclusive. It returns to the pool when it is dropped, unless its last
/// command was cancelled or the caller discards it.
pub(crate) async fn pool_gives_out_dedicated_connections(verbs: &Verbs) {
    let redis = Engine::redis(&[]);
    let server = TestServer::start(verbs, &redis);
    // The response timeout does not apply to dedicated connections.
    let config = AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(5)));
    let mut pool = builder(verbs, server.address).config(config).build().pool(1);
    let mut dedicated = pool.dedicated().await.expect("a dedicated connection");
    let blocked = tokio::spawn(async move {
        let popped = dedicated.blpop::<_, (String, i64)>("list", 0.0).await;
        (popped, dedicated)
    });
    while blocked_clients(&mut pool).await == 0 {}
    tokio::time::timeout(Duration::from_millis(50), pool.dedicated())
        .await
        .expect_err("the only dedicated connection is in use");
    tokio::time::sleep(Duration::from_secs(6)).await;
    let () = pool.rpush("list", 7).await.expect("RPUSH");
    let (popped, dedicated) = blocked.await.expect("task does not panic");
    assert_eq!(popped.expect("BLPOP"), ("list".to_owned(), 7));
    drop(dedicated);
    assert_eq!(server.sessions(), 2);

    let mut dedicated = pool.dedicated().await.expect("the same connection");
    let cancelled = dedicated.blpop::<_, (String, i64)>("list", 0.0);
    tokio::time::timeout(Duration::from_millis(200), cancelled)
        .await
        .expect_err("the list is empty");
    assert_eq!(server.sessions(), 2, "the connection has returned to the pool");
    drop(dedicated);
    let begun = Instant::now();
    while blocked_clients(&mut pool).await > 0 {
        assert!(begun.elapsed() < TIMEOUT, "the cancelled command is still blocked");
    }
    let mut dedicated = pool.dedicated().await.expect("a new connection");
    let () = redis::cmd("PING").query_async(&mut dedicated).await.expect("PING");
    assert_eq!(server.sessions(), 3, "the connection of the cancelled command was closed");
    dedicated.discard();
    let () = redis::cmd("PING")
        .query_async(&mut pool.dedicated().await.expect("a new connection"))
        .await
        .expect("PING");
    assert_eq!(server.sessions(), 4, "the connection was discarded");
    drop(pool);
    server.end().await;
}

/// The pool reopens connections that the engine has closed.
pub(crate) async fn pool_reconnects(verbs: &Verbs) {
    let redis = Engine::redis(&[]);
    let server = TestServer::start(verbs, &redis);
    let mut pool = builder(verbs, server.address).build().pool(2);
    let mut blocked = pool.clone();
    let blocked =
        tokio::spawn(async move { blocked.blpop::<_, (String, i64)>("list", 25.0).await });
    while blocked_clients(&mut pool).await == 0 {}
    assert_eq!(server.sessions(), 2);
    let kill = redis::cmd("CLIENT").arg(&["KILL", "TYPE", "normal", "SKIPME", "no"]).clone();
    let _ = kill.query_async::<i64>(&mut pool).await; // kills itself, so the reply may be lost
    blocked.await.expect("task does not panic").expect_err("the client was killed");
    let begun = Instant::now();
    while server.sessions() < 4 {
        let (mut one, mut other) = (pool.clone(), pool.clone());
        let _ = tokio::join!(
            one.incr::<_, _, i64>("counter", 1),
            other.incr::<_, _, i64>("counter", 1)
        );
        assert!(begun.elapsed() < TIMEOUT, "{} sessions", server.sessions());
    }
    for _ in 0..10 {
        let _: i64 = pool.incr("counter", 1).await.expect("INCR");
    }
    assert_eq!((server.sessions(), pool.transports().len()), (4, 2));
    drop(pool);
    server.end().await;
}

/// A URL sets the policy, the database and the protocol, and names several servers. The client uses
/// the first server that accepts.
pub(crate) async fn connects_by_url(verbs: &Verbs) {
    let redis = Engine::redis(&[]);
    let server = TestServer::start(verbs, &redis);
    let fabric = fabric(verbs, 1);
    let nobody = free_port();
    let url = |more: &str| format!("redis+rdma://10.0.0.1:{nobody},{}{more}", server.address);
    let client = Client::builder_for(&fabric, &url("/3?rdma=require&protocol=3"));
    let client = client.expect("valid URL").local(any_port(1)).build();
    let mut connection = client.connect().await.expect("connect");
    assert_eq!(connection.transport_info().transport, SessionTransport::FerriteRdma);
    let info: String =
        redis::cmd("CLIENT").arg("INFO").query_async(&mut connection).await.expect("CLIENT INFO");
    assert!(info.contains(" db=3 ") && info.contains(" resp=3"), "{info}");
    drop(connection);
    server.end().await;
}

/// The default settings suit values of 64 MiB. redis-rs's own limit of 500 ms does not.
pub(crate) async fn carries_values_of_64_mib(verbs: &Verbs) {
    let redis = Engine::redis(&[]);
    let server = TestServer::start(verbs, &redis);
    let client = builder(verbs, server.address).rdma(Rdma::Require).build();
    let mut connection = client.connect().await.expect("connect");
    let value = large_value();
    let () = connection.set("large", &value).await.expect("SET");
    assert!(connection.get::<_, Vec<u8>>("large").await.expect("GET") == value, "bytes differ");
    assert_eq!(connection.transport_info().transport, SessionTransport::FerriteRdma);
    assert_eq!(connection.reconnects(), 0);
    drop(connection);
    server.end().await;
}

/// Returns 64 MiB in which no two neighbouring blocks of 4 KiB are equal.
fn large_value() -> Vec<u8> {
    let mut value: Vec<u8> = (0..251).collect::<Vec<u8>>().repeat((64 << 20) / 251 + 1);
    value.truncate(64 << 20);
    value
}

/// A subscriber that only waits for messages gets messages again after its connection was lost.
pub(crate) async fn restores_subscriptions(verbs: &Verbs) {
    let redis = Engine::redis(&[]);
    let server = TestServer::start(verbs, &redis);
    let (pushes, mut pushed) = tokio::sync::mpsc::unbounded_channel();
    let client = builder(verbs, server.address).push_sender(pushes).build();
    let mut subscriber = client.connect().await.expect("connect");
    for command in ["SUBSCRIBE a b", "PSUBSCRIBE n.*", "SSUBSCRIBE s t"] {
        let (name, channels) = command.split_once(' ').expect("channels");
        let channels: Vec<_> = channels.split(' ').collect();
        redis::cmd(name).arg(channels).exec_async(&mut subscriber).await.expect(command);
    }
    redis::cmd("UNSUBSCRIBE").arg("b").exec_async(&mut subscriber).await.expect("UNSUBSCRIBE");
    redis::cmd("SUNSUBSCRIBE").arg("t").exec_async(&mut subscriber).await.expect("SUNSUBSCRIBE");
    let mut other = builder(verbs, server.address).build().connect().await.expect("connect");
    let kill = redis::cmd("CLIENT").arg(&["KILL", "TYPE", "pubsub"]).clone();
    assert_eq!(kill.query_async::<i64>(&mut other).await.expect("CLIENT KILL"), 1);
    let begun = Instant::now();
    for (channel, receivers) in [("n.1", 1), ("a", 1), ("s", 1), ("b", 0), ("t", 0)] {
        let command = if ["s", "t"].contains(&channel) { "SPUBLISH" } else { "PUBLISH" };
        let publish = redis::cmd(command).arg(channel).arg("hello").clone();
        while publish.query_async::<i64>(&mut other).await.expect(command) != receivers {
            assert!(begun.elapsed() < TIMEOUT, "{channel}: expected {receivers} receivers");
        }
    }
    use redis::PushKind::{Message, PMessage, SMessage};
    let mut messages = Vec::new();
    while messages.len() < 3 {
        let push = pushed.recv().await.expect("the connection is open");
        if matches!(push.kind, Message | PMessage | SMessage) {
            messages.push(push.kind);
        }
    }
    assert_eq!(messages, [PMessage, Message, SMessage]);
    assert_eq!(subscriber.reconnects(), 1);
    assert_eq!(subscriber.transport_info().transport, SessionTransport::FerriteRdma);
    drop((subscriber, other));
    server.end().await;
}

/// Returns a certificate for this host, and the settings of a client that trusts it.
fn create_certificate() -> (rcgen::CertifiedKey<rcgen::KeyPair>, Arc<ClientConfig>) {
    let certified = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]);
    let certified = certified.expect("create a certificate");
    let mut roots = RootCertStore::empty();
    roots.add(certified.cert.der().clone()).expect("add the root certificate");
    let config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    (certified, Arc::new(config))
}

/// With TLS over TCP, the client connects only to a server that it trusts. It uses RDMA only if the
/// caller allows that explicitly.
pub(crate) async fn connects_over_tls(verbs: &Verbs) {
    let (certified, config) = create_certificate();
    let files = TempDir::new("client-tls");
    let cert = files.file("cert", pem("CERTIFICATE", certified.cert.der()));
    let key = files.file("key", pem("PRIVATE KEY", &certified.signing_key.serialize_der()));
    let [cert, key] = [cert, key].map(|file| file.display().to_string());
    let at = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let port = at.port().to_string();
    let listen = ["--bind", "127.0.0.1", "--tls-port", &port, "--tls-auth-clients", "no"];
    let certificate = ["--tls-cert-file", &cert, "--tls-key-file", &key];
    let redis = Engine::redis(&[&listen[..], &certificate[..]].concat());
    let name = || "127.0.0.1".try_into().expect("valid server name");

    let fabric = fabric(verbs, 1);
    let client = Client::builder(&fabric, at).tls(Arc::clone(&config), name());
    let mut connection = client.rdma(Rdma::Prefer).build().connect().await.expect("connect");
    let transport_info = connection.transport_info();
    assert_eq!(transport_info.transport, SessionTransport::Tls);
    let fallback = transport_info.fallback.expect("a fallback, because RDMA was preferred");
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
    let forbidden = forbidden.build().connect().await.expect("connect");
    assert!(
        forbidden.transport_info().fallback.is_none() && counted(&fabric) == 1,
        "TCP is no fallback where RDMA is forbidden"
    );
    let value = vec![7; 3 << 20];
    let () = connection.set("a", &value).await.expect("SET");
    assert!(connection.get::<_, Vec<u8>>("a").await.expect("GET") == value, "GET after SET");

    let other_root = create_certificate().1;
    let distrusting = Client::builder(&fabric, at).rdma(Rdma::Forbid).tls(other_root, name());
    let error = distrusting.build().connect().await.expect_err("the server is not trusted");
    let error = error.to_string();
    assert!(
        error.contains("TLS handshake with 127.0.0.1")
            && error.contains("invalid peer certificate"),
        "{error}"
    );

    let server = TestServer::start(verbs, &redis);
    let required =
        || builder(verbs, server.address).rdma(Rdma::Require).tls(Arc::clone(&config), name());
    let error = required().build().connect().await.expect_err("TLS and required RDMA").to_string();
    assert!(error.contains("RDMA is not encrypted"), "{error}");
    let plain = required().plain_rdma_beside_tls().build().connect().await.expect("connect");
    assert_eq!(plain.transport_info().transport, SessionTransport::FerriteRdma);
    assert!(plain.transport_info().fallback.is_none());
    drop((connection, forbidden, plain));
    server.end().await;
}

/// Defines every test in the calling target.
macro_rules! run_suite {
    ($run:path) => {
        #[test]
        fn runs_commands() {
            $run(crate::client::runs_commands);
        }
        #[test]
        fn reconnects_after_an_engine_restart() {
            $run(crate::client::reconnects_after_an_engine_restart);
        }
        #[test]
        fn falls_back_to_tcp() {
            $run(crate::client::falls_back_to_tcp);
        }
        #[test]
        fn connects_over_tls() {
            $run(crate::client::connects_over_tls);
        }
        #[test]
        fn connects_by_url() {
            $run(crate::client::connects_by_url);
        }
        #[test]
        fn carries_values_of_64_mib() {
            $run(crate::client::carries_values_of_64_mib);
        }
        #[test]
        fn restores_subscriptions() {
            $run(crate::client::restores_subscriptions);
        }
        #[test]
        fn pool_opens_connections_on_demand() {
            $run(crate::client::pool_opens_connections_on_demand);
        }
        #[test]
        fn pool_gives_out_dedicated_connections() {
            $run(crate::client::pool_gives_out_dedicated_connections);
        }
        #[test]
        fn pool_reconnects() {
            $run(crate::client::pool_reconnects);
        }
    };
}
pub(crate) use run_suite;
