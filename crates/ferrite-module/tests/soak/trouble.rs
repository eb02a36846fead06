//! What happens to engines and clients, one thing at a time.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::time::sleep;

use crate::connection::Connection;
use crate::fuzz;
use crate::random::Random;
use crate::world::World;

/// Where clients of a process of their own go to.
pub(crate) const PROCESS: &str = "FERRITE_SOAK_PROCESS";
const PATIENCE: Duration = Duration::from_secs(60);

const TROUBLES: &[&str] = &[
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
    "peers that break rules",
    "peers that talk nonsense",
];

/// Settings, and what they are set to.
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

/// The ports to both hosts, as they were when it is dropped. Not the hosts' own interfaces: to put
/// a queueing discipline in the place of another there makes sends fail for a moment, and Soft-RoCE
/// ends a queue pair for good when a send fails.
pub(crate) struct Wires(());

const PORTS: [&str; 2] = ["p1", "p2"];

impl Wires {
    pub(crate) fn new() -> Self {
        let wires = Self(());
        assert!(tc("add", "delay 0"), "tc");
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

pub(crate) struct Troubles {
    world: Arc<World>,
    random: Random,
    /// What is still to come of this round; each has its turn in every one.
    round: Vec<&'static str>,
    pub(crate) done: Vec<(&'static str, u64)>,
    begun: Instant,
    /// Every one as it comes: FERRITE_SOAK_TROUBLES.
    is_told: bool,
}

impl Troubles {
    pub(crate) fn new(world: Arc<World>, seed: u64) -> Self {
        let done = TROUBLES.iter().map(|what| (*what, 0)).collect();
        let is_told = std::env::var_os("FERRITE_SOAK_TROUBLES").is_some();
        Self {
            world,
            random: Random::new(seed),
            round: Vec::new(),
            done,
            begun: Instant::now(),
            is_told,
        }
    }

    pub(crate) async fn go_on(mut self) -> Self {
        while !self.world.is_over() {
            if self.round.is_empty() {
                self.round = TROUBLES.to_vec();
            }
            let what = self.round.remove(self.random.below(self.round.len() as u64) as usize);
            self.note(what.into());
            self.one(what).await;
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
        if self.is_told {
            eprintln!("{:.1?}: {what}", self.begun.elapsed());
        }
        *self.world.trouble.lock().expect("no panic") = what;
    }

    async fn one(&mut self, what: &str) {
        match what {
            "clients dropped" => self.drop_clients(),
            "clients vanish" => self.vanish().await,
            "clients killed" => self.kill_processes().await,
            "FERRITE KILL" => self.kill().await,
            "wire cut" => self.cut().await,
            "wire bad" => self.spoil().await,
            "CONFIG SET" => self.configure().await,
            "FLUSHALL" => self.flush().await,
            "FAILOVER" => self.fail_over().await,
            "peers that break rules" => fuzz::break_rules(&self.world, &mut self.random).await,
            "peers that talk nonsense" => fuzz::talk_nonsense(&self.world, &mut self.random).await,
            save => {
                // The engine may be at one of the other kind.
                let engine = self.random_engine();
                let answer = self.ask(engine, &[save]).await;
                assert!(answer.starts_with(['+', '-']), "{save}: {answer}");
            }
        }
    }

    fn random_engine(&mut self) -> usize {
        self.random.below(2) as usize
    }

    fn primary(&self) -> usize {
        self.world.primary.load(Ordering::Relaxed)
    }

    /// An engine's answer at its own socket.
    async fn ask(&self, engine: usize, words: &[&str]) -> String {
        let asking =
            async { Connection::to_socket(&self.world.sockets[engine]).await?.ask(words).await };
        let answer = tokio::time::timeout(PATIENCE, asking).await;
        let answer = answer.unwrap_or_else(|_| panic!("{words:?}: no answer of engine {engine}"));
        let answer = answer.unwrap_or_else(|error| panic!("{words:?}: engine {engine}: {error}"));
        String::from_utf8_lossy(&answer).into_owned()
    }

    fn drop_clients(&mut self) {
        for interrupt in &self.world.interrupts {
            interrupt.store(self.random.below(2) == 0, Ordering::Relaxed);
        }
    }

    /// Processes full of clients end without a word of theirs.
    async fn kill_processes(&mut self) {
        let own = std::env::current_exe().expect("a test has a file");
        let spawn = |_| {
            let mut command = Command::new(&own);
            command.args(["--exact", "clients_to_be_killed", "--ignored", "--nocapture"]);
            command.stdout(Stdio::null()).env(PROCESS, self.world.rdma[self.primary()].to_string());
            command.spawn().expect("this program")
        };
        let mut processes: Vec<_> = (0..2).map(spawn).collect();
        sleep(Duration::from_millis(300 + self.random.below(1500))).await;
        for process in &mut processes {
            process.kill().expect("it is ours");
            process.wait().expect("it is ours");
        }
    }

    /// Clients go while nothing of theirs can be heard.
    async fn vanish(&mut self) {
        assert!(tc("change", "loss 100%"), "tc");
        self.drop_clients();
        sleep(Duration::from_millis(500 + self.random.below(2000))).await;
        self.mend();
    }

    async fn cut(&mut self) {
        assert!(tc("change", "loss 100%"), "tc");
        sleep(Duration::from_millis(50 + self.random.below(3000))).await;
        self.mend();
    }

    fn mend(&self) {
        assert!(tc("change", "delay 0"), "tc");
        *self.world.cut.lock().expect("no panic") = Some(Instant::now());
    }

    async fn spoil(&mut self) {
        let kinds =
            ["loss 5%", "delay 2ms 1ms", "duplicate 5%", "corrupt 2%", "delay 1ms reorder 25%"];
        assert!(tc("change", kinds[self.random.below(kinds.len() as u64) as usize]), "tc");
        sleep(Duration::from_millis(1000)).await;
        self.mend();
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
            let answer = self.ask(engine, &["CONFIG", "SET", name, value]).await;
            assert!(answer == "+OK\r\n", "{name} {value}: {answer}");
        }
    }

    /// While nobody works, so that what is empty then is known.
    async fn flush(&mut self) {
        let how = ["SYNC", "ASYNC"][self.random.below(2) as usize];
        let _nobody = self.world.flow.write().await;
        let answer = self.ask(self.primary(), &["FLUSHALL", how]).await;
        assert_eq!(answer, "+OK\r\n");
        self.world.flushes.fetch_add(1, Ordering::Relaxed);
    }

    /// The replica takes over, with all that was acknowledged: the primary waits for it.
    async fn fail_over(&mut self) {
        let (from, to) = (self.primary(), 1 - self.primary());
        let begun = Instant::now();
        let mut answer;
        loop {
            let port = self.world.tcp[to].port().to_string();
            // Clients wait meanwhile, until the replica has everything; it may be at its first
            // copy.
            answer =
                self.ask(from, &["FAILOVER", "TO", "127.0.0.1", &port, "TIMEOUT", "10000"]).await;
            while self.ask(from, &["INFO", "replication"]).await.contains("failover-in-progress") {
                sleep(Duration::from_millis(5)).await;
            }
            if self.ask(to, &["ROLE"]).await.contains("master") {
                break;
            }
            assert!(begun.elapsed() < PATIENCE, "no failover: {answer}");
            sleep(Duration::from_millis(100)).await;
        }
        self.world.primary.store(to, Ordering::Relaxed);
    }
}
