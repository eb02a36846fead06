//! Ferrite's own clients of the same servers: redis-rs over our sessions (`ferrite-client`), and
//! `ferrite bench kv`.
//!
//! They come from the other host: what they say crosses the wire. Against Valkey's server this is
//! our client's side of Valkey's protocol with its own listener; each test says what must carry it.

use std::time::{Duration, Instant};

use ferrite_client::redis::{
    self, AsyncCommands as _, AsyncConnectionConfig, ProtocolVersion, PushInfo, PushKind,
    RedisConnectionInfo, Value,
};
use ferrite_client::{Client, ClientBuilder, Connection};
use ferrite_fabric::{Config, Fabric, Rdma};

use crate::scene::{CLIENT_HOST, Scene, bytes};
use crate::{LONG, SOON};

/// Runs what a client does, which must end in time; nothing may be left of its engine.
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
            .expect("a fabric that ends")
            .expect("no panic")
            .expect("it drove");
    });
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

/// A connection, carried by what it must be.
async fn connect(scene: &Scene, client: &Client) -> Connection {
    let connection = client.connect().await.expect("a connection");
    assert_eq!(connection.transport_info().transport.to_string(), scene.transport());
    assert_eq!(connection.transport_info().device.as_deref(), Some("rxe2"));
    connection
}

/// Set and read over RDMA, each compared with the engine's own answer.
pub(crate) fn client_values(scene: &mut Scene) {
    const SIZES: [usize; 12] = [
        1,
        2,
        1 << 10,
        4096,
        65_535,
        65_536,
        65_537,
        1_048_575,
        1_048_576,
        1_048_577,
        10_000_000,
        64 << 20,
    ];
    run(&scene.address(), async |client| {
        let mut connection = connect(scene, &client.build()).await;
        for (seed, size) in SIZES.into_iter().enumerate() {
            let value = bytes(seed, size);
            let () = connection.set("key", &value).await.expect("SET");
            assert!(
                scene.engine(&["GET", "key"]) == value,
                "the engine has another value of {size} B"
            );
            let got: Vec<u8> = connection.get("key").await.expect("GET");
            assert!(got == value, "of {size} B, {} came back, other ones", got.len());
        }
    });
}

/// A thousand commands at a time, of few bytes and of many.
pub(crate) fn client_pipelines(scene: &mut Scene) {
    run(&scene.address(), async |client| {
        let mut connection = connect(scene, &client.build()).await;
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
            assert!(scene.engine(&["GET", "999"]) == values[999], "the engine has another one");
        }
    });
}

pub(crate) fn client_transactions(scene: &mut Scene) {
    run(&scene.address(), async |client| {
        let mut connection = connect(scene, &client.build()).await;
        let mut multi = redis::pipe();
        multi.atomic().set("counter", 1).ignore().incr("counter", 10).get("counter");
        let got: (i64, i64) = multi.query_async(&mut connection).await.expect("MULTI");
        assert_eq!(got, (11, 11));
        assert_eq!(scene.engine(&["GET", "counter"]), b"11");
    });
}

pub(crate) fn client_blocking_pops(scene: &mut Scene) {
    run(&scene.address(), async |client| {
        let client = client.build();
        let (mut waiting, mut other) =
            (connect(scene, &client).await, connect(scene, &client).await);
        let popped = tokio::spawn(async move { waiting.blpop("list", 30.0).await });
        while scene.info("blocked_clients") == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let length: usize = other.rpush("list", &["a", "b"]).await.expect("RPUSH");
        assert_eq!(length, 2);
        let popped: (String, String) = popped.await.expect("no panic").expect("BLPOP");
        assert_eq!(popped, ("list".into(), "a".into()));
        let nothing: Option<(String, String)> = other.blpop("none", 0.2).await.expect("BLPOP");
        assert_eq!(nothing, None);
    });
}

/// A flood by pipelines on one connection; who listens on another gets all of it, in order.
pub(crate) fn client_subscriptions(scene: &mut Scene) {
    const BATCHES: usize = 20;
    run(&scene.address(), async |client| {
        let (sender, mut pushes) = tokio::sync::mpsc::unbounded_channel::<PushInfo>();
        let config =
            AsyncConnectionConfig::new().set_response_timeout(Some(LONG)).set_push_sender(sender);
        let info = RedisConnectionInfo::default().set_protocol(ProtocolVersion::RESP3);
        let client = client.config(config).info(info).build();
        let (mut subscriber, mut publisher) =
            (connect(scene, &client).await, connect(scene, &client).await);
        redis::cmd("SUBSCRIBE").arg("news").exec_async(&mut subscriber).await.expect("SUBSCRIBE");
        assert_eq!(pushes.recv().await.expect("a push").kind, PushKind::Subscribe);
        for batch in 0..BATCHES {
            let mut pipeline = redis::pipe();
            for number in 0..1000 {
                pipeline.publish("news", bytes(batch * 1000 + number, number % 100 + 1));
            }
            let heard: Vec<usize> = pipeline.query_async(&mut publisher).await.expect("PUBLISH");
            assert!(heard.iter().all(|count| *count == 1));
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

/// A hundred connections at a time, each with a value of its own.
pub(crate) fn client_many(scene: &mut Scene) {
    run(&scene.address(), async |client| {
        let client = client.build();
        let mut connections = Vec::new();
        for _ in 0..100 {
            connections.push(connect(scene, &client).await);
        }
        assert_eq!(scene.info("connected_clients"), 101, "and we ourselves");
        let asking = connections.into_iter().enumerate().map(|(number, mut connection)| {
            tokio::spawn(async move {
                for round in 0..5 {
                    let value = bytes(number * 5 + round, 3000);
                    let () = connection.set(number, &value).await.expect("SET");
                    let got: Vec<u8> = connection.get(number).await.expect("GET");
                    assert!(got == value, "connection {number}, round {round}");
                }
            })
        });
        for asking in asking.collect::<Vec<_>>() {
            asking.await.expect("no panic");
        }
        assert!(scene.engine(&["GET", "99"]) == bytes(499, 3000), "the engine has another value");
    });
    scene.until("clients are gone", SOON, || scene.info("connected_clients") == 1);
}

/// The server goes and comes back: what is under way fails, a later command is answered, over RDMA
/// again.
pub(crate) fn client_reconnects(scene: &mut Scene) {
    run(&scene.address(), async |client| {
        let mut connection = connect(scene, &client.build()).await;
        for restart in 1..=2 {
            let () = connection.set("a", restart).await.expect("SET");
            scene.stop_engine();
            let begun = Instant::now();
            while connection.get::<_, Option<i64>>("a").await.is_ok() {
                assert!(begun.elapsed() < SOON, "it never notices");
            }
            scene.restart_engine();
            let begun = Instant::now();
            let answer = loop {
                match connection.get::<_, Option<i64>>("a").await {
                    Ok(answer) => break answer,
                    Err(error) => assert!(begun.elapsed() < SOON, "{error}"),
                }
            };
            assert_eq!(answer, None, "another engine");
            assert!(connection.reconnects() >= restart, "{connection:?}");
            assert_eq!(connection.transport_info().transport.to_string(), scene.transport());
        }
    });
}

/// Keys are few, so that each is written: every value that the engine has is then as long as it
/// should be.
fn load(scene: &Scene, size: &str, more: &[&str]) {
    const KEYS: usize = 20;
    let keys = KEYS.to_string();
    let common = ["--keys", &keys, "--size", size, "--seconds", "1", "--warmup", "0.2"];
    let report = scene.bench_kv(&[&common[..], more].concat(), LONG);
    assert_eq!(report["transport"], scene.transport(), "{report}");
    assert_eq!(report["device"], "rxe2", "{report}");
    for (row, test) in report["results"].as_array().expect("rows").iter().zip(["set", "get"]) {
        assert_eq!((&row["test"], &row["errors"]), (&test.into(), &0.into()), "{more:?}: {row}");
        assert!(row["requests"].as_u64().is_some_and(|count| count > 0), "{more:?}: {row}");
    }
    let value =
        vec![b'x'; usize::try_from(report["size_bytes"].as_u64().expect("a size")).expect("small")];
    for key in 0..KEYS {
        assert!(
            scene.engine(&["GET", &format!("key:{key}")]) == value,
            "key:{key} has another value"
        );
    }
}

pub(crate) fn bench_kv(scene: &mut Scene) {
    load(scene, "64", &[]);
    load(scene, "1", &["--pipeline", "16"]);
}

pub(crate) fn bench_kv_c100(scene: &mut Scene) {
    load(scene, "64", &["--connections", "100"]);
    load(scene, "64", &["--connections", "100", "--pipeline", "16", "--threads", "2"]);
}

pub(crate) fn bench_kv_p1000(scene: &mut Scene) {
    load(scene, "64", &["--connections", "1", "--pipeline", "1000"]);
    load(scene, "64", &["--pipeline", "1000"]);
}

/// A pipeline is larger than either side's memory for it.
pub(crate) fn bench_kv_of_64k(scene: &mut Scene) {
    load(scene, "64K", &["--connections", "4", "--pipeline", "20"]);
}
