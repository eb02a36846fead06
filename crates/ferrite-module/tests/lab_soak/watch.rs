//! The engines' resources over time, which must stop growing.

use ferrite_testkit::Engine;
use ferrite_testkit::process::{descriptors, rss_bytes};
use ferrite_testkit::trend::assert_flat;
use std::process::Command;
use std::time::{Duration, Instant};

/// The resources that one engine uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Resources {
    pub(crate) descriptors: u64,
    pub(crate) queue_pairs: u64,
    pub(crate) pinned_bytes: u64,
    pub(crate) in_use_bytes: u64,
    pub(crate) windows_bytes: u64,
    pub(crate) sessions: u64,
    pub(crate) rss_bytes: u64,
}

pub(crate) fn resources(server: &Engine) -> Resources {
    let pid = server.pid();
    // Descriptors are counted while no connection of this function is open: that of the last call
    // may still be closing, and INFO below opens another.
    std::thread::sleep(Duration::from_millis(50));
    let descriptors = descriptors(pid);
    let info: String = server.ask(&["INFO", "ferrite"]);
    let field = |name: &str| {
        let found = info
            .lines()
            .find_map(|line| line.strip_prefix("ferrite_")?.strip_prefix(name)?.strip_prefix(':'));
        found.and_then(|value| value.trim_end().parse().ok()).unwrap_or_default()
    };
    Resources {
        descriptors,
        queue_pairs: queue_pairs(pid),
        pinned_bytes: field("rdma_memory_registered_bytes"),
        in_use_bytes: field("rdma_memory_send_bytes") + field("rdma_memory_receive_bytes"),
        windows_bytes: field("rdma_memory_windows_bytes"),
        sessions: field("sessions"),
        rss_bytes: rss_bytes(pid),
    }
}

/// Counts the queue pairs of all threads of a process. The kernel reports the thread that created
/// each.
fn queue_pairs(pid: u32) -> u64 {
    let listed = Command::new("rdma").args(["resource", "show", "qp"]).output().expect("rdma");
    let threads =
        std::fs::read_dir(format!("/proc/{pid}/task")).expect("a running engine").flatten();
    let marks: Vec<_> =
        threads.map(|thread| format!(" pid {} ", thread.file_name().to_string_lossy())).collect();
    let is_of = |line: &&str| marks.iter().any(|mark| line.contains(mark));
    String::from_utf8_lossy(&listed.stdout).lines().filter(is_of).count() as u64
}

/// How much the RSS may vary because of the clients' keys and the allocator.
const RSS_SLACK: u64 = 8 << 20;

type Field = fn(&[Resources; 2]) -> u64;

/// Samples of both engines.
#[derive(Default)]
pub(crate) struct Watch {
    samples: Vec<[Resources; 2]>,
}

impl Watch {
    pub(crate) fn sample(&mut self, servers: &[Engine; 2]) -> [Resources; 2] {
        let now = [resources(&servers[0]), resources(&servers[1])];
        self.samples.push(now);
        now
    }

    /// Asserts that no resource grew.
    pub(crate) fn assert_flat(&self) {
        // Sessions are at the primary, which changes. So the resources of sessions are summed over
        // both engines.
        let fields: [(&str, Field, u64); 6] = [
            ("descriptors", |[a, b]| a.descriptors + b.descriptors, 8),
            ("queue pairs", |[a, b]| a.queue_pairs + b.queue_pairs, 8),
            ("pinned bytes of engine 0", |[a, _]| a.pinned_bytes, 0),
            ("pinned bytes of engine 1", |[_, b]| b.pinned_bytes, 0),
            ("RSS of engine 0", |[a, _]| a.rss_bytes, RSS_SLACK),
            ("RSS of engine 1", |[_, b]| b.rss_bytes, RSS_SLACK),
        ];
        for (name, field, slack) in fields {
            let values: Vec<_> = self.samples.iter().map(field).collect();
            assert_flat(name, &values, slack);
        }
    }
}

/// Waits until the engines have no session, and no more descriptors, queue pairs and memory in use
/// than before.
pub(crate) fn wait_until_as_before(
    servers: &[Engine; 2],
    before: &[Resources; 2],
    limit: Duration,
) {
    let started = Instant::now();
    loop {
        let now = [resources(&servers[0]), resources(&servers[1])];
        let back = now.iter().zip(before).all(|(now, before)| {
            now.descriptors <= before.descriptors
                && now.queue_pairs <= before.queue_pairs
                && now.in_use_bytes <= before.in_use_bytes
                && now.windows_bytes == 0
                && now.sessions == 0
        });
        if back {
            eprintln!("resources are as before after {:.1?}", started.elapsed());
            return;
        }
        assert!(started.elapsed() < limit, "resources were not freed: {now:?}; before: {before:?}");
        std::thread::sleep(Duration::from_millis(200));
    }
}
