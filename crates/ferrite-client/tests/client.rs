//! The client against a gateway with a real `redis-server` behind it: `fake_client` anywhere, `lab_client` in the lab.

#[path = "../../ferrite-session/tests/redis_server.rs"]
mod redis_server;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use ferrite_client::redis::AsyncCommands as _;
use ferrite_client::redis::{self, AsyncConnectionConfig, ProtocolVersion, RedisConnectionInfo};
use ferrite_client::{Client, ClientBuilder};
use ferrite_fabric::{Config, Engine, Rdma};
use ferrite_session::{EngineAddress, Gateway, GatewayConfig, SessionTransport};
use ferrite_verbs::Verbs;
use redis_server::Redis;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) const HOSTS: [&str; 2] = ["10.0.0.1", "10.0.0.2"];

/// Runs a test, which must end in time.
pub(crate) fn run(verbs: &Verbs, test: impl AsyncFnOnce(&Verbs)) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    runtime.block_on(async { tokio::time::timeout(PATIENCE, test(verbs)).await.expect("in time") });
    let begun = Instant::now();
    while runtime.metrics().num_alive_tasks() > 0 {
        assert!(begun.elapsed() < PATIENCE, "engines that do not end");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn engine(verbs: &Verbs, host: usize) -> Engine {
    let builder = Engine::builder(verbs).rdma(Rdma::Require).config(Config::default());
    let engine = builder.device(["rxe1", "rxe2"][host]).build().expect("an engine");
    tokio::spawn(engine.drive());
    engine
}

fn any_port(host: usize) -> SocketAddr {
    SocketAddr::new(HOSTS[host].parse().expect("an address"), 0)
}

/// A gateway on the first host.
struct Served {
    at: SocketAddr,
    end: oneshot::Sender<()>,
    serving: JoinHandle<()>,
}

impl Served {
    fn start(verbs: &Verbs, redis: &Redis) -> Self {
        let listener = engine(verbs, 0).listen(any_port(0)).expect("listen");
        let at = listener.local_addr();
        let address = EngineAddress::Unix(redis.socket.clone());
        let gateway = Gateway::new(GatewayConfig { protected_mode: false, ..GatewayConfig::new(address) });
        let (end, ended) = oneshot::channel();
        let serving = tokio::spawn(async move {
            gateway.serve(listener, async { drop(ended.await) }).await.expect("it served");
        });
        Self { at, end, serving }
    }

    async fn end(self) {
        let _ = self.end.send(());
        self.serving.await.expect("no panic");
    }
}

fn builder(verbs: &Verbs, at: SocketAddr) -> ClientBuilder {
    let config = AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(30)));
    Client::builder(&engine(verbs, 1), at).local(any_port(1)).config(config)
}

/// Typed commands, pipelines, RESP3, several tasks on one connection.
pub(crate) async fn commands(verbs: &Verbs) {
    let redis = Redis::start("client", &[]).await;
    let served = Served::start(verbs, &redis);
    let info = RedisConnectionInfo::default().set_protocol(ProtocolVersion::RESP3).set_db(3);
    let client = builder(verbs, served.at).info(info).build();
    let mut connection = client.connect().await.expect("a connection");
    assert_eq!(connection.carrier().transport, SessionTransport::FerriteRdma);
    assert!(connection.carrier().device.is_some() && connection.carrier().fallback.is_none());
    let () = connection.hset_multiple("hash", &[("a", 1), ("b", 2)]).await.expect("HSET");
    let all: std::collections::BTreeMap<String, i64> = connection.hgetall("hash").await.expect("HGETALL");
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
    let redis = Redis::start("falls", &["--bind", "127.0.0.1", "--port", &at.port().to_string()]).await;
    let engine = engine(verbs, 1);
    let client = Client::builder(&engine, at).connect_timeout(Duration::from_secs(1));
    let error = client.rdma(Rdma::Require).reconnect(1, Duration::ZERO).build().connect().await;
    let error = error.expect_err("no RDMA there");
    assert!(error.is_io_error(), "{error}");
    let client = Client::builder(&engine, at).connect_timeout(Duration::from_secs(1)).rdma(Rdma::Prefer);
    let mut connection = client.build().connect().await.expect("over TCP");
    let carrier = connection.carrier();
    assert_eq!(carrier.transport, SessionTransport::Tcp);
    assert!(carrier.fallback.is_some());
    let () = connection.set("a", "b").await.expect("SET");
    drop((connection, redis));
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
    };
}
pub(crate) use run_suite;
