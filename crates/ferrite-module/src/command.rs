//! The command FERRITE: each subcommand is a function from its arguments to a reply.

use std::ffi::CStr;
use std::fmt::Write as _;

use ferrite_session::{Killed, SessionInfo, SessionTransport};

use crate::api::Reply;
use crate::api::clients::{client_flag, client_info};
use crate::call_path;
use crate::info;
use crate::module::{Module, Service, command_paths};

/// A subcommand of FERRITE.
pub(crate) struct Subcommand {
    pub(crate) name: &'static CStr,
    /// The engine's command flags.
    pub(crate) flags: &'static CStr,
    /// The ACL categories.
    pub(crate) categories: &'static CStr,
    /// The engine's own command that reports or does the same. The caller needs the permission to
    /// run it. Empty if no further permission is needed.
    pub(crate) needs: &'static [&'static str],
    /// Runs the subcommand with the words after its name.
    pub(crate) run: Run,
}

/// Runs a subcommand for the engine's client with this id.
type Run = fn(&mut Module, u64, &[String]) -> Reply;

/// Flags of commands for every client.
const READ: &CStr = c"deny-script allow-loading allow-stale";
const ADMIN: &CStr = c"admin deny-script allow-loading allow-stale";
/// Flags of BIND. It runs before a login and whatever the client's rights are, since it concerns
/// only the connection. Its argument is a secret, so neither MONITOR nor the slow log shows it.
const BIND: &CStr =
    c"no-auth deny-script allow-loading allow-stale allow-busy no-monitor no-slowlog fast";
/// Flags of ATTEST: those of BIND without `no-auth`. So if the engine runs ATTEST, the client has
/// authenticated or need not authenticate.
const ATTEST: &CStr =
    c"deny-script allow-loading allow-stale allow-busy no-monitor no-slowlog fast";
/// Flags of MARK. It runs whatever the client's rights are. MONITOR does not show it, since the
/// client has not sent it. Without the flag `write`, the engine would not count the command as a
/// write of this client, and WAIT would cover only older writes.
const MARK: &CStr = c"no-auth write deny-script no-monitor no-slowlog fast";
/// The ACL categories of commands for administrators.
const ADMINS: &CStr = c"admin dangerous";

/// All subcommands.
pub(crate) const SUBCOMMANDS: [Subcommand; 9] = [
    admin(c"clients", &["CLIENT", "LIST"], clients),
    admin(c"kill", &["CLIENT", "KILL", "ID", "0"], kill),
    admin(c"stats", &["INFO"], stats),
    admin(c"doctor", &["INFO"], doctor),
    internal(c"bind", BIND),
    internal(c"attest", ATTEST),
    internal(c"mark", MARK),
    // Clients of a cluster need this command, as they need CLUSTER SLOTS, so it is not for
    // administrators only. It shows the same kind of information: addresses and ports of nodes.
    Subcommand {
        name: c"endpoints",
        flags: READ,
        categories: c"slow",
        needs: &["CLUSTER", "SLOTS"],
        run: endpoints,
    },
    Subcommand { name: c"help", flags: READ, categories: c"fast", needs: &[], run: help },
];

/// Returns a subcommand that sessions run on their proxy connections.
const fn internal(name: &'static CStr, flags: &'static CStr) -> Subcommand {
    Subcommand { name, flags, categories: c"fast", needs: &[], run: run_internal }
}

const fn admin(name: &'static CStr, needs: &'static [&'static str], run: Run) -> Subcommand {
    Subcommand { name, flags: ADMIN, categories: ADMINS, needs, run }
}

const HELP: [&str; 15] = [
    "FERRITE <subcommand> [<arg> ...]. Subcommands are:",
    "CLIENTS",
    "    List the module's sessions, one per line: client, transport, age, memory and bytes.",
    "KILL <id>",
    "    End the session with this id (the field id in FERRITE CLIENTS).",
    "STATS",
    "    Return all fields of INFO ferrite as names and values.",
    "DOCTOR",
    "    Report what works, what does not, and what to do about it.",
    "ENDPOINTS",
    "    List the addresses at which the modules of the cluster's nodes accept clients.",
    "BIND <token>, ATTEST <token>, MARK",
    "    Internal. Only the module's sessions run these, on their connections to the engine.",
    "HELP",
    "    Print this help.",
];

/// Never runs: `entry.rs` answers internal commands.
fn run_internal(_: &mut Module, _: u64, _: &[String]) -> Reply {
    failed()
}

fn help(_: &mut Module, _: u64, words: &[String]) -> Reply {
    match words {
        [] => Reply::Lines(HELP.map(Into::into).into()),
        _ => Reply::WrongArity,
    }
}

fn clients(module: &mut Module, _: u64, words: &[String]) -> Reply {
    match (words, &module.service) {
        ([], Service::On(transport)) => {
            let lines = transport.gateway.sessions().iter().map(line).collect();
            Reply::Text(lines)
        }
        ([], Service::Off(_)) => Reply::Text(String::new()),
        _ => Reply::WrongArity,
    }
}

fn endpoints(module: &mut Module, _: u64, words: &[String]) -> Reply {
    match words {
        [] => module.list_endpoints(),
        _ => Reply::WrongArity,
    }
}

/// Formats a session as a line, as in CLIENT LIST.
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
        session.client_id.and_then(call_path::user_of).unwrap_or_default(),
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

/// Ends a session. A client that ends its own session gets the reply first, as with CLIENT KILL.
fn kill(module: &mut Module, caller: u64, words: &[String]) -> Reply {
    let [id] = words else { return Reply::WrongArity };
    let Ok(id) = id.parse() else {
        return Reply::Error(
            "ERR invalid session id: expected a number; see FERRITE CLIENTS".into(),
        );
    };
    let killed = match &module.service {
        // The engine revokes the login of a client that closes itself. The rest of the transaction
        // would then run as the user `default`, and a script in it could use that user's rights.
        Service::On(transport)
            if transport.gateway.client_id(id) == Some(caller) && is_in_transaction(caller) =>
        {
            return Reply::Error(
                "ERR a transaction cannot end its own session; run FERRITE KILL after EXEC".into(),
            );
        }
        Service::On(transport) => transport.gateway.kill_for(id, caller),
        Service::Off(_) => None,
    };
    match killed {
        Some(Killed::CloseClient(client)) if client != caller && call_path::kill_client(client) => {
            Reply::Simple("OK".into())
        }
        Some(Killed::CloseClient(client)) => Reply::SimpleAndClose("OK".into(), client),
        Some(Killed::Ending) => Reply::Simple("OK".into()),
        None => Reply::Error(format!("ERR no session has the id {id}; see FERRITE CLIENTS")),
    }
}

fn is_in_transaction(client: u64) -> bool {
    client_info(client).is_some_and(|info| info.flags & client_flag::MULTI != 0)
}

fn stats(module: &mut Module, _: u64, words: &[String]) -> Reply {
    if !words.is_empty() {
        return Reply::WrongArity;
    }
    let info::Sections { mut general, mut rdma } = info::sections(module, false);
    general.append(&mut rdma);
    Reply::Map(general)
}

fn doctor(module: &mut Module, _: u64, words: &[String]) -> Reply {
    if !words.is_empty() {
        return Reply::WrongArity;
    }
    let mut report = String::new();
    let mut say = |is_ok: bool, what: &str| {
        let _ = writeln!(report, "[{}] {what}", if is_ok { " ok " } else { "warn" });
    };
    match &mut module.service {
        Service::Off(why) => say(false, &format!("no listener: {why}")),
        Service::On(transport) => {
            if let Some(why) = transport.state.why_ended() {
                say(false, &format!("no listener: {why}; restart the engine"));
                return Reply::Text(report);
            }
            let listener = transport.listener.clone();
            let config = transport.gateway.config();
            match &listener.absence {
                Some(why) => {
                    say(false, &format!("{}: TCP only, no RDMA: {why}", listener.all_addresses()));
                }
                None => say(
                    true,
                    &format!(
                        "{}: RDMA on {}",
                        listener.rdma_addresses(),
                        listener.devices.join(", ")
                    ),
                ),
            }
            for unused in listener.unserved.iter().chain(&listener.unused) {
                say(false, unused);
            }
            say(true, &command_paths(&config.engine));
            if !config.protected_mode {
                say(
                    false,
                    "protected mode is off: if the engine has no password, every client that can \
                     reach the port has full access",
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
            let (pinned, limit) =
                (stats.memory.registered_bytes, stats.memory.registered_max_bytes);
            say(
                pinned <= limit,
                &format!(
                    "pinned memory: {pinned} bytes, limit {limit}{}; {} bytes are windows that \
                     clients write to",
                    if pinned > limit { " (exceeded)" } else { "" },
                    stats.memory.exposed_bytes
                ),
            );
            let exhausted =
                stats.memory.failures.send_exhausted + stats.memory.failures.receive_exhausted;
            say(exhausted == 0, &format!("failed allocations of RDMA memory: {exhausted}"));
            let unisolated = stats.devices_without_windows;
            say(
                unisolated == 0,
                &format!(
                    "devices without memory windows of type 2: {unisolated} (see \
                     rdma-shared-windows); clients rejected there: {}, served with a shared \
                     window: {}",
                    stats.refused_without_windows, stats.shared_windows
                ),
            );
            let violations = stats.remote_access_errors;
            say(
                violations == 0,
                &format!(
                    "connections closed because the peer accessed memory that is not its own: \
                     {violations}"
                ),
            );
            match stats.device_faults.as_slice() {
                [] if listener.devices.is_empty() => {} // reported above
                [] => say(true, "all RDMA devices in use are present and their ports are up"),
                faults => faults.iter().for_each(|fault| say(false, fault)),
            }
            let fallbacks: u64 = stats.fallbacks.iter().map(|(_, count)| count).sum();
            say(
                fallbacks == 0,
                &format!("links that fell back from RDMA to TCP since the start: {fallbacks}"),
            );
        }
    }
    Reply::Text(report)
}

/// Returns the reply to a caller who lacks the permission that `subcommand` needs.
pub(crate) fn denied(subcommand: &Subcommand) -> Reply {
    let needed: Vec<_> = subcommand.needs.iter().take(2).copied().collect();
    Reply::Error(format!(
        "NOPERM FERRITE {} also needs the permission to run {}",
        subcommand.name.to_string_lossy().to_uppercase(),
        needed.join(" ")
    ))
}

/// Returns the reply to a subcommand that failed because of a bug, or while the module was busy.
pub(crate) fn failed() -> Reply {
    Reply::Error("ERR internal error in the ferrite module; see the engine's log".into())
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
