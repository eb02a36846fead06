//! Waits until the engine answers PING and has loaded its data. Then reads from INFO what the
//! module listens on.
//!
//! Queries the Unix socket with a few bytes of RESP. An engine that asks for a password counts as
//! ready. In that case the supervisor reports the module's last log line instead of its state.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep, timeout};

/// Time between two queries.
const PAUSE: Duration = Duration::from_millis(50);
/// Time between two reports that the engine is loading its data.
const LOADING_INTERVAL: Duration = Duration::from_secs(1);
/// The longest reply. INFO has a few kilobytes.
const REPLY_MAX: u64 = 1 << 20;

/// The state of a ready engine.
#[derive(Debug, Serialize, PartialEq, Eq)]
pub(super) struct Report {
    /// Name and version, such as `Redis 7.0.15`; `None` if the engine did not say.
    pub(super) engine: Option<String>,
    /// The engine's own TCP port.
    pub(super) tcp_port: Option<u16>,
    /// The module's state: `listening`, `tcp-only`, `off`, `ended`, `none` (not loaded), or
    /// `unknown` (the engine asks for a password).
    pub(super) status: String,
    /// The address on which the module listens.
    pub(super) address: Option<String>,
    pub(super) devices: Vec<String>,
    /// Why RDMA is unavailable, and how to fix it. If the status is `unknown`, the module's last
    /// log line.
    pub(super) reason: Option<String>,
}

/// How far an engine has loaded its data; without figures if it did not say.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Loading {
    loaded_bytes: Option<u64>,
    total_bytes: Option<u64>,
    /// The engine's own estimate of the remaining time.
    seconds_left: Option<u64>,
}

/// The state in which the engine answered.
enum Answer {
    /// The engine is loading its data: it is alive, but not ready.
    Loading(Loading),
    Ready(Report),
}

/// Waits until the engine is ready. Calls `loading` at intervals while the engine loads its data.
///
/// # Errors
///
/// The engine gave no answer for `silence_limit`.
pub(super) async fn wait_until_ready(
    socket: &Path,
    password: Option<&str>,
    silence_limit: Duration,
    mut loading: impl FnMut(&Loading),
) -> Result<Report, String> {
    let (mut last_answer, mut last_call) = (Instant::now(), None::<Instant>);
    loop {
        let left = silence_limit.saturating_sub(last_answer.elapsed());
        match timeout(left, query(socket, password)).await {
            Ok(Ok(Answer::Ready(report))) => return Ok(report),
            Ok(Ok(Answer::Loading(progress))) => {
                last_answer = Instant::now();
                if last_call.is_none_or(|call| call.elapsed() >= LOADING_INTERVAL) {
                    last_call = Some(last_answer);
                    loading(&progress);
                }
            }
            // The engine does not listen yet, or is busy.
            Ok(Err(_)) | Err(_) if last_answer.elapsed() < silence_limit => {}
            _ => {
                let (socket, seconds) = (socket.display(), silence_limit.as_secs_f32());
                return Err(format!("the engine did not answer at {socket} for {seconds} s"));
            }
        }
        sleep(PAUSE).await;
    }
}

async fn query(socket: &Path, password: Option<&str>) -> io::Result<Answer> {
    let mut engine = BufReader::new(UnixStream::connect(socket).await?);
    if let Some(password) = password {
        // If the password has changed, the replies below are errors and the state is unknown.
        let _ = command(&mut engine, &["AUTH", password]).await?;
    }
    let answer = command(&mut engine, &["PING"]).await?;
    if answer.starts_with("-LOADING") {
        let info = command(&mut engine, &["INFO", "persistence"]).await?;
        return Ok(Answer::Loading(Loading::from_info(&info)));
    }
    // Any other reply, such as -NOAUTH, -NOPERM or -BUSY, shows that the engine serves clients.
    let server = command(&mut engine, &["INFO", "server"]).await?;
    let module = command(&mut engine, &["INFO", "ferrite"]).await?;
    Ok(Answer::Ready(report(&server, &module)))
}

/// Changes a setting of the engine. Returns the engine's reply.
pub(super) async fn config_set(
    socket: &Path,
    password: Option<&str>,
    (name, value): (&str, &str),
) -> io::Result<String> {
    let mut engine = BufReader::new(UnixStream::connect(socket).await?);
    if let Some(password) = password {
        let _ = command(&mut engine, &["AUTH", password]).await?;
    }
    command(&mut engine, &["CONFIG", "SET", name, value]).await
}

/// Runs a command. Returns a one-line reply with its type character, and a bulk string without its
/// header.
async fn command(engine: &mut BufReader<UnixStream>, arguments: &[&str]) -> io::Result<String> {
    let mut request = format!("*{}\r\n", arguments.len());
    for argument in arguments {
        request += &format!("${}\r\n{argument}\r\n", argument.len());
    }
    engine.write_all(request.as_bytes()).await?;
    let mut line = String::new();
    if (&mut *engine).take(REPLY_MAX).read_line(&mut line).await? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let length = line.strip_prefix('$').and_then(|length| length.trim_end().parse::<u64>().ok());
    let Some(length) = length.filter(|length| *length <= REPLY_MAX) else { return Ok(line) };
    let mut text = vec![0; usize::try_from(length).unwrap_or(0) + 2];
    engine.read_exact(&mut text).await?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Builds the report from the replies to INFO server and INFO ferrite. A reply that is an error has
/// no fields.
fn report(server: &str, module: &str) -> Report {
    let fields: BTreeMap<&str, &str> = server
        .lines()
        .chain(module.lines())
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name, value.trim_end()))
        .collect();
    let text = |name: &str| {
        fields.get(name).filter(|value| !value.is_empty()).map(|value| (*value).to_owned())
    };
    let engine = (text("valkey_version").map(|version| format!("Valkey {version}")))
        .or_else(|| text("redis_version").map(|version| format!("Redis {version}")));
    let has_info = fields.contains_key("redis_version");
    let without_module = if has_info { "none" } else { "unknown" };
    Report {
        engine,
        tcp_port: text("tcp_port").and_then(|port| port.parse().ok()).filter(|port| *port != 0),
        status: text("ferrite_status").unwrap_or_else(|| without_module.into()),
        address: text("ferrite_address"),
        devices: text("ferrite_devices")
            .map(|names| {
                names.split([',', ' ']).filter(|name| !name.is_empty()).map(Into::into).collect()
            })
            .unwrap_or_default(),
        reason: text("ferrite_reason"),
    }
}

impl Loading {
    /// Reads the reply to INFO persistence. A reply that is an error has no fields.
    fn from_info(info: &str) -> Self {
        let field = |name: &str| {
            let mut lines = info.lines();
            lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':')?.trim().parse().ok())
        };
        Self {
            loaded_bytes: field("loading_loaded_bytes"),
            total_bytes: field("loading_total_bytes").filter(|bytes| *bytes > 0),
            seconds_left: field("loading_eta_seconds"),
        }
    }

    /// Describes the progress in one sentence.
    pub(super) fn sentence(&self) -> String {
        const MIB: u64 = 1 << 20;
        let mut text = "the engine is loading its data".to_owned();
        if let (Some(loaded), Some(total)) = (self.loaded_bytes, self.total_bytes) {
            let percent = loaded.min(total) * 100 / total;
            text += &format!(": {percent} %, {} of {} MiB", loaded / MIB, total.div_ceil(MIB));
            if let Some(seconds) = self.seconds_left {
                text += &format!(", about {seconds} s left");
            }
        }
        text
    }
}

impl Report {
    /// Describes the state in one sentence, for the log and for systemd.
    pub(super) fn sentence(&self) -> String {
        let engine = self.engine.as_deref().unwrap_or("the engine");
        let tcp = self.tcp_port.map(|port| format!(" at TCP port {port}")).unwrap_or_default();
        format!("ready: {engine}{tcp}; {}", self.module_state())
    }

    /// Describes whether the module accepts clients, and how.
    pub(super) fn module_state(&self) -> String {
        let address = self.address.as_deref().unwrap_or("its port");
        let reason = self.reason.as_deref().unwrap_or("see the engine's log");
        match self.status.as_str() {
            "listening" => {
                format!("accepts clients at {address} over RDMA ({})", self.devices.join(", "))
            }
            "tcp-only" => format!("accepts clients at {address} over TCP only, no RDMA: {reason}"),
            "none" => "without RDMA".into(),
            "unknown" => format!(
                "state unknown: the engine rejects INFO (is a password missing?); the module \
                 logged: {reason}"
            ),
            _ => format!("no RDMA listener: {reason}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn describes_the_progress_of_loading() {
        let info = "# Persistence\r\nloading:1\r\nloading_start_time:1\r\n\
                    loading_total_bytes:10485760\r\nloading_loaded_bytes:4404019\r\n\
                    loading_loaded_perc:42.00\r\nloading_eta_seconds:7\r\n";
        let expected = "the engine is loading its data: 41 %, 4 of 10 MiB, about 7 s left";
        assert_eq!(Loading::from_info(info).sentence(), expected);
        let denied = Loading::from_info("-NOAUTH Authentication required.\r\n");
        assert_eq!(denied.sentence(), "the engine is loading its data");
    }

    #[test]
    fn builds_the_report_from_info() {
        let server = "# Server\r\nredis_version:7.2.4\r\nvalkey_version:9.1.2\r\ntcp_port:6379\r\n";
        let module = "# ferrite_ferrite\r\nferrite_status:listening\r\n\
                      ferrite_address:[::1]:6380\r\nferrite_devices:a,b\r\n";
        let both = report(server, module);
        let sentence =
            "ready: Valkey 9.1.2 at TCP port 6379; accepts clients at [::1]:6380 over RDMA (a, b)";
        assert_eq!(both.sentence(), sentence);
        assert_eq!(
            report("redis_version:7.0.15\r\ntcp_port:0\r\n", "\r\n").sentence(),
            "ready: Redis 7.0.15; without RDMA"
        );
        let denied =
            report("-NOAUTH Authentication required.\r\n", "-NOAUTH Authentication required.\r\n");
        assert_eq!((denied.status.as_str(), denied.engine), ("unknown", None));
    }
}
