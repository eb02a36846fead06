//! The server from the user's point of view: a connection that is opened again when it is lost, a
//! database, and a transaction.

use std::io::{self, IsTerminal as _};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use ferrite_fabric::Rdma;
use ferrite_proto::resp::Value;
use ferrite_session::Host;

use crate::connection::{Connection, Frame};
use crate::dial::{Dialed, Dialer, TransportInfo, TransportSource};
use crate::format::error_of;
use crate::output;
use crate::replying::Replying;
use crate::settings::{Address, Protocol, Settings};
use crate::terminal;

/// A command that the server replies to in any state.
const REPLY_ON: [&str; 3] = ["CLIENT", "REPLY", "ON"];

const RECONNECT_PAUSE: Duration = Duration::from_secs(1);

/// A server, connected or not.
pub(crate) struct Server {
    pub(crate) settings: Settings,
    dialer: Dialer,
    /// The node of a cluster that a redirect led to. The address in the settings is then that of
    /// its engine.
    node: Option<ClusterNode>,
    connection: Option<Connection>,
    transport: Option<TransportSource>,
    /// The host that has accepted the connection, which may be any of those in the settings.
    dialed: Option<Host>,
    /// The database of the connection.
    database: u32,
    /// The database that is selected after a reconnect.
    wanted_database: u32,
    /// During a transaction, the database before MULTI.
    transaction: Option<u32>,
    replying: Replying,
    /// Whether the last command has no reply. It is then unknown whether the server has run the
    /// command.
    is_unanswered: bool,
    /// Whether the transport is reported elsewhere, or the warning was already printed. No warning
    /// is needed in these cases.
    pub(crate) reports_transport: bool,
}

/// How a node of a cluster is reached.
enum ClusterNode {
    /// At the RDMA endpoints of its module.
    Module(Address),
    /// At the port of its engine, over TCP.
    Engine,
}

/// Why connecting has failed.
#[derive(Debug)]
pub(crate) enum ConnectError {
    /// There is no connection.
    Unreachable(anyhow::Error),
    /// There is a connection, but the server has rejected AUTH, SELECT or HELLO.
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
        let reports_transport = settings.verbose || settings.is_rdma_explicit;
        Self {
            settings,
            dialer,
            node: None,
            connection: None,
            transport: None,
            dialed: None,
            database: 0,
            wanted_database,
            transaction: None,
            replying: Replying::On,
            is_unanswered: false,
            reports_transport,
        }
    }

    /// Opens a new connection in place of the current one, and sends AUTH, SELECT and HELLO as
    /// needed.
    pub(crate) async fn connect(&mut self) -> Result<(), ConnectError> {
        self.disconnect();
        let Settings { server, rdma, .. } = &self.settings;
        let dialed = match &self.node {
            None => self.dialer.dial(server, *rdma).await,
            Some(ClusterNode::Module(endpoints)) => self.dialer.dial(endpoints, *rdma).await,
            Some(ClusterNode::Engine) => self.dialer.dial(server, Rdma::Forbid).await,
        };
        let Dialed { connection, transport, host } = dialed.map_err(ConnectError::Unreachable)?;
        (self.connection, self.transport) = (Some(connection), Some(transport));
        self.dialed = host;
        // The warning must come before the password is sent.
        if self.settings.password.is_some() || io::stderr().is_terminal() {
            self.warn_of_clear_text();
        }
        self.initialize().await
    }

    /// Warns once if the connection has fallen back to TCP and others could eavesdrop.
    fn warn_of_clear_text(&mut self) {
        let warning = self.transport_info().and_then(|transport_info| transport_info.warning);
        if let Some(warning) = warning.filter(|_| !self.reports_transport) {
            output::write_stderr(warning);
            self.reports_transport = true;
        }
    }

    async fn initialize(&mut self) -> Result<(), ConnectError> {
        if let Some(password) = self.settings.password.clone() {
            let mut words = vec!["AUTH".to_owned()];
            words.extend(self.settings.user.clone());
            words.push(password);
            self.expect_success("AUTH", &words).await?;
        }
        self.select().await?;
        match self.settings.protocol {
            Protocol::Resp2 => {}
            Protocol::Resp3 => {
                self.expect_success("HELLO 3", &["HELLO".into(), "3".into()]).await?;
            }
            // As in redis-cli, a server without RESP3 is reported, and RESP2 is used.
            Protocol::Resp3IfKnown => {
                match self.expect_success("HELLO 3", &["HELLO".into(), "3".into()]).await {
                    Err(ConnectError::Refused(text)) => output::write_stderr(text),
                    other => other?,
                }
            }
        }
        Ok(())
    }

    /// Selects the wanted database, if it is not selected already.
    pub(crate) async fn select(&mut self) -> Result<(), ConnectError> {
        if self.database != self.wanted_database {
            let number = self.wanted_database.to_string();
            self.expect_success(&format!("SELECT {number}"), &["SELECT".into(), number]).await?;
            self.database = self.wanted_database;
        }
        Ok(())
    }

    async fn expect_success(&mut self, name: &str, words: &[String]) -> Result<(), ConnectError> {
        let reply = self.request(words).await.map_err(ConnectError::Unreachable)?;
        let value = reply.value().map_err(|error| ConnectError::Unreachable(error.into()))?;
        match error_of(&value) {
            Some(text) => Err(ConnectError::Refused(format!(
                "{name} failed: {}",
                String::from_utf8_lossy(text)
            ))),
            None => Ok(()),
        }
    }

    /// Sends a command and returns its reply. Drops push messages that arrive before the reply.
    pub(crate) async fn request<A: AsRef<[u8]>>(&mut self, words: &[A]) -> anyhow::Result<Frame> {
        let (is_replied_to, after) = self.replying.after(words);
        ensure!(
            is_replied_to,
            "the server sends no reply after CLIENT REPLY OFF or SKIP; run CLIENT REPLY ON"
        );
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

    /// Sends a command and returns its reply. If the connection is lost, reconnects and sends the
    /// command again, until that succeeds or the server rejects the login.
    pub(crate) async fn request_with_reconnects(
        &mut self,
        words: &[&str],
    ) -> anyhow::Result<Frame> {
        loop {
            let lost = match self.request(words).await {
                Ok(frame) => return Ok(frame),
                Err(error) => error,
            };
            output::write_stderr(format_args!("{lost:#}. Reconnecting..."));
            while let Err(error) = self.connect().await {
                match error {
                    ConnectError::Unreachable(_) => tokio::time::sleep(RECONNECT_PAUSE).await,
                    refused => return Err(refused.into()),
                }
            }
        }
    }

    /// Sends a command. Returns whether the server will reply to it.
    pub(crate) async fn send(&mut self, words: &[Vec<u8>]) -> io::Result<bool> {
        if has_password(words) {
            self.warn_of_clear_text();
        }
        self.connection()?.send(words).await?;
        if self.is_in_transaction() {
            return Ok(true); // every command has a reply here, usually QUEUED
        }
        let (is_replied_to, after) = self.replying.after(words);
        self.replying = after;
        self.is_unanswered = !is_replied_to;
        Ok(is_replied_to)
    }

    /// Checks that the server accepts CLIENT REPLY, before a command that turns replies off.
    /// Returns the error reply if the server does not accept it.
    ///
    /// A server that does not know or does not allow CLIENT REPLY would send an error, although no
    /// reply is expected. ferrite-cli would take that error for the reply to the next command.
    /// Therefore this function first sends CLIENT REPLY ON, which always has a reply.
    pub(crate) async fn check_client_reply(
        &mut self,
        words: &[Vec<u8>],
    ) -> anyhow::Result<Option<Frame>> {
        let (is_replied_to, _) = self.replying.after(words);
        if self.replying != Replying::On || is_replied_to || self.is_in_transaction() {
            return Ok(None);
        }
        let frame = self.request(&REPLY_ON).await?;
        let is_refused = error_of(&frame.value()?).is_some();
        Ok(is_refused.then_some(frame))
    }

    /// Waits until the server has run commands that have no reply. Call this before the program
    /// closes the connection.
    pub(crate) async fn confirm_unanswered(&mut self) -> anyhow::Result<()> {
        if !self.is_unanswered || !self.is_connected() {
            return Ok(());
        }
        let limit = self.settings.timeout;
        match tokio::time::timeout(limit, self.request(&REPLY_ON)).await {
            Ok(reply) => reply.map(drop).context("cannot confirm that the last commands have run"),
            Err(_) => {
                bail!("the server did not confirm the last commands within {limit:?}")
            }
        }
    }

    pub(crate) fn connection(&mut self) -> io::Result<&mut Connection> {
        self.connection
            .as_mut()
            .ok_or_else(|| io::Error::new(io::ErrorKind::NotConnected, "not connected"))
    }

    /// Takes the connection out of this value, which is disconnected from then on.
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

    /// Returns the transport that the connection uses now.
    pub(crate) fn transport_info(&self) -> Option<TransportInfo> {
        self.transport.as_ref().map(TransportSource::now)
    }

    pub(crate) fn disconnect(&mut self) {
        self.connection = None;
        self.transport = None;
        self.database = 0;
        self.transaction = None;
        self.replying = Replying::On;
        self.is_unanswered = false;
    }

    /// Disconnects, and uses another server from now on.
    pub(crate) fn switch_to(&mut self, host: String, port: u16) {
        self.disconnect();
        self.node = None;
        self.settings.server = Address::Net(vec![Host { name: host, port: Some(port) }]);
    }

    /// Disconnects, and uses a node of a cluster from now on: the first of its RDMA endpoints that
    /// accepts, or its engine over TCP if it has no endpoints.
    pub(crate) fn switch_to_node(&mut self, node: Host, endpoints: Vec<Host>) {
        self.disconnect();
        self.settings.server = Address::Net(vec![node]);
        self.node = Some(match endpoints.is_empty() {
            true => ClusterNode::Engine,
            false => ClusterNode::Module(Address::Net(endpoints)),
        });
    }

    /// Returns the host of the server: that of a node's engine in a cluster, otherwise the one that
    /// has accepted the connection. `None` for a Unix socket.
    pub(crate) fn peer(&self) -> Option<&Host> {
        match &self.settings.server {
            Address::Net(hosts) if self.node.is_none() => self.dialed.as_ref().or(hosts.first()),
            Address::Net(hosts) => hosts.first(),
            Address::Unix(_) => None,
        }
    }

    /// Returns the prompt, for example `10.0.0.1:6380[3] RDMA(TX)> `.
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
        // For a Unix socket, the path already shows the transport.
        let transport = match self.transport_info() {
            Some(info) if matches!(self.settings.server, Address::Net(_)) => {
                format!(" {}", info.name)
            }
            _ => String::new(),
        };
        let transaction = if self.transaction.is_some() { "(TX)" } else { "" };
        let prompt = format!("{place}{database}{transport}{transaction}> ");
        // A redirect may have named the place.
        terminal::escape_text(&prompt)
    }

    /// Updates the database and the transaction after the reply to a command.
    pub(crate) async fn track_state(
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
                self.set_database(number.unwrap_or(self.database));
            }
            (b"auth", [_, _] | [_, _, _]) => return self.select().await,
            (b"multi", [_]) if !failed => self.transaction = Some(self.database),
            (b"exec", [_]) => {
                if let Some(before) = self.transaction.take()
                    && (failed || *reply == Value::Null)
                {
                    self.set_database(before);
                }
            }
            (b"discard", [_]) if !failed => {
                if let Some(before) = self.transaction.take() {
                    self.set_database(before);
                }
            }
            (b"reset", [_]) if !failed => {
                self.transaction = None;
                self.set_database(0);
                self.settings.protocol = Protocol::Resp2;
            }
            _ => {}
        }
        Ok(())
    }

    fn set_database(&mut self, database: u32) {
        (self.database, self.wanted_database) = (database, database);
    }
}

/// Returns whether a command may be a login, which contains a password: AUTH, or HELLO with
/// options.
fn has_password(words: &[Vec<u8>]) -> bool {
    let is = |at: usize, word: &str| {
        words.get(at).is_some_and(|typed| typed.eq_ignore_ascii_case(word.as_bytes()))
    };
    is(0, "AUTH") || is(0, "HELLO") && words.len() > 2
}
