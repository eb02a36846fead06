//! The command FERRITE: its subcommands as functions from words to a reply.

use std::ffi::CStr;
use std::fmt::Write as _;

use ferrite_session::{SessionInfo, SessionTransport};

use crate::api::Reply;
use crate::event_loop;
use crate::info;
use crate::module::{Module, Service, command_paths};

/// A subcommand: its name, the engine's flags for it, and what it does with the words after its
/// name.
pub(crate) struct Subcommand {
    pub(crate) name: &'static CStr,
    pub(crate) flags: &'static CStr,
    pub(crate) categories: &'static CStr,
    /// The engine's own command that tells or does the like: the caller needs the right to it, too.
    /// Empty: nothing more is needed.
    pub(crate) needs: &'static [&'static str],
    pub(crate) run: fn(&mut Module, &[String]) -> Reply,
}

const ADMIN: &CStr = c"admin deny-script allow-loading allow-stale";
/// Before a login, and whatever the client's rights are: the command is about the connection
/// itself. Its argument is a secret.
const BIND: &CStr =
    c"no-auth deny-script allow-loading allow-stale allow-busy no-monitor no-slowlog fast";
/// As BIND, but not before a login: that the engine runs it is proof of one.
const ATTEST: &CStr =
    c"deny-script allow-loading allow-stale allow-busy no-monitor no-slowlog fast";
/// Whatever the client's rights are: without it WAIT would count older writes only.
const MARK: &CStr = c"no-auth write deny-script fast";
/// For those who may administer.
const ADMINS: &CStr = c"admin dangerous";

/// All of them.
pub(crate) const SUBCOMMANDS: [Subcommand; 8] = [
    admin(c"clients", &["CLIENT", "LIST"], clients),
    admin(c"kill", &["CLIENT", "KILL", "ID", "0"], kill),
    admin(c"stats", &["INFO"], stats),
    admin(c"doctor", &["INFO"], doctor),
    own(c"bind", BIND),
    own(c"attest", ATTEST),
    own(c"mark", MARK),
    Subcommand {
        name: c"help",
        flags: c"deny-script allow-loading allow-stale",
        categories: c"fast",
        needs: &[],
        run: help,
    },
];

/// Of sessions themselves, on their proxy connections.
const fn own(name: &'static CStr, flags: &'static CStr) -> Subcommand {
    Subcommand { name, flags, categories: c"fast", needs: &[], run: internal }
}

const fn admin(
    name: &'static CStr,
    needs: &'static [&'static str],
    run: fn(&mut Module, &[String]) -> Reply,
) -> Subcommand {
    Subcommand { name, flags: ADMIN, categories: ADMINS, needs, run }
}

const HELP: [&str; 13] = [
    "FERRITE <subcommand> [<arg> ...]. Subcommands are:",
    "CLIENTS",
    "    List the sessions of the module, one per line: client, transport, age, memory and bytes.",
    "KILL <id>",
    "    End the session with this id (the field id of FERRITE CLIENTS).",
    "STATS",
    "    Return all fields of INFO ferrite as names and values.",
    "DOCTOR",
    "    Report what works, what does not, and what to do about it.",
    "BIND <token>, ATTEST <token>, MARK",
    "    Internal. Sessions run them on their connections to the engine.",
    "HELP",
    "    Print this help.",
];

/// See `entry.rs`, which has answered by now.
fn internal(_: &mut Module, _: &[String]) -> Reply {
    failed()
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
    let address = |address: Option<std::net::SocketAddr>| {
        address.map_or("?".into(), |address| address.to_string())
    };
    let transport = match session.transport {
        SessionTransport::FerriteRdma => "rdma-ferrite",
        SessionTransport::ValkeyRdma => "rdma-valkey",
        SessionTransport::Tls => "tls",
        _ => "tcp",
    };
    format!(
        "id={} client-id={} user={} addr={} laddr={} transport={transport} device={} path={} age={} held={} \
         tot-net-in={} tot-net-out={}\n",
        session.id,
        session.client_id.map_or(String::new(), |id| id.to_string()),
        session.client_id.and_then(event_loop::user_of).unwrap_or_default(),
        address(session.peer),
        address(session.local),
        session.device.as_deref().unwrap_or(""),
        if session.is_called { "call" } else { "proxy" },
        session.age.as_secs(),
        session.held_bytes,
        session.to_engine_bytes,
        session.to_client_bytes
    )
}

fn kill(module: &mut Module, words: &[String]) -> Reply {
    let [id] = words else { return Reply::WrongArity };
    let Ok(id) = id.parse() else {
        return Reply::Error(
            "ERR invalid session id: expected a number; FERRITE CLIENTS lists the ids".into(),
        );
    };
    match &module.service {
        Service::On(transport) if transport.gateway.kill(id) => Reply::Simple("OK".into()),
        _ => Reply::Error(format!("ERR no session has the id {id}; FERRITE CLIENTS lists the ids")),
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
        let _ = writeln!(report, "[{}] {what}", if good { " ok " } else { "warn" });
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
                Some(why) => {
                    say(false, &format!("{}: TCP only, no RDMA: {why}", begun.places(true)))
                }
                None => say(
                    true,
                    &format!("{}: RDMA on {}", begun.places(false), begun.devices.join(", ")),
                ),
            }
            for unused in begun.unserved.iter().chain(&begun.unused) {
                say(false, unused);
            }
            say(true, &command_paths(&config.engine));
            if !config.protected_mode {
                say(
                    false,
                    "protected mode is off: if the engine has no password, every client that reaches the port has full access",
                );
            }
            let gateway = transport.gateway.stats();
            say(
                gateway.sessions < config.max_clients,
                &format!("sessions: {} of {}", gateway.sessions, config.max_clients),
            );
            let failures = gateway.engine_failures;
            say(failures == 0, &format!("engine connection failures: {failures}"));
            let stats = transport.stats();
            let (pinned, most) = (stats.memory.registered_bytes, stats.memory.registered_max_bytes);
            say(
                pinned <= most,
                &format!(
                    "pinned memory: {pinned} bytes of {most} at most{}; {} of them are windows that clients write to",
                    if pinned > most { ", above the limit" } else { "" },
                    stats.memory.exposed_bytes
                ),
            );
            let exhausted =
                stats.memory.failures.send_exhausted + stats.memory.failures.receive_exhausted;
            say(
                exhausted == 0,
                &format!("allocations that failed for lack of RDMA memory: {exhausted}"),
            );
            let apart = stats.devices_without_windows;
            say(
                apart == 0,
                &format!(
                    "devices without memory windows of type 2 (rdma-shared-windows): {apart}; clients refused there: {}, \
                     served with a shared window: {}",
                    stats.refused_without_windows, stats.shared_windows
                ),
            );
            let reached = stats.remote_access_errors;
            say(
                reached == 0,
                &format!(
                    "connections closed because the peer accessed memory that is not its own: {reached}"
                ),
            );
            let lost = stats.devices_lost.saturating_sub(stats.devices_back);
            say(lost == 0, &format!("devices lost and not back: {lost}"));
            let falls: u64 = stats.fallbacks.iter().map(|(_, count)| count).sum();
            say(
                falls == 0,
                &format!("links that use TCP although RDMA was wanted, since the start: {falls}"),
            );
        }
    }
    Reply::Text(report)
}

/// A reply to a caller without the right to what `subcommand` does.
pub(crate) fn denied(subcommand: &Subcommand) -> Reply {
    let needed: Vec<_> = subcommand.needs.iter().take(2).copied().collect();
    Reply::Error(format!(
        "NOPERM FERRITE {} also needs the permission to run {}",
        subcommand.name.to_string_lossy().to_uppercase(),
        needed.join(" ")
    ))
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
            assert!(
                HELP.iter().any(|line| line.split([' ', ',']).any(|word| word == name)),
                "{name}"
            );
        }
    }
}
