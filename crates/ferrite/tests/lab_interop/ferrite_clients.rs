//! Tests Ferrite's own clients with the same servers: redis-rs over Ferrite's sessions
//! (`ferrite-client`), and `ferrite bench kv`.
//!
//! The clients run on the second host, so that their bytes cross the network. They use Valkey's
//! protocol with Valkey's server. Each test checks the transport.

use std::time::Instant;

use ferrite_client::redis::{
    self, AsyncCommands as _, AsyncConnectionConfig, ProtocolVersion, PushInfo, PushKind,
    RedisConnectionInfo, Value,
};
use ferrite_client::{Client, ClientBuilder, Connection};
use ferrite_fabric::{Config, Fabric, Rdma};
use ferrite_testkit::wait::until_async;

use crate::server::{CLIENT_HOST, TestServer, bytes};
use crate::{LONG, SIZES, SOON};

/// Runs `test` with a client. The test must end in time, and its fabric must release all verbs
/// objects.
fn run(server: &str, test: impl AsyncFnOnce(ClientBuilder)) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let config = Config { busy_poll_us: 0, ..Config::default() };
        let fabric = Fabric::system().rdma(Rdma::Require).device("rxe2").config(config).build();
        let fabric = fabric.expect("a fabric");
        let driver = tokio::spawn(fabric.drive());
        let config = AsyncConnectionConfig::new().set_response_timeout(Some(LONG));
        let local = format!("{CLIENT_HOST}:0").parse().expect("an address");
        let server = server.parse().expect("an address");
        let client =
            Client::builder(&fabric, server).rdma(Rdma::Require).local(local).config(config);
        drop(fabric);
        tokio::time::timeout(2 * LONG, test(client)).await.expect("in time");
        tokio::time::timeout(SOON, driver)
            .await
            .expect("the fabric stops in time")
            .expect("no panic")
            .expect("no error");
    });
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

/// Opens a connection and checks its transport.
async fn connect(server: &TestServer, client: &Client) -> Connection {
    let connection = client.connect().await.expect("a connection");
    assert_eq!(connection.transport_info().transport.to_string(), server.transport());
    assert_eq!(connection.transport_info().device.as_deref(), Some("rxe2"));
    connection
}

/// Writes and reads values over RDMA, and compares each with the engine's.
pub(crate) fn client_values(server: &mut TestServer) {
    run(&server.address(), async |client| {
        let mut connection = connect(server, &client.build()).await;
        for (seed, size) in SIZES.into_iter().enumerate() {
            let value = bytes(seed, size);
            let () = connection.set("key", &value).await.expect("SET");
            assert!(
                server.engine(&["GET", "key"]) == value,
                "the engine has another value of {size} B"
            );
            let got: Vec<u8> = connection.get("key").await.expect("GET");
            assert!(got == value, "wrong value of {size} B: received {} B", got.len());
        }
    });
}

/// Sends pipelines of a thousand commands, small and large.
pub(crate) fn client_pipelines(server: &mut TestServer) {
    run(&server.address(), async |client| {
        let mut connection = connect(server, &client.build()).await;
        for length in [1, 16, 1000, 16 << 10] {
            let values: Vec<_> = (0..1000).map(|number| bytes(number, length)).collect();
            let (mut sets, mut gets) = (redis::pipe(), redis::pipe());
            for (number, value) in values.iter().enumerate() {
                sets.set(number, value).ignore();
                gets.get(number);
            }
            let () = sets.query_async(&mut connection).await.expect("SETs");
            let got: Vec<Vec<u8>> = gets.query_async(&mut connection).await.expect("GETs");
            assert!(got == values, "values of {length} B");
            assert!(server.engine(&["GET", "999"]) == values[999], "the engine has another value");
        }
    });
}

pub(crate) fn client_transactions(server: &mut TestServer) {
    run(&server.address(), async |client| {
        let mut connection = connect(server, &client.build()).await;
        let mut multi = redis::pipe();
        multi.atomic().set("counter", 1).ignore().incr("counter", 10).get("counter");
        let got: (i64, i64) = multi.query_async(&mut connection).await.expect("MULTI");
        assert_eq!(got, (11, 11));
        assert_eq!(server.engine(&["GET", "counter"]), b"11");
    });
}

pub(crate) fn client_blocking_pops(server: &mut TestServer) {
    run(&server.address(), async |client| {
        let client = client.build();
        let (mut waiting, mut other) =
            (connect(server, &client).await, connect(server, &client).await);
        let popped = tokio::spawn(async move { waiting.blpop("list", 30.0).await });
        until_async("a blocked client", async || server.info("blocked_clients") > 0).await;
        let length: usize = other.rpush("list", &["a", "b"]).await.expect("RPUSH");
        assert_eq!(length, 2);
        let popped: (String, String) = popped.await.expect("no panic").expect("BLPOP");
        assert_eq!(popped, ("list".into(), "a".into()));
        let nothing: Option<(String, String)> = other.blpop("none", 0.2).await.expect("BLPOP");
        assert_eq!(nothing, None);
    });
}

/// One connection publishes large pipelines. A subscriber on another connection gets all messages,
/// in order.
pub(crate) fn client_subscriptions(server: &mut TestServer) {
    const BATCHES: usize = 20;
    run(&server.address(), async |client| {
        let (sender, mut pushes) = tokio::sync::mpsc::unbounded_channel::<PushInfo>();
        let config =
            AsyncConnectionConfig::new().set_response_timeout(Some(LONG)).set_push_sender(sender);
        let info = RedisConnectionInfo::default().set_protocol(ProtocolVersion::RESP3);
        let client = client.config(config).info(info).build();
        let (mut subscriber, mut publisher) =
            (connect(server, &client).await, connect(server, &client).await);
        redis::cmd("SUBSCRIBE").arg("news").exec_async(&mut subscriber).await.expect("SUBSCRIBE");
        assert_eq!(pushes.recv().await.expect("a push").kind, PushKind::Subscribe);
        for batch in 0..BATCHES {
            let mut pipeline = redis::pipe();
            for number in 0..1000 {
                pipeline.publish("news", bytes(batch * 1000 + number, number % 100 + 1));
            }
            let receivers: Vec<usize> =
                pipeline.query_async(&mut publisher).await.expect("PUBLISH");
            assert!(receivers.iter().all(|count| *count == 1));
        }
        for number in 0..BATCHES * 1000 {
            let push =
                tokio::time::timeout(SOON, pushes.recv()).await.expect("in time").expect("a push");
            let expected = [
                Value::BulkString(b"news".to_vec()),
                Value::BulkString(bytes(number, number % 1000 % 100 + 1)),
            ];
            assert!(
                push.kind == PushKind::Message && push.data == expected,
                "message {number}: {push:?}"
            );
        }
    });
}

/// Keeps a hundred connections open at the same time. Each writes and reads a key of its own.
pub(crate) fn client_many(server: &mut TestServer) {
    run(&server.address(), async |client| {
        let client = client.build();
        let mut connections = Vec::new();
        for _ in 0..100 {
            connections.push(connect(server, &client).await);
        }
        assert_eq!(server.info("connected_clients"), 101, "100 clients and the test's own");
        let tasks = connections.into_iter().enumerate().map(|(number, mut connection)| {
            tokio::spawn(async move {
                for round in 0..5 {
                    let value = bytes(number * 5 + round, 3000);
                    let () = connection.set(number, &value).await.expect("SET");
                    let got: Vec<u8> = connection.get(number).await.expect("GET");
                    assert!(got == value, "connection {number}, round {round}");
                }
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.expect("no panic");
        }
        assert!(server.engine(&["GET", "99"]) == bytes(499, 3000), "the engine has another value");
    });
    server.until("clients are gone", SOON, || server.info("connected_clients") == 1);
}

/// Commands fail while the engine is stopped. After a restart of the engine they succeed, again
/// over RDMA.
pub(crate) fn client_reconnects(server: &mut TestServer) {
    run(&server.address(), async |client| {
        let mut connection = connect(server, &client.build()).await;
        for restart in 1..=2 {
            let () = connection.set("a", restart).await.expect("SET");
            server.stop_engine();
            let started = Instant::now();
            while connection.get::<_, Option<i64>>("a").await.is_ok() {
                assert!(started.elapsed() < SOON, "the client does not notice the stop");
            }
            server.restart_engine();
            let started = Instant::now();
            let value = loop {
                match connection.get::<_, Option<i64>>("a").await {
                    Ok(value) => break value,
                    Err(error) => assert!(started.elapsed() < SOON, "{error}"),
                }
            };
            assert_eq!(value, None, "a new engine has no data");
            assert!(connection.reconnects() >= restart, "{connection:?}");
            assert_eq!(connection.transport_info().transport.to_string(), server.transport());
        }
    });
}

/// Runs `ferrite bench kv` with few keys, so that each is written. Then checks every value in the
/// engine.
fn load(server: &TestServer, size: &str, more: &[&str]) {
    const KEYS: usize = 20;
    let keys = KEYS.to_string();
    let common =
        ["--keys", &keys, "--keep-keys", "--size", size, "--seconds", "1", "--warmup", "0.2"];
    let report = server.bench_kv(&[&common[..], more].concat(), LONG);
    assert_eq!(report["transport"], server.transport(), "{report}");
    assert_eq!(report["device"], "rxe2", "{report}");
    for (row, test) in report["results"].as_array().expect("rows").iter().zip(["set", "get"]) {
        assert_eq!((&row["test"], &row["errors"]), (&test.into(), &0.into()), "{more:?}: {row}");
        assert!(row["requests"].as_u64().is_some_and(|count| count > 0), "{more:?}: {row}");
    }
    let value =
        vec![b'x'; usize::try_from(report["size_bytes"].as_u64().expect("a size")).expect("small")];
    let prefix = report["key_prefix"].as_str().expect("a prefix");
    for key in (0..KEYS).map(|key| format!("{prefix}{key}")) {
        assert!(server.engine(&["GET", &key]) == value, "{key} has another value");
    }
}

pub(crate) fn bench_kv(server: &mut TestServer) {
    load(server, "64", &[]);
    load(server, "1", &["--pipeline", "16"]);
}

pub(crate) fn bench_kv_c100(server: &mut TestServer) {
    load(server, "64", &["--connections", "100"]);
    load(server, "64", &["--connections", "100", "--pipeline", "16", "--threads", "2"]);
}

pub(crate) fn bench_kv_p1000(server: &mut TestServer) {
    load(server, "64", &["--connections", "1", "--pipeline", "1000"]);
    load(server, "64", &["--pipeline", "1000"]);
}

/// The pipeline is larger than the window of either side.
pub(crate) fn bench_kv_of_64k(server: &mut TestServer) {
    load(server, "64kb", &["--connections", "4", "--pipeline", "20"]);
}
