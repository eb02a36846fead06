//! INFO: the sections `ferrite` and `ferrite_rdma`. The engine adds the prefix `ferrite_` to every
//! field's name.

use ferrite_fabric::{FabricStats, Status};
use ferrite_session::{SessionInfo, SessionTransport};

use crate::api::Value;
use crate::module::{Module, Service};

pub(crate) type Fields = Vec<(String, Value)>;

/// The fields of both sections.
pub(crate) struct Sections {
    pub(crate) general: Fields,
    pub(crate) rdma: Fields,
}

/// Returns the module's INFO sections. In a crash report, leaves out everything that needs a lock,
/// since the crashed thread may hold the lock.
pub(crate) fn sections(module: &mut Module, in_crash: bool) -> Sections {
    let (mut general, mut rdma) = (Vec::new(), Vec::new());
    text(&mut general, "version", env!("CARGO_PKG_VERSION"));
    text(&mut general, "rdma_policy", module.options.rdma().to_string());
    number(&mut general, "max_clients", module.options.max_clients() as u64);
    number(&mut general, "cluster_endpoints", module.endpoints.peer_count() as u64);
    number(&mut general, "cluster_rejected_messages", module.endpoints.rejected());
    match &mut module.service {
        Service::Off(why) => {
            text(&mut general, "status", "off");
            text(&mut general, "reason", one_line(why));
        }
        Service::On(transport) => {
            let ended = transport.state.why_ended();
            let listener = &transport.listener;
            let (status, reason) = match (ended, &listener.absence) {
                (Some(why), _) => ("ended", Some(why)),
                (None, Some(why)) => ("tcp-only", Some(why.as_str())),
                (None, None) => ("listening", None),
            };
            text(&mut general, "status", status);
            if let Some(reason) = reason {
                text(&mut general, "reason", one_line(reason));
            }
            if ended.is_none() {
                let addresses = listener.addresses.iter().map(|(address, _)| address.to_string());
                text(&mut general, "address", addresses.collect::<Vec<_>>().join(","));
                text(&mut general, "devices", listener.devices.join(","));
            }
            if !in_crash {
                let has_ended = ended.is_some();
                text(&mut general, "engine", transport.gateway.config().engine.to_string());
                let sessions = transport.gateway.sessions();
                self::sessions(&mut general, &sessions);
                gateway(&mut general, &transport.gateway.stats());
                // If the thread that reads the fabric's counters has ended, they are left out. Old
                // counters would say that links are open.
                if !has_ended {
                    fabric(&mut rdma, transport.stats(), &sessions);
                }
            }
        }
    }
    Sections { general, rdma }
}

fn sessions(out: &mut Fields, sessions: &[SessionInfo]) {
    let of =
        |transport| sessions.iter().filter(|session| session.transport == transport).count() as u64;
    number(out, "sessions", sessions.len() as u64);
    number(out, "sessions_rdma_ferrite", of(SessionTransport::FerriteRdma));
    number(out, "sessions_rdma_valkey", of(SessionTransport::ValkeyRdma));
    number(out, "sessions_tcp", of(SessionTransport::Tcp));
    let called = sessions.iter().filter(|session| session.is_called).count() as u64;
    number(
        out,
        "sessions_held_bytes",
        sessions.iter().map(|session| session.held_bytes as u64).sum(),
    );
    number(out, "sessions_in_process", called);
    number(out, "sessions_proxied", sessions.len() as u64 - called);
}

fn gateway(out: &mut Fields, stats: &ferrite_session::GatewayStats) {
    number(out, "begun_ferrite", stats.ferrite_sessions);
    number(out, "begun_valkey", stats.valkey_sessions);
    number(out, "begun_tcp", stats.tcp_sessions);
    number(out, "refused", stats.refused);
    number(out, "killed", stats.killed);
    number(out, "engine_failures", stats.engine_failures);
    number(out, "commands_called", stats.called);
    number(out, "commands_proxied", stats.proxied);
    number(out, "sessions_pinned", stats.pinned);
    number(out, "sessions_evicted", stats.evicted);
    number(out, "input_bytes", stats.to_engine_bytes);
    number(out, "output_bytes", stats.to_client_bytes);
}

fn fabric(out: &mut Fields, stats: &FabricStats, sessions: &[SessionInfo]) {
    let over_rdma = |session: &&SessionInfo| {
        matches!(session.transport, SessionTransport::FerriteRdma | SessionTransport::ValkeyRdma)
    };
    // Flushed requests were pending when another one failed, or when a link was closed. So
    // `rdma_completion_errors` leaves them out. They have a field of their own, like every status.
    let failed = |wanted: &dyn Fn(Status) -> bool| {
        stats.errors.iter().filter(|(status, _)| wanted(*status)).map(|(_, count)| count).sum()
    };
    let (totals, memory) = (&stats.totals, &stats.memory);
    for (name, value) in [
        ("rdma_connections", sessions.iter().filter(over_rdma).count() as u64),
        ("rdma_send_ops", totals.send_ops),
        ("rdma_recv_ops", totals.recv_ops),
        ("rdma_read_ops", totals.read_ops),
        ("rdma_write_ops", totals.write_ops),
        ("rdma_send_bytes", totals.send_bytes),
        ("rdma_recv_bytes", totals.recv_bytes),
        ("rdma_read_bytes", totals.read_bytes),
        ("rdma_write_bytes", totals.write_bytes),
        ("rdma_tcp_bytes", totals.tcp_bytes),
        ("rdma_completions", stats.completions),
        ("rdma_completion_errors", failed(&|status| status != Status::FLUSHED)),
        ("rdma_retry_exceeded", failed(&|status| status == Status::RETRY_EXCEEDED)),
        ("rdma_links", stats.links),
        ("rdma_failed_links", stats.failed_links),
        ("rdma_refused", stats.refused),
        ("rdma_remote_access_errors", stats.remote_access_errors),
        ("rdma_refused_after_access_errors", stats.refused_after_access_errors),
        ("rdma_refused_without_windows", stats.refused_without_windows),
        ("rdma_shared_windows", stats.shared_windows),
        ("rdma_devices_without_windows", stats.devices_without_windows),
        ("rdma_refused_other_address", stats.misdirected),
        ("rdma_handshakes_displaced", stats.handshakes_displaced),
        ("rdma_accept_failures", stats.accept_failures),
        ("rdma_migrations", totals.moves),
        ("rdma_upgrades", stats.upgrades),
        ("rdma_offers_refused", stats.offers_refused),
        ("rdma_devices_lost", stats.devices_lost),
        ("rdma_devices_back", stats.devices_back),
        ("rdma_memory_registered_bytes", memory.registered_bytes),
        ("rdma_memory_registered_max_bytes", memory.registered_max_bytes),
        ("rdma_memory_send_bytes", memory.send.in_use_bytes),
        ("rdma_memory_receive_bytes", memory.receive.in_use_bytes),
        ("rdma_memory_windows_bytes", memory.exposed_bytes),
    ] {
        number(out, name, value);
    }
    for (status, count) in &stats.errors {
        number(out, &format!("rdma_completion_errors_{}", word(&status.to_string())), *count);
    }
    for (cause, count) in stats.fallbacks {
        number(out, &format!("rdma_fallbacks_{}", word(&cause.to_string())), count);
    }
}

/// Makes a text usable in the name of a field.
fn word(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' })
        .collect()
}

fn one_line(text: &str) -> String {
    text.replace(['\r', '\n'], " ")
}

fn number(out: &mut Fields, name: &str, value: u64) {
    out.push((name.into(), Value::Number(value)));
}

fn text(out: &mut Fields, name: &str, value: impl Into<String>) {
    out.push((name.into(), Value::Text(value.into())));
}
