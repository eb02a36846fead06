//! `--stat`: what the server does, a line at a time.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::bail;
use ferrite_proto::resp::Value;

use crate::format::error_of;
use crate::output;
use crate::server::Server;

const HEAD: &str = "\
------- data ------ --------------------- load -------------------- - child -
keys       mem      clients blocked requests            connections          
";
/// Lines below a head, before it comes again.
const LINES: u32 = 20;

/// What a line has, of INFO.
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
    fn of(info: &str) -> Self {
        let field = |name: &str| {
            let values = info.lines().filter_map(|line| line.split_once(':'));
            let value =
                values.filter(|(field, _)| *field == name).map(|(_, value)| value.trim()).next();
            value.and_then(|value| value.parse().ok()).unwrap_or(0)
        };
        // db0:keys=2,expires=0,avg_ttl=0
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

    /// `more` requests than in the line before.
    fn line(&self, more: i64) -> String {
        let requests = format!("{} (+{more})", self.requests);
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

    fn json(&self, more: i64) -> String {
        let Self { keys, memory_bytes, clients, blocked, requests, connections, child } = self;
        format!(
            "{{\"keys\":{keys},\"used_memory\":{memory_bytes},\"clients\":{clients},\"blocked\":{blocked},\
             \"requests\":{requests},\"new_requests\":{more},\"connections\":{connections},\"child\":\"{child}\"}}\n"
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

/// Until interrupted.
pub(crate) async fn run(server: &mut Server) -> anyhow::Result<()> {
    let is_json = output::is_json(server.settings.format.style);
    let interval = server.settings.interval.unwrap_or(Duration::from_secs(1));
    let mut before = None;
    for number in 0_u32.. {
        let frame = server.ask_persistently(&["INFO"]).await?;
        let reply = frame.value()?;
        if let Some(text) = error_of(&reply) {
            bail!("ERROR: {}", String::from_utf8_lossy(text));
        }
        let (Value::Bulk(text) | Value::Verbatim { text, .. }) = reply else {
            bail!("the reply to INFO is no text");
        };
        let sample = Sample::of(&String::from_utf8_lossy(text));
        let more = sample.requests - before.unwrap_or(sample.requests);
        before = Some(sample.requests);
        if is_json {
            output::write(sample.json(more).as_bytes())?;
        } else {
            let head = if number.is_multiple_of(LINES) { HEAD } else { "" };
            output::write(format!("{head}{}", sample.line(more)).as_bytes())?;
        }
        tokio::time::sleep(interval).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_as_wide_as_its_head() {
        let info = "used_memory:1572864\r\nused_memory_human:1.5M\r\nconnected_clients:12\r\nblocked_clients:1\r\n\
            total_commands_processed:1000\r\ntotal_connections_received:77\r\nrdb_bgsave_in_progress:1\r\n\
            aof_rewrite_in_progress:0\r\nloading:0\r\ndb0:keys=40,expires=1\r\ndb3:keys=2,expires=0\r\n";
        let line = Sample::of(info).line(10);
        assert_eq!(
            line,
            "42         1.50M    12      1       1000 (+10)          77          SAVE\n"
        );
    }

    #[test]
    fn sizes() {
        assert_eq!([0, 1023, 1024, 3 << 30].map(bytes), ["0B", "1023B", "1.00K", "3.00G"]);
    }
}
