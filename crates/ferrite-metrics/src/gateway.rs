//! The metrics of a gateway, whether it is a program of its own or inside the engine.

use ferrite_session::{Gateway, GatewayStats, SessionTransport};

use crate::exposition::Exposition;

/// The label of each transport.
const TRANSPORTS: [(SessionTransport, &str); 4] = [
    (SessionTransport::FerriteRdma, "rdma_ferrite"),
    (SessionTransport::ValkeyRdma, "rdma_valkey"),
    (SessionTransport::Tcp, "tcp"),
    (SessionTransport::Tls, "tls"),
];

/// Writes the metrics of a gateway's sessions.
pub fn gateway_metrics(gateway: &Gateway, out: &mut Exposition) {
    let open = gateway.sessions();
    let by_transport = TRANSPORTS.map(|(transport, name)| {
        let count = open.iter().filter(|session| session.transport == transport).count();
        (vec![("transport", name)], count as u64)
    });
    out.gauges("sessions", "Open sessions, by their current transport", &by_transport);
    let held = open.iter().map(|session| session.held_bytes as u64).sum();
    out.gauge("session_held_bytes", "Memory held for pending commands and replies", held);
    out.gauge("sessions_max", "Maximum number of sessions", gateway.config().max_clients as u64);
    let GatewayStats {
        valkey_sessions,
        ferrite_sessions,
        tcp_sessions,
        refused,
        engine_failures,
        killed,
        to_engine_bytes,
        to_client_bytes,
        called,
        proxied,
        pinned,
        evicted,
        ..
    } = gateway.stats();
    let kinds = [("valkey", valkey_sessions), ("ferrite", ferrite_sessions), ("tcp", tcp_sessions)];
    let kinds = kinds.map(|(client, count)| (vec![("client", client)], count));
    out.counters("sessions_opened", "Clients that have connected, by kind", &kinds);
    out.counter("sessions_refused", "Clients that were rejected", refused);
    out.counter("sessions_killed", "Sessions that an operator has ended", killed);
    let help = "Sessions ended because all sessions together held more than maxmemory-clients";
    out.counter("sessions_evicted", help, evicted);
    let help =
        "Clients that got no session because the engine was unreachable or rejected the connection";
    out.counter("engine_connect_failures", help, engine_failures);
    let bytes = [("to_engine", to_engine_bytes), ("to_client", to_client_bytes)];
    let bytes = bytes.map(|(direction, count)| (vec![("direction", direction)], count));
    out.counters("session_bytes", "Bytes of commands and replies", &bytes);
    let paths = [("called", called), ("proxied", proxied)];
    let paths = paths.map(|(path, count)| (vec![("path", path)], count));
    let help =
        "Commands of in-process sessions, by path: called in the engine, or sent to its socket";
    out.counters("commands", help, &paths);
    out.counter(
        "sessions_pinned",
        "In-process sessions that were pinned to the proxy path",
        pinned,
    );
}
