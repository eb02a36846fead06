//! Tests of clients that use a real engine through a gateway.

use std::time::Duration;

use ferrite_fabric::{Config, ConnectOptions, Fabric, ListenOptions, Listener, Rdma, Stream};
use ferrite_proto::Role;
use ferrite_session::{
    Connector, EngineAddress, EngineSocket, Gateway, GatewayConfig, Moved, SessionTransport,
    ValkeyConfig, ValkeyStream, pump,
};
use ferrite_testkit::Engine;
use ferrite_testkit::wait::until_async;
use redis::aio::MultiplexedConnection;
use redis::{AsyncCommands as _, AsyncConnectionConfig, RedisConnectionInfo};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::{Harness, any_port, pattern};

/// A gateway on the first host, and a fabric on the second host for its clients.
pub(crate) struct TestServer {
    pub(crate) gateway: Gateway,
    pub(crate) address: std::net::SocketAddr,
    fabric: Fabric,
    pub(crate) client: Fabric,
    end: oneshot::Sender<()>,
    serving: JoinHandle<Result<(), ferrite_fabric::Error>>,
}

impl TestServer {
    pub(crate) fn start(harness: &Harness, config: GatewayConfig) -> Self {
        let fabric = harness.fabric(0);
        Self::serve(harness.listen(&fabric), [fabric, harness.fabric(1)], config)
    }

    /// Starts a gateway with other fabric settings.
    pub(crate) fn start_with(
        harness: &Harness,
        config: GatewayConfig,
        fabric_config: Config,
    ) -> Self {
        let fabric = harness.fabric_with(0, fabric_config);
        Self::serve(harness.listen(&fabric), [fabric, harness.fabric(1)], config)
    }

    pub(crate) fn remote_access_errors(&self) -> u64 {
        self.fabric.stats().remote_access_errors
    }

    fn serve(listener: Listener, [fabric, client]: [Fabric; 2], config: GatewayConfig) -> Self {
        let address = listener.local_addr();
        let gateway = Gateway::new(config);
        let (end, ended) = oneshot::channel();
        let serving = tokio::spawn({
            let gateway = gateway.clone();
            async move { gateway.serve(listener, async { drop(ended.await) }).await }
        });
        Self { gateway, address, fabric, client, end, serving }
    }

    pub(crate) async fn connect(&self, harness: &Harness) -> ValkeyStream {
        harness.connect(&self.client, self.address, &ValkeyConfig::default()).await
    }

    /// Returns the number of links of the gateway's host, and the numbers of its send and receive
    /// blocks in use.
    ///
    /// Posted receives do not count, since their number changes while some are replaced. Receives
    /// that failed links have taken with them (`receives_overdue`) do not count either: they come
    /// back when no link is left that could own them.
    pub(crate) fn holds(&self) -> (u64, u64, u64) {
        let stats = self.fabric.stats();
        let [send, receive] = [stats.memory.send, stats.memory.receive]
            .map(|heap| heap.in_use_blocks.iter().sum::<u64>());
        (stats.links, send, receive.saturating_sub(stats.receives_overdue + stats.receives_posted))
    }

    pub(crate) async fn end(self) {
        let _ = self.end.send(());
        self.serving.await.expect("gateway does not panic").expect("gateway ends without an error");
    }
}

/// Returns the settings of a gateway without protected mode.
pub(crate) fn unprotected(redis: &Engine) -> GatewayConfig {
    GatewayConfig {
        protected_mode: false,
        ..GatewayConfig::new(EngineAddress::Unix(redis.socket()))
    }
}

pub(crate) async fn connection<S>(stream: S) -> MultiplexedConnection
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    // redis-rs waits for half a second by default: too short for a server in an emulated guest.
    let config = AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(30)));
    let info = RedisConnectionInfo::default();
    let connected = MultiplexedConnection::new_with_config(&info, stream, config).await;
    let (connection, driver) = connected.expect("connect");
    tokio::spawn(driver);
    connection
}

/// redis-rs runs a command, a pipeline and a transaction over Valkey Over RDMA.
pub(crate) async fn runs_commands(harness: Harness) {
    let redis = Engine::redis(&[]);
    let server = TestServer::start(&harness, unprotected(&redis));
    let mut connection = connection(server.connect(&harness).await).await;
    let pong: String = redis::cmd("PING").query_async(&mut connection).await.expect("PING");
    assert_eq!(pong, "PONG");
    let mut pipeline = redis::pipe();
    (0..1000).for_each(|number| {
        pipeline.set(format!("key {number}"), number).ignore();
    });
    pipeline.cmd("DBSIZE");
    let (keys,): (u64,) = pipeline.query_async(&mut connection).await.expect("run the pipeline");
    assert_eq!(keys, 1000);
    let (a, b): (i64, i64) = redis::pipe()
        .atomic()
        .incr("n", 1)
        .incr("n", 10)
        .query_async(&mut connection)
        .await
        .expect("MULTI");
    assert_eq!((a, b), (1, 11));
    drop(connection);
    server.end().await;
}

/// The largest value is several times as large as the initial windows.
pub(crate) async fn carries_large_values(harness: Harness) {
    let redis = Engine::redis(&[]);
    let server = TestServer::start(&harness, unprotected(&redis));
    let mut connection = connection(server.connect(&harness).await).await;
    for size in [0, 1, 1000, 65_535, 65_536, 65_537, (8 << 20) / harness.slowdown] {
        let value = pattern(size, size);
        let () = connection.set("value", &value).await.expect("SET");
        let read: Vec<u8> = connection.get("value").await.expect("GET");
        assert!(read == value, "GET returned {} bytes, different from {size} set", read.len());
    }
    drop(connection);
    server.end().await;
}

/// Each client has its own session, and all sessions end with their clients.
pub(crate) async fn serves_many_clients(harness: Harness) {
    let redis = Engine::redis(&[]);
    let server = TestServer::start(&harness, unprotected(&redis));
    let mut connections = Vec::new();
    for _ in 0..100 / harness.slowdown.min(4) {
        connections.push(connection(server.connect(&harness).await).await);
    }
    let count = connections.len();
    let adding = connections.iter().cloned().map(|mut connection| {
        tokio::spawn(async move {
            for _ in 0..20 {
                connection.incr::<_, _, i64>("counter", 1).await.expect("INCR");
            }
        })
    });
    for adding in adding.collect::<Vec<_>>() {
        adding.await.expect("client does not panic");
    }
    let total: usize = connections[0].get("counter").await.expect("GET");
    assert_eq!(total, 20 * count);
    assert_eq!(server.gateway.stats().sessions, count);
    drop(connections);
    until_async("the end of all sessions", async || server.gateway.stats().sessions == 0).await;
    assert_eq!(server.gateway.stats().valkey_sessions, count as u64);
    server.end().await;
}

/// Ferrite peers connect to the same address, as links.
pub(crate) async fn serves_ferrite_peers(harness: Harness) {
    let redis = Engine::redis(&[]);
    let server = TestServer::start(&harness, unprotected(&redis));
    let options = ConnectOptions::new().local(any_port(1));
    let link = server.client.connect_with(server.address, &options).await.expect("connect");
    let mut connection = connection(Stream::new(link)).await;
    let value = pattern(1, 1 << 20);
    let () = connection.set("value", &value).await.expect("SET");
    let read: Vec<u8> = connection.get("value").await.expect("GET");
    assert!(read == value);
    assert_eq!(server.gateway.stats().ferrite_sessions, 1);
    drop(connection);
    server.end().await;
}

/// Plain RESP clients connect to the same address over TCP. They may stay silent before their first
/// command.
pub(crate) async fn serves_tcp_clients(harness: Harness) {
    let redis = Engine::redis(&[]);
    let config = Config { connection_timeout: Duration::from_millis(300), ..Config::default() };
    let fabric = Fabric::system().rdma(Rdma::Forbid).config(config).build();
    let fabric = fabric.expect("build the fabric");
    tokio::spawn(fabric.drive());
    let options = ListenOptions::new().accept_foreign_peers();
    let address = "127.0.0.1:0".parse().expect("valid address");
    let listener = fabric.listen_with(address, &options).expect("listen");
    let server = TestServer::serve(listener, [fabric, harness.fabric(1)], unprotected(&redis));
    let tcp = tokio::net::TcpStream::connect(server.address).await.expect("connect");
    let mut connection = connection(tcp).await;
    let value = pattern(9, 1 << 20);
    let () = connection.set("value", &value).await.expect("SET");
    let read: Vec<u8> = connection.get("value").await.expect("GET");
    assert!(read == value);

    let mut silent = tokio::net::TcpStream::connect(server.address).await.expect("connect");
    tokio::time::sleep(Duration::from_millis(600)).await;
    silent.write_all(b"PING\r\n").await.expect("write");
    let mut reply = [0; 7];
    silent.read_exact(&mut reply).await.expect("read the reply");
    assert_eq!(&reply, b"+PONG\r\n");
    assert_eq!(server.gateway.stats().tcp_sessions, 2);
    drop((connection, silent));
    server.end().await;
}

/// The connector detects a Ferrite gateway and a Valkey server, and falls back to TCP.
pub(crate) async fn detects_the_servers_protocol(harness: Harness) {
    let redis = Engine::redis(&[]);
    let server = TestServer::start(&harness, unprotected(&redis));
    let connector = Connector::new(&server.client).local(any_port(1));
    let session = connector.connect(server.address).await.expect("connect");
    assert_eq!(session.transport(), SessionTransport::FerriteRdma);
    assert!(session.device().is_some() && session.fallback().is_none());
    let mut ferrite = connection(session).await;
    let () = ferrite.set("key", "value").await.expect("SET");

    // A server of Valkey Over RDMA accepts clients that send a hello, but sends none itself.
    let options = ListenOptions::new().foreign_peers_only();
    let valkey = harness.fabric(0).listen_with(any_port(0), &options).expect("listen");
    let at = valkey.local_addr();
    let serving = tokio::spawn(serve_as_valkey(valkey, redis.socket()));
    for _ in 0..2 {
        let session = connector.connect(at).await.expect("connect");
        assert_eq!(session.transport(), SessionTransport::ValkeyRdma);
        let value: String = connection(session).await.get("key").await.expect("GET");
        assert_eq!(value, "value");
    }
    serving.abort();

    // At this address there is a TCP listener, but no RDMA listener.
    let tcp = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let at = tcp.local_addr().expect("bound address");
    let preferring =
        Connector::new(&server.client).rdma(Rdma::Prefer).timeout(Duration::from_secs(1));
    let (session, accepted) = tokio::join!(preferring.connect(at), tcp.accept());
    let (session, _accepted) = (session.expect("connect"), accepted.expect("accept"));
    assert_eq!(session.transport(), SessionTransport::Tcp);
    let fallback = session.fallback().expect("fallback with its cause");
    assert!(fallback.to_string().contains("uses TCP instead of RDMA"), "{fallback}");
    let counted: u64 = server.client.stats().fallbacks.iter().map(|(_, count)| count).sum();
    assert_eq!(counted, 1);
    let requiring = preferring.clone().rdma(Rdma::Require).connect(at).await;
    requiring.expect_err("RDMA is required and unavailable");
    drop((tcp, session));
    let error = preferring.connect(at).await.expect_err("no listener is left");
    assert!(error.to_string().contains("RDMA (tried first)"), "{error}");
    drop(ferrite);
    server.end().await;
}

/// Serves every client by Valkey Over RDMA, with or without a hello, as Valkey's own listener does.
async fn serve_as_valkey(listener: Listener, socket: std::path::PathBuf) {
    let foreign_peers = listener.foreign_peers();
    loop {
        let request = foreign_peers.next().await.expect("a connection request");
        let raw = foreign_peers.accept(request).await.expect("accept");
        let stream = ValkeyStream::new(raw, Role::Server, &ValkeyConfig::default());
        let mut client = stream.expect("register a window");
        let engine = EngineSocket::connect(&EngineAddress::Unix(socket.clone())).await;
        let mut engine = engine.expect("connect to the engine");
        tokio::spawn(async move { pump(&mut client, &mut engine, &Moved::default()).await });
    }
}

/// Returns everything that a client can read before the connection ends.
pub(crate) async fn read_until_end(mut stream: impl AsyncRead + Unpin) -> String {
    let mut received = String::new();
    stream.read_to_string(&mut received).await.expect("read until the end of the stream");
    received
}

/// While the engine is down, the gateway disconnects its clients and sends new ones an error. When
/// the engine is back, the gateway serves clients again.
pub(crate) async fn survives_an_engine_restart(harness: Harness) {
    let mut redis = Engine::redis(&[]);
    let server = TestServer::start(&harness, unprotected(&redis));
    let mut stream = server.connect(&harness).await;
    stream.write_all(b"PING\r\n").await.expect("write");
    stream.read_exact(&mut [0; 7]).await.expect("read the reply");
    redis.kill();
    assert_eq!(read_until_end(stream).await, "");
    let error = read_until_end(server.connect(&harness).await).await;
    // The client has not logged in, so it does not learn the engine's address or the system's
    // error.
    assert_eq!(error, "-ERR Ferrite gateway: cannot connect to the engine\r\n");
    assert_eq!(server.gateway.stats().engine_failures, 1);

    redis.restart();
    let mut stream = server.connect(&harness).await;
    stream.write_all(b"PING\r\n").await.expect("write");
    let mut reply = [0; 7];
    stream.read_exact(&mut reply).await.expect("read the reply");
    assert_eq!(&reply, b"+PONG\r\n");
    drop((stream, redis));
    server.end().await;
}

/// The gateway shuts down without waiting the whole drain timeout for a client that has sent half a
/// command. It does wait for another client whose complete command is running in the engine.
pub(crate) async fn does_not_wait_for_half_a_command(harness: Harness) {
    let redis = Engine::redis(&[]);
    let drain_timeout = Duration::from_secs(40);
    let server =
        TestServer::start(&harness, GatewayConfig { drain_timeout, ..unprotected(&redis) });
    let mut half = server.connect(&harness).await;
    half.write_all(b"PING\r\n").await.expect("write");
    half.read_exact(&mut [0; 7]).await.expect("read the reply");
    let mut blocked = server.connect(&harness).await;
    let sent = [&b"*2\r\n$4\r\nPING\r\n"[..], b"BLPOP nothing 3\r\n*1\r\n"];
    half.write_all(sent[0]).await.expect("write");
    blocked.write_all(sent[1]).await.expect("write");
    let bytes = "PING\r\n".len() + sent.concat().len();
    until_async("all bytes at the engine", async || {
        server.gateway.stats().to_engine_bytes >= bytes as u64
    })
    .await;
    until_a_client_blocks(&redis).await;
    let TestServer { end, serving, .. } = server;
    let begun = std::time::Instant::now();
    let _ = end.send(());
    assert_eq!(read_until_end(half).await, "");
    let mut reply = [0; 5];
    blocked.read_exact(&mut reply).await.expect("a reply, although half a command follows");
    assert_eq!(&reply, b"*-1\r\n");
    assert_eq!(read_until_end(blocked).await, "");
    serving.await.expect("gateway does not panic").expect("gateway ends without an error");
    assert!(begun.elapsed() < drain_timeout / 2, "{:?}", begun.elapsed());
}

/// Waits until a client is blocked in the engine.
async fn until_a_client_blocks(redis: &Engine) {
    until_async("a blocked client", async || {
        query_engine(redis, "INFO clients").await.contains("blocked_clients:1")
    })
    .await;
}

/// Runs a command at the engine's own socket, and returns the reply.
async fn query_engine(redis: &Engine, command: &str) -> String {
    let mut stream = UnixStream::connect(redis.socket()).await.expect("connect to the engine");
    stream.write_all(format!("{command}\r\nQUIT\r\n").as_bytes()).await.expect("send the command");
    let mut reply = String::new();
    stream.read_to_string(&mut reply).await.expect("read the reply");
    reply
}

/// When the gateway shuts down, pending commands get their replies first, even if the client needs
/// 300 ms to send the rest of a command, or the engine a second to reply. Then clients see the end
/// of the connection.
pub(crate) async fn finishes_pending_commands_before_it_ends(harness: Harness) {
    let redis = Engine::redis(&[]);
    let server = TestServer::start(&harness, unprotected(&redis));
    let mut idle = server.connect(&harness).await;
    let mut busy = server.connect(&harness).await;
    let mut blocked = server.connect(&harness).await;
    let value = pattern(0, (4 << 20) / harness.slowdown);
    busy.write_all(format!("*3\r\n$3\r\nSET\r\n$1\r\nv\r\n${}\r\n", value.len()).as_bytes())
        .await
        .expect("SET");
    idle.write_all(b"PING\r\n").await.expect("write");
    idle.read_exact(&mut [0; 7]).await.expect("read the reply");
    blocked.write_all(b"BLPOP nothing 1\r\n").await.expect("write");
    until_a_client_blocks(&redis).await;
    let TestServer { end, serving, .. } = server;
    let _ = end.send(());
    tokio::time::sleep(Duration::from_millis(300)).await;
    busy.write_all(&value).await.expect("write the rest of the command");
    busy.write_all(b"\r\n").await.expect("write the rest of the command");
    let mut reply = [0; 5];
    busy.read_exact(&mut reply).await.expect("read the reply");
    assert_eq!(&reply, b"+OK\r\n");
    blocked.read_exact(&mut reply).await.expect("read the reply");
    assert_eq!(&reply, b"*-1\r\n");
    assert_eq!(read_until_end(idle).await, "");
    assert_eq!(read_until_end(busy).await, "");
    assert_eq!(read_until_end(blocked).await, "");
    serving.await.expect("gateway does not panic").expect("gateway ends without an error");
}
