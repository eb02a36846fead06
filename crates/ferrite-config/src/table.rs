//! The table: every setting, in the order of the reference page.
//!
//! There is one file per area, except that logs are in `server.rs`. A constant that several areas
//! or programs share is in this file.

mod agent;
mod clients;
mod foreign;
mod memory;
mod network;
mod queues;
mod server;

use crate::kind::Kind;
use crate::setting::{Program, Setting, TakesEffect};

pub use agent::*;
pub use clients::*;
pub use foreign::{FOREIGN, Foreign};
pub use memory::*;
use network::admin_address;
pub use network::*;
pub use queues::*;
pub use server::*;

/// The default port for clients: the engine's default port plus one.
pub const CLIENT_PORT: u16 = 6380;
/// The default port for links between agents.
pub const AGENT_PORT: u16 = 7470;
/// The engine's default port.
pub const ENGINE_PORT: u16 = 6379;
/// The largest value of [`MAX_CLIENTS`]. It is below [`LINKS_MAX`], so that a program can still
/// tell further clients why it rejects them.
pub const CLIENTS_MAX: u32 = 16_000;
/// The largest number of links of a program.
pub const LINKS_MAX: u32 = 16_384;
/// The smallest window that a client of Valkey Over RDMA writes to.
pub const WINDOW_MIN: u64 = 4 << 10;
/// The largest window that a client of Valkey Over RDMA writes to, and the largest buffer: a chunk
/// of the memory pool.
pub const CHUNK: u64 = 2 << 20;

/// The sizes of the memory pool's blocks. A buffer uses the smallest block that holds it.
pub const BLOCKS: [u64; 6] = [256, 1 << 10, 8 << 10, 64 << 10, 512 << 10, CHUNK];

/// The settings of each area, with the heading of the reference page.
pub const AREAS: [(&str, &[&Setting]); 7] = [
    ("Addresses and RDMA policy", network::SETTINGS),
    ("Clients and the event loop", clients::SETTINGS),
    ("Queues and polling", queues::SETTINGS),
    ("Memory", memory::SETTINGS),
    ("ferrite agent", agent::SETTINGS),
    ("The engine under ferrite server", server::SETTINGS),
    ("Logs", server::LOGS),
];

/// Keys of the file that have no meaning here: the key, and what to do instead.
pub const REFUSED: [(&str, &str); 6] = [
    ("network.rdma.max_send_sge", ONE_BUFFER),
    ("network.rdma.max_recv_sge", ONE_BUFFER),
    ("network.rdma.rdma_max_sge", ONE_BUFFER),
    ("replication.rdma_device", REPLICATION),
    ("replication.rdma.use_rdma_write", REPLICATION),
    ("replication.rdma.max_inline_size", REPLICATION),
];

const ONE_BUFFER: &str =
    "every request has exactly one buffer; set its size with recv_buffer_size instead";
const REPLICATION: &str = "replication uses the agent's links, which [network] and [network.rdma] \
                           set up (rdma_device, inline_threshold); remove the key";

const ALL: &[Program] = &Program::ALL;
/// Programs that accept clients over RDMA.
const SERVING: &[Program] = &[Program::Module, Program::Gateway, Program::Server];
/// Programs that accept the module's settings: the module, and the server, which passes them on.
const MODULE: &[Program] = &[Program::Module, Program::Server];
const SERVER: &[Program] = &[Program::Server];

/// Returns all settings.
pub fn all() -> impl Iterator<Item = &'static Setting> {
    AREAS.iter().flat_map(|(_, settings)| settings.iter().copied())
}

/// Returns why a name is refused, if it is, and what to do instead.
#[must_use]
pub fn refused(name: &str) -> Option<&'static str> {
    // A name without a section is an argument, a flag, or a name of other software.
    let full = format!("network.rdma.{}", name.replace('-', "_"));
    let found = REFUSED.iter().find(|(key, _)| *key == name || *key == full);
    found.map(|(_, instead)| *instead)
}

/// Accepts every word of a list.
fn any_word(word: &str) -> Result<(), &'static str> {
    if word == "\0" { Err("words separated by commas") } else { Ok(()) }
}

/// Returns a setting of all programs that takes effect at start. The functions below change these
/// properties.
const fn setting(
    name: &'static str,
    key: &'static str,
    kind: Kind,
    default: &'static str,
    meaning: &'static str,
) -> Setting {
    Setting {
        name,
        key,
        aliases: &[],
        kind,
        default,
        other_defaults: &[],
        programs: ALL,
        takes_effect: TakesEffect::AtStart,
        in_config: true,
        memory: "",
        meaning,
    }
}

impl Setting {
    const fn of(mut self, programs: &'static [Program]) -> Self {
        self.programs = programs;
        self
    }

    const fn takes_effect(mut self, takes_effect: TakesEffect) -> Self {
        self.takes_effect = takes_effect;
        self
    }

    const fn memory(mut self, memory: &'static str) -> Self {
        self.memory = memory;
        self
    }

    const fn aliases(mut self, aliases: &'static [crate::setting::Alias]) -> Self {
        self.aliases = aliases;
        self
    }

    const fn default_in_program(mut self, defaults: &'static [(Program, &'static str)]) -> Self {
        self.other_defaults = defaults;
        self
    }

    const fn not_in_config(mut self) -> Self {
        self.in_config = false;
        self
    }
}

const fn alias(name: &'static str, form: crate::setting::AliasForm) -> crate::setting::Alias {
    crate::setting::Alias { name, form }
}

#[cfg(test)]
mod tests;
