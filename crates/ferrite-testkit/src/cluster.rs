//! Clusters: a node that knows another node, which does not exist, and clusters that run.
//!
//! With the first, one engine is enough to test redirects.

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
    let is_valkey = program.file_name().is_some_and(|name| name == "valkey-server");
    // Without shard ids Valkey 9.1 fails an assertion in SPUBLISH. Redis 7.0 does not know them.
    let shard = |id: &str| if is_valkey { format!(",,shard-id={id}") } else { String::new() };
    // The engine replaces its own address when it starts.
    let known = format!(
        "{OWN_NODE} 127.0.0.1:7@17{} myself,master - 0 0 1 connected 0-8191\n\
         {OTHER_NODE} 127.0.0.1:9@19{} master - 0 0 2 connected 8192-16383\n\
         vars currentEpoch 2 lastVoteEpoch 0\n",
        shard(OWN_NODE),
        shard(OTHER_NODE)
    );
    let bus = free_port().to_string();
    let file = directory.join(&format!("nodes-{bus}.conf"));
    std::fs::write(&file, known).expect("a file");
    [
        ["--cluster-enabled", "yes"],
        ["--cluster-port", &bus],
        ["--cluster-config-file", file.to_str().expect("UTF-8")],
        ["--cluster-require-full-coverage", "no"],
        // The other node never responds. When the engine notices that, the cluster is down.
        ["--cluster-node-timeout", "3600000"],
    ]
    .concat()
    .into_iter()
    .map(str::to_owned)
    .collect()
}
