//! The cluster client over RDMA, in the lab's guest (`cargo xtask lab-test client::lab_cluster`):
//! all nodes on 10.0.0.1 (rxe1), clients on 10.0.0.2 (rxe2).

mod cluster;

use std::net::IpAddr;
use std::path::Path;

use cluster::connect;
use ferrite_client::redis::AsyncCommands as _;
use ferrite_client::{ClientBuilder, ClusterClientBuilder, SessionTransport};
use ferrite_testkit::cluster::{Cluster, Shape};
use ferrite_testkit::engine::REDIS;

const HOST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));

/// Three primaries and a replica of the first. Node 2 has no module.
fn shape() -> Shape<'static> {
    Shape { replicas: 1, without_module: &[2], ip: HOST, ..Shape::primaries(Path::new(REDIS), 3) }
}

/// Returns a builder for a client on the other host that is given these servers. Waits until the
/// modules have found each other.
fn builder(cluster: &Cluster, servers: &str, parameters: &str) -> ClusterClientBuilder {
    cluster.wait_until("the endpoints of all modules", |cluster, number| {
        number == 2 || cluster.nodes[number].engine.count("cluster_endpoints") == 2
    });
    let url = format!("redis://{servers}{parameters}");
    let local = "10.0.0.2:0".parse().expect("an address");
    ClientBuilder::open(&url).expect("a URL").local(local).cluster()
}

/// Returns the transports to each node by its number, and the bytes that they have carried.
fn transports(
    cluster: &Cluster,
    connection: &ferrite_client::ClusterConnection,
) -> Vec<(usize, SessionTransport, u64)> {
    let number = |address: &String| {
        cluster.nodes.iter().position(|node| node.address.to_string() == *address)
    };
    let parts = connection.transports().into_iter().filter_map(|part| {
        let bytes = part.sent_bytes + part.received_bytes;
        Some((number(&part.address)?, part.transport_info.transport, bytes))
    });
    parts.collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_with_the_module_are_reached_over_rdma() {
    let mut cluster = Cluster::start(&shape());
    // The server may be a module, an engine with a module, or an engine without one.
    let servers = [
        cluster.nodes[0].module_address().to_string(),
        cluster.nodes[0].address.to_string(),
        cluster.nodes[2].address.to_string(),
    ];
    for server in servers {
        let mut connection = connect(builder(&cluster, &server, "")).await;
        for number in 0..300 {
            let () = connection.set(number, number).await.expect("SET");
        }
        for number in 0..300_u64 {
            assert_eq!(connection.get::<_, u64>(number).await.expect("GET"), number);
        }
        let used = transports(&cluster, &connection);
        for (node, expected) in [
            (0, SessionTransport::FerriteRdma),
            (1, SessionTransport::FerriteRdma),
            (2, SessionTransport::Tcp),
        ] {
            let mut parts: Vec<_> = used.iter().filter(|(number, ..)| *number == node).collect();
            parts.sort_by_key(|(.., bytes)| *bytes);
            let (_, transport, bytes) = parts.last().expect("a connection");
            assert_eq!(*transport, expected, "{server}: {used:?}");
            assert!(*bytes > 2000, "{server}: {used:?}");
        }
    }
    cluster.assert_healthy();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_required_transport_names_the_node_that_lacks_it() {
    let mut cluster = Cluster::start(&shape());
    let server = cluster.nodes[0].module_address().to_string();
    let mut connection = connect(builder(&cluster, &server, "?rdma=require")).await;
    let mut errors = Vec::new();
    for number in 0..100 {
        if let Err(error) = connection.set::<_, _, ()>(number, number).await {
            errors.push(error.to_string());
        }
    }
    assert!((20..50).contains(&errors.len()), "a third of the keys: {errors:?}");
    for error in errors {
        assert!(error.contains(&cluster.nodes[2].id) && error.contains("over RDMA"), "{error}");
    }
    let used = transports(&cluster, &connection);
    assert!(used.iter().all(|(_, transport, _)| *transport == SessionTransport::FerriteRdma));
    cluster.assert_healthy();
}

#[tokio::test(flavor = "multi_thread")]
async fn pipelines_and_splits_work_over_rdma() {
    let mut cluster = Cluster::start(&shape());
    let server = cluster.nodes[1].module_address().to_string();
    let mut connection = connect(builder(&cluster, &server, "?protocol=3")).await;
    let keys: Vec<_> = (0..200).map(|number| format!("key{number}")).collect();
    let mut pipeline = ferrite_client::redis::pipe();
    for key in &keys {
        pipeline.set(key, vec![7_u8; 20_000]).ignore().strlen(key);
    }
    let lengths: Vec<u64> = pipeline.query_async(&mut connection).await.expect("replies");
    assert_eq!(lengths, vec![20_000; keys.len()]);
    let values: Vec<Vec<u8>> = connection.mget(&keys).await.expect("MGET");
    assert!(values.iter().all(|value| value.len() == 20_000) && values.len() == keys.len());
    assert_eq!(connection.del::<_, u64>(&keys).await.expect("DEL"), 200);
    cluster.assert_healthy();
}

/// As in `host_cluster`, over RDMA to three of four nodes.
#[tokio::test(flavor = "multi_thread")]
async fn has_no_more_errors_than_redis_rs_while_the_cluster_changes() {
    cluster::changes_under_load(&shape(), |cluster| {
        let servers: Vec<_> =
            [0, 1].map(|number: usize| cluster.nodes[number].address.to_string()).into();
        builder(cluster, &servers.join(","), "")
    })
    .await;
}
