//! Clients before a real engine.

use std::time::Duration;

use ferrite_fabric::{Config, ConnectOptions, Fabric, ListenOptions, Listener, Rdma, Stream};
use ferrite_proto::Role;
use ferrite_session::{
    Connector, EngineAddress, EngineSocket, Gateway, GatewayConfig, Moved, SessionTransport,
    ValkeyConfig, ValkeyStream, pump,
};
use redis::aio::MultiplexedConnection;
use redis::{AsyncCommands as _, AsyncConnectionConfig, RedisConnectionInfo};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::{Redis, Scene, any_port, pattern};

/// A gateway on the first host, and an engine of the fabric on the second for its clients.
pub(crate) struct Served {
    pub(crate) gateway: Gateway,
    pub(crate) at: std::net::SocketAddr,
    server: Fabric,
    pub(crate) client: Fabric,
    end: oneshot::Sender<()>,
    serving: JoinHandle<Result<(), ferrite_fabric::Error>>,
}

impl Served {
    pub(crate) fn start(scene: &Scene, config: GatewayConfig) -> Self {
        let server = scene.fabric(0);
        Self::of(scene.listen(&server), [server, scene.fabric(1)], config)
    }

    /// With other settings of the listening side.
    pub(crate) fn start_with(scene: &Scene, config: GatewayConfig, engine: Config) -> Self {
        let server = scene.fabric_with(0, engine);
        Self::of(scene.listen(&server), [server, scene.fabric(1)], config)
    }

    pub(crate) fn remote_access_errors(&self) -> u64 {
        self.server.stats().remote_access_errors
    }

    fn of(listener: Listener, [server, client]: [Fabric; 2], config: GatewayConfig) -> Self {
        let at = listener.local_addr();
        let gateway = Gateway::new(config);
        let (end, ended) = oneshot::channel();
        let serving = tokio::spawn({
            let gateway = gateway.clone();
            async move { gateway.serve(listener, async { drop(ended.await) }).await }
        });
        Self { gateway, at, server, client, end, serving }
    }

    pub(crate) async fn call(&self, scene: &Scene) -> ValkeyStream {
        scene.call(&self.client, self.at, &ValkeyConfig::default()).await
    }

    /// Links of the gateway's host and blocks of its memory that are in use, to send and to
    /// receive. Receives that wait for messages do not count, since their number changes while some
    /// are replaced; those that failed links took along are known, and come back when no link is
    /// left that could have them.
    pub(crate) fn holds(&self) -> (u64, u64, u64) {
        let stats = self.server.stats();
        let [send, receive] = [stats.memory.send, stats.memory.receive]
            .map(|heap| heap.in_use_blocks.iter().sum::<u64>());
        (stats.links, send, receive.saturating_sub(stats.receives_overdue + stats.receives_posted))
    }

    pub(crate) async fn end(self) {
        let _ = self.end.send(());
        self.serving.await.expect("no panic").expect("it served");
    }
}

pub(crate) fn open(redis: &Redis) -> GatewayConfig {
    GatewayConfig {
        protected_mode: false,
        ..GatewayConfig::new(EngineAddress::Unix(redis.socket.clone()))
    }
}

pub(crate) async fn connection<S>(stream: S) -> MultiplexedConnection
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    // Half a second is what it gives a server by itself: too little for one in an emulated guest.
    let config = AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(30)));
    let info = RedisConnectionInfo::default();
    let made = MultiplexedConnection::new_with_config(&info, stream, config).await;
    let (connection, driver) = made.expect("a connection");
    tokio::spawn(driver);
    connection
}

/// redis-rs over Valkey's protocol: commands, a pipeline, a transaction.
pub(crate) async fn commands(scene: Scene) {
    let redis = Redis::start("commands", &[]).await;
    let served = Served::start(&scene, open(&redis));
    let mut connection = connection(served.call(&scene).await).await;
    let pong: String = redis::cmd("PING").query_async(&mut connection).await.expect("PING");
    assert_eq!(pong, "PONG");
    let mut pipeline = redis::pipe();
    (0..1000).for_each(|number| {
        pipeline.set(format!("key {number}"), number).ignore();
    });
    pipeline.cmd("DBSIZE");
    let (keys,): (u64,) = pipeline.query_async(&mut connection).await.expect("a pipeline");
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
    served.end().await;
}

/// Values much larger than any window.
pub(crate) async fn large_values(scene: Scene) {
    let redis = Redis::start("large", &[]).await;
    let served = Served::start(&scene, open(&redis));
    let mut connection = connection(served.call(&scene).await).await;
    for size in [0, 1, 1000, 65_535, 65_536, 65_537, (8 << 20) / scene.slower] {
        let value = pattern(size, size);
        let () = connection.set("value", &value).await.expect("SET");
        let read: Vec<u8> = connection.get("value").await.expect("GET");
        assert!(read == value, "a value of {size} bytes came back as another of {}", read.len());
    }
    drop(connection);
    served.end().await;
}

/// Each has a connection to the engine, and all of them end.
pub(crate) async fn many_clients(scene: Scene) {
    let redis = Redis::start("many", &[]).await;
    let served = Served::start(&scene, open(&redis));
    let mut connections = Vec::new();
    for _ in 0..100 / scene.slower.min(4) {
        connections.push(connection(served.call(&scene).await).await);
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
        adding.await.expect("no panic");
    }
    let total: usize = connections[0].get("counter").await.expect("GET");
    assert_eq!(total, 20 * count);
    assert_eq!(served.gateway.stats().sessions, count);
    drop(connections);
    while served.gateway.stats().sessions > 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(served.gateway.stats().valkey_sessions, count as u64);
    served.end().await;
}

/// Ferrite peers come in by the same door, as links.
pub(crate) async fn ferrite_peers(scene: Scene) {
    let redis = Redis::start("peers", &[]).await;
    let served = Served::start(&scene, open(&redis));
    let options = ConnectOptions::new().local(any_port(1));
    let link = served.client.connect_with(served.at, &options).await.expect("a link");
    let mut connection = connection(Stream::new(link)).await;
    let value = pattern(1, 1 << 20);
    let () = connection.set("value", &value).await.expect("SET");
    let read: Vec<u8> = connection.get("value").await.expect("GET");
    assert!(read == value);
    assert_eq!(served.gateway.stats().ferrite_sessions, 1);
    drop(connection);
    served.end().await;
}

/// So do clients that know nothing of us, over TCP: at once, or after a silence.
pub(crate) async fn tcp_clients(scene: Scene) {
    let redis = Redis::start("tcp", &[]).await;
    let config = Config { connection_timeout: Duration::from_millis(300), ..Config::default() };
    let fabric = Fabric::system().rdma(Rdma::Forbid).config(config).build().expect("a fabric");
    tokio::spawn(fabric.drive());
    let options = ListenOptions::new().accept_foreign_peers();
    let listener =
        fabric.listen_with("127.0.0.1:0".parse().expect("an address"), &options).expect("listen");
    let served = Served::of(listener, [fabric, scene.fabric(1)], open(&redis));
    let tcp = tokio::net::TcpStream::connect(served.at).await.expect("connected");
    let mut connection = connection(tcp).await;
    let value = pattern(9, 1 << 20);
    let () = connection.set("value", &value).await.expect("SET");
    let read: Vec<u8> = connection.get("value").await.expect("GET");
    assert!(read == value);

    let mut silent = tokio::net::TcpStream::connect(served.at).await.expect("connected");
    tokio::time::sleep(Duration::from_millis(600)).await;
    silent.write_all(b"PING\r\n").await.expect("to write");
    let mut said = [0; 7];
    silent.read_exact(&mut said).await.expect("an answer");
    assert_eq!(&said, b"+PONG\r\n");
    assert_eq!(served.gateway.stats().tcp_sessions, 2);
    drop((connection, silent));
    served.end().await;
}

/// The calling side finds out what it talks to.
pub(crate) async fn sessions_find_their_way(scene: Scene) {
    let redis = Redis::start("ways", &[]).await;
    let served = Served::start(&scene, open(&redis));
    let connector = Connector::new(&served.client).local(any_port(1));
    let session = connector.connect(served.at).await.expect("a session");
    assert_eq!(session.transport(), SessionTransport::FerriteRdma);
    assert!(session.device().is_some() && session.fallback().is_none());
    let mut ferrite = connection(session).await;
    let () = ferrite.set("way", "found").await.expect("SET");

    // A server of Valkey's protocol says no hello, and takes who does.
    let options = ListenOptions::new().foreign_peers_only();
    let valkey = scene.fabric(0).listen_with(any_port(0), &options).expect("listen");
    let at = valkey.local_addr();
    let serving = tokio::spawn(serve_as_valkey(valkey, redis.socket.clone()));
    for _ in 0..2 {
        let session = connector.connect(at).await.expect("a session");
        assert_eq!(session.transport(), SessionTransport::ValkeyRdma);
        let way: String = connection(session).await.get("way").await.expect("GET");
        assert_eq!(way, "found");
    }
    serving.abort();

    // Nobody listens there on RDMA; on TCP somebody does.
    let tcp = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let at = tcp.local_addr().expect("bound");
    let preferring =
        Connector::new(&served.client).rdma(Rdma::Prefer).timeout(Duration::from_secs(1));
    let (session, accepted) = tokio::join!(preferring.connect(at), tcp.accept());
    let (session, _accepted) = (session.expect("a session"), accepted.expect("a client"));
    assert_eq!(session.transport(), SessionTransport::Tcp);
    let fallback = session.fallback().expect("it is said why");
    assert!(fallback.to_string().contains("over TCP instead of RDMA"), "{fallback}");
    let counted: u64 = served.client.stats().fallbacks.iter().map(|(_, count)| count).sum();
    assert_eq!(counted, 1);
    let requiring = preferring.clone().rdma(Rdma::Require).connect(at).await;
    requiring.expect_err("RDMA was required");
    drop((tcp, session));
    let nowhere = preferring.connect(at).await.expect_err("nobody listens any more");
    assert!(nowhere.to_string().contains("RDMA (tried first)"), "{nowhere}");
    drop(ferrite);
    served.end().await;
}

/// Takes everybody as a client of Valkey's protocol, hello or not: as Valkey's own listener does.
async fn serve_as_valkey(listener: Listener, socket: std::path::PathBuf) {
    let foreign_peers = listener.foreign_peers();
    loop {
        let request = foreign_peers.next().await.expect("a client");
        let raw = foreign_peers.accept(request).await.expect("it stays");
        let mut client =
            ValkeyStream::new(raw, Role::Server, &ValkeyConfig::default()).expect("a window");
        let mut engine =
            EngineSocket::connect(&EngineAddress::Unix(socket.clone())).await.expect("a fabric");
        tokio::spawn(async move { pump(&mut client, &mut engine, &Moved::default()).await });
    }
}

/// What a client reads before the connection ends.
async fn last_words(mut stream: ValkeyStream) -> String {
    let mut said = String::new();
    stream.read_to_string(&mut said).await.expect("words, then the end");
    said
}

/// Clients that are turned away hear why.
pub(crate) async fn refusals(scene: Scene) {
    let redis = Redis::start("refusals", &[]).await;
    let served = Served::start(&scene, GatewayConfig { protected_mode: true, ..open(&redis) });
    let said = last_words(served.call(&scene).await).await;
    assert!(said.starts_with("-DENIED") && said.ends_with("\r\n"), "{said}");
    served.end().await;

    let with_password = Redis::start("password", &["--requirepass", "secret"]).await;
    let served =
        Served::start(&scene, GatewayConfig { protected_mode: true, ..open(&with_password) });
    let mut stream = served.call(&scene).await;
    stream.write_all(b"GET a\r\nAUTH secret\r\nPING\r\n").await.expect("to write");
    let expected = b"-NOAUTH Authentication required.\r\n+OK\r\n+PONG\r\n";
    let mut said = vec![0; expected.len()];
    stream.read_exact(&mut said).await.expect("an answer");
    assert_eq!(said, expected);
    drop(stream);
    served.end().await;

    let served = Served::start(&scene, GatewayConfig { max_clients: 1, ..open(&redis) });
    let mut first = served.call(&scene).await;
    first.write_all(b"PING\r\n").await.expect("to write");
    first.read_exact(&mut [0; 7]).await.expect("an answer");
    assert_eq!(
        last_words(served.call(&scene).await).await,
        "-ERR max number of clients reached\r\n"
    );
    assert_eq!(served.gateway.stats().refused, 1);
    drop(first);
    served.end().await;
}

/// The engine goes: its clients are told by the end, new ones in words, and when it is back all is
/// well.
pub(crate) async fn engine_restarts(scene: Scene) {
    let redis = Redis::start("restarts", &[]).await;
    let served = Served::start(&scene, open(&redis));
    let mut stream = served.call(&scene).await;
    stream.write_all(b"PING\r\n").await.expect("to write");
    stream.read_exact(&mut [0; 7]).await.expect("an answer");
    drop(redis);
    assert_eq!(last_words(stream).await, "");
    let said = last_words(served.call(&scene).await).await;
    // Without its address and the system's error: this client has not logged in.
    assert_eq!(said, "-ERR Ferrite gateway: cannot connect to the engine\r\n");
    assert_eq!(served.gateway.stats().engine_failures, 1);

    let redis = Redis::start("restarts", &[]).await;
    let mut stream = served.call(&scene).await;
    stream.write_all(b"PING\r\n").await.expect("to write");
    let mut said = [0; 7];
    stream.read_exact(&mut said).await.expect("an answer");
    assert_eq!(&said, b"+PONG\r\n");
    drop((stream, redis));
    served.end().await;
}

/// A part of a command is no work of the engine's: its client does not hold the gateway's end for
/// the whole drain time, and one whose command is under way is waited for beside it.
pub(crate) async fn half_a_command_does_not_hold_the_end(scene: Scene) {
    let redis = Redis::start("half", &[]).await;
    let drain_timeout = Duration::from_secs(40);
    let served = Served::start(&scene, GatewayConfig { drain_timeout, ..open(&redis) });
    let mut half = served.call(&scene).await;
    half.write_all(b"PING\r\n").await.expect("to write");
    half.read_exact(&mut [0; 7]).await.expect("an answer");
    let mut waiting = served.call(&scene).await;
    let sent = [&b"*2\r\n$4\r\nPING\r\n"[..], b"BLPOP nothing 3\r\n*1\r\n"];
    half.write_all(sent[0]).await.expect("to write");
    waiting.write_all(sent[1]).await.expect("to write");
    let bytes = "PING\r\n".len() + sent.concat().len();
    while served.gateway.stats().to_engine_bytes < bytes as u64 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    while !said_of(&redis, "INFO clients").await.contains("blocked_clients:1") {}
    let Served { end, serving, .. } = served;
    let begun = std::time::Instant::now();
    let _ = end.send(());
    assert_eq!(last_words(half).await, "");
    let mut said = [0; 5];
    waiting.read_exact(&mut said).await.expect("an answer, although half a command follows");
    assert_eq!(&said, b"*-1\r\n");
    assert_eq!(last_words(waiting).await, "");
    serving.await.expect("no panic").expect("it served");
    assert!(begun.elapsed() < drain_timeout / 2, "{:?}", begun.elapsed());
}

/// What the engine answers at its own socket.
async fn said_of(redis: &Redis, command: &str) -> String {
    let mut stream = UnixStream::connect(&redis.socket).await.expect("it listens");
    stream.write_all(format!("{command}\r\nQUIT\r\n").as_bytes()).await.expect("it hears");
    let mut said = String::new();
    stream.read_to_string(&mut said).await.expect("it answers");
    said
}

/// The gateway ends: what is under way is answered first, however slow client and engine are, then
/// clients see the end.
pub(crate) async fn drains(scene: Scene) {
    let redis = Redis::start("drains", &[]).await;
    let served = Served::start(&scene, open(&redis));
    let mut idle = served.call(&scene).await;
    let mut busy = served.call(&scene).await;
    let mut waiting = served.call(&scene).await;
    let value = pattern(0, (4 << 20) / scene.slower);
    busy.write_all(format!("*3\r\n$3\r\nSET\r\n$1\r\nv\r\n${}\r\n", value.len()).as_bytes())
        .await
        .expect("SET");
    idle.write_all(b"PING\r\n").await.expect("to write");
    idle.read_exact(&mut [0; 7]).await.expect("an answer");
    waiting.write_all(b"BLPOP nothing 1\r\n").await.expect("to write");
    while !said_of(&redis, "INFO clients").await.contains("blocked_clients:1") {}
    let Served { end, serving, .. } = served;
    let _ = end.send(());
    tokio::time::sleep(Duration::from_millis(300)).await;
    busy.write_all(&value).await.expect("the rest");
    busy.write_all(b"\r\n").await.expect("the rest");
    let mut said = [0; 5];
    busy.read_exact(&mut said).await.expect("an answer");
    assert_eq!(&said, b"+OK\r\n");
    waiting.read_exact(&mut said).await.expect("an answer");
    assert_eq!(&said, b"*-1\r\n");
    assert_eq!(last_words(idle).await, "");
    assert_eq!(last_words(busy).await, "");
    assert_eq!(last_words(waiting).await, "");
    serving.await.expect("no panic").expect("it served");
}
