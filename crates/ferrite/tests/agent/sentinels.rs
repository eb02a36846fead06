//! Replication with three Sentinels in transparent mode. Neither engines nor Sentinels have
//! settings for their addresses.

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::process::Command;

use ferrite_testkit::directory::TempDir;
use ferrite_testkit::process::KillOnDrop;
use ferrite_testkit::resp::{Client, text_of};
use ferrite_testkit::wait::until_or;
use ferrite_testkit::{Engine, TIMEOUT, until};

use super::cluster::{compare, write};
use super::harness::{Group, PASSWORD, sum};
use super::killed::AUTH;

const PORT: u16 = 7001;
const SENTINEL: u16 = 26379;
/// How long a primary may be silent. On a busy machine, it may wait for a CPU for seconds.
const DOWN_AFTER_MS: &str = "5000";

/// The engines that run, by host.
type Engines = BTreeMap<usize, Engine>;

/// An operator replaces the primary, and then the Sentinels replace a killed primary. After each
/// step, all keys are compared, on all engines.
pub(crate) fn replace_primaries(group: &Group, over_tcp: bool) {
    let mut engines = Engines::new();
    engines.insert(1, group.start_engine(1, PORT, &AUTH));
    let first = group.address(1);
    let of = [&AUTH[..], &["--replicaof", &first, "7001"]].concat();
    for host in 2..=3 {
        engines.insert(host, group.start_engine(host, PORT, &of));
    }
    wait_for_replicas(group, &engines, 1);
    write(&mut group.client(2, 1, PORT), 0);
    compare_all(group, &engines, 1, 0);
    let sentinels = [1, 2, 3].map(|host| Sentinel::start(group, host));
    for (host, sentinel) in (1..=3).zip(&sentinels) {
        let connect = || TcpStream::connect(("127.0.0.1", SENTINEL)).is_ok();
        until_or(TIMEOUT, "a sentinel", || group.hosts.within(host, connect), || sentinel.log());
    }
    wait_for_sentinels(group, &sentinels, 1);
    group.assert_only_links(over_tcp);

    // A Sentinel may refuse it until it has heard from a replica.
    let begins = || client(group, 2).ask(&["SENTINEL", "FAILOVER", "group"]) == "+OK";
    until_or(TIMEOUT, "a failover", begins, || sentinels[1].log());
    let second = wait_for_another_primary(group, &engines, &sentinels, 1);
    wait_for_sentinels(group, &sentinels, second);
    compare_all(group, &engines, second, 0);
    write(&mut group.client(1, second, PORT), 1);
    compare_all(group, &engines, second, 1);

    engines.remove(&second).expect("the primary").kill();
    let third = wait_for_another_primary(group, &engines, &sentinels, second);
    compare_all(group, &engines, third, 1);
    write(&mut group.client(second, third, PORT), 2);
    compare_all(group, &engines, third, 2);
    group.assert_only_links(over_tcp);
    for host in 1..=3 {
        assert!(sum(&group.scrape(host), "agent_direct_connections_total", "") == 0.0);
    }
}

/// Compares all keys on all engines, which other hosts read. `version` is that of the values.
fn compare_all(group: &Group, engines: &Engines, primary: usize, version: usize) {
    let mut client = group.client(primary % 3 + 1, primary, PORT);
    client.ok(&["SET", "written last", "x"]);
    let replicas = (engines.len() - 1).to_string();
    assert_eq!(client.ask(&["WAIT", &replicas, "30000"]), format!(":{replicas}"));
    for host in engines.keys() {
        compare(&mut group.client(host % 3 + 1, *host, PORT), version);
    }
}

/// Returns whether a field of INFO has this value. A Sentinel closes the connections of an engine
/// that gets another role; then it has not.
fn has(engine: &Engine, name: &str, value: &str) -> bool {
    let mut client = engine.client();
    client.send(&[vec!["AUTH", PASSWORD], vec!["INFO"]]);
    let replies = [client.next_reply(), client.next_reply()];
    let [_, Some(info)] = replies else { return false };
    text_of(&info).lines().any(|line| line.trim() == format!("{name}:{value}"))
}

/// Waits until all other engines are replicas of this one.
fn wait_for_replicas(group: &Group, engines: &Engines, primary: usize) {
    for (_, engine) in engines.iter().filter(|(host, _)| **host != primary) {
        engine.wait_until("a replica of the primary", || {
            has(engine, "role", "slave")
                && has(engine, "master_host", &group.address(primary))
                && has(engine, "master_link_status", "up")
        });
    }
}

/// Waits until every Sentinel knows the primary, two replicas, and the other Sentinels.
fn wait_for_sentinels(group: &Group, sentinels: &[Sentinel], primary: usize) {
    let all = format!("status=ok,address={}:{PORT},slaves=2,sentinels=3", group.address(primary));
    for (host, sentinel) in (1..=3).zip(sentinels) {
        let knows = || client(group, host).text(&["INFO", "sentinel"]).contains(&all);
        until_or(TIMEOUT, "a sentinel that knows all others", knows, || sentinel.log());
    }
}

/// Waits until all Sentinels name another primary, and all other engines are its replicas.
fn wait_for_another_primary(
    group: &Group,
    engines: &Engines,
    sentinels: &[Sentinel],
    old: usize,
) -> usize {
    let mut new = None;
    for (host, sentinel) in (1..=3).zip(sentinels) {
        let names_another = || {
            let mut client = client(group, host);
            let asked = ["SENTINEL", "get-master-addr-by-name", "group"];
            client.send(&[asked.map(String::from).to_vec()]);
            let reply = client.replies(1).remove(0);
            let reply = String::from_utf8_lossy(&reply).into_owned();
            let mut others = engines.keys().filter(|host| **host != old);
            new = others.find(|host| reply.contains(&group.address(**host))).copied();
            new.is_some()
        };
        until_or(TIMEOUT, "another primary", names_another, || sentinel.log());
    }
    let new = new.expect("a host");
    until(TIMEOUT, "the role of a primary", || has(&engines[&new], "role", "master"));
    wait_for_replicas(group, engines, new);
    new
}

/// Returns a client of a host's Sentinel, on another host.
fn client(group: &Group, of: usize) -> Client {
    let address = group.address(of);
    group.hosts.within(of % 3 + 1, || Client::to_tcp((address.as_str(), SENTINEL)))
}

/// A Sentinel on a host.
struct Sentinel {
    _process: KillOnDrop,
    directory: TempDir,
}

impl Sentinel {
    fn start(group: &Group, host: usize) -> Self {
        let start = || {
            let directory = TempDir::new("sentinel");
            let lines = format!(
                "port {SENTINEL}\ndir {}\nlogfile {}\nsentinel monitor group {} {PORT} 2\n\
                 sentinel auth-pass group {PASSWORD}\n\
                 sentinel down-after-milliseconds group {DOWN_AFTER_MS}\n\
                 sentinel failover-timeout group 20000\n",
                directory.path().display(),
                directory.join("log").display(),
                group.address(1),
            );
            let file = directory.file("sentinel.conf", lines);
            let mut command = Command::new(&group.engines.path);
            let process = command.arg(&file).arg("--sentinel").spawn().expect("a sentinel");
            Self { _process: KillOnDrop(process), directory }
        };
        group.hosts.within(host, || group.engines.run(start))
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.join("log")).unwrap_or_default()
    }
}
