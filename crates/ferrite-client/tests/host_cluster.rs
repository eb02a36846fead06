//! The cluster client with real clusters on this host, over TCP. `lab_cluster` does the same over
//! RDMA.

mod cluster;

use cluster::{builder, connect};
use ferrite_client::redis::cluster_routing::{RoutingInfo, SingleNodeRoutingInfo};
use ferrite_client::redis::{self, AsyncCommands as _, Value};
use ferrite_client::{Client, ClusterClient, ReadFrom, SessionTransport};
use ferrite_testkit::cluster::{Cluster, Shape};
use ferrite_testkit::engine::engines;

const FORBID: &str = "?rdma=forbid";

#[tokio::test(flavor = "multi_thread")]
async fn commands_go_to_the_nodes_of_their_keys() {
    for program in engines() {
        let shape = Shape { without_module: &[2], ..Shape::primaries(&program, 3) };
        let mut cluster = Cluster::start(&shape);
        let mut connection = connect(builder(&cluster, "")).await;
        let keys: Vec<_> = (0..300).map(|number| format!("key{number}")).collect();
        for (number, key) in keys.iter().enumerate() {
            let () = connection.set(key, number).await.expect("SET");
        }
        for node in 0..3 {
            let count: u64 = cluster.ask(node, &["DBSIZE"]);
            assert!((50..150).contains(&count), "node {node} has {count} keys");
        }
        let values: Vec<usize> = connection.mget(&keys).await.expect("MGET of all slots");
        assert!(values.into_iter().eq(0..300));
        assert_eq!(connection.del::<_, u64>(&keys[200..]).await.expect("DEL of all slots"), 100);
        let count: u64 = redis::cmd("DBSIZE").query_async(&mut connection).await.expect("DBSIZE");
        assert_eq!(count, 200, "the sum of all nodes");
        let pong: String = redis::cmd("PING").query_async(&mut connection).await.expect("PING");
        assert_eq!(pong, "PONG");
        let scan = redis::cmd("SCAN").arg(0).arg("COUNT").arg(1000).clone();
        let node = &cluster.nodes[2];
        let at = SingleNodeRoutingInfo::ByAddress {
            host: node.address.ip().to_string(),
            port: node.address.port(),
        };
        let scanned = connection.route_command(scan, RoutingInfo::SingleNode(at)).await;
        let (_, found): (u64, Vec<String>) =
            redis::from_redis_value(scanned.expect("SCAN")).expect("keys");
        assert_eq!(found.len() as u64, cluster.ask::<u64>(2, &["DBSIZE"]));

        // Every node is known by its id, and was reached over TCP, since loopback has no RDMA.
        let mut used = connection.transports();
        used.retain(|part| part.node.is_some());
        let mut ids: Vec<_> = used.iter().filter_map(|part| part.node.clone()).collect();
        ids.dedup();
        let mut expected: Vec<_> = cluster.nodes.iter().map(|node| node.id.clone()).collect();
        ids.sort();
        expected.sort();
        assert_eq!(ids, expected);
        for part in used {
            assert_eq!(part.transport_info.transport, SessionTransport::Tcp, "{part:?}");
            assert!(part.sent_bytes > 1000 && part.received_bytes > 500, "{part:?}");
        }
        cluster.assert_healthy();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pipelines_may_have_keys_of_all_slots() {
    for program in engines() {
        let mut cluster = Cluster::start(&Shape::primaries(&program, 3));
        let mut connection = connect(builder(&cluster, FORBID)).await;
        let mut pipeline = redis::pipe();
        for number in 0..100 {
            let key = format!("key{number}");
            pipeline.set(&key, 1).ignore().incr(&key, number).get(&key);
        }
        pipeline.cmd("PING");
        pipeline.mget(&["key1", "key2", "key3"]);
        pipeline.set("key1", "after").ignore().get("key1");
        let mut replies: Vec<Value> = pipeline.query_async(&mut connection).await.expect("replies");
        let end = replies.split_off(200);
        let texts = |values: &[i64]| {
            let bulk = |value: &i64| Value::BulkString(value.to_string().into_bytes());
            values.iter().map(bulk).collect::<Vec<_>>()
        };
        for (number, pair) in replies.chunks(2).enumerate() {
            let value = number as i64 + 1;
            assert_eq!(pair, [Value::Int(value), texts(&[value]).remove(0)], "key{number}");
        }
        let pong = Value::SimpleString("PONG".into());
        let mget = Value::Array(texts(&[2, 3, 4]));
        assert_eq!(end, [pong, mget, Value::BulkString("after".into())]);

        // An error of one command does not end the others.
        let mut pipeline = redis::pipe();
        pipeline.lpush("key1", 1).get("key2").ignore_errors();
        let replies: Vec<redis::RedisResult<Value>> =
            pipeline.query_async(&mut connection).await.expect("replies");
        let error = replies[0].as_ref().expect_err("LPUSH to a key that has a string");
        assert_eq!(error.code(), Some("WRONGTYPE"));
        assert!(replies[1].is_ok());

        // The keys of a transaction must belong to one slot.
        let (value,): (i64,) = redis::pipe()
            .atomic()
            .set("{slot}a", 5)
            .ignore()
            .incr("{slot}a", 1)
            .query_async(&mut connection)
            .await
            .expect("a transaction");
        assert_eq!(value, 6);
        let crossing: redis::RedisResult<Value> =
            redis::pipe().atomic().set("a", 1).set("b", 1).query_async(&mut connection).await;
        let error = crossing.expect_err("two slots");
        assert!(error.to_string().to_lowercase().contains("slot"), "{error}");
        cluster.assert_healthy();
    }
}

/// While a slot moves, some of its keys are at the old node and some at the new one. Each INCR of a
/// pipeline runs once.
#[tokio::test(flavor = "multi_thread")]
async fn pipelines_run_each_command_once_while_a_slot_moves() {
    for program in engines() {
        let mut cluster = Cluster::start(&Shape::primaries(&program, 3));
        let mut connection = connect(builder(&cluster, FORBID)).await;
        let keys: Vec<_> = (0..50).map(|number| format!("{{slot}}{number}")).collect();
        let mut pipeline = redis::pipe();
        for key in &keys {
            pipeline.incr(key, 1);
        }
        let mut expect = async |value: i64| {
            let values: Vec<i64> = pipeline.query_async(&mut connection).await.expect("INCR");
            assert_eq!(values, vec![value; keys.len()]);
        };
        expect(1).await;
        let slot: u16 = cluster.ask(0, &["CLUSTER", "KEYSLOT", "{slot}0"]);
        let from = cluster.primary_of(slot);
        let to = (from + 1) % 3;
        cluster.begin_move(slot, from, to);
        expect(2).await;
        cluster.move_keys(slot, from, to, 20);
        expect(3).await;
        cluster.move_slot(slot, from, to);
        expect(4).await; // the first replies are MOVED, and the commands are sent again
        expect(5).await;
        cluster.assert_healthy();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_serve_reads_if_the_policy_says_so() {
    for program in engines() {
        let shape = Shape { replicas: 3, ..Shape::primaries(&program, 3) };
        let mut cluster = Cluster::start(&shape);
        let gets = |cluster: &Cluster| -> Vec<u64> {
            let count = |number| {
                let stats: String = cluster.ask(number, &["INFO", "commandstats"]);
                let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_get:calls="));
                line.and_then(|line| line.split(',').next()?.parse().ok()).unwrap_or(0)
            };
            (0..6).map(count).collect()
        };
        for (read_from, replicas_serve) in [
            (ReadFrom::Primary, false),
            (ReadFrom::Replica, true),
            (ReadFrom::ReplicasInTurn, true),
        ] {
            if replicas_serve {
                // CLUSTER SLOTS leaves out a replica until the node knows its replication offset.
                cluster.wait_until("the replicas in CLUSTER SLOTS", |cluster, number| {
                    let slots: Vec<Vec<redis::Value>> = cluster.ask(number, &["CLUSTER", "SLOTS"]);
                    slots.iter().map(|range| range.len() - 3).sum::<usize>() == 3
                });
            }
            let mut connection = connect(builder(&cluster, FORBID).read_from(read_from)).await;
            for number in 0..30 {
                let () = connection.set(number, number).await.expect("SET");
            }
            cluster.wait_until("the replicas to have the writes", |cluster, number| {
                number < 3 || {
                    let sizes = [number, number - 3].map(|at| cluster.ask::<u64>(at, &["DBSIZE"]));
                    sizes[0] == sizes[1]
                }
            });
            let before = gets(&cluster);
            for number in 0..30_u64 {
                assert!(connection.get::<_, Option<u64>>(number).await.expect("GET").is_some());
            }
            let after = gets(&cluster);
            let grown: Vec<_> =
                after.iter().zip(before).map(|(after, before)| after - before).collect();
            let [primaries, replicas] = [&grown[..3], &grown[3..]].map(|it| it.iter().sum::<u64>());
            let expected = if replicas_serve { (0, 30) } else { (30, 0) };
            assert_eq!((primaries, replicas), expected, "{read_from:?}");
        }
        cluster.assert_healthy();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_in_at_every_node() {
    for program in engines() {
        let cluster = Cluster::start(&Shape::primaries(&program, 3));
        for node in 0..3 {
            let () = cluster.ask(node, &["CONFIG", "SET", "requirepass", "se:cret"]);
        }
        let [first, second] = [0, 1].map(|number: usize| cluster.nodes[number].address);
        // The port of a module works as well as that of an engine, and one server may be down.
        let module = cluster.nodes[0].module_address();
        let url = format!("redis://:se%3acret@127.0.0.1:1,{module},{second}?protocol=3");
        let client = ClusterClient::open(&url).expect("a URL");
        let mut connection = client.connect().await.expect("a cluster");
        for number in 0..30 {
            let () = connection.set(number, number).await.expect("SET");
        }
        let wrong = ClusterClient::open(&format!("redis://:wrong@{first}")).expect("a URL");
        let error = wrong.connect().await.expect_err("a wrong password");
        assert!(!error.to_string().contains("ferrite-cluster"), "{error}");
        assert!(error.to_string().contains("authentication failed"), "{error}");
    }
}

#[tokio::test]
async fn a_server_without_a_cluster_is_an_error() {
    let port = ferrite_testkit::free_port().to_string();
    let _redis = ferrite_testkit::Engine::redis(&["--port", &port]);
    let client = ClusterClient::open(&format!("127.0.0.1:{port}?rdma=forbid")).expect("a URL");
    let error = client.connect().await.expect_err("no cluster");
    assert!(error.to_string().contains("cluster"), "{error}");
    assert!(Client::open(&format!("127.0.0.1:{port}")).is_ok());
}

/// Runs load while slots move, and while a primary is killed and its replica takes over. One node
/// has no module. redis-rs's own client over TCP has the same load at the same time.
/// FERRITE_CLUSTER=full takes a minute in each engine and moves 1,000 slots.
#[tokio::test(flavor = "multi_thread")]
async fn has_no_more_errors_than_redis_rs_while_the_cluster_changes() {
    for program in engines() {
        let shape = Shape { replicas: 1, without_module: &[2], ..Shape::primaries(&program, 3) };
        cluster::changes_under_load(&shape, |cluster| builder(cluster, "")).await;
    }
}
