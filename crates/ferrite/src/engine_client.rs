//! A blocking client of an engine, over TCP or a Unix socket, and the flags of a login: for `ferrite
//! top` and `ferrite agent rehome`.

use std::fmt;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use ferrite_proto::resp::{Limits, ReplyFramer, Value, encode_command};

/// The port of an engine whose address has none.
pub(crate) const DEFAULT_PORT: u16 = 6379;
/// How long to wait for a connection, or for more of an answer.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(5);
/// How long a whole answer may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);
/// The longest answer. A program sends a few tens of kilobytes, and some hundred bytes per session.
const ANSWER_MAX: usize = 16 << 20;
/// The first byte that a TLS server sends if the client does not use TLS.
const TLS_ALERT: u8 = 0x15;
/// What to do about an engine that serves only TLS.
pub(crate) const NO_TLS: &str =
    "this command has no TLS; use the engine's Unix socket (--unix), or a port without TLS";

/// The flags with which a command logs in at an engine.
#[derive(Args)]
pub(crate) struct Login {
    /// Password for AUTH; safer in the environment variable REDISCLI_AUTH, which other users cannot
    /// see
    #[arg(long, value_name = "PASSWORD")]
    auth: Option<String>,
    /// User for AUTH [default: default]
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
}

impl Login {
    /// Returns the arguments of AUTH; none if neither a user nor a password is given. A user
    /// without a password is tried with an empty password. The user may need none (`nopass`);
    /// otherwise the engine reports an error.
    pub(crate) fn credentials(&self) -> Vec<String> {
        // As in redis-cli, an empty variable counts as unset.
        let variable = std::env::var("REDISCLI_AUTH").ok().filter(|password| !password.is_empty());
        let password = self.auth.clone().or(variable);
        match (self.user.clone(), password) {
            (Some(user), password) => vec![user, password.unwrap_or_default()],
            (None, password) => password.into_iter().collect(),
        }
    }
}

/// Where an engine is.
#[derive(Debug, Clone)]
pub(crate) enum EngineAt {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl fmt::Display for EngineAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => path.display().fmt(f),
        }
    }
}

/// A client of an engine. Connects when it is first needed.
pub(crate) struct EngineClient {
    address: EngineAt,
    /// The arguments of AUTH; empty if neither a user nor a password is given.
    credentials: Vec<String>,
    connection: Option<Connection>,
}

impl EngineClient {
    pub(crate) fn new(address: EngineAt, credentials: Vec<String>) -> Self {
        Self { address, credentials, connection: None }
    }

    pub(crate) fn address(&self) -> &EngineAt {
        &self.address
    }

    /// Runs a command on the open connection, or on a new one. Returns its reply, which may be an
    /// error reply.
    ///
    /// # Errors
    /// The connection fails. The next command connects again.
    pub(crate) fn request(&mut self, words: &[&str]) -> anyhow::Result<Vec<u8>> {
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => Connection::open(&self.address, &self.credentials)
                .with_context(|| format!("cannot connect to {}", self.address))?,
        };
        let reply = connection.request(words)?;
        self.connection = Some(connection);
        Ok(reply)
    }

    /// Runs a command that replies with a text.
    ///
    /// # Errors
    /// The connection fails, or the reply is an error.
    pub(crate) fn text(&mut self, words: &[&str]) -> anyhow::Result<String> {
        let reply = self.request(words)?;
        match Value::parse(&reply)? {
            Value::Error(text) => bail!("{}: {}", words.join(" "), explained(text)),
            value => Ok(text_of(&value)),
        }
    }
}

/// Returns an explanation of an error reply, or the reply itself.
pub(crate) fn explained(text: &[u8]) -> String {
    if text.starts_with(b"NOAUTH") {
        return "the engine requires a password: set REDISCLI_AUTH, and --user unless the user is \
                default"
            .into();
    }
    String::from_utf8_lossy(text).into_owned()
}

/// Returns the text of a reply; an empty one if the reply is a list or a map.
pub(crate) fn text_of(value: &Value<'_>) -> String {
    match value {
        Value::Bulk(text) | Value::Simple(text) => String::from_utf8_lossy(text).into_owned(),
        Value::Verbatim { text, .. } => String::from_utf8_lossy(text).into_owned(),
        Value::Integer(number) => number.to_string(),
        _ => String::new(),
    }
}

/// A connection to the engine.
struct Connection {
    stream: Box<dyn Stream>,
    framer: ReplyFramer,
}

trait Stream: Read + Write + Send {}
impl<S: Read + Write + Send> Stream for S {}

impl Connection {
    fn open(address: &EngineAt, credentials: &[String]) -> anyhow::Result<Self> {
        let stream: Box<dyn Stream> = match address {
            EngineAt::Tcp(address) => {
                let stream = TcpStream::connect_timeout(address, TIMEOUT)?;
                stream.set_read_timeout(Some(TIMEOUT))?;
                stream.set_write_timeout(Some(TIMEOUT))?;
                Box::new(stream)
            }
            EngineAt::Unix(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_read_timeout(Some(TIMEOUT))?;
                stream.set_write_timeout(Some(TIMEOUT))?;
                Box::new(stream)
            }
        };
        let mut connection = Self { stream, framer: ReplyFramer::new(Limits::default()) };
        if !credentials.is_empty() {
            let words: Vec<_> =
                ["AUTH"].into_iter().chain(credentials.iter().map(String::as_str)).collect();
            if let Value::Error(text) = Value::parse(&connection.request(&words)?)? {
                bail!("AUTH: {}", String::from_utf8_lossy(text));
            }
        }
        Ok(connection)
    }

    /// Sends a command. Returns its reply.
    fn request(&mut self, words: &[&str]) -> anyhow::Result<Vec<u8>> {
        let mut out = Vec::new();
        encode_command(words, &mut out);
        self.stream.write_all(&out).context("cannot write to the engine")?;
        let (mut reply, mut input) = (Answer::new(), vec![0; 16 << 10]);
        loop {
            let count = self.stream.read(&mut input).context("no reply from the engine")?;
            // A TLS port answers with an alert, or closes the connection.
            let is_first = reply.bytes.is_empty();
            if is_first && input[..count].first() == Some(&TLS_ALERT) {
                bail!("the engine's port expects TLS; {NO_TLS}");
            }
            if count == 0 && is_first {
                bail!(
                    "the engine closed the connection, perhaps because its port expects TLS; \
                     {NO_TLS}"
                );
            }
            if count == 0 {
                bail!("the engine closed the connection");
            }
            let progress = self.framer.feed(&input[..count])?;
            reply.add(&input[..progress.consumed])?;
            if progress.complete {
                return Ok(reply.bytes);
            }
        }
    }
}

/// An answer that arrives in pieces. An endless answer is an error, so that the sender can neither
/// block the watcher nor use up its memory.
pub(crate) struct Answer {
    pub(crate) bytes: Vec<u8>,
    begun: Instant,
}

impl Answer {
    pub(crate) fn new() -> Self {
        Self { bytes: Vec::new(), begun: Instant::now() }
    }

    pub(crate) fn add(&mut self, piece: &[u8]) -> anyhow::Result<()> {
        self.bytes.extend(piece);
        ensure!(self.bytes.len() <= ANSWER_MAX, "the answer is longer than {ANSWER_MAX} bytes");
        let is_late = self.begun.elapsed() > ANSWER_TIMEOUT;
        ensure!(!is_late, "the answer is not complete after {ANSWER_TIMEOUT:?}");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_must_end() {
        let mut answer = Answer::new();
        assert!(answer.add(b"a piece").is_ok());
        answer.begun -= ANSWER_TIMEOUT * 2;
        let error = answer.add(b"a drop").expect_err("too late");
        assert_eq!(error.to_string(), "the answer is not complete after 15s");
    }
}
