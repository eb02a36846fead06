//! Whether the engine is ready: it answers PING, and the module has said what it listens on.
//!
//! Asked at the Unix socket, by a few bytes of RESP. An engine that wants a password is ready too;
//! what it does not tell us then is taken from its log.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep, timeout};

/// Between two tries.
const PAUSE: Duration = Duration::from_millis(50);
/// Between two words about an engine that loads its data.
const LOADING_EVERY: Duration = Duration::from_secs(1);
/// INFO is a few kilobytes. More is not an engine.
const ANSWER_MAX: u64 = 1 << 20;

/// What there is now.
#[derive(Debug, Serialize, PartialEq, Eq)]
pub(super) struct Report {
    /// `Redis 7.0.15`; absent if it did not say.
    pub(super) engine: Option<String>,
    /// The engine's own port for TCP.
    pub(super) tcp_port: Option<u16>,
    /// Of the module: `listening`, `tcp-only`, `off`, `ended`, `none` (not loaded), or `unknown`
    /// (it could not be asked).
    pub(super) status: String,
    /// Where clients of the module come in.
    pub(super) address: Option<String>,
    pub(super) devices: Vec<String>,
    /// Why there is no RDMA, and what to do.
    pub(super) reason: Option<String>,
}

/// How the engine answers.
enum Answer {
    /// It reads its data: not ready, and not dead.
    Loading,
    Ready(Report),
}

/// Waits for it. An error says for how long nothing was heard.
pub(super) async fn ready(
    socket: &Path,
    password: Option<&str>,
    patience: Duration,
    mut loading: impl FnMut(),
) -> Result<Report, String> {
    let (mut heard, mut told) = (Instant::now(), None::<Instant>);
    loop {
        let left = patience.saturating_sub(heard.elapsed());
        match timeout(left, ask(socket, password)).await {
            Ok(Ok(Answer::Ready(report))) => return Ok(report),
            Ok(Ok(Answer::Loading)) => {
                heard = Instant::now();
                if told.is_none_or(|told| told.elapsed() >= LOADING_EVERY) {
                    told = Some(heard);
                    loading();
                }
            }
            // Not there yet, or busy.
            Ok(Err(_)) | Err(_) if heard.elapsed() < patience => {}
            _ => {
                let (socket, seconds) = (socket.display(), patience.as_secs_f32());
                return Err(format!("the engine did not answer at {socket} for {seconds} s"));
            }
        }
        sleep(PAUSE).await;
    }
}

async fn ask(socket: &Path, password: Option<&str>) -> io::Result<Answer> {
    let mut engine = BufReader::new(UnixStream::connect(socket).await?);
    if let Some(password) = password {
        // Refused where the password is another one by now: then the engine does not tell, that is
        // all.
        let _ = command(&mut engine, &["AUTH", password]).await?;
    }
    let answer = command(&mut engine, &["PING"]).await?;
    if answer.starts_with("-LOADING") {
        return Ok(Answer::Loading);
    }
    // Whatever else it says, it is there: -NOAUTH, -NOPERM, -BUSY.
    let server = command(&mut engine, &["INFO", "server"]).await?;
    let module = command(&mut engine, &["INFO", "ferrite"]).await?;
    Ok(Answer::Ready(report(&server, &module)))
}

/// A line with its first character, or a text without anything.
async fn command(engine: &mut BufReader<UnixStream>, words: &[&str]) -> io::Result<String> {
    let mut request = format!("*{}\r\n", words.len());
    for word in words {
        request += &format!("${}\r\n{word}\r\n", word.len());
    }
    engine.write_all(request.as_bytes()).await?;
    let mut line = String::new();
    if (&mut *engine).take(ANSWER_MAX).read_line(&mut line).await? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let length = line.strip_prefix('$').and_then(|length| length.trim_end().parse::<u64>().ok());
    let Some(length) = length.filter(|length| *length <= ANSWER_MAX) else { return Ok(line) };
    let mut text = vec![0; usize::try_from(length).unwrap_or(0) + 2];
    engine.read_exact(&mut text).await?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// From two answers to INFO. One that is an error has no fields.
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
    let was_told = fields.contains_key("redis_version");
    let unasked = if was_told { "none" } else { "unknown" };
    Report {
        engine,
        tcp_port: text("tcp_port").and_then(|port| port.parse().ok()).filter(|port| *port != 0),
        status: text("ferrite_status").unwrap_or_else(|| unasked.into()),
        address: text("ferrite_address"),
        devices: text("ferrite_devices")
            .map(|names| {
                names.split([',', ' ']).filter(|name| !name.is_empty()).map(Into::into).collect()
            })
            .unwrap_or_default(),
        reason: text("ferrite_reason"),
    }
}

impl Report {
    /// For people.
    pub(super) fn sentence(&self) -> String {
        let engine = self.engine.as_deref().unwrap_or("the engine");
        let tcp = self.tcp_port.map(|port| format!(" at TCP port {port}")).unwrap_or_default();
        let address = self.address.as_deref().unwrap_or("its port");
        let reason = self.reason.as_deref().unwrap_or("its log says why");
        let rdma = match self.status.as_str() {
            "listening" => format!("clients at {address} over RDMA ({})", self.devices.join(", ")),
            "tcp-only" => format!("clients at {address} over TCP only, no RDMA: {reason}"),
            "none" => "without RDMA".into(),
            "unknown" => format!("it wants a password; the module says: {reason}"),
            _ => format!("no RDMA listener: {reason}"),
        };
        format!("ready: {engine}{tcp}; {rdma}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_info_says() {
        let server = "# Server\r\nredis_version:7.2.4\r\nvalkey_version:9.1.2\r\ntcp_port:6379\r\n";
        let module = "# ferrite_ferrite\r\nferrite_status:listening\r\nferrite_address:[::1]:6380\r\nferrite_devices:a,b\r\n";
        let both = report(server, module);
        let words = "ready: Valkey 9.1.2 at TCP port 6379; clients at [::1]:6380 over RDMA (a, b)";
        assert_eq!(both.sentence(), words);
        assert_eq!(
            report("redis_version:7.0.15\r\ntcp_port:0\r\n", "\r\n").sentence(),
            "ready: Redis 7.0.15; without RDMA"
        );
        let silent =
            report("-NOAUTH Authentication required.\r\n", "-NOAUTH Authentication required.\r\n");
        assert_eq!((silent.status.as_str(), silent.engine), ("unknown", None));
    }
}
