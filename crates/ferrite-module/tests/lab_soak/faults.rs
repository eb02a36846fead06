//! The faults that happen to engines and clients, one at a time.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::time::sleep;

use crate::connection::Connection;
use crate::fuzz;
use crate::world::World;
use ferrite_testkit::Random;

/// The variable with the address that clients in a separate process connect to.
pub(crate) const PROCESS: &str = "FERRITE_SOAK_PROCESS";
const TIMEOUT: Duration = Duration::from_secs(60);

const FAULTS: &[&str] = &[
    "clients dropped",
    "clients vanish",
    "clients killed",
    "FERRITE KILL",
    "wire cut",
    "wire bad",
    "CONFIG SET",
    "BGSAVE",
    "BGREWRITEAOF",
    "FLUSHALL",
    "FAILOVER",
    "protocol violations",
    "invalid commands",
];

/// Settings and the values that they are set to.
const SETTINGS: &[(&str, &[&str])] = &[
    ("ferrite.rx-size", &["4kb", "16kb", "64kb", "2mb"]),
    ("ferrite.rx-size-max", &["64kb", "2mb"]),
    ("ferrite.busy-poll-us", &["0", "0", "5", "20"]),
    ("ferrite.slice-us", &["500", "50", "5000"]),
    ("ferrite.max-clients", &["100", "10000"]),
    ("maxmemory", &["1gb", "0"]),
    ("maxmemory-policy", &["noeviction", "allkeys-lfu", "allkeys-lru"]),
    ("appendonly", &["yes", "yes", "no"]),
    ("appendfsync", &["always", "everysec", "no"]),
    ("timeout", &["0", "0", "1000"]),
    ("maxclients", &["500", "1000"]),
    ("lazyfree-lazy-user-del", &["yes", "no"]),
    ("hz", &["10", "100"]),
    ("slowlog-log-slower-than", &["0", "10000"]),
    ("latency-tracking", &["yes", "no"]),
];

/// Adds a queueing discipline to the switch ports of both hosts, and removes it on drop. The hosts'
/// own interfaces cannot be used: replacing a queueing discipline there makes sends fail for a
/// moment, and Soft-RoCE ends a queue pair when a send fails.
pub(crate) struct Wires(());

const PORTS: [&str; 2] = ["p1", "p2"];

impl Wires {
    pub(crate) fn new() -> Self {
        let wires = Self(());
        assert!(tc("add", "delay 0"), "tc failed");
        wires
    }
}

impl Drop for Wires {
    fn drop(&mut self) {
        for port in PORTS {
            let _ = Command::new("tc").args(["qdisc", "del", "dev", port, "root"]).status();
        }
    }
}

fn tc(verb: &str, netem: &str) -> bool {
    PORTS.iter().all(|port| {
        let words =
            ["qdisc", verb, "dev", port, "root", "netem"].into_iter().chain(netem.split(' '));
        Command::new("tc").args(words).status().is_ok_and(|status| status.success())
    })
}

pub(crate) struct Faults {
    world: Arc<World>,
    random: Random,
    /// The faults that remain in this round. Every round has each fault once.
    round: Vec<&'static str>,
    pub(crate) done: Vec<(&'static str, u64)>,
    started: Instant,
    /// Whether to print every fault. `FERRITE_SOAK_FAULTS` enables it.
    is_verbose: bool,
}

impl Faults {
    pub(crate) fn new(world: Arc<World>, seed: u64) -> Self {
        let done = FAULTS.iter().map(|what| (*what, 0)).collect();
        let is_verbose = std::env::var_os("FERRITE_SOAK_FAULTS").is_some();
        Self {
            world,
            random: Random::new(seed),
            round: Vec::new(),
            done,
            started: Instant::now(),
            is_verbose,
        }
    }

    /// Causes one fault after another until the test is over.
    pub(crate) async fn run(mut self) -> Self {
        while !self.world.is_over() {
            if self.round.is_empty() {
                self.round = FAULTS.to_vec();
            }
            let what = self.round.remove(self.random.below(self.round.len() as u64) as usize);
            self.note(what.into());
            self.cause(what).await;
            self.done
                .iter_mut()
                .filter(|(name, _)| *name == what)
                .for_each(|(_, count)| *count += 1);
            self.note(format!("after {what}"));
            sleep(Duration::from_millis(200 + self.random.below(1500))).await;
        }
        self
    }

    fn note(&self, what: String) {
        if self.is_verbose {
            eprintln!("{:.1?}: {what}", self.started.elapsed());
        }
        *self.world.fault.lock().expect("no panic") = what;
    }

    async fn cause(&mut self, what: &str) {
        match what {
            "clients dropped" => self.drop_clients(),
            "clients vanish" => self.vanish().await,
            "clients killed" => self.kill_processes().await,
            "FERRITE KILL" => self.kill().await,
            "wire cut" => self.cut().await,
            "wire bad" => self.degrade().await,
            "CONFIG SET" => self.configure().await,
            "FLUSHALL" => self.flush().await,
            "FAILOVER" => self.fail_over().await,
            "protocol violations" => fuzz::violate_protocol(&self.world, &mut self.random).await,
            "invalid commands" => fuzz::send_invalid(&self.world, &mut self.random).await,
            save => {
                // An error is allowed: a save of the other kind may be in progress.
                let engine = self.random_engine();
                let reply = self.ask(engine, &[save]).await;
                assert!(reply.starts_with(['+', '-']), "{save}: {reply}");
            }
        }
    }

    fn random_engine(&mut self) -> usize {
        self.random.below(2) as usize
    }

    fn primary(&self) -> usize {
        self.world.primary.load(Ordering::Relaxed)
    }

    /// Runs a command over an engine's own socket.
    async fn ask(&self, engine: usize, words: &[&str]) -> String {
        let asking =
            async { Connection::to_socket(&self.world.sockets[engine]).await?.ask(words).await };
        let reply = tokio::time::timeout(TIMEOUT, asking).await;
        let reply = reply.unwrap_or_else(|_| panic!("{words:?}: no reply of engine {engine}"));
        let reply = reply.unwrap_or_else(|error| panic!("{words:?}: engine {engine}: {error}"));
        String::from_utf8_lossy(&reply).into_owned()
    }

    fn drop_clients(&mut self) {
        for interrupt in &self.world.interrupts {
            interrupt.store(self.random.below(2) == 0, Ordering::Relaxed);
        }
    }

    /// Kills processes with several clients each, so that they cannot close their connections.
    async fn kill_processes(&mut self) {
        let own = std::env::current_exe().expect("the path of this test");
        let spawn = |_| {
            let mut command = Command::new(&own);
            command.args(["--exact", "clients_to_be_killed", "--ignored", "--nocapture"]);
            command.stdout(Stdio::null()).env(PROCESS, self.world.rdma[self.primary()].to_string());
            command.spawn().expect("a child process")
        };
        let mut processes: Vec<_> = (0..2).map(spawn).collect();
        sleep(Duration::from_millis(300 + self.random.below(1500))).await;
        for process in &mut processes {
            process.kill().expect("a running child process");
            process.wait().expect("an exit status");
        }
    }

    /// Lets clients disconnect while the wire is cut.
    async fn vanish(&mut self) {
        assert!(tc("change", "loss 100%"), "tc failed");
        self.drop_clients();
        sleep(Duration::from_millis(500 + self.random.below(2000))).await;
        self.restore_wire();
    }

    /// Cuts the wire for a while.
    async fn cut(&mut self) {
        assert!(tc("change", "loss 100%"), "tc failed");
        sleep(Duration::from_millis(50 + self.random.below(3000))).await;
        self.restore_wire();
    }

    fn restore_wire(&self) {
        assert!(tc("change", "delay 0"), "tc failed");
        *self.world.cut.lock().expect("no panic") = Some(Instant::now());
    }

    /// Makes the wire unreliable for a second.
    async fn degrade(&mut self) {
        let kinds =
            ["loss 5%", "delay 2ms 1ms", "duplicate 5%", "corrupt 2%", "delay 1ms reorder 25%"];
        assert!(tc("change", kinds[self.random.below(kinds.len() as u64) as usize]), "tc failed");
        sleep(Duration::from_millis(1000)).await;
        self.restore_wire();
    }

    async fn kill(&mut self) {
        let primary = self.primary();
        let listed = self.ask(primary, &["FERRITE", "CLIENTS"]).await;
        let ids: Vec<_> =
            listed.lines().filter_map(|line| line.strip_prefix("id=")?.split(' ').next()).collect();
        for id in ids {
            if self.random.below(3) == 0 {
                self.ask(primary, &["FERRITE", "KILL", id]).await;
            }
        }
    }

    async fn configure(&mut self) {
        for _ in 0..4 {
            let (name, values) = SETTINGS[self.random.below(SETTINGS.len() as u64) as usize];
            let value = values[self.random.below(values.len() as u64) as usize];
            self.note(format!("CONFIG SET {name} {value}"));
            let engine = self.random_engine();
            let reply = self.ask(engine, &["CONFIG", "SET", name, value]).await;
            assert!(reply == "+OK\r\n", "{name} {value}: {reply}");
        }
    }

    /// Runs FLUSHALL while no client works, so that the clients' models stay correct.
    async fn flush(&mut self) {
        let how = ["SYNC", "ASYNC"][self.random.below(2) as usize];
        let _exclusive = self.world.flow.write().await;
        let reply = self.ask(self.primary(), &["FLUSHALL", how]).await;
        assert_eq!(reply, "+OK\r\n");
        self.world.flushes.fetch_add(1, Ordering::Relaxed);
    }

    /// Fails over to the replica. The primary waits until the replica has all acknowledged writes.
    async fn fail_over(&mut self) {
        let (from, to) = (self.primary(), 1 - self.primary());
        let started = Instant::now();
        let mut reply;
        loop {
            let port = self.world.tcp[to].port().to_string();
            // Clients wait until the replica has everything. The replica may still be at its first
            // synchronisation.
            reply =
                self.ask(from, &["FAILOVER", "TO", "127.0.0.1", &port, "TIMEOUT", "10000"]).await;
            while self.ask(from, &["INFO", "replication"]).await.contains("failover-in-progress") {
                sleep(Duration::from_millis(5)).await;
            }
            if self.ask(to, &["ROLE"]).await.contains("master") {
                break;
            }
            assert!(started.elapsed() < TIMEOUT, "no failover: {reply}");
            sleep(Duration::from_millis(100)).await;
        }
        self.world.primary.store(to, Ordering::Relaxed);
    }
}
