//! What clients without a password can make the engine's process keep: clients that send and read
//! nothing, links with unfinished messages, and `Resume` frames that nothing has asked for, all at
//! once and from many addresses. Memory and log lines are bounded, and memory returns when they are
//! gone.
//!
//! By itself it is small, and measures no time. `FERRITE_MEMORY=full` (the stage `memory` of
//! `.ci/long`) runs 1,000 clients of 100 MB, 100 links and 1,000,000 frames, and compares how long
//! honest clients wait with and without the attack, in alternating rounds.
//!
//! | file | what |
//! |---|---|
//! | `memory/attack.rs` | the attackers |
//! | `memory/honest.rs` | clients that work meanwhile, and measure |
//! | `memory/run.rs` | rounds of attacks, and what must hold |
#![expect(clippy::print_stderr, reason = "the figures are for people to judge")]

#[path = "memory/attack.rs"]
mod attack;
#[path = "memory/honest.rs"]
mod honest;
#[path = "memory/run.rs"]
mod run;
mod scene;
mod talk;

use run::PASSWORD;
use talk::{engines, start};

#[test]
fn clients_without_a_password_cost_little_memory_and_few_log_lines() {
    for program in engines() {
        eprintln!("{}", program.display());
        let mut server = start(&program, &["--requirepass", PASSWORD]);
        run::attack(&mut server, run::plan());
    }
}
