//! `--stat`: prints server statistics at intervals.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::bail;
use ferrite_proto::resp::Value;

use crate::format::error_of;
use crate::output;
use crate::server::Server;

const HEADER: &str = "\
------- data ------ --------------------- load -------------------- - child -
keys       mem      clients blocked requests            connections          
";
/// The number of lines after which the header is repeated.
const LINES_PER_HEADER: u32 = 20;

/// The values of a line, from INFO.
#[derive(Debug, PartialEq, Eq)]
struct Sample {
    keys: i64,
    memory_bytes: i64,
    clients: i64,
    blocked: i64,
    requests: i64,
    connections: i64,
    child: &'static str,
}

impl Sample {
    fn from_info(info: &str) -> Self {
        let field = |name: &str| {
            let values = info.lines().filter_map(|line| line.split_once(':'));
            let value =
                values.filter(|(field, _)| *field == name).map(|(_, value)| value.trim()).next();
            value.and_then(|value| value.parse().ok()).unwrap_or(0)
        };
        // For example: db0:keys=2,expires=0,avg_ttl=0
        let keys = info.lines().filter_map(|line| line.strip_prefix("db")?.split_once(":keys="));
        let keys = keys.filter_map(|(_, rest)| rest.split(',').next()?.parse::<i64>().ok());
        let is_on = |name| field(name) != 0;
        Self {
            keys: keys.sum(),
            memory_bytes: field("used_memory"),
            clients: field("connected_clients"),
            blocked: field("blocked_clients"),
            requests: field("total_commands_processed"),
            connections: field("total_connections_received"),
            child: match (
                is_on("rdb_bgsave_in_progress"),
                is_on("aof_rewrite_in_progress"),
                is_on("loading"),
            ) {
                (_, _, true) => "LOAD",
                (true, true, _) => "SAVE+AOF",
                (true, ..) => "SAVE",
                (_, true, _) => "AOF",
                _ => "",
            },
        }
    }

    /// Formats a line as redis-cli does. `new_requests` is the number of requests since the last
    /// line.
    fn line(&self, new_requests: i64) -> String {
        let requests = format!("{} (+{new_requests})", self.requests);
        format!(
            "{:<11}{:<8} {:<8}{:<8}{requests:<19} {:<12}{}\n",
            self.keys,
            bytes(self.memory_bytes),
            self.clients,
            self.blocked,
            self.connections,
            self.child
        )
    }

    fn json(&self, new_requests: i64) -> String {
        let Self { keys, memory_bytes, clients, blocked, requests, connections, child } = self;
        format!(
            "{{\"keys\":{keys},\"used_memory\":{memory_bytes},\"clients\":{clients},\"blocked\":{blocked},\
             \"requests\":{requests},\"new_requests\":{new_requests},\"connections\":{connections},\"child\":\"{child}\"}}\n"
        )
    }
}

fn bytes(count: i64) -> String {
    let mut value = count as f64;
    let mut units = ["K", "M", "G", "T"].into_iter();
    let mut text = format!("{count}B");
    while value.abs() >= 1024.0
        && let Some(unit) = units.next()
    {
        value /= 1024.0;
        text.clear();
        let _ = write!(text, "{value:.2}{unit}");
    }
    text
}

/// Prints statistics until interrupted.
pub(crate) async fn run(server: &mut Server) -> anyhow::Result<()> {
    let is_json = output::is_json(server.settings.format.style);
    let interval = server.settings.interval.unwrap_or(Duration::from_secs(1));
    let mut before = None;
    for number in 0_u32.. {
        let frame = server.request_with_reconnects(&["INFO"]).await?;
        let reply = frame.value()?;
        if let Some(text) = error_of(&reply) {
            bail!("ERROR: {}", String::from_utf8_lossy(text));
        }
        let (Value::Bulk(text) | Value::Verbatim { text, .. }) = reply else {
            bail!("invalid reply to INFO: expected a string");
        };
        let sample = Sample::from_info(&String::from_utf8_lossy(text));
        let new_requests = sample.requests - before.unwrap_or(sample.requests);
        before = Some(sample.requests);
        if is_json {
            output::write(sample.json(new_requests).as_bytes())?;
        } else {
            let header = if number.is_multiple_of(LINES_PER_HEADER) { HEADER } else { "" };
            output::write(format!("{header}{}", sample.line(new_requests)).as_bytes())?;
        }
        tokio::time::sleep(interval).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligns_lines_with_the_header() {
        let info = "used_memory:1572864\r\nused_memory_human:1.5M\r\nconnected_clients:12\r\nblocked_clients:1\r\n\
            total_commands_processed:1000\r\ntotal_connections_received:77\r\nrdb_bgsave_in_progress:1\r\n\
            aof_rewrite_in_progress:0\r\nloading:0\r\ndb0:keys=40,expires=1\r\ndb3:keys=2,expires=0\r\n";
        let line = Sample::from_info(info).line(10);
        assert_eq!(
            line,
            "42         1.50M    12      1       1000 (+10)          77          SAVE\n"
        );
    }

    #[test]
    fn formats_sizes() {
        assert_eq!([0, 1023, 1024, 3 << 30].map(bytes), ["0B", "1023B", "1.00K", "3.00G"]);
    }
}
