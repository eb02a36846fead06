//! The command FERRITE: its subcommands as functions from words to a reply.

use std::ffi::CStr;
use std::fmt::Write as _;

use ferrite_session::{SessionInfo, SessionTransport};

use crate::api::Reply;
use crate::info;
use crate::module::{Module, Service, lanes};

/// A subcommand: its name, the engine's flags for it, and what it does with the words after its name.
pub(crate) struct Subcommand {
    pub(crate) name: &'static CStr,
    pub(crate) flags: &'static CStr,
    pub(crate) categories: &'static CStr,
    pub(crate) run: fn(&mut Module, &[String]) -> Reply,
}

const ADMIN: &CStr = c"admin deny-script allow-loading allow-stale";
/// For those who may administer.
const ADMINS: &CStr = c"admin dangerous";

/// All of them.
pub(crate) const SUBCOMMANDS: [Subcommand; 6] = [
    Subcommand { name: c"clients", flags: ADMIN, categories: ADMINS, run: clients },
    Subcommand { name: c"kill", flags: ADMIN, categories: ADMINS, run: kill },
    Subcommand { name: c"stats", flags: ADMIN, categories: ADMINS, run: stats },
    Subcommand { name: c"doctor", flags: ADMIN, categories: ADMINS, run: doctor },
    Subcommand { name: c"mark", flags: c"write deny-script fast", categories: c"fast", run: mark },
    Subcommand {
        name: c"help",
        flags: c"deny-script allow-loading allow-stale",
        categories: c"fast",
        run: help,
    },
];

const HELP: [&str; 13] = [
    "FERRITE <subcommand> [<arg> ...]. Subcommands are:",
    "CLIENTS",
    "    The sessions of the RDMA listener, one per line: who, over what, how long, how much.",
    "KILL <id>",
    "    End the session of this number.",
    "STATS",
    "    All counters of INFO ferrite as names and values.",
    "DOCTOR",
    "    What works, what does not, and what to do about it.",
    "MARK",
    "    Let WAIT of this connection wait for what its session wrote by calls. Sessions send it by themselves.",
    "HELP",
    "    Print this help.",
];

/// See `entry.rs`, which has replicated something by now.
fn mark(_: &mut Module, words: &[String]) -> Reply {
    match words {
        [] => Reply::Simple("OK".into()),
        _ => Reply::WrongArity,
    }
}

fn help(_: &mut Module, words: &[String]) -> Reply {
    match words {
        [] => Reply::Lines(HELP.map(Into::into).into()),
        _ => Reply::WrongArity,
    }
}

fn clients(module: &mut Module, words: &[String]) -> Reply {
    match (words, &module.service) {
        ([], Service::On(transport)) => {
            let lines = transport.gateway.sessions().iter().map(line).collect();
            Reply::Text(lines)
        }
        ([], Service::Off(_)) => Reply::Text(String::new()),
        _ => Reply::WrongArity,
    }
}

/// As CLIENT LIST has it.
fn line(session: &SessionInfo) -> String {
    let address =
        |address: Option<std::net::SocketAddr>| address.map_or("?".into(), |address| address.to_string());
    let transport = match session.transport {
        SessionTransport::FerriteRdma => "rdma-ferrite",
        SessionTransport::ValkeyRdma => "rdma-valkey",
        SessionTransport::Tls => "tls",
        _ => "tcp",
    };
    format!(
        "id={} addr={} laddr={} transport={transport} device={} lane={} age={} tot-net-in={} tot-net-out={}\n",
        session.id,
        address(session.peer),
        address(session.local),
        session.device.as_deref().unwrap_or(""),
        if session.is_called { "call" } else { "bridge" },
        session.age.as_secs(),
        session.to_engine_bytes,
        session.to_client_bytes
    )
}

fn kill(module: &mut Module, words: &[String]) -> Reply {
    let [id] = words else { return Reply::WrongArity };
    let Ok(id) = id.parse() else {
        return Reply::Error("ERR a session's id is a number: FERRITE CLIENTS lists them".into());
    };
    match &module.service {
        Service::On(transport) if transport.gateway.kill(id) => Reply::Simple("OK".into()),
        _ => Reply::Error(format!("ERR no session has the id {id}")),
    }
}

fn stats(module: &mut Module, words: &[String]) -> Reply {
    if !words.is_empty() {
        return Reply::WrongArity;
    }
    let info::Sections { mut general, mut rdma } = info::sections(module, false);
    general.append(&mut rdma);
    Reply::Map(general)
}

fn doctor(module: &mut Module, words: &[String]) -> Reply {
    if !words.is_empty() {
        return Reply::WrongArity;
    }
    let mut report = String::new();
    let mut say = |good: bool, what: &str| {
        let _ = writeln!(report, "[{}] {what}", if good { " ok " } else { "look" });
    };
    match &mut module.service {
        Service::Off(why) => say(false, &format!("no listener: {why}")),
        Service::On(transport) => {
            let begun = transport.begun.clone();
            let config = transport.gateway.config();
            match &begun.absence {
                _ if !transport.is_alive() => {
                    say(false, "the transport has ended: the engine's log says why");
                }
                Some(why) => say(false, &format!("{}: TCP alone, no RDMA: {why}", begun.address)),
                None => say(true, &format!("{}: RDMA on {}", begun.address, begun.devices.join(", "))),
            }
            say(true, &lanes(&config.engine));
            if !config.protected_mode {
                say(
                    false,
                    "protected mode is off: whoever reaches the port may come in without a password, if the engine asks for none",
                );
            }
            let gateway = transport.gateway.stats();
            say(
                gateway.sessions < config.max_clients,
                &format!("sessions: {} of {}", gateway.sessions, config.max_clients),
            );
            let failures = gateway.engine_failures;
            say(failures == 0, &format!("clients for whom the engine's socket did not answer: {failures}"));
            let stats = transport.stats();
            let pinned = stats.memory.registered_bytes;
            say(
                true,
                &format!(
                    "pinned memory: {pinned} bytes of {} at most",
                    stats.memory.send.max_bytes + stats.memory.receive.max_bytes
                ),
            );
            let exhausted = stats.memory.failures.send_exhausted + stats.memory.failures.receive_exhausted;
            say(exhausted == 0, &format!("times that memory for RDMA ran out: {exhausted}"));
            let lost = stats.devices_lost.saturating_sub(stats.devices_back);
            say(lost == 0, &format!("devices that are missing: {lost}"));
            let falls: u64 = stats.fallbacks.iter().map(|(_, count)| count).sum();
            say(falls == 0, &format!("links over TCP that should be on RDMA, so far: {falls}"));
        }
    }
    Reply::Text(report)
}

/// A reply to a subcommand that failed within.
pub(crate) fn failed() -> Reply {
    Reply::Error("ERR Ferrite failed: the engine's log says how".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_names_every_subcommand() {
        for subcommand in &SUBCOMMANDS {
            let name = subcommand.name.to_string_lossy().to_uppercase();
            assert!(HELP.iter().any(|line| line.split(' ').next() == Some(&name)), "{name}");
        }
    }
}
