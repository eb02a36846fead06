//! Stateful differential fuzzing: runs whole sessions of several clients at two equal engines. The
//! clients use the own port of one engine, and the module's port of the other. Replies, closed
//! connections, decisions of the ACL and the final dataset must be equal.
//!
//! ```text
//!                                     ┌─► engine A, its own port ──┐
//!   seed ─► generate ─► steps ─► run ─┤                            ├─► compare, after every step
//!                                     └─► engine B, the module's ──┘
//! ```
//!
//! | file | contents |
//! |---|---|
//! | `generate.rs` `commands.rs` `vocabulary.rs` | generates a session from a seed |
//! | `session.rs` | sessions as data |
//! | `run.rs` `side.rs` `idle.rs` `flood.rs` `waiting.rs` | runs a session at both engines |
//! | `compare.rs` `differences.rs` | compares replies; lists what may differ |
//! | `hunt.rs` | runs many seeds and shortens a failing session |
//!
//! By default it runs a few fixed seeds. `cargo xtask fuzz session-diff` runs new seeds with the
//! test `hunt`, whose options are environment variables: `FERRITE_DIFF_SEED`, `_SECONDS`,
//! `_ENGINE`, `_CALL_PATH` (the setting `call-path`), `_KEEP_GOING`, `_SHOW` and `_FOLDER`.
#![expect(clippy::print_stderr, reason = "prints findings")]

mod commands;
mod compare;
mod differences;
mod flood;
mod generate;
mod hunt;
mod idle;
mod run;
mod session;
mod side;
mod vocabulary;
mod waiting;

use std::time::Duration;

use ferrite_testkit::engine::REDIS;
use hunt::{Hunt, Summary};

/// The seeds that every run of the tests uses.
const FIXED_SEEDS: std::ops::RangeInclusive<u64> = 1..=12;

fn variable(name: &str) -> Option<String> {
    std::env::var(format!("FERRITE_DIFF_{name}")).ok()
}

fn number(name: &str) -> Option<u64> {
    variable(name).map(|value| {
        value.parse().unwrap_or_else(|_| panic!("FERRITE_DIFF_{name}: expected a number"))
    })
}

fn assert_no_findings(hunt: &Hunt) {
    let Summary { sessions, steps, unreproduced, without_data, findings } = hunt.run();
    eprintln!(
        "{sessions} sessions ({without_data} compared by their replies only), {steps} steps, \
         {unreproduced} differences seen only once, findings: {findings:?}"
    );
    assert!(findings.is_empty(), "seeds with differences: {findings:?}");
}

fn fixed(call_path: &str) -> Hunt {
    Hunt {
        program: REDIS.into(),
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
    assert_no_findings(&fixed("no"));
}

#[test]
fn in_process_sessions_agree_with_the_engines_own_port() {
    assert_no_findings(&fixed("yes"));
}

#[test]
#[ignore = "cargo xtask fuzz session-diff runs it"]
fn hunt() {
    let seed = number("SEED").expect("FERRITE_DIFF_SEED is set");
    let seconds = number("SECONDS");
    assert_no_findings(&Hunt {
        program: variable("ENGINE").map_or_else(|| REDIS.into(), Into::into),
        call_path: variable("CALL_PATH"),
        seeds: seed..=if seconds.is_some() { u64::MAX } else { seed },
        time: seconds.map(Duration::from_secs),
        keep_going: variable("KEEP_GOING").is_some(),
        show: variable("SHOW").is_some(),
        folder: variable("FOLDER").map(Into::into),
    });
}
