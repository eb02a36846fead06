//! How much memory clients without a password can use in the engine's process. The attackers are
//! clients that send and never read, links with unfinished messages, and unsolicited `Resume`
//! frames, all at once and from many addresses. The growth of memory and of the log must be
//! bounded, and the memory must be freed when the attackers have gone.
//!
//! By default the test is small and checks no latencies. `FERRITE_MEMORY=full` (the stage `memory`
//! of `.ci/long`) runs 1,000 clients of 100 MiB, 100 links and 1,000,000 frames. It also compares
//! the latency of honest clients with and without the attack, in alternating rounds.
//!
//! | file | contents |
//! |---|---|
//! | `memory/attack.rs` | the attackers |
//! | `memory/honest.rs` | clients that work meanwhile and measure their latency |
//! | `memory/run.rs` | rounds of attacks, and the checks |
#![expect(clippy::print_stderr, reason = "the figures are for people to judge")]

mod client;
mod memory {
    pub(crate) mod attack;
    pub(crate) mod honest;
    pub(crate) mod run;
}

use client::start;
use ferrite_testkit::engine::engines;
use memory::run::{self, PASSWORD};

#[test]
fn clients_without_a_password_cost_little_memory_and_few_log_lines() {
    for program in engines() {
        eprintln!("{}", program.display());
        let mut server = start(&program, &["--requirepass", PASSWORD]);
        run::attack(&mut server, run::plan());
    }
}
