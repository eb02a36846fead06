//! An attack on an engine's memory in several rounds, with checks during and after it.

use std::time::{Duration, Instant};

use super::attack::{Attack, Size};
use super::honest::Honest;
use ferrite_testkit::process::rss_bytes;
use ferrite_testkit::resp::Client;
use ferrite_testkit::{Engine, TIMEOUT};

/// The engine's password.
pub(crate) const PASSWORD: &str = "x";

const MIB: u64 = 1 << 20;
/// How much memory may remain after the attack, since allocators keep some. The C library's
/// allocator keeps most of the memory, as it does for the engine's own clients. With that
/// allocator, the test only checks that the next attack reuses the memory.
const LEFT_OVER: u64 = 16 * MIB;
/// How long it may take until the memory is freed.
const FREE_TIMEOUT: Duration = Duration::from_secs(60);
/// The most log lines per started minute.
const LINES_PER_MINUTE: usize = 10;
/// By which factor the p99 of honest requests may rise.
const SLOWDOWN: u32 = 2;

/// The parameters of a test.
pub(crate) struct Plan {
    size: Size,
    rounds: usize,
    /// How much the process's memory may grow during the attack.
    growth: u64,
    /// How long a complete attack lasts, and how long honest clients run alone before it.
    holds: Duration,
    /// Whether the latency of honest clients is checked.
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

/// Returns the small plan, or the full one with `FERRITE_MEMORY=full`.
pub(crate) fn plan() -> &'static Plan {
    if std::env::var("FERRITE_MEMORY").is_ok_and(|size| size == "full") { &FULL } else { &SMALL }
}

/// Returns the address of the module's port. `admin` must have logged in.
fn address(admin: &mut Client) -> String {
    let info = admin.ask(&["INFO", "ferrite"]);
    let address = info.lines().find_map(|line| line.strip_prefix("ferrite_address:"));
    address.expect("an address").trim_end().to_owned()
}

/// The memory and sessions of the engine's process.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    rss: u64,
    pinned: u64,
    sessions: u64,
    sessions_bytes: u64,
    /// The number of sessions since the start, without those of Valkey Over RDMA.
    all_sessions: u64,
}

fn held(server: &Engine, admin: &mut Client) -> Held {
    let info = admin.ask(&["INFO", "ferrite"]);
    let field = |name: &str| -> u64 {
        let line = info.lines().find_map(|line| line.strip_prefix("ferrite_")?.strip_prefix(name));
        line.and_then(|value| value.strip_prefix(':')?.trim_end().parse().ok()).unwrap_or_default()
    };
    Held {
        rss: rss_bytes(server.pid()),
        pinned: field("rdma_memory_registered_bytes"),
        sessions: field("sessions"),
        sessions_bytes: field("sessions_held_bytes"),
        all_sessions: field("begun_tcp") + field("begun_ferrite"),
    }
}

/// Attacks an engine that has the password [`PASSWORD`]. Checks its memory, its log, that all
/// attackers got sessions, and, if the plan says so, the latency of honest clients. The module must
/// listen on one address.
pub(crate) fn attack(server: &mut Engine, plan: &Plan) {
    let mut admin = server.client();
    admin.ok(&["AUTH", PASSWORD]);
    let address = address(&mut admin);
    let keeps_pages = admin.ask(&["INFO", "memory"]).contains("mem_allocator:libc");
    let honest = Honest::start(&address, PASSWORD);
    // Waits as long as an attack lasts, so that the engine has allocated what honest clients need.
    std::thread::sleep(plan.holds);
    let before = held(server, &mut admin);
    let (lines, started) = (server.log().lines().count(), Instant::now());
    let mut most = before;
    for round in 1..=plan.rounds {
        honest.set_attacked(true);
        let attack = Attack::start(address.parse().expect("an address"), plan.size);
        let mut complete = None;
        while complete.is_none_or(|since: Instant| since.elapsed() < plan.holds) {
            let now = held(server, &mut admin);
            (most.rss, most.pinned) = (most.rss.max(now.rss), most.pinned.max(now.pinned));
            assert!(
                started.elapsed() < 20 * TIMEOUT,
                "the attack is not complete: {:?}; {}",
                attack.stop(),
                server.log()
            );
            if complete.is_none() && attack.is_complete() {
                complete = Some(Instant::now());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let sessions = held(server, &mut admin).sessions;
        let progress = attack.stop();
        let ended = Instant::now();
        honest.set_attacked(false);
        let mut now = held(server, &mut admin);
        while now.sessions > before.sessions
            || now.sessions_bytes > before.sessions_bytes + MIB
            || now.pinned > before.pinned + LEFT_OVER
            || (now.rss > before.rss + LEFT_OVER && !keeps_pages)
        {
            assert!(
                ended.elapsed() < FREE_TIMEOUT,
                "the memory is not freed: {before:?} before, {now:?} now"
            );
            std::thread::sleep(Duration::from_millis(50));
            now = held(server, &mut admin);
        }
        eprintln!(
            "round {round}: {sessions} sessions at the end, {progress:?}; RSS {} MiB before, at \
             most {} MiB, {} MiB {:.1?} after the attack",
            before.rss / MIB,
            most.rss / MIB,
            now.rss / MIB,
            ended.elapsed()
        );
        std::thread::sleep(if plan.is_timed { plan.holds } else { Duration::ZERO });
    }
    let log = server.log();
    let new_lines = log.lines().skip(lines).count();
    let minutes = started.elapsed().as_secs() as usize / 60 + 1;
    assert!(
        new_lines <= LINES_PER_MINUTE * minutes,
        "{new_lines} log lines in {minutes} minutes: {log}"
    );
    assert!(
        most.rss <= before.rss + plan.growth,
        "the RSS grew too much: {before:?} before, {most:?} at most"
    );
    assert!(
        most.pinned <= before.pinned + plan.growth,
        "the pinned memory grew too much: {before:?} before, {most:?} at most"
    );
    let expected = plan.rounds * (plan.size.clients + plan.size.links);
    let now = held(server, &mut admin);
    assert!(
        now.all_sessions >= before.all_sessions + expected as u64,
        "not all attackers got a session: {before:?} before, {now:?} now"
    );
    let [mut calm, mut attacked] = honest.stop();
    let [usual, slowest] = [&mut calm, &mut attacked].map(|all| all.percentile(99));
    eprintln!(
        "{new_lines} log lines; p99 of SET and GET {usual:.2?} ({} requests), under attack \
         {slowest:.2?} ({} requests)",
        calm.count(),
        attacked.count()
    );
    if plan.is_timed {
        assert!(slowest <= usual * SLOWDOWN, "p99: {usual:?}, but {slowest:?} under attack");
    }
    server.assert_healthy();
}
