//! Clusters of engines: options of their nodes, and clusters that run.
//!
//! Nodes with these options know their cluster from the start, so that no test has to wait until
//! nodes have met. [`node_options`] is for a node that knows another node, which does not exist. So
//! one engine is enough to test redirects. [`cluster_options`] is for a whole cluster.

#[cfg(feature = "redis")]
mod running;

use std::path::Path;

#[cfg(feature = "redis")]
pub use running::{Cluster, Node, SLOTS, Shape};

use crate::directory::TempDir;
use crate::port::free_port;

/// The id of the node that does not exist. It has the slots from 8192 on.
pub const OTHER_NODE: &str = "2222222222222222222222222222222222222222";
const OWN_NODE: &str = "1111111111111111111111111111111111111111";

/// Returns the options of a node that has the slots up to 8191. The node keeps its state in
/// `directory`.
///
/// # Panics
/// If the file with that state cannot be written.
#[must_use]
pub fn node_options(program: &Path, directory: &TempDir) -> Vec<String> {
    let shard = |id: &str| shard(program, id);
    // The engine replaces its own address when it starts.
    let known = format!(
        "{OWN_NODE} 127.0.0.1:7@17{} myself,master - 0 0 1 connected 0-8191\n\
         {OTHER_NODE} 127.0.0.1:9@19{} master - 0 0 2 connected 8192-16383\n\
         vars currentEpoch 2 lastVoteEpoch 0\n",
        shard(OWN_NODE),
        shard(OTHER_NODE)
    );
    // The other node never responds. After the timeout, the engine would regard the cluster as
    // down. The timeout is an hour, so this does not happen during a test.
    options(directory, free_port(), &known, "3600000")
}

/// Returns the id of a node of [`cluster_options`], by its number.
#[must_use]
pub fn node_id(number: usize) -> String {
    format!("{:040x}", number + 1)
}

/// Returns the options of all nodes of a cluster, with their ports. The primaries come first and
/// share all slots evenly. Then come the replicas: node `primaries + n` is a replica of node `n`.
/// The nodes keep their state in `directory`.
///
/// # Panics
/// If the files with that state cannot be written.
#[must_use]
pub fn cluster_options(
    program: &Path,
    directory: &TempDir,
    primaries: usize,
    replicas: usize,
) -> Vec<Vec<String>> {
    let ports: Vec<_> = (0..primaries + replicas).map(|_| (free_port(), free_port())).collect();
    let line = |number: usize, myself: &str| {
        let (port, bus) = ports[number];
        let (id, of) = (node_id(number), node_id(number % primaries));
        let role = if number < primaries { "master -".into() } else { format!("slave {of}") };
        let [from, end] = [number, number + 1].map(|part| 16384 * part / primaries);
        let slots = if number < primaries { format!(" {from}-{}", end - 1) } else { String::new() };
        let (shard, epoch) = (shard(program, &of), number % primaries + 1);
        format!("{id} 127.0.0.1:{port}@{bus}{shard} {myself}{role} 0 0 {epoch} connected{slots}\n")
    };
    (0..ports.len())
        .map(|own| {
            let mut known: String = (0..ports.len())
                .map(|number| line(number, if number == own { "myself," } else { "" }))
                .collect();
            known.push_str(&format!("vars currentEpoch {primaries} lastVoteEpoch 0\n"));
            let (port, bus) = ports[own];
            let mut all = options(directory, bus, &known, "3000");
            all.extend(["--port".to_owned(), port.to_string()]);
            all
        })
        .collect()
}

/// Returns the shard id of a node, as the state of a cluster contains it. Without shard ids Valkey
/// 9.1 fails an assertion in SPUBLISH. Redis 7.0 does not know them.
fn shard(program: &Path, id: &str) -> String {
    let is_valkey = program.file_name().is_some_and(|name| name == "valkey-server");
    if is_valkey { format!(",,shard-id={id}") } else { String::new() }
}

/// Writes the cluster's state that a node knows, and returns the node's options.
fn options(directory: &TempDir, bus: u16, known: &str, timeout_ms: &str) -> Vec<String> {
    let file = directory.join(&format!("nodes-{bus}.conf"));
    std::fs::write(&file, known).expect("a file");
    [
        ["--cluster-enabled", "yes"],
        ["--cluster-port", &bus.to_string()],
        ["--cluster-config-file", file.to_str().expect("UTF-8")],
        ["--cluster-require-full-coverage", "no"],
        ["--cluster-node-timeout", timeout_ms],
    ]
    .concat()
    .into_iter()
    .map(str::to_owned)
    .collect()
}
