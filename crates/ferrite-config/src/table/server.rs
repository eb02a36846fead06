//! The engine that `ferrite server` runs.

use std::time::Duration;

use super::{SERVER, admin_address, any_word, setting};
use crate::kind::Kind;
use crate::setting::{Program, Setting, TakesEffect};

pub(super) const SETTINGS: &[&Setting] = &[
    &ENGINE_PROGRAM,
    &MODULE_FILE,
    &ENGINE_CONFIG,
    &DATA_DIR,
    &RUNTIME_DIR,
    &UNIX_SOCKET,
    &RESTART,
    &RESTART_DELAY,
    &RESTART_LIMIT,
    &STARTUP_TIMEOUT,
    &SHUTDOWN_TIMEOUT,
    &BIND,
    &PORT,
    &CLUSTER_ENABLED,
    &SERVER_AGENT,
    &AGENT_ADMIN_LISTEN,
    &REPLICATION_TRANSPORT,
    &CLUSTER_TRANSPORT,
    &GOSSIP_RDMA,
    &MIGRATION_RDMA,
];

pub(super) const LOGS: &[&Setting] = &[&LOG, &LOG_LEVEL];

/// From a millisecond to a week. A longer time is probably a mistake.
const TIME: Kind =
    Kind::Time { bare: None, min: Duration::from_millis(1), max: Duration::from_secs(7 * 86_400) };
const PATH: Kind = Kind::Text(path);

/// The engine's program, by its name or path.
pub static ENGINE_PROGRAM: Setting = setting(
    "engine-program",
    "server.engine",
    PATH,
    "auto",
    "The engine: a name, a path, or `auto` (`valkey-server`, then `redis-server`, in PATH).",
)
.of(SERVER);

/// The module's file.
pub static MODULE_FILE: Setting = setting(
    "module-file",
    "server.module",
    PATH,
    "auto",
    "The module: a path, or `auto` (`ferrite.so` beside the `ferrite` program, then in \
     `../lib/ferrite`).",
)
.of(SERVER);

/// The engine's own configuration file.
pub static ENGINE_CONFIG: Setting = setting(
    "engine-config",
    "server.engine_config",
    PATH,
    "",
    "A configuration file of the engine. `ferrite server` passes its lines on, except `logfile` and \
     `pidfile`. Other settings override them.",
)
.of(SERVER);

/// The engine's data directory.
pub static DATA_DIR: Setting = setting(
    "data-dir",
    "server.data_dir",
    PATH,
    "",
    "The engine's data directory. Unset: `dir` of `engine-config`, or the current directory.",
)
.of(SERVER);

/// The directory of the engine's Unix socket.
pub static RUNTIME_DIR: Setting = setting(
    "runtime-dir",
    "server.runtime_dir",
    PATH,
    "",
    "The directory of the engine's Unix socket. Unset: the directory in the environment variable \
     RUNTIME_DIRECTORY, or else a private directory in XDG_RUNTIME_DIR or /tmp.",
)
.of(SERVER);

/// The path of the engine's Unix socket.
pub static UNIX_SOCKET: Setting = setting(
    "unix-socket",
    "server.unix_socket",
    PATH,
    "",
    "The path of the engine's Unix socket, at most 107 bytes. Unset: a file in `runtime-dir`.",
)
.of(SERVER);

/// Whether to restart an engine that fails after it was ready.
pub static RESTART: Setting = setting(
    "restart",
    "server.restart",
    Kind::Choice(&["no", "on-failure"]),
    "no",
    "Whether to restart an engine that fails after it was ready.",
)
.of(SERVER)
.takes_effect(TakesEffect::AtOnce);

/// The delay before the first restart.
pub static RESTART_DELAY: Setting = setting(
    "restart-delay",
    "server.restart_delay",
    TIME,
    "1s",
    "Delay before the first restart; doubles each time, up to 30 s.",
)
.of(SERVER)
.takes_effect(TakesEffect::AtOnce);

/// The largest number of restarts in a row.
pub static RESTART_LIMIT: Setting = setting(
    "restart-limit",
    "server.restart_limit",
    Kind::Number { min: 0, max: 1_000_000 },
    "5",
    "Number of restarts in a row before `ferrite server` gives up. The count begins again when the \
     engine has been ready for a minute.",
)
.of(SERVER)
.takes_effect(TakesEffect::AtOnce);

/// How long a starting engine may leave requests unanswered. Time to load data does not count.
pub static STARTUP_TIMEOUT: Setting = setting(
    "startup-timeout",
    "server.startup_timeout",
    TIME,
    "60s",
    "How long a starting engine may leave requests unanswered before `ferrite server` stops it. \
     Time to load data does not count.",
)
.of(SERVER);

/// How long the engine may take to save and exit before it is killed.
// Saving a large dataset takes minutes; a kill during that time loses data.
pub static SHUTDOWN_TIMEOUT: Setting = setting(
    "shutdown-timeout",
    "server.shutdown_timeout",
    TIME,
    "5m",
    "How long the engine may take to save and exit. After this time, the engine is killed, and \
     unsaved data is lost.",
)
.of(SERVER)
.takes_effect(TakesEffect::AtOnce);

/// The engine's own addresses for TCP.
pub static BIND: Setting = setting(
    "bind",
    "network.bind",
    Kind::List(any_word),
    "",
    "The engine's own addresses for TCP. Unset: `bind` of `engine-config`, or the engine's default.",
)
.of(SERVER);

/// The engine's own port for TCP.
pub static PORT: Setting = setting(
    "port",
    "network.port",
    Kind::Number { min: 0, max: 65_535 },
    "",
    "The engine's own port for TCP. Unset: `port` of `engine-config`, or the engine's default.",
)
.of(SERVER);

/// The engine's cluster mode.
pub static CLUSTER_ENABLED: Setting = setting(
    "cluster-enabled",
    "cluster.enabled",
    Kind::Switch,
    "no",
    "The engine's own `cluster-enabled`.",
)
.of(SERVER);

/// Whether `ferrite server` also runs an agent.
pub static SERVER_AGENT: Setting = setting(
    "agent",
    "server.agent",
    Kind::Switch,
    "no",
    "Whether `ferrite server` also runs `ferrite agent`, with the settings in `[agent]`. The agent \
     starts before the engine and ends after it. `replication-transport rdma` and \
     `cluster-transport rdma` turn it on.",
)
.of(SERVER);

/// The address of the admin port of the agent in `ferrite server`.
pub static AGENT_ADMIN_LISTEN: Setting = setting(
    "agent-admin-listen",
    "server.agent_admin_listen",
    Kind::Text(admin_address),
    "off",
    "The admin port of the agent that `ferrite server` runs, because the module serves the one of \
     `admin-listen`. `/metrics` are those of the agent. `/ready` answers 200 while the engine \
     answers and the agent has a link to each peer.",
)
.of(SERVER);

/// The programs that know how replication and clusters connect.
const CARRYING: &[Program] = &[Program::Server, Program::Agent];
const TRANSPORT: Kind = Kind::Choice(&["auto", "rdma", "tcp"]);

/// How replicas connect to their primaries.
pub static REPLICATION_TRANSPORT: Setting = setting(
    "replication-transport",
    "replication.transport",
    TRANSPORT,
    "auto",
    "How replicas connect to primaries on other hosts. `auto`: over the agent's links if there is \
     an agent, otherwise directly by TCP. `rdma`: over the agent's links, which then use RDMA \
     only; `ferrite server` runs an agent. `tcp`: directly; an agent can do that with `mode \
     transparent`. An agent knows connections by their ports: those of clients of this host and of \
     slot migration go the same way.",
)
.of(CARRYING);

/// How nodes of a cluster connect to each other.
pub static CLUSTER_TRANSPORT: Setting = setting(
    "cluster-transport",
    "cluster.transport",
    TRANSPORT,
    "auto",
    "How the nodes of a cluster connect to each other, with the values of `replication-transport`: \
     the cluster bus, at the ports 10,000 above those of the engines, and slot migration, at the \
     engines' ports.",
)
.of(CARRYING);

/// Whether the transport of the cluster is also that of its bus.
pub static GOSSIP_RDMA: Setting = setting(
    "gossip-rdma",
    "cluster.rdma.gossip_rdma",
    Kind::Switch,
    "yes",
    "Whether `cluster-transport` applies to the cluster bus. `no`: the bus uses `tcp`.",
)
.of(CARRYING);

/// Whether the transport of the cluster is also that of slot migration.
pub static MIGRATION_RDMA: Setting = setting(
    "migration-rdma",
    "cluster.rdma.migration_rdma",
    Kind::Switch,
    "yes",
    "Whether `cluster-transport` applies to slot migration. `no`: it uses `tcp`, which \
     `replication-transport rdma` contradicts, because both use the engines' ports.",
)
.of(CARRYING);

/// The programs that write a log of their own. The module writes to the engine's log.
const LOGGING: &[Program] = &[Program::Gateway, Program::Server, Program::Relay, Program::Agent];

/// The form of log lines.
pub static LOG: Setting = setting(
    "log",
    "observability.log_format",
    Kind::Choice(&["text", "json"]),
    "text",
    "The form of log lines on stderr: `text` is a time, a level and a sentence, `json` is one \
     object on each line. `ferrite server` passes the engine's lines on as they are, or as JSON.",
)
.of(LOGGING);

/// The least level that is logged.
pub static LOG_LEVEL: Setting = setting(
    "log-level",
    "observability.log_level",
    Kind::Choice(&["error", "warn", "info", "debug", "trace"]),
    "info",
    "Log lines of this level and above are written. `info`: changes of state. `debug`: details.",
)
.of(LOGGING)
.takes_effect(TakesEffect::AtOnce);

fn path(text: &str) -> Result<(), &'static str> {
    if text.is_empty() || text == "\0" { Err("a path") } else { Ok(()) }
}
