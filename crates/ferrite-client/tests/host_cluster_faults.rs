//! The cluster client with nodes that are slow, gone or moving slots, over TCP. All clusters are
//! real, without the module.

mod cluster;

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use cluster::{builder, connect};
use ferrite_client::redis::{self, AsyncCommands as _, Value};
use ferrite_client::{ClusterClientBuilder, ClusterConnection};
use ferrite_testkit::cluster::{Cluster, Shape};
use ferrite_testkit::engine::engines;
use tokio::time::timeout;

const ALL: &[usize] = &[0, 1, 2];
const FORBID: &str = "?rdma=forbid";
/// The longest time for what must not wait for a node: far below the client's limits, 30 and 60 s.
const SOON: Duration = Duration::from_secs(10);

fn primaries(program: &std::path::Path) -> Shape<'_> {
    Shape { without_module: ALL, ..Shape::primaries(program, 3) }
}

fn slot_of(cluster: &Cluster, key: &str) -> u16 {
    cluster.ask(0, &["CLUSTER", "KEYSLOT", key])
}

/// Returns keys of different slots of one node.
fn keys_of(cluster: &Cluster, node: usize, count: usize) -> Vec<String> {
    let [first, last] = cluster.slots_of(node);
    let keys = (0..).map(|number| format!("key{number}"));
    keys.filter(|key| (first..=last).contains(&slot_of(cluster, key))).take(count).collect()
}

async fn tried_for(cluster: &Cluster, time: Duration) -> ClusterConnection {
    let builder: ClusterClientBuilder = builder(cluster, FORBID);
    connect(builder.retry_for(time)).await
}

/// A command that waits in the server blocks its connection. Meanwhile a slot of another node
/// moves, so that the client asks for the slots and checks its connections.
#[tokio::test(flavor = "multi_thread")]
async fn a_blocked_node_holds_up_no_other() {
    for program in engines() {
        let cluster = Cluster::start(&primaries(&program));
        let mut connection = connect(builder(&cluster, FORBID)).await;
        let [own, moving, other] = [0, 1, 2].map(|node| keys_of(&cluster, node, 30));
        for key in own[1..].iter().chain(&moving).chain(&other[..5]) {
            let () = connection.set(key, 1).await.expect("SET");
        }
        let waiting = tokio::spawn({
            let (mut connection, key) = (connection.clone(), own[0].clone());
            async move { connection.blpop::<_, (String, String)>(key, 0.0).await }
        });
        cluster.wait_until("a blocked client", |cluster, number| {
            let clients: String = cluster.ask(number, &["INFO", "clients"]);
            number != 0 || clients.contains("blocked_clients:1")
        });
        let slot = slot_of(&cluster, &moving[0]);
        cluster.move_slot(slot, 1, 2);
        let others = async {
            for _ in 0..3 {
                for key in moving.iter().chain(&other) {
                    let () = connection.set(key, 2).await.expect("SET");
                }
            }
            let mut pipeline = redis::pipe();
            for key in moving.iter().chain(&other) {
                pipeline.get(key);
            }
            let values: Vec<u32> = pipeline.query_async(&mut connection).await.expect("GET");
            assert_eq!(values, [2; 60]);
        };
        timeout(SOON, others).await.expect("other nodes work");
        assert!(!waiting.is_finished());
        let _: u32 = cluster.ask(0, &["LPUSH", &own[0], "value"]);
        let popped = timeout(SOON, waiting).await.expect("in time").expect("no panic");
        assert_eq!(popped.expect("BLPOP"), (own[0].clone(), "value".to_owned()));
    }
}

/// A new client connects although a node does not answer.
#[tokio::test(flavor = "multi_thread")]
async fn connects_although_a_node_is_stopped() {
    let program = engines().remove(0);
    let shape =
        Shape { options: &["--cluster-require-full-coverage", "no"], ..primaries(&program) };
    let cluster = Cluster::start(&shape);
    let keys = keys_of(&cluster, 1, 20);
    cluster.nodes[0].engine.signal("STOP");
    let connected = async {
        let mut connection = connect(builder(&cluster, FORBID)).await;
        for key in keys {
            let () = connection.set(key, 1).await.expect("SET");
        }
    };
    let connected = timeout(SOON, connected).await;
    cluster.nodes[0].engine.signal("CONT");
    connected.expect("the other nodes work");
}

fn transaction(keys: &[&str]) -> redis::Pipeline {
    let mut pipeline = redis::pipe();
    pipeline.atomic();
    for key in keys {
        pipeline.incr(*key, 1);
    }
    pipeline
}

/// The whole transaction goes to the node that has the slot, and runs once.
#[tokio::test(flavor = "multi_thread")]
async fn transactions_follow_redirects_as_a_whole() {
    for program in engines() {
        let mut cluster = Cluster::start(&primaries(&program));
        let mut connection = connect(builder(&cluster, FORBID)).await;
        let keys = ["{slot}a", "{slot}b"];
        let slot = slot_of(&cluster, keys[0]);
        let from = cluster.primary_of(slot);
        let to = (from + 1) % 3;
        let run = async |connection: &mut ClusterConnection| {
            let run = transaction(&keys).query_async::<(u32, u32)>(connection).await;
            run.expect("a transaction")
        };
        assert_eq!(run(&mut connection).await, (1, 1));
        cluster.move_slot(slot, from, to);
        assert_eq!(run(&mut connection).await, (2, 2), "after MOVED");

        // All keys have moved, but the slot still belongs to the old node (ASK).
        cluster.begin_move(slot, to, from);
        while cluster.move_keys(slot, to, from, 100) > 0 {}
        assert_eq!(run(&mut connection).await, (3, 3), "after ASK");
        cluster.move_slot(slot, to, from);
        assert_eq!(run(&mut connection).await, (4, 4));

        // Only one key has moved, so no node can run it until the other has moved, too (TRYAGAIN).
        let has_tried = |cluster: &Cluster| {
            [from, to].iter().any(|node| {
                let errors: String = cluster.ask(*node, &["INFO", "errorstats"]);
                errors.contains("errorstat_TRYAGAIN")
            })
        };
        assert!(!has_tried(&cluster));
        cluster.begin_move(slot, from, to);
        cluster.move_keys(slot, from, to, 1);
        let waiting = tokio::spawn({
            let mut connection = connection.clone();
            async move { transaction(&keys).query_async::<(u32, u32)>(&mut connection).await }
        });
        cluster.wait_until("TRYAGAIN", |cluster, _| has_tried(cluster));
        assert!(!waiting.is_finished());
        cluster.move_slot(slot, from, to);
        let waited = timeout(SOON, waiting).await.expect("in time").expect("no panic");
        assert_eq!(waited.expect("a transaction"), (5, 5));
        for key in keys {
            assert_eq!(cluster.ask::<u32>(to, &["GET", key]), 5);
        }
        cluster.assert_healthy();
    }
}

/// MULTI and EXEC in a pipeline are a transaction as well. They never reach different nodes, or a
/// connection that other tasks use meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_pipeline_may_contain_a_transaction() {
    for program in engines() {
        let mut cluster = Cluster::start(&primaries(&program));
        let mut connection = connect(builder(&cluster, FORBID)).await;
        let slot = slot_of(&cluster, "{slot}");
        let from = cluster.primary_of(slot);
        for expected in 1..=2_i64 {
            let mut pipeline = redis::pipe();
            pipeline.set("first", expected).cmd("multi").incr("{slot}a", 1).incr("{slot}b", 1);
            pipeline.cmd("EXEC").get("first");
            let replies: Vec<Value> = pipeline.query_async(&mut connection).await.expect("replies");
            let queued = Value::SimpleString("QUEUED".into());
            let both = Value::Array(vec![Value::Int(expected); 2]);
            let last = Value::BulkString(expected.to_string().into_bytes());
            let ok = Value::Okay;
            assert_eq!(replies, [ok.clone(), ok, queued.clone(), queued, both, last]);
            if expected == 1 {
                cluster.move_slot(slot, from, (from + 1) % 3);
            }
        }
        for words in [["MULTI", "GET"], ["GET", "EXEC"]] {
            let mut pipeline = redis::pipe();
            for word in words {
                pipeline.cmd(word);
            }
            let error = pipeline.query_async::<Value>(&mut connection).await.expect_err("no end");
            assert!(error.to_string().contains("one pipeline"), "{error}");
        }
        let error = redis::cmd("MULTI").exec_async(&mut connection).await.expect_err("MULTI alone");
        assert!(error.to_string().contains("one pipeline"), "{error}");
        let wrong = redis::pipe()
            .atomic()
            .cmd("INCR")
            .arg("{slot}a")
            .cmd("INCR")
            .arg("{slot}")
            .arg("")
            .clone();
        let error = wrong.query_async::<Value>(&mut connection).await.expect_err("too many words");
        assert!(
            error.code() == Some("EXECABORT")
                && error.to_string().contains("command 1: ERR wrong number"),
            "{error}"
        );
        cluster.assert_healthy();
    }
}

/// Commands to one node are in the order of the pipeline, whatever their slots are.
#[tokio::test(flavor = "multi_thread")]
async fn commands_to_a_node_keep_their_order() {
    let program = engines().remove(0);
    let mut cluster = Cluster::start(&primaries(&program));
    let mut connection = connect(builder(&cluster, FORBID)).await;
    let mut monitor = TcpStream::connect(cluster.nodes[1].address).expect("a connection");
    monitor.set_read_timeout(Some(SOON)).expect("a limit");
    monitor.write_all(b"MONITOR\r\n").expect("written");
    let mut lines = BufReader::new(monitor).lines();
    assert_eq!(lines.next().expect("a line").expect("OK"), "+OK");
    let keys = keys_of(&cluster, 1, 100);
    let mut pipeline = redis::pipe();
    for key in &keys {
        pipeline.set(key, 1);
    }
    let () = pipeline.query_async(&mut connection).await.expect("SET");
    let set = lines.map(|line| line.expect("a line")).filter(|line| line.contains("\"SET\""));
    for (key, line) in keys.iter().zip(set) {
        assert!(line.contains(&format!("\"{key}\"")), "{key}: {line}");
    }
    cluster.assert_healthy();
}

/// Commands of one slot are in order while the slot moves, and after the server has closed the
/// connection.
#[tokio::test(flavor = "multi_thread")]
async fn commands_of_a_slot_keep_their_order() {
    for program in engines() {
        let mut cluster = Cluster::start(&primaries(&program));
        let mut connection = connect(builder(&cluster, FORBID)).await;
        let slot = slot_of(&cluster, "{slot}");
        let from = cluster.primary_of(slot);
        let to = (from + 1) % 3;
        let mut next = 0_u32;
        let mut push = async || {
            let mut pipeline = redis::pipe();
            for number in next..next + 50 {
                pipeline.rpush("{slot}list", number).set(format!("{{slot}}{number}"), number);
            }
            pipeline.exec_async(&mut connection).await.expect("RPUSH");
            let list: Vec<u32> = connection.lrange("{slot}list", 0, -1).await.expect("LRANGE");
            assert!(list.into_iter().eq(0..next + 50));
            next += 50;
        };
        push().await;
        cluster.begin_move(slot, from, to);
        push().await;
        cluster.move_keys(slot, from, to, 60);
        push().await;
        cluster.move_slot(slot, from, to);
        push().await;
        for _ in 0..5 {
            let _: u32 = cluster.ask(to, &["CLIENT", "KILL", "TYPE", "normal"]);
            push().await;
        }
        cluster.assert_healthy();
    }
}

/// All commands of a pipeline share the time for which it is tried.
#[tokio::test(flavor = "multi_thread")]
async fn a_pipeline_has_one_deadline() {
    let program = engines().remove(0);
    let mut cluster = Cluster::start(&primaries(&program));
    let mut connection = tried_for(&cluster, Duration::from_secs(1)).await;
    let keys = ["{slot}a", "{slot}b"];
    let slot = slot_of(&cluster, keys[0]);
    let from = cluster.primary_of(slot);
    for key in keys {
        let () = connection.set(key, 1).await.expect("SET");
    }
    cluster.begin_move(slot, from, (from + 1) % 3);
    cluster.move_keys(slot, from, (from + 1) % 3, 1);
    let mut pipeline = redis::pipe();
    for _ in 0..8 {
        // Each ECHO makes a part of its own.
        pipeline.mget(&keys).cmd("ECHO").arg("text");
    }
    pipeline.ignore_errors();
    let begun = Instant::now();
    let replies: Vec<redis::RedisResult<Value>> =
        pipeline.query_async(&mut connection).await.expect("replies");
    let took = begun.elapsed();
    for pair in replies.chunks(2) {
        let error = pair[0].as_ref().expect_err("half of the keys have moved");
        assert_eq!(error.code(), Some("TRYAGAIN"), "{error}");
        assert!(pair[1].is_ok(), "{pair:?}");
    }
    assert!((Duration::from_secs(1)..Duration::from_secs(4)).contains(&took), "{took:?}");

    // A node that is gone: the same for all its slots.
    let lost = keys_of(&cluster, 2, 20);
    cluster.nodes[2].engine.kill();
    let mut pipeline = redis::pipe();
    for key in &lost {
        pipeline.get(key).cmd("ECHO").arg("text");
    }
    let begun = Instant::now();
    let result = pipeline.query_async::<Vec<Value>>(&mut connection).await;
    let took = begun.elapsed();
    assert!(result.is_err(), "{result:?}");
    assert!(took < Duration::from_secs(4), "{took:?}");
}

/// With this setting, a node sends redirects and slots without a host: the client uses the host
/// that it has asked.
#[tokio::test(flavor = "multi_thread")]
async fn redirects_without_a_host_lead_to_the_same_host() {
    let program = engines().remove(0);
    let shape = Shape {
        options: &["--cluster-preferred-endpoint-type", "unknown-endpoint"],
        ..primaries(&program)
    };
    let mut cluster = Cluster::start(&shape);
    let mut connection = tried_for(&cluster, Duration::from_secs(5)).await;
    let slot = slot_of(&cluster, "{slot}");
    let from = cluster.primary_of(slot);
    let to = (from + 1) % 3;
    let () = connection.set("{slot}old", 1).await.expect("SET");
    let refused = cluster.nodes[to].engine.refusal(&["GET", "{slot}old"]);
    assert!(refused.to_uppercase().starts_with("MOVED") && refused.contains(" :"), "{refused}");
    cluster.begin_move(slot, from, to);
    let () = connection.set("{slot}new", 2).await.expect("SET after ASK");
    let deleted: u32 = connection.del(&["{slot}new", "other"]).await.expect("DEL of two slots");
    assert_eq!(deleted, 1);
    cluster.move_slot(slot, from, to);
    assert_eq!(connection.get::<_, u32>("{slot}old").await.expect("GET after MOVED"), 1);
    cluster.assert_healthy();
}

/// Sharded channels of several slots, in one command.
#[tokio::test(flavor = "multi_thread")]
async fn subscribes_to_sharded_channels_of_all_nodes() {
    let program = engines().remove(0);
    let cluster = Cluster::start(&primaries(&program));
    let (sender, mut pushes) = tokio::sync::mpsc::unbounded_channel();
    let address = cluster.nodes[0].address;
    let url = format!("redis://{address}{FORBID}");
    let client = ferrite_client::ClientBuilder::open(&url).expect("a URL").push_sender(sender);
    let mut connection = connect(client.cluster()).await;
    let channels: Vec<_> = (0..3).map(|node| keys_of(&cluster, node, 1).remove(0)).collect();
    let subscribe = redis::cmd("SSUBSCRIBE").arg(&channels).clone();
    let subscribed = timeout(SOON, subscribe.exec_async(&mut connection)).await;
    subscribed.expect("in time").expect("SSUBSCRIBE");
    // A slot that has moved: the client follows MOVED.
    let moved = keys_of(&cluster, 1, 2).remove(1);
    cluster.move_slot(slot_of(&cluster, &moved), 1, 2);
    let subscribe = redis::cmd("SSUBSCRIBE").arg(&moved).clone();
    let subscribed = timeout(SOON, subscribe.exec_async(&mut connection)).await;
    subscribed.expect("in time").expect("SSUBSCRIBE");
    for channel in ["plain", "other"] {
        let subscribe = redis::cmd("SUBSCRIBE").arg(channel).clone();
        subscribe.exec_async(&mut connection).await.expect("SUBSCRIBE");
    }
    // A connection that has ended is replaced, and subscribed again, without a command.
    let _: u32 = cluster.ask(2, &["CLIENT", "KILL", "TYPE", "pubsub"]);
    cluster.wait_until("all subscriptions", |cluster, number| {
        let count = |channel: &String| {
            let (_, count): (String, u32) =
                cluster.ask(number, &["PUBSUB", "SHARDNUMSUB", channel]);
            count
        };
        let expected = [1, 1, 2][number];
        channels.iter().chain([&moved]).map(count).sum::<u32>() == expected
    });
    // No confirmation is taken for the reply to a later command.
    for number in 0..100 {
        let () = connection.set(number, number).await.expect("SET");
        assert_eq!(connection.get::<_, u32>(number).await.expect("GET"), number);
    }
    for channel in channels.iter().chain([&moved]) {
        let publish = redis::cmd("SPUBLISH").arg(channel).arg("text").clone();
        let receivers: u32 = publish.query_async(&mut connection).await.expect("SPUBLISH");
        assert_eq!(receivers, 1, "{channel}");
        let message = loop {
            let push = timeout(SOON, pushes.recv()).await.expect("in time").expect("a message");
            if push.kind == redis::PushKind::SMessage {
                break push.data;
            }
        };
        let text = |text: &str| Value::BulkString(text.into());
        assert_eq!(message, [text(channel), text("text")]);
    }
    // Without RESP3, a message would be taken for a reply.
    let mut plain = connect(builder(&cluster, FORBID)).await;
    let error = subscribe.exec_async(&mut plain).await.expect_err("RESP2");
    assert!(error.to_string().contains("RESP3"), "{error}");
}
