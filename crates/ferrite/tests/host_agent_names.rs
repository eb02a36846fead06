//! `ferrite agent` with names of hosts in its list of peers: names without an answer, with wrong
//! answers, and with answers that change. The hosts are network namespaces, and the links use TCP.
//! The tests need root.

mod agent {
    pub(crate) mod harness;
    pub(crate) mod wire;
}
mod metrics {
    pub(crate) mod harness;
}

use std::fs;
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use agent::harness::{accept_all, alias, is_carried};
use agent::wire;
use ferrite_testkit::netns::Hosts;
use ferrite_testkit::{TIMEOUT, TempDir, until};
use metrics::harness::Running;

/// The names that an agent knows.
struct Names {
    /// Its /etc/hosts.
    file: PathBuf,
    servers: PathBuf,
    _directory: TempDir,
}

impl Names {
    /// Returns names with these lines in /etc/hosts. All other names are asked of a server.
    fn new(lines: &str, server: &str) -> Self {
        let directory = TempDir::new("names");
        let file = directory.file("hosts", lines);
        let servers = directory.file("resolv.conf", format!("nameserver {server}\n"));
        Self { file, servers, _directory: directory }
    }

    fn set(&self, lines: &str) {
        fs::write(&self.file, lines).expect("written");
    }

    /// Starts an agent with these peers, without protected mode.
    fn start(&self, hosts: &Hosts, host: usize, peers: &[&str]) -> Running {
        let mount = format!(
            "mount --bind {} /etc/hosts && mount --bind {} /etc/resolv.conf && exec \"$0\" \"$@\"",
            self.file.display(),
            self.servers.display()
        );
        let (listen, alias) = (hosts.ip(host), alias(host));
        let words = ["agent", "--alias", &alias, "--listen", &listen, "--protected-mode", "no"];
        let more = ["--ports", "7001", "--rdma", "forbid", "--allow-unauthenticated-peers", "yes"];
        let peers = peers.iter().flat_map(|peer| ["--peer", peer]);
        let words: Vec<_> = words.into_iter().chain(more).chain(peers).collect();
        let agent = Running::command(&words);
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", &mount]).arg(agent.get_program()).args(agent.get_args());
        hosts.within(host, || Running::spawn(&mut command))
    }
}

/// Starts an agent on host 1 that knows host 2 by its name, and one on host 2.
fn start_pair(hosts: &Hosts, names: &Names) -> [Running; 2] {
    [
        names.start(hosts, 1, &["127.1.0.2=host2.test"]),
        names.start(hosts, 2, &["127.1.0.1=10.77.0.1"]),
    ]
}

/// Waits until the agent of host 1 is not ready for a reason that has these texts.
#[track_caller]
fn wait_for_reason(hosts: &Hosts, agents: &[Running; 2], texts: &[&str]) {
    until(TIMEOUT, texts[0], || {
        let (status, body) = hosts.within(1, || agents[0].get("/ready"));
        assert_eq!(status, 503, "{body}");
        texts.iter().all(|text| body.contains(text))
    });
}

/// Waits until both agents are ready: without TLS, each accepts only links from the address of a
/// peer.
#[track_caller]
fn wait_for_links(hosts: &Hosts, agents: &[Running; 2]) {
    for (host, agent) in [1, 2].into_iter().zip(agents) {
        until(TIMEOUT, "links", || hosts.within(host, || agent.get("/ready").0 == 200));
    }
}

/// The agent starts without the address of a peer, and looks for it again.
#[test]
fn name_of_a_peer_may_be_unknown_at_the_start() {
    let Some(hosts) = Hosts::start_or_skip(2) else { return };
    // No server of names answers in the namespace, which the agent notices at once.
    let names = Names::new("127.0.0.1 localhost\n", "127.0.0.1");
    let agents = start_pair(&hosts, &names);
    let unknown = ["127.1.0.2 (host2.test:7470)", "cannot resolve host2.test"];
    wait_for_reason(&hosts, &agents, &unknown);
    names.set("10.77.0.2 host2.test\n");
    wait_for_links(&hosts, &agents);
    accept_all(&hosts, 2, ("127.1.0.2", 7001));
    let mut program = hosts.within(1, || TcpStream::connect(("127.1.0.2", 7001)).expect("agent"));
    program.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
    assert!(is_carried(&mut program));
}

/// First an address of this host, which the agent must not connect to, then one where no agent is.
#[test]
fn wrong_address_of_a_name_does_not_stay() {
    let Some(hosts) = Hosts::start_or_skip(3) else { return };
    let names = Names::new("10.77.0.1 host2.test\n", "127.0.0.1");
    let agents = start_pair(&hosts, &names);
    let own = ["127.1.0.2 (host2.test:7470)", "10.77.0.1 is an address of this host"];
    wait_for_reason(&hosts, &agents, &own);
    names.set("10.77.0.3 host2.test\n");
    wait_for_reason(&hosts, &agents, &["127.1.0.2 (10.77.0.3:7470)"]);
    names.set("10.77.0.2 host2.test\n");
    wait_for_links(&hosts, &agents);
}

/// The server of names drops all questions, so each takes 10 s.
#[test]
fn names_without_an_answer_do_not_delay_the_start() {
    let Some(hosts) = Hosts::start_or_skip(2) else { return };
    let drop_all = "add table ip names; \
                    add chain ip names in { type filter hook input priority 0; }; \
                    add rule ip names in udp dport 53 drop";
    wire::nft(&hosts, 2, drop_all);
    let names = Names::new("127.0.0.1 localhost\n", "10.77.0.2");
    let begun = Instant::now();
    let peers = ["127.1.0.2=b.test", "127.1.0.3=c.test", "127.1.0.4=d.test"];
    let agent = names.start(&hosts, 1, &peers);
    assert!(begun.elapsed() < Duration::from_secs(9), "{:?}", begun.elapsed());
    let (status, body) = hosts.within(1, || agent.get("/ready"));
    assert!(status == 503 && body.contains("127.1.0.4 (d.test:7470)"), "{status} {body}");
}
