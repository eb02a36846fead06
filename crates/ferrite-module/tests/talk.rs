//! Clients of an engine that see replies as they came, byte for byte: one at the module's port,
//! whose commands are called, and one at the engine's own socket.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ferrite_proto::resp::{Limits, ReplyFramer, Value, encode_command};

use crate::scene::{PATIENCE, REDIS, Server, Start, free_port, valkey};

/// The engines there are, and those named in FERRITE_ENGINES (paths of servers, separated by
/// colons).
pub(crate) fn engines() -> Vec<PathBuf> {
    let named = std::env::var_os("FERRITE_ENGINES").unwrap_or_default();
    // "" has one
    let named = std::env::split_paths(&named).filter(|path| !path.as_os_str().is_empty());
    [Some(REDIS.into()), valkey()].into_iter().flatten().chain(named).collect()
}

/// An engine whose sessions call, with more options of its own.
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

/// A client.
pub(crate) struct Peer {
    socket: Box<dyn Socket>,
    heard: Vec<u8>,
}

impl Peer {
    /// At the module's port.
    pub(crate) fn called(server: &Server) -> Self {
        Self::called_at(&server.info("address"))
    }

    pub(crate) fn called_at(address: &str) -> Self {
        let socket = TcpStream::connect(address).expect("it listens");
        socket.set_nodelay(true).expect("no delay");
        Self::new(Box::new(socket))
    }

    /// At the engine's own socket.
    pub(crate) fn native(server: &Server) -> Self {
        let socket =
            UnixStream::connect(server.directory().join("engine.sock")).expect("it listens");
        Self::new(Box::new(socket))
    }

    fn new(socket: Box<dyn Socket>) -> Self {
        socket.limit(PATIENCE);
        socket.limit_writes(PATIENCE);
        Self { socket, heard: Vec::new() }
    }

    /// Commands in one piece, without waiting.
    pub(crate) fn send<W: AsRef<[u8]>>(&mut self, commands: &[Vec<W>]) {
        assert!(self.try_send(commands), "the other side has hung up");
    }

    /// The same; false if the other side has hung up.
    pub(crate) fn try_send<W: AsRef<[u8]>>(&mut self, commands: &[Vec<W>]) -> bool {
        let mut bytes = Vec::new();
        for words in commands {
            encode_command(words.iter().map(AsRef::as_ref), &mut bytes);
        }
        self.socket.write_all(&bytes).is_ok()
    }

    /// These bytes, as they are.
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).expect("the other side is there");
    }

    /// The same in this time; false if the other side does not take them all.
    pub(crate) fn write_within(&mut self, bytes: &[u8], time: Duration) -> bool {
        self.socket.limit_writes(time);
        self.socket.write_all(bytes).is_ok()
    }

    /// The next reply, as it came; `None` if the other side has hung up.
    pub(crate) fn next(&mut self) -> Option<Vec<u8>> {
        self.within(PATIENCE).expect("a reply in time")
    }

    /// The same, or an error if there is none in this time, or what came is none: SYNC sends line
    /// ends while it is at work.
    pub(crate) fn within(&mut self, time: Duration) -> Result<Option<Vec<u8>>, ()> {
        self.socket.limit(time);
        let mut piece = vec![0; 64 << 10];
        loop {
            let progress = ReplyFramer::new(Limits::default()).feed(&self.heard).map_err(|_| ())?;
            if progress.complete {
                let rest = self.heard.split_off(progress.consumed);
                return Ok(Some(std::mem::replace(&mut self.heard, rest)));
            }
            match self.socket.read(&mut piece) {
                Ok(0) => return Ok(None),
                Ok(count) => self.heard.extend_from_slice(&piece[..count]),
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) =>
                {
                    return Err(());
                }
                Err(_) => return Ok(None), // a reset
            }
        }
    }

    /// Everything up to these bytes, whatever it is.
    pub(crate) fn until(&mut self, end: &[u8]) -> Vec<u8> {
        let mut piece = vec![0; 64 << 10];
        while !self.heard.ends_with(end) {
            let count = self.socket.read(&mut piece).expect("more in time");
            assert!(count > 0, "the other side has hung up");
            self.heard.extend_from_slice(&piece[..count]);
        }
        std::mem::take(&mut self.heard)
    }

    pub(crate) fn replies(&mut self, count: usize) -> Vec<Vec<u8>> {
        (0..count).map(|_| self.next().expect("a reply")).collect()
    }

    /// A command's reply, as it came.
    pub(crate) fn raw<W: AsRef<[u8]>>(&mut self, words: &[W]) -> Vec<u8> {
        let words: Vec<_> = words.iter().map(AsRef::as_ref).collect();
        self.send(&[words]);
        self.next().expect("a reply")
    }

    /// The same as text, to look at.
    pub(crate) fn ask<W: AsRef<[u8]>>(&mut self, words: &[W]) -> String {
        String::from_utf8_lossy(&self.raw(words)).trim_end().into()
    }

    /// One that must be answered with OK.
    /// What INFO tells of the module.
    pub(crate) fn info(&mut self, field: &str) -> String {
        let info = self.ask(&["INFO", "ferrite"]);
        let line = info
            .lines()
            .find_map(|line| line.strip_prefix("ferrite_")?.strip_prefix(field)?.strip_prefix(':'));
        line.unwrap_or_else(|| panic!("no {field} in {info}")).trim_end().into()
    }

    pub(crate) fn ok<W: AsRef<[u8]> + std::fmt::Debug>(&mut self, words: &[W]) {
        assert_eq!(self.ask(words), "+OK", "{words:?}");
    }
}

/// The two at one engine.
pub(crate) struct Pair {
    pub(crate) called: Peer,
    pub(crate) native: Peer,
}

impl Pair {
    pub(crate) fn new(server: &Server) -> Self {
        Self { called: Peer::called(server), native: Peer::native(server) }
    }

    /// Both say it and hear the same: what they heard, as text.
    pub(crate) fn same<W: AsRef<[u8]> + std::fmt::Debug>(&mut self, words: &[W]) -> String {
        let called = self.called.ask(words);
        assert_eq!(called, self.native.ask(words), "{words:?}");
        called
    }

    /// Each in a database of its own, with nothing in it, so that what one writes does not change
    /// what the other hears.
    pub(crate) fn apart(server: &Server) -> Self {
        let mut pair = Self::new(server);
        pair.called.ok(&["SELECT", "1"]);
        pair.native.ok(&["SELECT", "2"]);
        pair.same(&["FLUSHDB"]);
        pair
    }
}

/// Every command that the engine says may be called by a script, does not block, and is not
/// dangerous: its words, subcommand included.
pub(crate) fn commands(native: &mut Peer) -> Vec<Vec<String>> {
    let table = native.raw(&["COMMAND"]);
    let Ok(Value::Array(rows)) = Value::parse(&table) else { panic!("a table") };
    let mut found = Vec::new();
    rows.iter().for_each(|row| gather(row, &mut found));
    found
}

fn gather(row: &Value<'_>, found: &mut Vec<Vec<String>>) {
    let Value::Array(fields) = row else { return };
    match fields.get(9) {
        Some(Value::Array(subcommands)) if !subcommands.is_empty() => {
            subcommands.iter().for_each(|row| gather(row, found));
        }
        _ => {
            let Some(Value::Bulk(name)) = fields.first() else { return };
            let name = String::from_utf8_lossy(name).to_uppercase();
            found.push(name.split('|').map(Into::into).collect());
        }
    }
}

/// How many commands were called while this ran.
pub(crate) fn calls(server: &Server, act: impl FnOnce()) -> u64 {
    let before = server.count("commands_called");
    act();
    server.count("commands_called") - before
}

/// A line of words.
pub(crate) fn words(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}
