//! Replication through agents whose RDMA path is lost and mended, and whose agents are killed.
#![expect(clippy::print_stdout, reason = "people judge how long each fault took")]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferrite_testkit::Engine;
use ferrite_testkit::engine::engines;
use ferrite_testkit::process::signal;
use ferrite_testkit::wait::until_or;

use super::faults::{add_device, cut, mend, remove_device, wait_for_transport, watch};
use super::size::{Times, is_strict, megabytes, rounds};
use crate::agent::harness::{Group, NOBODY, PASSWORD, operator};
use crate::hosts;

/// The size of a value.
const VALUE: usize = 10_000;
/// The longest time until a replica is up after a fault was mended, beside the time that a full
/// synchronisation takes without a fault.
const UP_MAX: Duration = Duration::from_secs(10);
/// How long a full synchronisation may take, also on a busy machine.
const SYNC_TIMEOUT: Duration = Duration::from_secs(240);
/// The pause between two writes.
const PAUSE: Duration = Duration::from_millis(2);
const OPTIONS: &[&str] = &["--rdma", "prefer", "--direct", "refuse", "--rdma-device", "DEVICE"];

#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    /// All packets of RoCE between the hosts are lost.
    Cut,
    /// The RDMA device of a host is removed, and added again.
    Removal,
    /// The agent of a host is killed, and started again.
    Kill,
}

#[test]
fn replication_survives_lost_packets_of_rdma() {
    survives(Fault::Cut);
}

#[test]
fn replication_survives_removed_devices() {
    survives(Fault::Removal);
}

#[test]
fn replication_survives_killed_agents() {
    survives(Fault::Kill);
}

fn survives(fault: Fault) {
    for program in engines() {
        let Some(hosts) = hosts(2) else { return };
        watch(&hosts);
        let group = Group::start(hosts, 2, OPTIONS, NOBODY);
        wait_for_transport(&group, "rdma");
        Pair::start(group, &program).survives(fault, &program);
    }
}

/// A primary on host 1 and a replica on host 2.
struct Pair {
    primary: Engine,
    replica: Engine,
    // Declared after the engines, which end before their hosts.
    group: Group,
}

impl Pair {
    fn start(group: Group, program: &Path) -> Self {
        let options = ["--requirepass", PASSWORD, "--masterauth", PASSWORD];
        let dataset = ["--enable-debug-command", "local", "--rdbcompression", "no"];
        let sync = ["--repl-diskless-sync-delay", "0", "--repl-backlog-size", "64mb"];
        let options = [&options[..], &dataset, &sync].concat();
        let engine = |host| group.start_engine_of(program, host, 7001, &options);
        let (primary, replica) = (engine(1), engine(2));
        Self { primary, replica, group }
    }

    fn survives(&mut self, fault: Fault, program: &Path) {
        let program = program.file_name().expect("a name").to_string_lossy().into_owned();
        let (rounds, bytes) = (rounds(1), megabytes(16) * 1_000_000);
        let keys = (bytes / VALUE).to_string();
        operator(&self.primary).ok(&["DEBUG", "POPULATE", &keys, "key", &VALUE.to_string()]);
        let begun = Instant::now();
        self.begin_full_sync();
        self.wait_until_up();
        let undisturbed = begun.elapsed();
        let [mut up_after_sync, mut up_online, mut back] = [(); 3].map(|()| Times::default());
        for round in 0..rounds {
            let host = round % 2 + 1;
            let writer = Writer::start(&self.primary);
            up_after_sync.add(self.fault_in_full_sync(fault, host, bytes as u64, &mut back));
            up_online.add(self.fault_online(fault, host, &mut back));
            drop(writer);
            self.compare();
        }
        println!(
            "{program}, {fault:?}, {rounds} rounds, {} MB: full sync without a fault {undisturbed:.1?}; \
             replica up after the end of a fault in mid full sync: {up_after_sync}; of a fault of an \
             online replica: {up_online}; RDMA back: {back}",
            bytes / 1_000_000
        );
        if is_strict() {
            let limit = UP_MAX + undisturbed;
            assert!(up_after_sync.max() <= limit, "{:?} of {limit:?}", up_after_sync.max());
            assert!(up_online.max() <= UP_MAX, "{:?} of {UP_MAX:?}", up_online.max());
            assert!(back.max() <= UP_MAX, "{:?} of {UP_MAX:?}", back.max());
        }
    }

    /// Makes the replica forget its data and its history, and connect to the primary.
    fn begin_full_sync(&self) {
        let mut client = operator(&self.replica);
        client.ok(&["REPLICAOF", "NO", "ONE"]);
        client.ok(&["FLUSHALL"]);
        client.ok(&["REPLICAOF", &self.group.address(1), "7001"]);
    }

    /// The fault begins when a part of the dataset has arrived, and ends after the agents or the
    /// engines have noticed it. Returns how long after its end the replica is up.
    fn fault_in_full_sync(
        &mut self,
        fault: Fault,
        host: usize,
        bytes: u64,
        back: &mut Times,
    ) -> Duration {
        let (full, _) = self.syncs();
        self.begin_full_sync();
        self.wait("a part of the dataset", || {
            count(&self.replica, "master_sync_read_bytes") >= bytes / 8
        });
        assert!(!self.is_up(), "the synchronisation has ended before the fault");
        self.begin(fault, host);
        let took = self.end(fault, host, back);
        let more = self.syncs().0 - full;
        // Links move to TCP and back without the engines' knowledge.
        let expected = if fault == Fault::Kill { more >= 2 } else { more == 1 };
        assert!(expected, "{fault:?}: {more} full synchronisations; {}", self.logs());
        took
    }

    /// The fault hits an online replica, which resumes where it was interrupted, if at all.
    fn fault_online(&mut self, fault: Fault, host: usize, back: &mut Times) -> Duration {
        let (full, partial) = self.syncs();
        self.begin(fault, host);
        if fault != Fault::Kill {
            self.assert_replicates();
        }
        let took = self.end(fault, host, back);
        self.assert_replicates();
        let resumed = u64::from(fault == Fault::Kill);
        assert_eq!(self.syncs(), (full, partial + resumed), "{fault:?}: {}", self.logs());
        took
    }

    /// Causes a fault, and waits until the agents or the engines have noticed it.
    fn begin(&self, fault: Fault, host: usize) {
        match fault {
            Fault::Cut => cut(&self.group.hosts),
            Fault::Removal => remove_device(&self.group, host),
            Fault::Kill => {
                signal("KILL", self.group.agent(host).process.0.id());
                return self.wait("both engines without each other", || {
                    count(&self.primary, "connected_slaves") == 0
                        && text(&self.replica, "master_link_status") == "down"
                });
            }
        }
        wait_for_transport(&self.group, "tcp");
    }

    /// Ends a fault, and waits until the replica is up and the links use RDMA again. Returns how
    /// long the replica took.
    fn end(&mut self, fault: Fault, host: usize, back: &mut Times) -> Duration {
        match fault {
            Fault::Cut => mend(&self.group.hosts),
            Fault::Removal => add_device(&self.group, host),
            Fault::Kill => self.group.agents[host - 1] = self.group.start_agent(host, 2),
        }
        let (ended, group) = (Instant::now(), &self.group);
        std::thread::scope(|scope| {
            let returns = scope.spawn(|| {
                wait_for_transport(group, "rdma");
                ended.elapsed()
            });
            self.wait_until_up();
            let took = ended.elapsed();
            back.add(returns.join().expect("the links use RDMA again"));
            took
        })
    }

    /// Returns the numbers of full and of partial synchronisations.
    fn syncs(&self) -> (u64, u64) {
        (count(&self.primary, "sync_full"), count(&self.primary, "sync_partial_ok"))
    }

    fn is_up(&self) -> bool {
        text(&self.replica, "master_link_status") == "up"
            && text(&self.primary, "slave0").contains("state=online")
    }

    fn wait_until_up(&self) {
        self.wait("a replica that is up", || self.is_up());
    }

    /// Asserts that a write arrives at the replica, without a fault that the replica notices.
    fn assert_replicates(&self) {
        let mut client = operator(&self.primary);
        client.ok(&["SET", "written last", "x"]);
        assert_eq!(client.ask(&["WAIT", "1", "30000"]), ":1", "{}", self.logs());
    }

    /// Asserts that both engines have the same data.
    fn compare(&self) {
        self.assert_replicates();
        let digest = |engine| operator(engine).ask(&["DEBUG", "DIGEST"]);
        let (of_primary, of_replica) = (digest(&self.primary), digest(&self.replica));
        assert!(of_primary.len() > 40, "{of_primary}");
        assert_eq!(of_primary, of_replica, "{}", self.logs());
    }

    fn wait(&self, what: &str, condition: impl FnMut() -> bool) {
        until_or(SYNC_TIMEOUT, what, condition, || self.logs());
    }

    fn logs(&self) -> String {
        format!("primary: {}\nreplica: {}", self.primary.log(), self.replica.log())
    }
}

/// Returns a field of INFO; an empty text if there is none.
fn text(engine: &Engine, name: &str) -> String {
    let info = operator(engine).text(&["INFO"]);
    let field = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    field.unwrap_or_default().trim().to_owned()
}

/// Returns a number of INFO; 0 if there is none.
fn count(engine: &Engine, name: &str) -> u64 {
    text(engine, name).parse().unwrap_or_default()
}

/// Writes to an engine until it is dropped.
struct Writer {
    thread: Option<JoinHandle<()>>,
    has_ended: Arc<AtomicBool>,
}

impl Writer {
    fn start(engine: &Engine) -> Self {
        let has_ended = Arc::new(AtomicBool::new(false));
        let (mut client, ended) = (operator(engine), Arc::clone(&has_ended));
        let write = move || {
            for number in 0_u64.. {
                if ended.load(Ordering::Relaxed) {
                    break;
                }
                client.ok(&["SET", &format!("written:{}", number % 1000), &"w".repeat(100)]);
                std::thread::sleep(PAUSE);
            }
        };
        Self { thread: Some(std::thread::spawn(write)), has_ended }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.has_ended.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || matches!(ended, Some(Ok(()))), "the writer failed");
    }
}
