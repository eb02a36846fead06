//! Every key of `ferrite.toml`: where it stands, and what it does. packaging/ferrite.toml says what
//! each is for.

use ferrite_fabric::Rdma;

use super::value::Value;
use super::{Choice, Config, Restart};

/// Where clients of the module come in, unless said otherwise: Valkey's port, one further.
pub(super) const RDMA_PORT: u16 = 6380;
/// The module's limits.
const CLIENTS_MAX: i64 = 16_000;
const BUSY_POLL_MAX: i64 = 1_000_000;
const TURN: [i64; 2] = [50, 1_000_000];

/// A key of a section.
pub(super) struct Key {
    pub(super) section: &'static str,
    pub(super) name: &'static str,
    pub(super) use_: Use,
}

/// What a key does.
pub(super) enum Use {
    /// Sets something, or says what would be right.
    Set(fn(&mut Config, &Value<'_>) -> Result<(), String>),
    /// Known from other files of this name, and nothing to be set here: why.
    Idle(&'static str),
    /// The same for values that this function accepts.
    IdleIf(fn(&Value<'_>) -> Result<(), String>, &'static str),
}

impl Key {
    pub(super) fn find(section: &str, name: &str) -> Option<&'static Self> {
        KEYS.iter().find(|key| key.section == section && key.name == name)
    }
}

/// `network.rdma.busy_poll_us`
pub(super) fn full_name(section: &str, name: &str) -> String {
    if section.is_empty() { name.into() } else { format!("{section}.{name}") }
}

pub(super) fn is_section(name: &str) -> bool {
    name == "engine" || KEYS.iter().any(|key| key.section == name)
}

/// What to say of a key that is not there.
pub(super) fn unknown(section: &str, name: &str) -> String {
    // A good name in a wrong place is the likeliest mistake; then one that is misspelt.
    let elsewhere =
        KEYS.iter().find(|key| key.name == name).map(|key| full_name(key.section, key.name));
    let sections = ["server", "engine"].into_iter().chain(KEYS.iter().map(|key| key.section));
    let all =
        KEYS.iter().map(|key| full_name(key.section, key.name)).chain(sections.map(Into::into));
    let full = full_name(section, name);
    let nearest = || all.min_by_key(|known| distance(known, &full));
    match elsewhere.or_else(nearest) {
        Some(nearest) => format!("unknown key; the nearest known one is {nearest}"),
        None => "unknown key".into(),
    }
}

/// How many characters to insert, remove or replace (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.chars().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row.last().copied().unwrap_or_default()
}

const BY_ADDRESS: &str = "the address in rdma_listen decides it";
const BY_FABRIC: &str = "queues and memory grow with the clients";
const OF_CLIENTS: &str = "it is the clients who connect";
const REPLICATION: &str = "replication goes over TCP";
const CLUSTER: &str = "the cluster's bus and migrations go over TCP";

pub(super) const KEYS: &[Key] = &[
    set("server", "engine", |config, value| {
        config.engine = choice(value)?;
        Ok(())
    }),
    set("server", "module", |config, value| {
        config.module = choice(value)?;
        Ok(())
    }),
    set("server", "engine_config", |config, value| {
        config.engine_config = Some(value.path()?);
        Ok(())
    }),
    set("server", "data_dir", |config, value| {
        config.data_dir = Some(value.path()?);
        Ok(())
    }),
    set("server", "runtime_dir", |config, value| {
        config.runtime_dir = Some(value.path()?);
        Ok(())
    }),
    set("server", "unix_socket", |config, value| {
        config.unix_socket = Some(value.path()?);
        Ok(())
    }),
    // Not in [network]: a table has that name there.
    set("server", "rdma", |config, value| {
        let policies =
            [("prefer", Rdma::Prefer), ("require", Rdma::Require), ("forbid", Rdma::Forbid)];
        config.rdma = Some(value.one_of(&policies)?);
        Ok(())
    }),
    set("server", "restart", |config, value| {
        config.restart =
            value.one_of(&[("no", Restart::No), ("on-failure", Restart::OnFailure)])?;
        Ok(())
    }),
    set("server", "restart_delay", |config, value| {
        config.restart_delay = value.time()?;
        Ok(())
    }),
    set("server", "restart_limit", |config, value| {
        config.restart_limit = value.number(0, 1_000_000)?;
        Ok(())
    }),
    set("server", "startup_timeout", |config, value| {
        config.startup_timeout = value.time()?;
        Ok(())
    }),
    set("server", "shutdown_timeout", |config, value| {
        config.shutdown_timeout = value.time()?;
        Ok(())
    }),
    set("network", "bind", |config, value| {
        config.bind = value.words()?;
        Ok(())
    }),
    set("network", "port", |config, value| {
        config.port = Some(value.number(0, 65_535)?);
        Ok(())
    }),
    set("network", "rdma_enabled", |config, value| {
        config.rdma_enabled = Some(value.yes_or_no()?);
        Ok(())
    }),
    set("network", "rdma_fallback", |config, value| {
        config.rdma_fallback =
            Some(value.one_of(&[("tcp", Rdma::Prefer), ("none", Rdma::Require)])?);
        Ok(())
    }),
    set("network", "rdma_device", |config, value| {
        config.rdma_devices = value.words()?;
        Ok(())
    }),
    set("network", "rdma_listen", |config, value| {
        let at = value.address(RDMA_PORT)?;
        (config.rdma_listen, config.rdma_port) = (Some(at.ip()), at.port());
        Ok(())
    }),
    set("network", "allow_clear_text", |config, value| {
        config.allow_clear_text = Some(value.yes_or_no()?);
        Ok(())
    }),
    Key { section: "network", name: "rdma_port", use_: Use::IdleIf(port_of_a_device, BY_ADDRESS) },
    idle("network", "rdma_gid_index", BY_ADDRESS),
    set("network.rdma", "max_connections", |config, value| {
        config.max_connections = Some(value.number(1, CLIENTS_MAX)?);
        Ok(())
    }),
    set("network.rdma", "busy_poll_us", |config, value| {
        config.busy_poll_us = Some(value.number(0, BUSY_POLL_MAX)?);
        Ok(())
    }),
    set("network.rdma", "slice_us", |config, value| {
        config.slice_us = Some(value.number(TURN[0], TURN[1])?);
        Ok(())
    }),
    set("network.rdma", "call_path", |config, value| {
        config.call_path = Some(value.yes_or_no()?);
        Ok(())
    }),
    set("network.rdma", "poller_thread", |config, value| {
        config.poller_thread = Some(value.yes_or_no()?);
        Ok(())
    }),
    set("network.rdma", "shared_windows", |config, value| {
        config.shared_windows = Some(value.yes_or_no()?);
        Ok(())
    }),
    set("network.rdma", "rx_size", |config, value| {
        config.rx_size = Some(value.window()?);
        Ok(())
    }),
    set("network.rdma", "rx_size_max", |config, value| {
        config.rx_size_max = Some(value.window()?);
        Ok(())
    }),
    idle("network.rdma", "adaptive_polling", "it always is: busy_poll_us long, then it sleeps"),
    idle("network.rdma", "pin_memory", "what a device may touch is always pinned"),
    idle("network.rdma", "huge_pages", BY_FABRIC),
    idle("network.rdma", "max_mr_size", BY_FABRIC),
    idle("network.rdma", "inline_threshold", "as much goes inline as the device takes"),
    idle("network.rdma", "send_queue_depth", BY_FABRIC),
    idle("network.rdma", "recv_queue_depth", BY_FABRIC),
    idle("network.rdma", "max_send_sge", BY_FABRIC),
    idle("network.rdma", "max_recv_sge", BY_FABRIC),
    idle("network.rdma", "cq_size", BY_FABRIC),
    idle("network.rdma", "poll_batch", BY_FABRIC),
    idle("network.rdma", "recv_buffer_pool_size", BY_FABRIC),
    idle("network.rdma", "recv_buffer_size", BY_FABRIC),
    idle("network.rdma", "connection_timeout_ms", OF_CLIENTS),
    idle("network.rdma", "connection_retries", OF_CLIENTS),
    idle("network.rdma", "retry_delay_ms", OF_CLIENTS),
    set("replication", "transport", |_, value| tcp_alone(value, REPLICATION)),
    idle("replication", "rdma_device", REPLICATION),
    idle("replication.rdma", "use_rdma_write", REPLICATION),
    idle("replication.rdma", "max_inline_size", REPLICATION),
    set("cluster", "enabled", |config, value| {
        config.is_cluster = value.yes_or_no()?;
        Ok(())
    }),
    set("cluster", "transport", |_, value| tcp_alone(value, CLUSTER)),
    idle("cluster.rdma", "gossip_rdma", CLUSTER),
    idle("cluster.rdma", "migration_rdma", CLUSTER),
];

const fn set(
    section: &'static str,
    name: &'static str,
    set: fn(&mut Config, &Value<'_>) -> Result<(), String>,
) -> Key {
    Key { section, name, use_: Use::Set(set) }
}

const fn idle(section: &'static str, name: &'static str, why: &'static str) -> Key {
    Key { section, name, use_: Use::Idle(why) }
}

fn choice(value: &Value<'_>) -> Result<Choice, String> {
    let path = value.path()?;
    Ok(if path.as_os_str() == "auto" { Choice::Auto } else { Choice::Path(path) })
}

/// A device has few ports: more is a port for clients, in the wrong place.
fn port_of_a_device(value: &Value<'_>) -> Result<(), String> {
    value
        .number::<u8>(1, 254)
        .map(drop)
        .map_err(|_| "the port for clients is in rdma_listen".into())
}

/// Asked for RDMA where there is none, we do not go on as if there were.
fn tcp_alone(value: &Value<'_>, what: &str) -> Result<(), String> {
    match value.one_of(&[("tcp", true), ("rdma", false)])? {
        true => Ok(()),
        false => Err(format!("{what}: say \"tcp\", or leave it out")),
    }
}
