//! The module of an engine, over FERRITE and INFO commands on the engine's own port or Unix socket.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::bail;
use ferrite_proto::resp::Value;

use super::snapshot::{LatencyRow, Session, Snapshot};
use super::source::Source;
use crate::engine_client::{self, EngineClient, text_of};

/// Counters of FERRITE STATS, and their names in `Snapshot::totals`.
const TOTALS: [(&str, &str); 24] = [
    ("begun_ferrite", "opened_ferrite"),
    ("begun_valkey", "opened_valkey"),
    ("begun_tcp", "opened_tcp"),
    ("refused", "refused"),
    ("killed", "killed"),
    ("sessions_evicted", "evicted"),
    ("engine_failures", "engine_failures"),
    ("commands_called", "called"),
    ("commands_proxied", "proxied"),
    ("input_bytes", "in_bytes"),
    ("output_bytes", "out_bytes"),
    ("rdma_send_ops", "send_ops"),
    ("rdma_recv_ops", "recv_ops"),
    ("rdma_read_ops", "read_ops"),
    ("rdma_write_ops", "write_ops"),
    ("rdma_send_bytes", "send_bytes"),
    ("rdma_recv_bytes", "recv_bytes"),
    ("rdma_read_bytes", "read_bytes"),
    ("rdma_write_bytes", "write_bytes"),
    ("rdma_tcp_bytes", "tcp_bytes"),
    ("rdma_completions", "completions"),
    ("rdma_completion_errors", "completion_errors"),
    ("rdma_failed_links", "failed_links"),
    ("rdma_migrations", "migrations"),
];
const MEMORY: [(&str, &str); 5] = [
    ("rdma_memory_registered_bytes", "registered"),
    ("rdma_memory_registered_max_bytes", "limit"),
    ("rdma_memory_send_bytes", "send"),
    ("rdma_memory_receive_bytes", "receive"),
    ("rdma_memory_windows_bytes", "windows"),
];
/// Counters of failures and changes of devices.
const DEVICES: [&str; 5] = [
    "rdma_retry_exceeded",
    "rdma_remote_access_errors",
    "rdma_devices_lost",
    "rdma_devices_back",
    "rdma_devices_without_windows",
];
const FALLBACKS: &str = "rdma_fallbacks_";
/// An engine with the module.
pub(super) struct Engine(EngineClient);

impl Engine {
    pub(super) fn new(client: EngineClient) -> Self {
        Self(client)
    }

    fn request<T>(
        &mut self,
        words: &[&str],
        read: impl FnOnce(&Value<'_>) -> T,
    ) -> anyhow::Result<T> {
        let reply = self.0.request(words)?;
        match Value::parse(&reply)? {
            Value::Error(text) => bail!("{}: {}", words.join(" "), explained(text)),
            value => Ok(read(&value)),
        }
    }

    fn text(&mut self, words: &[&str]) -> anyhow::Result<String> {
        self.request(words, text_of)
    }
}

/// Returns an explanation of an error reply, or the reply itself.
fn explained(text: &[u8]) -> String {
    let text = engine_client::explained(text);
    match text.contains("unknown command") {
        true => "the engine has no Ferrite module; for a gateway or a relay use --admin".into(),
        false => text,
    }
}

impl Source for Engine {
    fn address(&self) -> String {
        self.0.address().to_string()
    }

    fn poll(&mut self) -> anyhow::Result<Snapshot> {
        let stats = self.request(&["FERRITE", "STATS"], fields)?;
        let clients = self.text(&["FERRITE", "CLIENTS"])?;
        let server = self.text(&["INFO", "server"])?;
        // Redis since 7.0 and Valkey have this section. It is empty with `latency-tracking no`.
        let latency = self.text(&["INFO", "latencystats"]).unwrap_or_default();
        Ok(snapshot(&stats, &clients, &server, &latency))
    }

    fn kill(&mut self, id: u64) -> anyhow::Result<()> {
        self.text(&["FERRITE", "KILL", &id.to_string()]).map(drop)
    }
}

/// Returns the names and values of a map, which RESP2 sends as an array.
fn fields(value: &Value<'_>) -> BTreeMap<String, String> {
    match value {
        Value::Array(items) => {
            items.chunks_exact(2).map(|pair| (text_of(&pair[0]), text_of(&pair[1]))).collect()
        }
        Value::Map(pairs) => {
            pairs.iter().map(|(name, value)| (text_of(name), text_of(value))).collect()
        }
        _ => BTreeMap::new(),
    }
}

/// Builds a snapshot from the replies.
fn snapshot(
    stats: &BTreeMap<String, String>,
    clients: &str,
    server: &str,
    latency: &str,
) -> Snapshot {
    let number = |name: &str| stats.get(name).and_then(|value| value.parse::<u64>().ok());
    let text = |name: &str| stats.get(name).map_or("", String::as_str);
    let named = |names: &[(&str, &'static str)]| {
        names.iter().filter_map(|(field, name)| Some((*name, number(field)?))).collect()
    };
    let sessions: Vec<_> = clients.lines().filter_map(session).collect();
    let mut transports = BTreeMap::new();
    for session in &sessions {
        *transports.entry(session.transport.clone()).or_insert(0) += 1;
    }
    let fallbacks = stats.iter().filter_map(|(name, value)| {
        let count = value.parse::<u64>().ok().filter(|count| *count > 0)?;
        Some((name.strip_prefix(FALLBACKS)?.replace('_', " "), count))
    });
    let devices = DEVICES.iter().filter_map(|name| {
        let count = number(name).filter(|count| *count > 0)?;
        Some((name.trim_start_matches("rdma_").replace('_', " "), count))
    });
    let reason = match text("reason") {
        "" => String::new(),
        reason => format!(": {reason}"),
    };
    let devices_text = match text("devices") {
        "" => String::new(),
        devices => format!(" over RDMA ({devices})"),
    };
    Snapshot {
        program: format!("{}, module {}", engine_name(server), text("version")),
        status: format!("{} {}{devices_text}{reason}", text("status"), text("address")),
        sessions: Some(sessions),
        transports,
        totals: named(&TOTALS),
        fallbacks: fallbacks.collect(),
        memory: named(&MEMORY),
        latency: latency.lines().filter_map(latency_row).collect(),
        devices: devices.collect(),
        taken: Instant::now(),
    }
}

fn engine_name(info: &str) -> String {
    let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name));
    match (field("valkey_version:"), field("redis_version:")) {
        (Some(version), _) => format!("Valkey {}", version.trim()),
        (None, Some(version)) => format!("Redis {}", version.trim()),
        (None, None) => "engine".into(),
    }
}

/// Parses a line of FERRITE CLIENTS.
fn session(line: &str) -> Option<Session> {
    let fields: BTreeMap<&str, &str> =
        line.split_whitespace().filter_map(|field| field.split_once('=')).collect();
    let text = |name: &str| fields.get(name).copied().unwrap_or_default().to_owned();
    let number = |name: &str| fields.get(name).and_then(|value| value.parse::<u64>().ok());
    Some(Session {
        id: number("id")?,
        client_id: number("client-id"),
        user: text("user"),
        address: text("addr"),
        local_address: text("laddr"),
        transport: text("transport"),
        device: text("device"),
        path: text("path"),
        age_s: number("age").unwrap_or(0),
        held_bytes: number("held").unwrap_or(0),
        in_bytes: number("tot-net-in").unwrap_or(0),
        out_bytes: number("tot-net-out").unwrap_or(0),
    })
}

/// Parses a line of INFO latencystats, such as
/// `latency_percentiles_usec_get:p50=1.003,p99=5.023,p99.9=9.023`. The engine's setting
/// `latency-tracking-info-percentiles` says which percentiles there are.
fn latency_row(line: &str) -> Option<LatencyRow> {
    let (name, values) = line.strip_prefix("latency_percentiles_usec_")?.split_once(':')?;
    let percentiles = values.trim().split(',').filter_map(|value| {
        let (percentile, us) = value.split_once('=')?;
        percentile.strip_prefix('p')?.parse::<f64>().ok()?;
        Some((percentile.to_owned(), us.parse().ok()?))
    });
    let percentiles: Vec<_> = percentiles.collect();
    let name = name.replace('|', " ");
    (!percentiles.is_empty()).then_some(LatencyRow { name, count: None, percentiles })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builds_a_snapshot_from_replies() {
        let stats = [
            ("status", "listening"),
            ("address", "10.0.0.1:6380"),
            ("devices", "rxe1"),
            ("version", "0.1.0"),
            ("commands_called", "12"),
            ("rdma_memory_registered_bytes", "4096"),
            ("rdma_fallbacks_no_device", "3"),
            ("rdma_fallbacks_other", "0"),
            ("rdma_retry_exceeded", "1"),
        ];
        let stats = stats.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let clients = "id=7 client-id=12 user=default addr=10.0.0.2:40000 laddr=10.0.0.1:6380 \
                       transport=rdma-ferrite device=rxe1 path=call age=5 held=64 tot-net-in=100 \
                       tot-net-out=200\nid=8 client-id= user= addr=? laddr=? transport=tcp device= \
                       path=proxy age=0 held=0 tot-net-in=0 tot-net-out=0\n";
        let latency = "latency_percentiles_usec_config|get:p50=1.003,p99=5.023,p99.9=9.023\r\n";
        let snapshot = snapshot(&stats, clients, "redis_version:7.0.15\r\n", latency);
        assert_eq!(snapshot.program, "Redis 7.0.15, module 0.1.0");
        assert_eq!(snapshot.status, "listening 10.0.0.1:6380 over RDMA (rxe1)");
        assert_eq!(snapshot.transports, [("rdma-ferrite".into(), 1), ("tcp".into(), 1)].into());
        assert_eq!((snapshot.total("called"), snapshot.memory["registered"]), (12, 4096));
        assert_eq!(snapshot.fallbacks, [("no device".into(), 3)].into());
        assert_eq!(snapshot.devices, [("retry exceeded".into(), 1)].into());
        let sessions = snapshot.sessions.expect("sessions");
        assert_eq!((sessions[0].id, sessions[0].client_id, sessions[0].age_s), (7, Some(12), 5));
        assert_eq!((sessions[0].in_bytes, sessions[0].out_bytes), (100, 200));
        assert_eq!((sessions[1].client_id, sessions[1].path.as_str()), (None, "proxy"));
        assert_eq!(
            (snapshot.latency[0].name.as_str(), snapshot.latency[0].at("p99.9")),
            ("config get", Some(9.023))
        );
    }

    #[test]
    fn reads_other_percentiles_than_the_default_ones() {
        let row = latency_row("latency_percentiles_usec_get:p75=1.5,p100=8.25").expect("a row");
        assert_eq!(row.percentiles, [("p75".to_owned(), 1.5), ("p100".to_owned(), 8.25)]);
        assert_eq!(
            serde_json::to_string(&row).expect("JSON"),
            r#"{"name":"get","count":null,"p75_us":1.5,"p100_us":8.25}"#
        );
        assert_eq!(latency_row("latency_percentiles_usec_get:"), None, "no percentiles");
    }
}
