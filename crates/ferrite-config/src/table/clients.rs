//! Clients, their windows, and the engine's event loop.

use std::time::Duration;

use super::{CHUNK, CLIENTS_MAX, MODULE, SERVING, WINDOW_MIN, alias, setting};
use crate::kind::Kind;
use crate::setting::{AliasForm, Program, Setting, TakesEffect};
use crate::time::Unit;

pub(super) const SETTINGS: &[&Setting] = &[
    &MAX_CLIENTS,
    &RX_SIZE,
    &RX_SIZE_MAX,
    &SHARED_WINDOWS,
    &PROTECTED_MODE,
    &DRAIN,
    &CALL_PATH,
    &POLLER_THREAD,
    &SLICE_US,
    &TRACE_VERBOSE,
];

/// The largest number of clients.
pub static MAX_CLIENTS: Setting = setting(
    "max-clients",
    "network.rdma.max_connections",
    Kind::Number { min: 1, max: CLIENTS_MAX as i64 },
    "10000",
    "Maximum number of sessions; further clients are rejected with an error. The engine's own \
     `maxclients` counts the module's sessions too.",
)
.of(SERVING)
.takes_effect(TakesEffect::AtOnce)
.memory("`rx-size-max` for each client of Valkey Over RDMA, within `receive-reserve`");

/// The initial size of the window of a client of Valkey Over RDMA.
pub static RX_SIZE: Setting = setting(
    "rx-size",
    "network.rdma.rx_size",
    Kind::Size { min: WINDOW_MIN, max: CHUNK },
    "64kb",
    "Initial size of the window: the receive buffer that a client of Valkey Over RDMA writes to. It \
     is pinned while the client is connected. Sizes other than 8kb, 64kb, 512kb and 2mb leave \
     a part of their memory block unused.",
)
.of(SERVING)
.takes_effect(TakesEffect::ForNewClients)
.memory("this much for each client of Valkey Over RDMA");

/// The largest size of the window of a client of Valkey Over RDMA.
pub static RX_SIZE_MAX: Setting = setting(
    "rx-size-max",
    "network.rdma.rx_size_max",
    Kind::Size { min: WINDOW_MIN, max: CHUNK },
    "2mb",
    "Maximum size of a window. Windows grow only for clients that fill them in one or two writes, \
     and grow less when many clients share the memory. A value below `rx-size` counts as `rx-size`.",
)
.of(SERVING)
.takes_effect(TakesEffect::ForNewClients)
.memory("this much for each client of Valkey Over RDMA, within `receive-reserve`");

/// Whether clients of Valkey Over RDMA may use devices that cannot restrict a window to one client.
pub static SHARED_WINDOWS: Setting = setting(
    "rdma-shared-windows",
    "network.rdma.shared_windows",
    Kind::Switch,
    "no",
    "Whether clients of Valkey Over RDMA may use devices that lack type 2 memory windows. `no`: \
     these devices reject such clients. `yes`: a client that finds out the rkey of another \
     client can send commands as that client.",
)
.of(SERVING);

/// Whether the gateway rejects clients from other hosts and all clients over RDMA while the engine
/// requires no password.
pub static PROTECTED_MODE: Setting = setting(
    "protected-mode",
    "",
    Kind::Switch,
    "yes",
    "While the engine requires no password, reject clients from other hosts and all clients over \
     RDMA. The engine's own protected mode cannot do that, because the connections of all these \
     clients come from the gateway's host.",
)
.of(&[Program::Gateway])
.takes_effect(TakesEffect::ForNewClients);

/// How long the gateway waits for its sessions when it shuts down.
pub static DRAIN: Setting = setting(
    "drain",
    "",
    Kind::Time {
        bare: Some(Unit::Seconds),
        min: Duration::from_millis(100),
        max: Duration::from_secs(86_400),
    },
    "5s",
    "How long sessions may take to receive outstanding replies after SIGTERM or SIGINT.",
)
.of(&[Program::Gateway])
.takes_effect(TakesEffect::AtOnce);

/// Whether commands run inside the engine.
pub static CALL_PATH: Setting = setting(
    "call-path",
    "network.rdma.call_path",
    Kind::Switch,
    "yes",
    "`yes`: sessions run on the engine's main thread, and data commands run in-process. `no`: all \
     commands go over the engine's own socket (the proxy path).",
)
.of(MODULE);

/// Whether a thread of the module drives the devices.
pub static POLLER_THREAD: Setting = setting(
    "poller-thread",
    "network.rdma.poller_thread",
    Kind::Switch,
    "no",
    "`yes`: a thread of the module polls the devices, and the engine's main thread only runs \
     sessions. Use it only if the thread can have a CPU of its own.",
)
.of(MODULE);

/// How long sessions may use the engine's event loop at a time.
pub static SLICE_US: Setting = setting(
    "slice-us",
    "network.rdma.slice_us",
    Kind::Time {
        bare: Some(Unit::Microseconds),
        min: Duration::from_micros(50),
        max: Duration::from_secs(1),
    },
    "500us",
    "Event-loop slice: how long sessions may use the engine's event loop before its other clients \
     are served. Lower: less latency for those clients. Higher: more throughput over RDMA.",
)
.of(MODULE)
.takes_effect(TakesEffect::AtOnce);

/// Whether each RDMA connection is logged.
pub static TRACE_VERBOSE: Setting = setting(
    "trace-verbose",
    "network.rdma.trace_verbose",
    Kind::Switch,
    "no",
    "Log each RDMA connection: its peer, local address, device, port, queue pair number and MTU.",
)
.aliases(&[alias("rdma_trace_verbose", AliasForm::Same)]);
