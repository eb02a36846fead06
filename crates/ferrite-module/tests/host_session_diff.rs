//! Stateful differential fuzzing: whole sessions of several clients at two equal engines, at one
//! over its own port, at the other through the module. Replies, ends of connections, decisions of
//! the ACL and the final dataset must be equal.
//!
//! ```text
//!                                     ┌─► engine A, its own port ──┐
//!   seed ─► generate ─► steps ─► run ─┤                            ├─► compare, after every step
//!                                     └─► engine B, the module's ──┘
//! ```
//!
//! | file | what |
//! |---|---|
//! | `generate.rs` `commands.rs` `vocabulary.rs` | a session of a seed |
//! | `session.rs` | sessions as data |
//! | `run.rs` `side.rs` `quiet.rs` `flood.rs` `waiting.rs` | both engines, step by step |
//! | `compare.rs` `differences.rs` | what must be equal, and what may differ |
//! | `hunt.rs` | many seeds; a finding is made shorter |
//!
//! By itself it runs a few fixed seeds. `cargo xtask fuzz session-diff` runs new ones by the test
//! `hunt`, whose options are variables: `FERRITE_DIFF_SEED`, `_SECONDS`, `_ENGINE`, `_CALL_LANE`,
//! `_KEEP_GOING`, `_SHOW`, `_FOLDER`.
#![expect(clippy::print_stderr, reason = "findings are printed")]

#[path = "../../ferrite-fabric/tests/links/random.rs"]
mod random;
mod server;
mod session_diff;
#[allow(dead_code, reason = "the parity tests use the rest")]
#[path = "parity/wire.rs"]
mod wire;

use std::time::Duration;

use session_diff::hunt::{Hunt, Score};

/// Seeds that are run in every build.
const FIXED_SEEDS: std::ops::RangeInclusive<u64> = 1..=12;

fn variable(name: &str) -> Option<String> {
    std::env::var(format!("FERRITE_DIFF_{name}")).ok()
}

fn number(name: &str) -> Option<u64> {
    variable(name)
        .map(|value| value.parse().unwrap_or_else(|_| panic!("FERRITE_DIFF_{name}: a number")))
}

fn judge(hunt: &Hunt) {
    let Score { sessions, steps, once, findings } = hunt.run();
    eprintln!(
        "{sessions} sessions, {steps} steps, {once} differences seen once, findings: {findings:?}"
    );
    assert!(findings.is_empty(), "seeds with differences: {findings:?}");
}

fn fixed(call_path: &str) -> Hunt {
    Hunt {
        program: server::REDIS.into(),
        call_path: Some(call_path.into()),
        seeds: FIXED_SEEDS,
        time: None,
        keep_going: true,
        show: false,
        folder: None,
    }
}

#[test]
fn proxied_sessions_agree_with_the_engines_own_port() {
    judge(&fixed("no"));
}

#[test]
fn in_process_sessions_agree_with_the_engines_own_port() {
    judge(&fixed("yes"));
}

#[test]
#[ignore = "cargo xtask fuzz session-diff runs it"]
fn hunt() {
    let seed = number("SEED").expect("FERRITE_DIFF_SEED");
    let seconds = number("SECONDS");
    judge(&Hunt {
        program: variable("ENGINE").map_or_else(|| server::REDIS.into(), Into::into),
        call_path: variable("CALL_LANE"),
        seeds: seed..=if seconds.is_some() { u64::MAX } else { seed },
        time: seconds.map(Duration::from_secs),
        keep_going: variable("KEEP_GOING").is_some(),
        show: variable("SHOW").is_some(),
        folder: variable("FOLDER").map(Into::into),
    });
}
