//! The server as one who types sees it: a connection that comes back, a database, a transaction.

use std::io::{self, IsTerminal as _};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use ferrite_proto::resp::Value;

use crate::connection::{Connection, Frame};
use crate::dial::{Dialer, TransportInfo};
use crate::format::error_of;
use crate::output;
use crate::replying::Replying;
use crate::settings::{Address, Protocol, Settings};

/// Replied to in any case.
const REPLY: [&str; 3] = ["CLIENT", "REPLY", "ON"];

const RECONNECT_PAUSE: Duration = Duration::from_secs(1);

/// A server, connected or not.
pub(crate) struct Server {
    pub(crate) settings: Settings,
    dialer: Dialer,
    connection: Option<Connection>,
    transport_info: Option<TransportInfo>,
    /// Where the connection is.
    database: u32,
    /// Where it should be, also when it comes back.
    wanted_database: u32,
    /// The database before MULTI, while there is a transaction.
    transaction: Option<u32>,
    replying: Replying,
    /// Nothing has come since the last command that is not replied to.
    is_unanswered: bool,
    /// Whoever runs it says what carries the connection: no warning is needed, or no other one.
    pub(crate) reports_transport: bool,
}

/// Why there is no connection, or none as wished.
#[derive(Debug)]
pub(crate) enum ConnectError {
    /// There is none.
    Unreachable(anyhow::Error),
    /// There is one, but the server does not let us in, or not where we want to be.
    Refused(String),
}

impl From<ConnectError> for anyhow::Error {
    fn from(error: ConnectError) -> Self {
        match error {
            ConnectError::Unreachable(error) => error,
            ConnectError::Refused(text) => Self::msg(text),
        }
    }
}

impl Server {
    pub(crate) fn new(settings: Settings, dialer: Dialer) -> Self {
        let wanted_database = settings.database;
        let reports_transport = settings.verbose || settings.is_rdma_asked_for;
        Self {
            settings,
            dialer,
            connection: None,
            transport_info: None,
            database: 0,
            wanted_database,
            transaction: None,
            replying: Replying::On,
            is_unanswered: false,
            reports_transport,
        }
    }

    /// Opens a connection, in the place of the one there is: AUTH, SELECT, HELLO.
    pub(crate) async fn connect(&mut self) -> Result<(), ConnectError> {
        self.disconnect();
        let dialed = self.dialer.dial(&self.settings.server).await;
        let (connection, transport_info) = dialed.map_err(ConnectError::Unreachable)?;
        (self.connection, self.transport_info) = (Some(connection), Some(transport_info));
        // Before the password is sent.
        if self.settings.password.is_some() || io::stderr().is_terminal() {
            self.warn_of_clear_text();
        }
        self.greet().await
    }

    /// Says once that TCP carries what RDMA should have, where others could listen.
    fn warn_of_clear_text(&mut self) {
        let warning =
            self.transport_info.as_ref().and_then(|transport_info| transport_info.warning.as_ref());
        if let Some(warning) = warning.filter(|_| !self.reports_transport) {
            output::tell(warning);
            self.reports_transport = true;
        }
    }

    async fn greet(&mut self) -> Result<(), ConnectError> {
        if let Some(password) = self.settings.password.clone() {
            let mut words = vec!["AUTH".to_owned()];
            words.extend(self.settings.user.clone());
            words.push(password);
            self.expect("AUTH", &words).await?;
        }
        self.select().await?;
        match self.settings.protocol {
            Protocol::Resp2 => {}
            Protocol::Resp3 => self.expect("HELLO 3", &["HELLO".into(), "3".into()]).await?,
            // As redis-cli: a server that knows none is told of, and will do.
            Protocol::Resp3IfKnown => {
                match self.expect("HELLO 3", &["HELLO".into(), "3".into()]).await {
                    Err(ConnectError::Refused(text)) => output::tell(text),
                    other => other?,
                }
            }
        }
        Ok(())
    }

    /// To the database where we want to be.
    pub(crate) async fn select(&mut self) -> Result<(), ConnectError> {
        if self.database != self.wanted_database {
            let number = self.wanted_database.to_string();
            self.expect(&format!("SELECT {number}"), &["SELECT".into(), number]).await?;
            self.database = self.wanted_database;
        }
        Ok(())
    }

    async fn expect(&mut self, name: &str, words: &[String]) -> Result<(), ConnectError> {
        let reply = self.ask(words).await.map_err(ConnectError::Unreachable)?;
        let value = reply.value().map_err(|error| ConnectError::Unreachable(error.into()))?;
        match error_of(&value) {
            Some(text) => Err(ConnectError::Refused(format!(
                "{name} failed: {}",
                String::from_utf8_lossy(text)
            ))),
            None => Ok(()),
        }
    }

    /// One command and its reply; what is said unasked meanwhile is passed over.
    pub(crate) async fn ask<A: AsRef<[u8]>>(&mut self, words: &[A]) -> anyhow::Result<Frame> {
        let (is_replied_to, after) = self.replying.after(words);
        ensure!(is_replied_to, "no replies: CLIENT REPLY ON brings them back");
        let connection = self.connection.as_mut().context("not connected")?;
        connection.send(words).await?;
        self.replying = after;
        loop {
            let frame = connection.frame().await?;
            if !frame.is_push() {
                return Ok(frame);
            }
        }
    }

    /// The same, and a connection that is lost is opened again for as long as it takes: for who
    /// watches a server.
    pub(crate) async fn ask_persistently(&mut self, words: &[&str]) -> anyhow::Result<Frame> {
        loop {
            let lost = match self.ask(words).await {
                Ok(frame) => return Ok(frame),
                Err(error) => error,
            };
            output::tell(format_args!("{lost:#}. Reconnecting..."));
            while let Err(error) = self.connect().await {
                match error {
                    ConnectError::Unreachable(_) => tokio::time::sleep(RECONNECT_PAUSE).await,
                    refused => return Err(refused.into()),
                }
            }
        }
    }

    /// Sends a command: whether it is replied to.
    pub(crate) async fn send(&mut self, words: &[Vec<u8>]) -> io::Result<bool> {
        if has_password(words) {
            self.warn_of_clear_text();
        }
        self.connection()?.send(words).await?;
        if self.is_in_transaction() {
            return Ok(true); // queued
        }
        let (is_replied_to, after) = self.replying.after(words);
        self.replying = after;
        self.is_unanswered = !is_replied_to;
        Ok(is_replied_to)
    }

    /// A server that does not know or does not allow CLIENT REPLY would reply to one that asks for
    /// no reply, and the next command would be taken to be replied to by that. So it is asked to
    /// reply first, which is always replied to: with this, if it refuses.
    pub(crate) async fn refusal_of_silence(
        &mut self,
        words: &[Vec<u8>],
    ) -> anyhow::Result<Option<Frame>> {
        let (is_replied_to, _) = self.replying.after(words);
        if self.replying != Replying::On || is_replied_to || self.is_in_transaction() {
            return Ok(None);
        }
        let frame = self.ask(&REPLY).await?;
        let is_refused = error_of(&frame.value()?).is_some();
        Ok(is_refused.then_some(frame))
    }

    /// At the end: what was not replied to is carried out, as far as the server is concerned,
    /// before the connection goes.
    pub(crate) async fn settle(&mut self) -> anyhow::Result<()> {
        if !self.is_unanswered || !self.is_connected() {
            return Ok(());
        }
        let patience = self.settings.timeout;
        match tokio::time::timeout(patience, self.ask(&REPLY)).await {
            Ok(reply) => reply.map(drop).context("after commands without reply"),
            Err(_) => {
                bail!("whether the server took the last commands, it does not say in {patience:?}")
            }
        }
    }

    pub(crate) fn connection(&mut self) -> io::Result<&mut Connection> {
        self.connection
            .as_mut()
            .ok_or_else(|| io::Error::new(io::ErrorKind::NotConnected, "not connected"))
    }

    /// The connection, for who wants it alone.
    pub(crate) fn take_connection(&mut self) -> io::Result<Connection> {
        self.connection
            .take()
            .ok_or_else(|| io::Error::new(io::ErrorKind::NotConnected, "not connected"))
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.connection.is_some()
    }

    pub(crate) fn is_in_transaction(&self) -> bool {
        self.transaction.is_some()
    }

    /// What carries the connection.
    pub(crate) fn transport_info(&self) -> Option<&TransportInfo> {
        self.transport_info.as_ref()
    }

    pub(crate) fn disconnect(&mut self) {
        self.connection = None;
        self.transport_info = None;
        self.database = 0;
        self.transaction = None;
        self.replying = Replying::On;
        self.is_unanswered = false;
    }

    /// Another server from now on.
    pub(crate) fn go_to(&mut self, host: String, port: u16) {
        self.disconnect();
        self.settings.server = Address::Net { host, port };
    }

    /// `127.0.0.1:6379[3](TX)> `.
    pub(crate) fn prompt(&self) -> String {
        if !self.is_connected() {
            return "not connected> ".into();
        }
        let place = match &self.settings.server {
            Address::Unix(path) => format!("redis {}", path.display()),
            net => net.to_string(),
        };
        let database =
            if self.database == 0 { String::new() } else { format!("[{}]", self.database) };
        let transaction = if self.transaction.is_some() { "(TX)" } else { "" };
        format!("{place}{database}{transaction}> ")
    }

    /// What a command that was replied to has changed.
    pub(crate) async fn note(
        &mut self,
        words: &[Vec<u8>],
        reply: &Value<'_>,
    ) -> Result<(), ConnectError> {
        let failed = error_of(reply).is_some();
        let name = words.first().map(|word| word.to_ascii_lowercase()).unwrap_or_default();
        match (name.as_slice(), words) {
            (b"select", [_, number]) if !failed => {
                let number =
                    std::str::from_utf8(number).ok().and_then(|number| number.parse().ok());
                self.be_in(number.unwrap_or(self.database));
            }
            (b"auth", [_, _] | [_, _, _]) => return self.select().await,
            (b"multi", [_]) if !failed => self.transaction = Some(self.database),
            (b"exec", [_]) => {
                if let Some(before) = self.transaction.take()
                    && (failed || *reply == Value::Null)
                {
                    self.be_in(before);
                }
            }
            (b"discard", [_]) if !failed => {
                if let Some(before) = self.transaction.take() {
                    self.be_in(before);
                }
            }
            (b"reset", [_]) if !failed => {
                self.transaction = None;
                self.be_in(0);
                self.settings.protocol = Protocol::Resp2;
            }
            _ => {}
        }
        Ok(())
    }

    fn be_in(&mut self, database: u32) {
        (self.database, self.wanted_database) = (database, database);
    }
}

/// Whether a command logs in.
fn has_password(words: &[Vec<u8>]) -> bool {
    let is = |at: usize, word: &str| {
        words.get(at).is_some_and(|typed| typed.eq_ignore_ascii_case(word.as_bytes()))
    };
    is(0, "AUTH") || is(0, "HELLO") && words.len() > 2
}
