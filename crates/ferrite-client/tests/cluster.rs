//! What the tests of the cluster client share: connections, load, and redis-rs's own client for
//! comparison.
#![allow(dead_code, reason = "each test binary uses a part of it")]
#![expect(clippy::print_stdout, reason = "shows what a longer test has measured")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ferrite_client::redis::aio::ConnectionLike;
use ferrite_client::redis::{self, AsyncCommands as _, RedisError};
use ferrite_client::{ClientBuilder, ClusterClientBuilder, ClusterConnection};
use ferrite_testkit::cluster::{Cluster, Shape};

/// Returns a builder for a client that is given the first two nodes, at the ports of their engines.
pub(crate) fn builder(cluster: &Cluster, parameters: &str) -> ClusterClientBuilder {
    let [first, second] = [0, 1].map(|number: usize| cluster.nodes[number].address);
    let url = format!("redis://{first},{second}{parameters}");
    ClientBuilder::open(&url).expect("a URL").cluster()
}

pub(crate) async fn connect(builder: ClusterClientBuilder) -> ClusterConnection {
    builder.build().connect().await.expect("a cluster")
}

/// Returns a line for each node, with the bytes sent and received over each transport.
pub(crate) fn bytes(cluster: &Cluster, connection: &ClusterConnection) -> Vec<String> {
    let line = |number: usize| {
        let node = &cluster.nodes[number];
        let mut parts = connection.transports();
        parts.retain(|part| part.address == node.address.to_string());
        let parts = parts.iter().map(|part| {
            let (sent, received) = (part.sent_bytes, part.received_bytes);
            format!("{}: {sent} sent, {received} received", part.transport_info.transport)
        });
        format!("node {number} ({}): {}", node.id, parts.collect::<Vec<_>>().join("; "))
    };
    (0..cluster.nodes.len()).map(line).collect()
}

/// Load of several tasks on one client: each writes its own keys and reads them back.
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    counts: Arc<Counts>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) done: AtomicU64,
    /// Reads that did not return what was written before.
    pub(crate) wrong: AtomicU64,
    errors: std::sync::Mutex<BTreeMap<String, u64>>,
    slowest_ms: AtomicU64,
}

impl Counts {
    fn note(&self, error: &RedisError) {
        let kind = format!("{:?}", error.kind());
        *self.errors.lock().expect("not poisoned").entry(kind).or_default() += 1;
    }

    pub(crate) fn errors(&self) -> BTreeMap<String, u64> {
        self.errors.lock().expect("not poisoned").clone()
    }

    pub(crate) fn slowest(&self) -> Duration {
        Duration::from_millis(self.slowest_ms.load(Ordering::Relaxed))
    }
}

impl Load {
    /// Starts tasks that use keys whose names begin with `prefix`.
    pub(crate) fn start<C>(connection: &C, prefix: &str, tasks: u32) -> Self
    where
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        let (stop, counts) = (Arc::new(AtomicBool::new(false)), Arc::new(Counts::default()));
        let tasks = (0..tasks).map(|task| {
            let (stop, counts) = (Arc::clone(&stop), Arc::clone(&counts));
            let (mut connection, prefix) = (connection.clone(), format!("{prefix}:{task}"));
            tokio::spawn(async move {
                let mut round = 0_u64;
                while !stop.load(Ordering::Relaxed) {
                    round += 1;
                    let started = Instant::now();
                    let key = format!("{prefix}:{}", round % 1000);
                    match write_and_read(&mut connection, &key, round).await {
                        Ok(is_right) => {
                            counts.done.fetch_add(2, Ordering::Relaxed);
                            counts.wrong.fetch_add((!is_right).into(), Ordering::Relaxed);
                        }
                        Err(error) => counts.note(&error),
                    }
                    let ms = started.elapsed().as_millis() as u64;
                    counts.slowest_ms.fetch_max(ms, Ordering::Relaxed);
                }
            })
        });
        let tasks = tasks.collect();
        Self { stop, counts, tasks }
    }

    pub(crate) fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Ends the load.
    pub(crate) async fn end(self) -> Arc<Counts> {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.expect("no panic");
        }
        self.counts
    }
}

/// Returns whether the value that was read is the one that was written.
async fn write_and_read(
    connection: &mut (impl ConnectionLike + Send + Sync),
    key: &str,
    round: u64,
) -> redis::RedisResult<bool> {
    let () = connection.set(key, round).await?;
    let read: Option<u64> = connection.get(key).await?;
    Ok(read == Some(round))
}

/// Runs load on a cluster with three primaries and a replica of the first primary. Meanwhile, slots
/// move from the second primary to the third. Then the first primary is killed, and its replica
/// takes over. redis-rs's own client over TCP has the same load at the same time.
pub(crate) async fn changes_under_load(
    shape: &Shape<'_>,
    builder: impl Fn(&Cluster) -> ClusterClientBuilder,
) {
    let is_full = std::env::var("FERRITE_CLUSTER").is_ok_and(|value| value == "full");
    let (seconds, slots) = if is_full { (60, 1000) } else { (10, 40) };
    let mut cluster = Cluster::start(shape);
    let mut connection = connect(builder(&cluster)).await;
    let servers: Vec<_> =
        cluster.nodes.iter().map(|node| format!("redis://{}", node.address)).collect();
    let other = redis::cluster::ClusterClientBuilder::new(servers)
        .retries(16)
        .min_retry_wait(10)
        .max_retry_wait(1000)
        .response_timeout(Duration::from_secs(60))
        .overall_response_timeout(None)
        .build()
        .expect("a client");
    let other = other.get_async_connection().await.expect("a cluster");
    let (started, length) = (Instant::now(), Duration::from_secs(seconds));
    let ours = Load::start(&connection, "ours", 4);
    let theirs = Load::start(&other, "theirs", 4);

    let [first, _] = cluster.slots_of(1);
    for slot in first..first + slots {
        cluster.move_slot(slot, 1, 2);
        // The tasks of the load run meanwhile, on other threads.
        tokio::task::yield_now().await;
    }
    println!("{slots} slots moved in {:?}", started.elapsed());
    // All nodes have worked until here, so no request may have failed.
    let wrong = ours.counts().wrong.load(Ordering::Relaxed);
    assert_eq!((ours.counts().errors().len(), wrong), (0, 0), "{:?}", ours.counts().errors());

    tokio::time::sleep(length.saturating_sub(started.elapsed()) / 3).await;
    cluster.nodes[0].engine.kill();
    cluster.wait_until("the replica to take over", |cluster, number| {
        let role: String = cluster.ask(3, &["INFO", "replication"]);
        let info: String = cluster.ask(number, &["CLUSTER", "INFO"]);
        role.contains("role:master") && info.contains("cluster_state:ok")
    });
    println!("the replica has taken over after {:?}", started.elapsed());
    tokio::time::sleep(length.saturating_sub(started.elapsed())).await;
    let [ours, theirs] = [ours.end().await, theirs.end().await];
    for (name, counts) in [("ferrite", &ours), ("redis-rs", &theirs)] {
        println!(
            "{}: {name}: {} commands, errors {:?}, {} reads of another value, slowest {:?}",
            shape.program.display(),
            counts.done.load(Ordering::Relaxed),
            counts.errors(),
            counts.wrong.load(Ordering::Relaxed),
            counts.slowest()
        );
    }
    bytes(&cluster, &connection).iter().for_each(|line| println!("{line}"));
    assert!(ours.errors().is_empty(), "{:?}", ours.errors());
    // All nodes serve again, over the same connection.
    for number in 0..100 {
        let () = connection.set(number, number).await.expect("SET after the failover");
    }
    cluster.assert_healthy();
}
