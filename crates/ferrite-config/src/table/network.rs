//! Addresses, devices, and whether RDMA may be used.

use std::time::Duration;

use super::{MODULE, any_word, setting};
use crate::address;
use crate::kind::Kind;
use crate::setting::{Program, Setting};
use crate::time::Unit;

pub(super) const SETTINGS: &[&Setting] = &[
    &RDMA,
    &RDMA_ENABLED,
    &RDMA_FALLBACK,
    &RDMA_BIND,
    &RDMA_PORT,
    &LISTEN,
    &RELAY_LISTEN,
    &TO,
    &LOCAL,
    &ALLOW_CLEAR_TEXT,
    &ENGINE,
    &RDMA_DEVICE,
    &RDMA_DEVICE_PORT,
    &RDMA_GID_INDEX,
    &CONNECTION_TIMEOUT,
    &CONNECTION_RETRIES,
    &RETRY_DELAY,
    &ADMIN_LISTEN,
];

/// Whether links may use RDMA.
// The key is not in [network], because `network.rdma` is a table.
pub static RDMA: Setting = setting(
    "rdma",
    "server.rdma",
    Kind::Choice(&["prefer", "require", "forbid"]),
    "prefer",
    "Whether RDMA may, must or must not be used. `prefer` uses TCP where RDMA does not work, and \
     reports why. `require` does not start without RDMA, and does not fall back to TCP. `forbid` \
     uses TCP only; with `forbid`, `ferrite server` starts the engine without the module. \
     Listeners on loopback addresses always use TCP.",
);

/// Another spelling of [`RDMA`].
pub static RDMA_ENABLED: Setting = setting(
    "rdma-enabled",
    "network.rdma_enabled",
    Kind::Switch,
    "",
    "`no` means `rdma forbid`. `yes` allows RDMA, as `rdma` and `rdma-fallback` say.",
)
.not_in_config();

/// Another spelling of [`RDMA`].
pub static RDMA_FALLBACK: Setting = setting(
    "rdma-fallback",
    "network.rdma_fallback",
    Kind::Choice(&["tcp", "none"]),
    "",
    "`tcp` means `rdma prefer`, `none` means `rdma require`.",
)
.not_in_config();

/// The addresses that the module listens on.
pub static RDMA_BIND: Setting = setting(
    "rdma-bind",
    "",
    Kind::Text(addresses),
    "auto",
    "Addresses or names of this host to listen on, separated by commas; 0.0.0.0 and :: mean all. \
     `auto`: the addresses on which the engine listens. Names are resolved when the module starts. \
     A loopback address accepts TCP only.",
)
.of(&[Program::Module]);

/// The port that the module listens on.
pub static RDMA_PORT: Setting = setting(
    "rdma-port",
    "",
    Kind::Number { min: 1, max: 65_535 },
    "6380",
    "Port for clients, over RDMA and, unless `rdma require`, over TCP.",
)
.of(&[Program::Module]);

/// The addresses that the gateway, or the module under `ferrite server`, listens on.
pub static LISTEN: Setting = setting(
    "listen",
    "network.rdma_listen",
    Kind::Text(addresses_with_ports),
    "",
    "Addresses or names to listen on for clients, separated by commas, each with an optional port \
     (6380 by default); IPv6 in brackets, with its interface if it is link-local. `ferrite server` \
     passes them to the module as `rdma-bind` and `rdma-port`. Unset: the module listens on the \
     engine's addresses.",
)
.of(&[Program::Gateway, Program::Server])
.default_in_program(&[(Program::Gateway, "0.0.0.0")]);

/// The address that the relay listens on.
pub static RELAY_LISTEN: Setting = setting(
    "listen",
    "",
    Kind::Text(address_or_name),
    "127.0.0.1",
    "Address for clients of the relay over TCP, with an optional port (6379 by default).",
)
.of(&[Program::Relay]);

/// The address of the server that the relay connects to.
pub static TO: Setting = setting(
    "to",
    "",
    Kind::Text(address_or_name),
    "",
    "Address of the server to connect to, with an optional port (6380 by default). Required.",
)
.of(&[Program::Relay]);

/// The local address that the relay connects from.
pub static LOCAL: Setting = setting(
    "local",
    "",
    Kind::Text(address_or_name),
    "",
    "Connect from this local address, and so over its device.",
)
.of(&[Program::Relay]);

/// Whether to listen beside an engine that serves TLS only.
pub static ALLOW_CLEAR_TEXT: Setting = setting(
    "allow-clear-text",
    "network.allow_clear_text",
    Kind::Switch,
    "no",
    "`yes`: listen even if the engine serves TLS only (`port 0` and a `tls-port`). Neither RDMA \
     nor TCP on this port is encrypted. Such an engine also needs a `unixsocket`.",
)
.of(MODULE);

/// The engine's own socket, which the module and the gateway connect to.
pub static ENGINE: Setting = setting(
    "engine",
    "",
    Kind::Text(engine),
    "auto",
    "The engine's own socket: `unix:/PATH` or `HOST:PORT`. `auto` (only in the module): \
     ask the engine with CONFIG GET. If the engine renames CONFIG, set the socket here.",
)
.of(&[Program::Module, Program::Gateway])
.default_in_program(&[(Program::Gateway, "127.0.0.1:6379")]);

/// The RDMA devices to use.
pub static RDMA_DEVICE: Setting = setting(
    "rdma-device",
    "network.rdma_device",
    Kind::List(any_word),
    "",
    "RDMA devices to use, separated by commas (`ferrite devices` lists them). Unset: the devices \
     that have one of the listen addresses. If this setting is unset, the relay and a program \
     that listens on 0.0.0.0 or :: use all devices.",
)
.memory("36 MiB for each device (relay: 8 MiB) with the default settings");

/// The port of the RDMA devices that links may use.
pub static RDMA_DEVICE_PORT: Setting = setting(
    "rdma-device-port",
    "network.rdma_port",
    Kind::Number { min: 0, max: 254 },
    "0",
    "Port of the RDMA devices that links may use, counted from 1; links whose address belongs to \
     another port use TCP. 0: any port. (Clients connect to `rdma-port` or `listen`.)",
);

/// The index of the entry in the port's GID table that links use.
pub static RDMA_GID_INDEX: Setting = setting(
    "rdma-gid-index",
    "network.rdma_gid_index",
    Kind::Number { min: -1, max: 254 },
    "-1",
    "Entry of the port's GID table to use (`ferrite devices` lists them); links with another \
     local address use TCP. -1: the entry of the local address, RoCE v2 if there is one.",
);

/// How long a handshake may take.
pub static CONNECTION_TIMEOUT: Setting = setting(
    "connection-timeout-ms",
    "network.rdma.connection_timeout_ms",
    Kind::Time {
        bare: Some(Unit::Milliseconds),
        min: Duration::from_millis(1),
        max: Duration::from_secs(600),
    },
    "5s",
    "Maximum duration of a handshake, for accepted and for outgoing connections.",
);

/// The number of retries over RDMA before TCP is used.
pub static CONNECTION_RETRIES: Setting = setting(
    "connection-retries",
    "network.rdma.connection_retries",
    Kind::Number { min: 0, max: 1000 },
    "0",
    "Retries over RDMA before TCP is used instead. A program that accepts clients retries to open \
     its devices when it starts; one that connects retries each connection. A module that is \
     loaded into a running engine does not retry: the engine would wait.",
);

/// Delay before each retry.
pub static RETRY_DELAY: Setting = setting(
    "retry-delay-ms",
    "network.rdma.retry_delay_ms",
    Kind::Time {
        bare: Some(Unit::Milliseconds),
        min: Duration::from_millis(1),
        max: Duration::from_secs(600),
    },
    "1s",
    "Delay before each retry of `connection-retries`.",
);

/// The address of the admin port.
pub static ADMIN_LISTEN: Setting = setting(
    "admin-listen",
    "observability.admin_listen",
    Kind::Text(admin_address),
    "off",
    "Address and port for `/metrics` (Prometheus), `/ready` and `/live` over HTTP. `off`: there is \
     no admin port. The admin port requires no password, so use a loopback or management address. \
     `ferrite server` passes the address to the module, which serves the port.",
);

/// Accepts `auto`, or addresses without ports: the module's port is a setting of its own.
fn addresses(text: &str) -> Result<(), &'static str> {
    let mut words = address::words(text).peekable();
    let is_valid =
        text == "auto" || words.peek().is_some() && words.all(|word| address::host(word).is_some());
    let expected = "auto (where the engine listens), or addresses or names of this host, without \
                    ports and separated by commas; 0.0.0.0 and :: mean all";
    if is_valid { Ok(()) } else { Err(expected) }
}

/// Accepts addresses with optional ports. Names are resolved when the program starts, and the
/// system chooses a port for 0.
fn addresses_with_ports(text: &str) -> Result<(), &'static str> {
    let mut words = address::words(text).peekable();
    let is_valid = words.peek().is_some() && words.all(|word| address::split(word).is_some());
    let expected = "addresses or names separated by commas, each with an optional port: 192.0.2.1 \
                    or [::]:6380";
    if is_valid { Ok(()) } else { Err(expected) }
}

/// Accepts one address with an optional port.
fn address_or_name(text: &str) -> Result<(), &'static str> {
    match address::split(text) {
        Some(_) => Ok(()),
        None => Err("an IP address or a name, with an optional port: 192.0.2.1 or [::]:6380"),
    }
}

/// Accepts `off`, or an IP address with a port. The system chooses a port for 0.
pub(super) fn admin_address(text: &str) -> Result<(), &'static str> {
    match text == "off" || text.parse::<std::net::SocketAddr>().is_ok() {
        true => Ok(()),
        false => Err("off, or an IP address with a port: 127.0.0.1:9121 or [::1]:9121"),
    }
}

fn engine(text: &str) -> Result<(), &'static str> {
    let is_socket = |text: &str| {
        let text = text.strip_prefix("tcp:").unwrap_or(text);
        address::split(text).is_some_and(|(_, port)| port.is_some_and(|port| port != 0))
    };
    let is_valid = match text.strip_prefix("unix:") {
        Some(path) => !path.is_empty(),
        None => text == "auto" || text.starts_with('/') || is_socket(text),
    };
    if is_valid { Ok(()) } else { Err("unix:/PATH or HOST:PORT, or auto in the module") }
}
