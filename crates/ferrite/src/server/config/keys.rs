//! The table of all keys of `ferrite.toml`. packaging/ferrite.toml explains each to users.

use ferrite_fabric::Rdma;

use super::value::Value;
use super::{Choice, Config, Restart};

/// The module's default port: the engine's default port plus one.
pub(super) const RDMA_PORT: u16 = 6380;
// The module's limits.
const CLIENTS_MAX: i64 = 16_000;
const BUSY_POLL_MAX: i64 = 1_000_000;
const SLICE_US_RANGE: [i64; 2] = [50, 1_000_000];

/// A key of a section.
pub(super) struct Key {
    pub(super) section: &'static str,
    pub(super) name: &'static str,
    pub(super) use_: Use,
}

/// What a key does.
pub(super) enum Use {
    /// Sets a field of [`Config`], or returns what the key expects.
    Set(fn(&mut Config, &Value<'_>) -> Result<(), String>),
    /// Accepted because similar files have it, but without effect, for this reason.
    Ignored(&'static str),
    /// The same, but only for values that this function accepts.
    IgnoredIf(fn(&Value<'_>) -> Result<(), String>, &'static str),
}

impl Key {
    pub(super) fn find(section: &str, name: &str) -> Option<&'static Self> {
        KEYS.iter().find(|key| key.section == section && key.name == name)
    }
}

/// Returns the name of a key with its section, such as `network.rdma.busy_poll_us`.
pub(super) fn full_name(section: &str, name: &str) -> String {
    if section.is_empty() { name.into() } else { format!("{section}.{name}") }
}

pub(super) fn is_section(name: &str) -> bool {
    name == "engine" || KEYS.iter().any(|key| key.section == name)
}

/// Returns the error for an unknown key. It suggests the nearest known one.
pub(super) fn unknown_key(section: &str, name: &str) -> String {
    // The likeliest mistake is a correct name in the wrong section, then a misspelt one.
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

/// Returns how many characters to insert, remove or replace (Levenshtein distance).
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

const FROM_ADDRESS: &str = "the address in rdma_listen determines it";
const AUTOMATIC: &str = "queues and memory grow with the number of clients";
const CLIENT_SIDE: &str = "clients open the connections, so it is a client setting";
const REPLICATION: &str = "replication uses TCP only";
const CLUSTER: &str = "the cluster bus and slot migration use TCP only";

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
    // Not in [network]: `network.rdma` is a table.
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
    Key {
        section: "network",
        name: "rdma_port",
        use_: Use::IgnoredIf(check_device_port, FROM_ADDRESS),
    },
    ignored("network", "rdma_gid_index", FROM_ADDRESS),
    set("network.rdma", "max_connections", |config, value| {
        config.max_connections = Some(value.number(1, CLIENTS_MAX)?);
        Ok(())
    }),
    set("network.rdma", "busy_poll_us", |config, value| {
        config.busy_poll_us = Some(value.number(0, BUSY_POLL_MAX)?);
        Ok(())
    }),
    set("network.rdma", "slice_us", |config, value| {
        config.slice_us = Some(value.number(SLICE_US_RANGE[0], SLICE_US_RANGE[1])?);
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
    ignored(
        "network.rdma",
        "adaptive_polling",
        "polling always adapts: busy_poll_us long, then sleep",
    ),
    ignored("network.rdma", "pin_memory", "memory that a device accesses is always pinned"),
    ignored("network.rdma", "huge_pages", AUTOMATIC),
    ignored("network.rdma", "max_mr_size", AUTOMATIC),
    ignored("network.rdma", "inline_threshold", "messages are inlined up to the device's limit"),
    ignored("network.rdma", "send_queue_depth", AUTOMATIC),
    ignored("network.rdma", "recv_queue_depth", AUTOMATIC),
    ignored("network.rdma", "max_send_sge", AUTOMATIC),
    ignored("network.rdma", "max_recv_sge", AUTOMATIC),
    ignored("network.rdma", "cq_size", AUTOMATIC),
    ignored("network.rdma", "poll_batch", AUTOMATIC),
    ignored("network.rdma", "recv_buffer_pool_size", AUTOMATIC),
    ignored("network.rdma", "recv_buffer_size", AUTOMATIC),
    ignored("network.rdma", "connection_timeout_ms", CLIENT_SIDE),
    ignored("network.rdma", "connection_retries", CLIENT_SIDE),
    ignored("network.rdma", "retry_delay_ms", CLIENT_SIDE),
    set("replication", "transport", |_, value| require_tcp(value, REPLICATION)),
    ignored("replication", "rdma_device", REPLICATION),
    ignored("replication.rdma", "use_rdma_write", REPLICATION),
    ignored("replication.rdma", "max_inline_size", REPLICATION),
    set("cluster", "enabled", |config, value| {
        config.is_cluster = value.yes_or_no()?;
        Ok(())
    }),
    set("cluster", "transport", |_, value| require_tcp(value, CLUSTER)),
    ignored("cluster.rdma", "gossip_rdma", CLUSTER),
    ignored("cluster.rdma", "migration_rdma", CLUSTER),
];

const fn set(
    section: &'static str,
    name: &'static str,
    set: fn(&mut Config, &Value<'_>) -> Result<(), String>,
) -> Key {
    Key { section, name, use_: Use::Set(set) }
}

const fn ignored(section: &'static str, name: &'static str, why: &'static str) -> Key {
    Key { section, name, use_: Use::Ignored(why) }
}

fn choice(value: &Value<'_>) -> Result<Choice, String> {
    let path = value.path()?;
    Ok(if path.as_os_str() == "auto" { Choice::Auto } else { Choice::Path(path) })
}

/// Accepts the number of a device port. A larger number is meant as the port for clients.
fn check_device_port(value: &Value<'_>) -> Result<(), String> {
    value
        .number::<u8>(1, 254)
        .map(drop)
        .map_err(|_| "expected a device port; set the port for clients in rdma_listen".into())
}

/// Rejects "rdma" where only TCP is implemented.
fn require_tcp(value: &Value<'_>, what: &str) -> Result<(), String> {
    match value.one_of(&[("tcp", true), ("rdma", false)])? {
        true => Ok(()),
        false => Err(format!("{what}: set \"tcp\" or remove the key")),
    }
}
