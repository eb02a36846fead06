//! Clients that return replies byte for byte: one at the module's port, whose commands are called
//! in-process, and one at the engine's own socket.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ferrite_proto::resp::{Limits, ReplyFramer, Value, encode_command};

use crate::server::{REDIS, Server, Start, TIMEOUT, free_port, valkey};

/// Returns the available engines, and those in FERRITE_ENGINES (paths of servers, separated by
/// colons).
pub(crate) fn engines() -> Vec<PathBuf> {
    let named = std::env::var_os("FERRITE_ENGINES").unwrap_or_default();
    // An empty variable is split into one empty path.
    let named = std::env::split_paths(&named).filter(|path| !path.as_os_str().is_empty());
    [Some(REDIS.into()), valkey()].into_iter().flatten().chain(named).collect()
}

/// Starts an engine with the call path enabled, and with these options of its own.
pub(crate) fn start(program: &Path, options: &[&str]) -> Server {
    let port = free_port();
    let arguments = ["rdma-port", &port, "rdma-bind", "127.0.0.1", "call-path", "yes"];
    let options = [&["--enable-debug-command", "yes", "--port", "0"], options].concat();
    Server::start(&Start { program, arguments: &arguments, options: &options })
}

trait Socket: Read + Write + Send {
    fn limit(&self, time: Duration);
    fn limit_writes(&self, time: Duration);
}

impl Socket for TcpStream {
    fn limit(&self, time: Duration) {
        self.set_read_timeout(Some(time)).expect("a time limit");
    }

    fn limit_writes(&self, time: Duration) {
        self.set_write_timeout(Some(time)).expect("a time limit");
    }
}

impl Socket for UnixStream {
    fn limit(&self, time: Duration) {
        self.set_read_timeout(Some(time)).expect("a time limit");
    }

    fn limit_writes(&self, time: Duration) {
        self.set_write_timeout(Some(time)).expect("a time limit");
    }
}

/// A client of an engine.
pub(crate) struct Client {
    socket: Box<dyn Socket>,
    received: Vec<u8>,
}

impl Client {
    /// Connects to the module's port.
    pub(crate) fn of_module(server: &Server) -> Self {
        Self::at(&server.info("address"))
    }

    /// Connects to the module's port at this address.
    pub(crate) fn at(address: &str) -> Self {
        let socket = TcpStream::connect(address).expect("a connection to the module");
        socket.set_nodelay(true).expect("TCP_NODELAY");
        Self::new(Box::new(socket))
    }

    /// Connects to the engine's own socket.
    pub(crate) fn native(server: &Server) -> Self {
        let path = server.directory().join("engine.sock");
        let socket = UnixStream::connect(path).expect("a connection to the engine");
        Self::new(Box::new(socket))
    }

    fn new(socket: Box<dyn Socket>) -> Self {
        socket.limit(TIMEOUT);
        socket.limit_writes(TIMEOUT);
        Self { socket, received: Vec::new() }
    }

    /// Sends commands in one piece, without waiting for replies.
    pub(crate) fn send<W: AsRef<[u8]>>(&mut self, commands: &[Vec<W>]) {
        assert!(self.try_send(commands), "the server closed the connection");
    }

    /// Sends commands. Returns false if the server has closed the connection.
    pub(crate) fn try_send<W: AsRef<[u8]>>(&mut self, commands: &[Vec<W>]) -> bool {
        let mut bytes = Vec::new();
        for words in commands {
            encode_command(words.iter().map(AsRef::as_ref), &mut bytes);
        }
        self.socket.write_all(&bytes).is_ok()
    }

    /// Sends bytes.
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).expect("the server reads");
    }

    /// Sends bytes. Returns false if the server does not read them all within this time.
    pub(crate) fn write_within(&mut self, bytes: &[u8], time: Duration) -> bool {
        self.socket.limit_writes(time);
        self.socket.write_all(bytes).is_ok()
    }

    /// Reads the next reply; `None` if the server has closed the connection.
    pub(crate) fn next(&mut self) -> Option<Vec<u8>> {
        self.next_within(TIMEOUT).expect("a reply in time")
    }

    /// Reads the next reply, as [`Client::next`] does.
    ///
    /// # Errors
    /// No reply arrives in time, or the bytes are not a reply: SYNC sends newlines while it works.
    pub(crate) fn next_within(&mut self, time: Duration) -> Result<Option<Vec<u8>>, ()> {
        self.socket.limit(time);
        let mut piece = vec![0; 64 << 10];
        loop {
            let progress =
                ReplyFramer::new(Limits::default()).feed(&self.received).map_err(|_| ())?;
            if progress.complete {
                let rest = self.received.split_off(progress.consumed);
                return Ok(Some(std::mem::replace(&mut self.received, rest)));
            }
            match self.socket.read(&mut piece) {
                Ok(0) => return Ok(None),
                Ok(count) => self.received.extend_from_slice(&piece[..count]),
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) =>
                {
                    return Err(());
                }
                Err(_) => return Ok(None), // a reset
            }
        }
    }

    /// Reads until the received bytes end with `end`, and returns all of them.
    pub(crate) fn read_until(&mut self, end: &[u8]) -> Vec<u8> {
        let mut piece = vec![0; 64 << 10];
        while !self.received.ends_with(end) {
            let count = self.socket.read(&mut piece).expect("more bytes in time");
            assert!(count > 0, "the server closed the connection");
            self.received.extend_from_slice(&piece[..count]);
        }
        std::mem::take(&mut self.received)
    }

    pub(crate) fn replies(&mut self, count: usize) -> Vec<Vec<u8>> {
        (0..count).map(|_| self.next().expect("a reply")).collect()
    }

    /// Runs a command and returns its reply.
    pub(crate) fn raw<W: AsRef<[u8]>>(&mut self, words: &[W]) -> Vec<u8> {
        let words: Vec<_> = words.iter().map(AsRef::as_ref).collect();
        self.send(&[words]);
        self.next().expect("a reply")
    }

    /// Runs a command and returns its reply as text.
    pub(crate) fn ask<W: AsRef<[u8]>>(&mut self, words: &[W]) -> String {
        String::from_utf8_lossy(&self.raw(words)).trim_end().into()
    }

    /// Returns a field of INFO ferrite, by its name without the prefix.
    pub(crate) fn info(&mut self, field: &str) -> String {
        let info = self.ask(&["INFO", "ferrite"]);
        let line = info
            .lines()
            .find_map(|line| line.strip_prefix("ferrite_")?.strip_prefix(field)?.strip_prefix(':'));
        line.unwrap_or_else(|| panic!("no {field} in {info}")).trim_end().into()
    }

    /// Runs a command whose reply must be OK.
    pub(crate) fn ok<W: AsRef<[u8]> + std::fmt::Debug>(&mut self, words: &[W]) {
        assert_eq!(self.ask(words), "+OK", "{words:?}");
    }
}

/// Two clients of one engine: one through the module, one at the engine's own socket.
pub(crate) struct Pair {
    pub(crate) module: Client,
    pub(crate) native: Client,
}

impl Pair {
    pub(crate) fn new(server: &Server) -> Self {
        Self { module: Client::of_module(server), native: Client::native(server) }
    }

    /// Runs a command with both clients, asserts that the replies are equal, and returns the reply
    /// as text.
    pub(crate) fn same<W: AsRef<[u8]> + std::fmt::Debug>(&mut self, words: &[W]) -> String {
        let reply = self.module.ask(words);
        assert_eq!(reply, self.native.ask(words), "{words:?}");
        reply
    }

    /// Connects both, each to its own empty database, so that the writes of one do not change the
    /// replies of the other.
    pub(crate) fn in_two_databases(server: &Server) -> Self {
        let mut pair = Self::new(server);
        pair.module.ok(&["SELECT", "1"]);
        pair.native.ok(&["SELECT", "2"]);
        pair.same(&["FLUSHDB"]);
        pair
    }
}

/// Returns the names of all of the engine's commands, each split into command and subcommand.
pub(crate) fn commands(native: &mut Client) -> Vec<Vec<String>> {
    let table = native.raw(&["COMMAND"]);
    let Ok(Value::Array(rows)) = Value::parse(&table) else { panic!("not an array") };
    let mut found = Vec::new();
    rows.iter().for_each(|row| collect_names(row, &mut found));
    found
}

fn collect_names(row: &Value<'_>, found: &mut Vec<Vec<String>>) {
    let Value::Array(fields) = row else { return };
    match fields.get(9) {
        Some(Value::Array(subcommands)) if !subcommands.is_empty() => {
            subcommands.iter().for_each(|row| collect_names(row, found));
        }
        _ => {
            let Some(Value::Bulk(name)) = fields.first() else { return };
            let name = String::from_utf8_lossy(name).to_uppercase();
            found.push(name.split('|').map(Into::into).collect());
        }
    }
}

/// Returns how many commands were called in-process while `act` ran.
pub(crate) fn calls(server: &Server, act: impl FnOnce()) -> u64 {
    let before = server.count("commands_called");
    act();
    server.count("commands_called") - before
}

/// Splits a line into words.
pub(crate) fn words(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}
