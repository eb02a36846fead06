//! Full synchronisations beside the bus of a cluster, in the same links.
#![expect(clippy::print_stdout, reason = "people judge the load")]

use std::time::{Duration, Instant};

use ferrite_testkit::wait::until_or;
use ferrite_testkit::{Engine, TIMEOUT, until};

use super::nodes::Nodes;
use super::size::{megabytes, seconds};
use crate::agent::harness::{Group, NOBODY, PASSWORD, alias, operator, sum};
use crate::{OPTIONS, hosts};

/// The port of the primary and the replica beside the cluster.
const PORT: u16 = 7003;
/// How long a full synchronisation may take, also on a busy machine.
const SYNC_TIMEOUT: Duration = Duration::from_secs(240);
/// How long a node may be silent. On a busy machine, a live node may wait for a CPU for seconds.
const NODE_TIMEOUT_MS: &str = "5000";
/// What a node logs about another node that is silent for that long.
const POSSIBLY_FAILING: &str = "possibly failing";

/// The replica forgets its data again and again. The data is in the same links as the buses of
/// hosts 1 and 2.
#[test]
fn full_synchronisation_does_not_silence_the_bus() {
    let Some(hosts) = hosts(3) else { return };
    let group = Group::start(hosts, 3, &[OPTIONS, &["--ports", "7003"]].concat(), NOBODY);
    let log_all = ["--loglevel", "debug", "--cluster-node-timeout", NODE_TIMEOUT_MS];
    let nodes = Nodes::create(&group, false, [7001, 7002], &log_all);
    let auth = ["--requirepass", PASSWORD, "--masterauth", PASSWORD];
    let dataset = ["--enable-debug-command", "local", "--rdbcompression", "no"];
    let options = [&auth[..], &dataset, &["--repl-diskless-sync-delay", "0"]].concat();
    let engine = |host| group.start_engine(host, PORT, &options);
    let (primary, replica) = (engine(1), engine(2));
    let (duration, megabytes) = (seconds(10), megabytes(8));
    let keys = (megabytes * 100).to_string();
    operator(&primary).ok(&["DEBUG", "POPULATE", &keys, "key", "10000"]);
    let silent = || nodes.all.iter().map(|node| count(&node.engine)).sum::<usize>();
    let before = silent();
    let (begun, mut syncs) = (Instant::now(), 0);
    while begun.elapsed() < duration || syncs == 0 {
        synchronise(&replica);
        syncs += 1;
        assert_eq!(silent(), before, "after {syncs} full synchronisations");
    }
    let took = begun.elapsed();
    let bytes = sum(&group.scrape(1), "agent_bytes_total{", "direction=\"to_peer\"") / 1e6;
    println!(
        "{syncs} full synchronisations of {megabytes} MB in {took:.1?} ({bytes:.0} MB from host 1) \
         beside the bus: no node was silent for {NODE_TIMEOUT_MS} ms"
    );
    assert!(bytes >= (syncs * megabytes) as f64, "{bytes} MB");
    nodes.wait_until_whole();
    // Shows that the logs tell it.
    nodes.all[0].engine.signal("STOP");
    until(TIMEOUT, "a node that another one misses", || silent() > before);
    nodes.all[0].engine.signal("CONT");
}

fn synchronise(replica: &Engine) {
    let mut client = operator(replica);
    client.ok(&["REPLICAOF", "NO", "ONE"]);
    client.ok(&["FLUSHALL"]);
    client.ok(&["REPLICAOF", &alias(1), &PORT.to_string()]);
    let is_up =
        || operator(replica).text(&["INFO", "replication"]).contains("master_link_status:up");
    until_or(SYNC_TIMEOUT, "a replica that is up", is_up, || replica.log());
}

/// Returns how often a node has found another one silent.
fn count(node: &Engine) -> usize {
    node.log().matches(POSSIBLY_FAILING).count()
}
