//! An attack on an engine's memory, in rounds, and what must hold during and after it.

use std::time::{Duration, Instant};

use crate::attack::{Attack, Size};
use crate::honest::Honest;
use crate::scene::{PATIENCE, Server};
use crate::talk::Peer;

/// The engine's password.
pub(crate) const PASSWORD: &str = "x";

const MIB: u64 = 1 << 20;
/// What may be left of the memory: allocators keep some. The one of the C library keeps most, as it
/// does for the engine's own clients; there the next attack must find it again.
const LEFT_OVER: u64 = 16 * MIB;
/// How long it may take to return.
const RETURNS: Duration = Duration::from_secs(60);
/// Log lines in each minute that has begun.
const LINES_PER_MINUTE: usize = 10;
/// How many times as long the slowest hundredth of honest requests may take.
const SLOWDOWN: u32 = 2;

/// What the test runs.
pub(crate) struct Plan {
    size: Size,
    rounds: usize,
    /// How much more memory the process may have during the attack.
    growth: u64,
    /// How long the attack goes on when it is complete, and how long honest clients are alone
    /// before.
    holds: Duration,
    /// Whether honest clients are measured.
    is_timed: bool,
}

const SMALL: Plan = Plan {
    size: Size { clients: 100, client_bytes: 100 << 20, links: 20, resumes: 20_000 },
    rounds: 2,
    growth: 32 * MIB,
    holds: Duration::from_secs(2),
    is_timed: false,
};
const FULL: Plan = Plan {
    size: Size { clients: 1000, client_bytes: 100 << 20, links: 100, resumes: 1_000_000 },
    rounds: 3,
    growth: 100 * MIB,
    holds: Duration::from_secs(20),
    is_timed: true,
};

/// The small plan, or with `FERRITE_MEMORY=full` the other.
pub(crate) fn plan() -> &'static Plan {
    if std::env::var("FERRITE_MEMORY").is_ok_and(|size| size == "full") { &FULL } else { &SMALL }
}

/// Where the module listens, as the engine tells one who is logged in.
fn address(admin: &mut Peer) -> String {
    let info = admin.ask(&["INFO", "ferrite"]);
    let address = info.lines().find_map(|line| line.strip_prefix("ferrite_address:"));
    address.expect("it listens").trim_end().to_owned()
}

/// What the engine's process holds.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    rss: u64,
    pinned: u64,
    sessions: u64,
    sessions_bytes: u64,
    /// Sessions that were begun, since the start.
    begun: u64,
}

fn held(server: &Server, admin: &mut Peer) -> Held {
    let info = admin.ask(&["INFO", "ferrite"]);
    let field = |name: &str| -> u64 {
        let line = info.lines().find_map(|line| line.strip_prefix("ferrite_")?.strip_prefix(name));
        line.and_then(|value| value.strip_prefix(':')?.trim_end().parse().ok()).unwrap_or_default()
    };
    Held {
        rss: rss(server.pid()),
        pinned: field("rdma_memory_registered_bytes"),
        sessions: field("sessions"),
        sessions_bytes: field("sessions_held_bytes"),
        begun: field("begun_tcp") + field("begun_ferrite"),
    }
}

fn rss(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the engine runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a size");
    line.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).expect("a number") << 10
}

/// Attacks an engine with that password, whose module listens on one address, and judges it.
pub(crate) fn attack(server: &mut Server, plan: &Plan) {
    let mut admin = Peer::native(server);
    admin.ok(&["AUTH", PASSWORD]);
    let address = address(&mut admin);
    let keeps_pages = admin.ask(&["INFO", "memory"]).contains("mem_allocator:libc");
    let honest = Honest::start(&address, PASSWORD);
    std::thread::sleep(plan.holds); // as long as under attack: what it needs for them it has then
    let before = held(server, &mut admin);
    let (lines, begun) = (server.log().lines().count(), Instant::now());
    let mut most = before;
    for round in 1..=plan.rounds {
        honest.is_attacked(true);
        let attack = Attack::start(address.parse().expect("an address"), plan.size);
        let mut complete = None;
        while complete.is_none_or(|since: Instant| since.elapsed() < plan.holds) {
            let now = held(server, &mut admin);
            (most.rss, most.pinned) = (most.rss.max(now.rss), most.pinned.max(now.pinned));
            assert!(begun.elapsed() < 20 * PATIENCE, "{:?}: {}", attack.stop(), server.log());
            if complete.is_none() && attack.is_complete() {
                complete = Some(Instant::now());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let sessions = held(server, &mut admin).sessions;
        let progress = attack.stop();
        let ended = Instant::now();
        honest.is_attacked(false);
        let mut now = held(server, &mut admin);
        while now.sessions > before.sessions
            || now.sessions_bytes > before.sessions_bytes + MIB
            || now.pinned > before.pinned + LEFT_OVER
            || (now.rss > before.rss + LEFT_OVER && !keeps_pages)
        {
            assert!(ended.elapsed() < RETURNS, "it does not return: {before:?}, then {now:?}");
            std::thread::sleep(Duration::from_millis(50));
            now = held(server, &mut admin);
        }
        eprintln!(
            "round {round}: {sessions} sessions at the end, {progress:?}; RSS {} MiB, at most {}, back at {} after {:.1?}",
            before.rss / MIB,
            most.rss / MIB,
            now.rss / MIB,
            ended.elapsed()
        );
        std::thread::sleep(if plan.is_timed { plan.holds } else { Duration::ZERO });
    }
    let log = server.log();
    let said: Vec<_> = log.lines().skip(lines).collect();
    let minutes = begun.elapsed().as_secs() as usize / 60 + 1;
    assert!(
        said.len() <= LINES_PER_MINUTE * minutes,
        "{} lines in {minutes} minutes: {log}",
        said.len()
    );
    assert!(most.rss <= before.rss + plan.growth, "RSS: {before:?}, then {most:?}");
    assert!(most.pinned <= before.pinned + plan.growth, "pinned: {before:?}, then {most:?}");
    let expected = plan.rounds * (plan.size.clients + plan.size.links);
    let now = held(server, &mut admin);
    assert!(
        now.begun >= before.begun + expected as u64,
        "all attackers got in: {before:?}, then {now:?}"
    );
    let [mut calm, mut attacked] = honest.stop();
    let [usual, slowest] = [&mut calm, &mut attacked].map(|all| all.percentile(99));
    eprintln!(
        "{} log lines; p99 of SET and GET {usual:.2?} ({} requests), under attack {slowest:.2?} ({})",
        said.len(),
        calm.count(),
        attacked.count()
    );
    if plan.is_timed {
        assert!(slowest <= usual * SLOWDOWN, "p99: {usual:?}, under attack {slowest:?}");
    }
    server.assert_well();
}
