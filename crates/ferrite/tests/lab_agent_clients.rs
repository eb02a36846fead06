//! Unchanged cluster clients of others through agents whose RDMA path is cut, and the same clients
//! directly over TCP beside them. Needs the programs that `lab/agent-clients setup` installs.
//!
//! ```text
//!   host 4: clients ──► 127.1.0.1-3:7001-7002 ── agents, links over RDMA ──► cluster 1
//!           clients ──► 10.77.0.1-3:7003-7004 ── TCP ──────────────────────► cluster 2
//! ```
//!
//! Both clusters have three primaries and three replicas on hosts 1 to 3, so both are used at the
//! same time on the same machine. A cut loses the RoCE packets of one host, until all its links
//! have moved to TCP and the clients continue. During the first [`DIRECT_CUT`], it also loses the
//! TCP packets of cluster 2.
//!
//! A client may report only errors that it also reports over TCP.

mod agent {
    pub(crate) mod harness;
    pub(crate) mod wire;
}
mod agent_clients {
    pub(crate) mod path;
    pub(crate) mod program;
}
mod metrics {
    pub(crate) mod harness;
}

use std::path::PathBuf;
use std::time::{Duration, Instant};

use agent::harness::{Group, NOBODY, PASSWORD, alias, sum};
use agent_clients::path::Cut;
use agent_clients::program::Program;
use ferrite_testkit::lab::sh;
use ferrite_testkit::netns::Hosts;
use ferrite_testkit::{Engine, Start, TIMEOUT, until};

/// The host of the clients. The hosts before it have engines.
const CLIENTS: usize = 4;
/// The time for which a cut loses TCP packets, about as long as links need to move to TCP. After
/// that, TCP sends the packets again within about two seconds.
const DIRECT_CUT: Duration = Duration::from_secs(2);
/// The number of rounds of each client that must succeed during a cut, and after it.
const ROUNDS: u64 = 10;
const OPTIONS: &[&str] = &["--rdma", "prefer", "--direct", "refuse", "--rdma-device", "DEVICE"];

/// A cluster, and programs that use it.
struct Arm {
    name: &'static str,
    ports: [u16; 2],
    address: fn(usize) -> String,
    engines: Vec<Engine>,
    programs: Vec<Program>,
}

impl Arm {
    /// Starts three primaries and three replicas.
    fn start(
        group: &Group,
        name: &'static str,
        ports: [u16; 2],
        address: fn(usize) -> String,
    ) -> Self {
        let mut engines = Vec::new();
        let mut words = vec!["--cluster".to_owned(), "create".into()];
        for port in ports {
            for host in 1..CLIENTS {
                let (own, port) = (address(host), port.to_string());
                let mut options = vec!["--port", &port, "--bind", &own, "--bind-source-addr", &own];
                options.extend(["--requirepass", PASSWORD, "--masterauth", PASSWORD]);
                options.extend(["--cluster-enabled", "yes", "--cluster-node-timeout", "15000"]);
                options.extend(["--repl-diskless-sync-delay", "0"]);
                let start = || Engine::start(&Start::redis(&options));
                engines.push(group.hosts.within(host, start));
                words.push(format!("{own}:{port}"));
            }
        }
        words.extend(["--cluster-replicas", "1", "--cluster-yes"].map(Into::into));
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        let text = group.redis_cli(CLIENTS, &words);
        assert!(text.contains("[OK] All 16384 slots covered"), "{text}");
        for engine in &engines {
            engine.wait_until("a node of a cluster that works", || {
                let mut operator = engine.client();
                operator.ok(&["AUTH", PASSWORD]);
                operator.text(&["CLUSTER", "INFO"]).contains("cluster_state:ok")
                    && operator.text(&["CLUSTER", "NODES"]).matches("slave").count() == 3
                    && !operator.text(&["INFO", "replication"]).contains("link_status:down")
            });
        }
        Self { name, ports, address, engines, programs: Vec::new() }
    }

    fn start_programs(&mut self, group: &Group, paths: &[PathBuf]) {
        for (number, path) in paths.iter().enumerate() {
            // The programs begin at different nodes.
            let node = (self.address)(1 + number % 3);
            let prefix = path.file_name().expect("a name").to_string_lossy();
            let start = || Program::start(path, (&node, self.ports[0]), PASSWORD, &prefix);
            let program = group.hosts.within(CLIENTS, start);
            // One after another, because their start costs much CPU time.
            program.wait_for_start();
            self.programs.push(program);
        }
    }

    fn wait_for(&self, rounds: u64, what: &str) {
        for program in &self.programs {
            program.wait_for(rounds, &format!("{}, {what}", self.name));
        }
    }

    /// Returns the number of connections that the engines have accepted on their ports.
    fn connections(&self) -> u64 {
        let of = |engine: &Engine| -> u64 {
            let mut operator = engine.client();
            operator.ok(&["AUTH", PASSWORD]);
            let stats = operator.text(&["INFO", "stats"]);
            let count = |line: &str| line.strip_prefix("total_connections_received:")?.parse().ok();
            stats.lines().find_map(count).expect("the count of connections")
        };
        self.engines.iter().map(of).sum()
    }

    #[expect(clippy::print_stdout, reason = "people judge the figures")]
    fn finish(&mut self) {
        for program in &mut self.programs {
            program.finish();
            let report = program.report();
            println!(
                "{:>6}, {}: {} rounds, at most {:.1?} between two, {} errors, {} wrong replies",
                self.name,
                program.name,
                report.rounds,
                report.longest_gap,
                report.errors.len(),
                report.wrong.len()
            );
            for error in report.errors.iter().take(5) {
                println!("        {error}");
            }
        }
    }
}

/// Returns the programs to run.
fn programs() -> Option<Vec<PathBuf>> {
    let directory = std::env::var_os("FERRITE_AGENT_CLIENTS")?;
    let files = std::fs::read_dir(&directory).expect("the directory of the clients");
    let mut paths: Vec<_> = files.map(|file| file.expect("a file").path()).collect();
    paths.sort();
    assert!(!paths.is_empty(), "{} is empty", directory.display());
    Some(paths)
}

/// Returns whether RDMA carries all links of a host (`true`), or none of them (`false`).
fn are_links_on_rdma(group: &Group, host: usize, wanted: bool) -> bool {
    // Scrapes cost CPU time, which the agents need.
    std::thread::sleep(Duration::from_millis(300));
    let samples = group.scrape(host);
    let on_rdma = sum(&samples, "agent_links{", "transport=\"rdma\"");
    let all = sum(&samples, "agent_links{", "");
    let expected = if wanted { all } else { 0.0 };
    all >= (CLIENTS - 1) as f64 && (on_rdma - expected).abs() < f64::EPSILON
}

#[test]
#[expect(clippy::print_stdout, reason = "people judge the figures")]
#[expect(clippy::print_stderr, reason = "reports that the test is skipped")]
fn clients_of_others_see_no_error_that_tcp_does_not_show() {
    let Some(paths) = programs() else {
        eprintln!("SKIPPED: FERRITE_AGENT_CLIENTS is not set; see lab/agent-clients");
        return;
    };
    let cuts = std::env::var("FERRITE_CUTS").ok().and_then(|cuts| cuts.parse().ok()).unwrap_or(6);
    let hosts = Hosts::start(CLIENTS).expect("the lab runs tests as root");
    hosts.add_devices();
    sh("chmod 666 /dev/infiniband/*");
    let direct = |host: usize| format!("10.77.0.{host}");
    let group = Group::start_with_tls(hosts, CLIENTS, OPTIONS, NOBODY);
    let mut arms = [
        Arm::start(&group, "agents", [7001, 7002], alias),
        Arm::start(&group, "tcp", [7003, 7004], direct),
    ];
    for arm in &mut arms {
        arm.start_programs(&group, &paths);
    }
    let all_on_rdma = || (1..=CLIENTS).all(|host| are_links_on_rdma(&group, host, true));
    until(TIMEOUT, "all links on RDMA", all_on_rdma);
    let wait_for = |what: &str| arms.iter().for_each(|arm| arm.wait_for(ROUNDS, what));
    wait_for("at first");
    let connections = [arms[0].connections(), arms[1].connections()];
    for number in 0..cuts {
        let host = [CLIENTS, 1, CLIENTS, 2, CLIENTS, 3][number % 6];
        let what = format!("cut {number}, of host {host}");
        let begun = Instant::now();
        let cut = Cut::new(&group.hosts, host, &[7003, 7004, 17003, 17004]);
        let moved = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(DIRECT_CUT);
                cut.mend_tcp();
            });
            until(TIMEOUT, &what, || are_links_on_rdma(&group, host, false));
            begun.elapsed()
        });
        wait_for(&what);
        drop(cut);
        let mended = Instant::now();
        until(TIMEOUT, &format!("{what}: all links on RDMA again"), all_on_rdma);
        let back = mended.elapsed();
        wait_for(&format!("after {what}"));
        println!("{what}: links on TCP after {moved:.1?}; back on RDMA after {back:.1?}");
    }
    for (arm, before) in arms.iter_mut().zip(connections) {
        // Each count adds a connection to each engine.
        let more = arm.connections() - before - arm.engines.len() as u64;
        println!("{:>6}: {more} connections opened since the first cut", arm.name);
        arm.finish();
    }
    let [agents, tcp] = &arms;
    for (through_agents, over_tcp) in agents.programs.iter().zip(&tcp.programs) {
        let name = &through_agents.name;
        assert_eq!(through_agents.report().wrong, over_tcp.report().wrong, "{name}");
        assert!(through_agents.report().wrong.is_empty(), "{name}");
        let kinds = through_agents.report().kinds();
        let more: Vec<_> = kinds.difference(&over_tcp.report().kinds()).cloned().collect();
        assert!(more.is_empty(), "{name}: errors that TCP does not show: {more:?}");
    }
    for host in 1..=CLIENTS {
        let samples = group.scrape(host);
        for counter in ["agent_links_lost_total", "agent_connections_refused_total"] {
            assert!(sum(&samples, counter, "") == 0.0, "host {host}: {samples:?}");
        }
    }
}
