//! One of the two engines, its clients, and an observer that is connected to the engine's own port.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use ferrite_proto::resp::Value;

use super::idle::Process;
use super::session::{Part, Setup, excerpt};
use ferrite_testkit::resp::{Connection, Response, encode};
use ferrite_testkit::{Engine, Start, TempDir, free_port};

pub(crate) const LONG: Duration = Duration::from_secs(20);
/// Number of databases of each engine.
const DATABASES: usize = 4;
/// The observer's user, which no generated command changes.
const OBSERVER: &str = "user observer on >observer ~* &* +@all";

/// The name of the ACL file. Both engines use the same name, since errors of ACL LOAD contain it.
/// Each engine has its own folder.
const ACL_FILE: &str = "users.acl";

/// The engine to start, and the module's setting `call-path`.
#[derive(Clone)]
pub(crate) struct EngineSetup {
    pub(crate) program: PathBuf,
    pub(crate) call_path: Option<String>,
}

/// A client of one engine.
#[derive(Default)]
pub(crate) struct Client {
    socket: Option<TcpStream>,
    /// Bytes that the socket has not accepted yet.
    unsent: Vec<u8>,
    /// Whether the client shuts down its side after the unsent bytes.
    ends: bool,
    pub(crate) has_ended_writing: bool,
    /// Bytes that were received and not compared yet.
    pub(crate) received: Vec<u8>,
    pub(crate) is_closed: bool,
    /// The engine's id of the client, once it is known.
    pub(crate) id: Option<i64>,
}

impl Client {
    /// Sends and receives as much as possible without blocking. Returns whether any bytes moved.
    fn exchange(&mut self) -> bool {
        let Some(socket) = &mut self.socket else { return false };
        let mut any = false;
        if !self.unsent.is_empty() {
            match socket.write(&self.unsent) {
                Ok(count) => {
                    self.unsent.drain(..count);
                    any = count > 0;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => self.unsent.clear(), // the read below finds the closed connection
            }
        }
        if self.unsent.is_empty() && std::mem::take(&mut self.ends) {
            let _ = socket.shutdown(Shutdown::Write); // the read below finds a closed connection
            self.has_ended_writing = true;
            any = true;
        }
        let mut piece = [0; 64 << 10];
        loop {
            match socket.read(&mut piece) {
                Ok(0) => break,
                Ok(count) => {
                    self.received.extend_from_slice(&piece[..count]);
                    any = true;
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return any,
                Err(_) => break,
            }
        }
        self.socket = None;
        self.is_closed = true;
        true
    }

    /// Returns the client's address, as the engine at its own port shows it.
    pub(crate) fn address(&self) -> Option<String> {
        Some(self.socket.as_ref()?.local_addr().ok()?.to_string())
    }

    /// Disconnects the client and discards what it has received.
    pub(crate) fn close(&mut self) {
        *self = Self { is_closed: true, ..Self::default() };
    }
}

pub(crate) struct Side {
    pub(crate) server: Engine,
    pub(crate) process: Process,
    pub(crate) clients: Vec<Client>,
    engine: EngineSetup,
    setup: Setup,
    port: String,
    /// The port that the clients connect to: the engine's own, or the module's.
    pub(crate) client_port: String,
    observer: Option<Connection>,
    /// The engine's working directory, with its ACL file.
    _folder: TempDir,
}

impl Side {
    /// Starts an engine with the module, without waiting for it.
    pub(crate) fn spawn(engine: &EngineSetup, setup: &Setup, through_module: bool) -> Self {
        let (port, module_port) = (free_port().to_string(), free_port().to_string());
        let folder = TempDir::new("session-diff");
        let users = [&[OBSERVER.to_owned()][..], &setup.users].concat().join("\n") + "\n";
        folder.file(ACL_FILE, users);
        let mut options: Vec<&str> =
            vec!["--port", &port, "--bind", "127.0.0.1", "--protected-mode", "no"];
        // The engine checks timeouts every 10 ms.
        options.extend(["--hz", "100", "--databases", "4", "--proto-max-bulk-len", "4mb"]);
        options.extend(["--acllog-max-len", "10000", "--slowlog-log-slower-than", "-1"]);
        options.extend(["--enable-debug-command", "local"]);
        options.extend(["--dir", folder.path().to_str().expect("UTF-8"), "--aclfile", ACL_FILE]);
        for (name, typed) in &setup.renames {
            options.extend(["--rename-command", name, typed]);
        }
        let own = format!("127.0.0.1:{port}");
        let mut arguments = vec!["rdma-port", &module_port, "rdma-bind", "127.0.0.1"];
        if setup.typed("CONFIG") != "CONFIG" {
            // If CONFIG is renamed, the module cannot find out where the engine listens.
            arguments.extend(["engine", &own]);
        }
        if let Some(value) = &engine.call_path {
            arguments.extend(["call-path", value]);
        }
        let server = Engine::spawn(&Start {
            program: &engine.program,
            module: Some(&arguments),
            options: &options,
        });
        Self {
            process: Process::new(server.pid()),
            server,
            clients: Vec::new(),
            engine: engine.clone(),
            setup: setup.clone(),
            client_port: if through_module { module_port } else { port.clone() },
            port,
            observer: None,
            _folder: folder,
        }
    }

    /// Waits until the engine listens on both ports. If another process took one of the ports
    /// first, starts the engine again with other ports.
    pub(crate) fn await_listeners(&mut self) {
        for _ in 0..10 {
            let mut is_up = false;
            let mut has_ended = false;
            let (server, port) = (&mut self.server, &self.port);
            let started = Instant::now();
            while !is_up && !has_ended && started.elapsed() < LONG {
                is_up = dial(port).is_some();
                has_ended = server.has_exited();
                std::thread::sleep(Duration::from_millis(5));
            }
            if !has_ended && self.listens() {
                // Active expiry deletes keys at random times, and the engine notifies clients that
                // track them. Without it, the engine still deletes the expired keys that a command
                // uses.
                assert_eq!(self.observe("DEBUG SET-ACTIVE-EXPIRE 0"), b"+OK\r\n");
                self.clients = (0..self.setup.clients).map(|_| Client::default()).collect();
                return;
            }
            let through_module = self.client_port != self.port;
            *self = Self::spawn(&self.engine.clone(), &self.setup.clone(), through_module);
        }
        panic!("the engine does not listen: {}", self.server.log());
    }

    fn listens(&mut self) -> bool {
        let own = format!("process_id:{}\r", self.server.pid());
        if !String::from_utf8_lossy(&self.observe("INFO server")).contains(&own) {
            return false;
        }
        let started = Instant::now();
        while started.elapsed() < LONG {
            let info = self.observe("INFO ferrite");
            let info = String::from_utf8_lossy(&info);
            let status = info.lines().find_map(|line| line.strip_prefix("ferrite_status:"));
            match status.map(str::trim_end) {
                Some("listening" | "tcp-only") => return true,
                Some("off" | "ended") => return false,
                _ => std::thread::sleep(Duration::from_millis(5)),
            }
        }
        false
    }

    /// Returns the output of the engine's `--version`.
    pub(crate) fn version(&self) -> String {
        let output = Command::new(&self.engine.program)
            .arg("--version")
            .output()
            .expect("the engine's version");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Disconnects a client. It reconnects when it next sends.
    ///
    /// When a client connects, the engine decides whether `default` needs a password. The module
    /// connects to the engine only after the client's first bytes, which show the protocol. So that
    /// both sides decide at the same point of the session, a client connects only when it has
    /// something to send.
    pub(crate) fn reconnect(&mut self, client: usize) {
        self.clients[client] = Client::default();
    }

    /// Shuts down a client's side of the connection. The client can send again after a reconnect.
    pub(crate) fn end_writing(&mut self, client: usize) {
        let client = &mut self.clients[client];
        client.ends = client.socket.is_some();
        client.is_closed |= client.socket.is_none(); // not connected yet
    }

    /// Connects to the clients' port and logs in as the observer.
    pub(crate) fn admin(&self) -> Option<Connection> {
        let connection = Connection::new(Box::new(dial(&self.client_port)?));
        Some(self.logged_in(connection, "observer"))
    }

    fn logged_in(&self, mut connection: Connection, user: &str) -> Connection {
        let words = [self.setup.typed("AUTH"), user, user].map(|word| word.as_bytes().to_vec());
        ask(&mut connection, &words);
        connection
    }

    /// Splits a command into words, and replaces its name by the one that the engine knows.
    pub(crate) fn words(&self, line: &str) -> Vec<Vec<u8>> {
        let mut words: Vec<_> = line.split(' ').collect();
        words[0] = self.setup.typed(words[0]);
        words.iter().map(|word| word.as_bytes().to_vec()).collect()
    }

    /// Queues bytes of a client, with the client ids of this engine.
    pub(crate) fn send(&mut self, client: usize, parts: &[Part]) {
        let mut bytes = Vec::new();
        for part in parts {
            match part {
                Part::Raw(raw) => bytes.extend_from_slice(raw),
                Part::Id(of) => {
                    // No client has the default id.
                    let id = self.clients[*of].id.unwrap_or(99_999_999).to_string();
                    bytes.extend_from_slice(format!("${}\r\n{id}\r\n", id.len()).as_bytes());
                }
            }
        }
        let client = &mut self.clients[client];
        if client.socket.is_none() && !client.is_closed {
            client.socket = dial(&self.client_port).inspect(|socket| {
                socket.set_nonblocking(true).expect("a socket");
            });
            client.is_closed = client.socket.is_none();
        }
        if client.socket.is_some() {
            client.unsent.extend_from_slice(&bytes);
        }
    }

    /// Sends and receives as much as possible without blocking. Returns whether any bytes moved.
    pub(crate) fn exchange(&mut self) -> bool {
        self.clients.iter_mut().fold(false, |any, client| client.exchange() | any)
    }

    /// Runs a command as the observer, which reconnects if a client has killed it.
    pub(crate) fn observe(&mut self, line: &str) -> Vec<u8> {
        let words = self.words(line);
        self.observe_words(&words)
    }

    fn observe_words(&mut self, words: &[Vec<u8>]) -> Vec<u8> {
        for _ in 0..3 {
            if self.observer.is_none() {
                let Some(socket) = dial(&self.port) else { continue };
                self.observer = Some(self.logged_in(Connection::new(Box::new(socket)), "observer"));
            }
            if let Some(reply) =
                self.observer.as_mut().and_then(|connection| ask(connection, words))
            {
                return reply;
            }
            self.observer = None;
        }
        b"-the engine does not reply to the observer\r\n".to_vec()
    }

    /// Ends a pause and removes the memory limit, so that all commands can run.
    pub(crate) fn relax(&mut self) {
        self.observe("CLIENT UNPAUSE");
        self.observe("CONFIG SET maxmemory 0");
    }

    /// Returns every key of every database with its value.
    pub(crate) fn dataset(&mut self) -> BTreeMap<String, String> {
        let mut all = BTreeMap::new();
        for database in 0..DATABASES {
            self.observe(&format!("SELECT {database}"));
            let reply = self.observe("KEYS *");
            for key in strings(&reply) {
                let ask = |side: &mut Self, words: &[&str], rest: &[&str]| {
                    let mut line: Vec<Vec<u8>> =
                        words.iter().map(|word| word.as_bytes().to_vec()).collect();
                    line[0] = side.setup.typed(words[0]).as_bytes().to_vec();
                    line.push(key.clone());
                    line.extend(rest.iter().map(|word| word.as_bytes().to_vec()));
                    side.observe_words(&line)
                };
                let kind = ask(self, &["TYPE"], &[]);
                let value = match &kind[..] {
                    b"+string\r\n" => ask(self, &["GET"], &[]),
                    b"+list\r\n" => ask(self, &["LRANGE"], &["0", "-1"]),
                    b"+set\r\n" => sorted(&ask(self, &["SMEMBERS"], &[]), 1),
                    b"+hash\r\n" => sorted(&ask(self, &["HGETALL"], &[]), 2),
                    b"+zset\r\n" => ask(self, &["ZRANGE"], &["0", "-1", "WITHSCORES"]),
                    b"+stream\r\n" => ask(self, &["XRANGE"], &["-", "+"]),
                    other => other.to_vec(),
                };
                let expires = ask(self, &["PEXPIRETIME"], &[]);
                let shown = format!(
                    "{} {} {:016x} expires {}",
                    kind.trim_ascii_end().escape_ascii(),
                    excerpt(&value, 160),
                    fnv(&value),
                    expires.trim_ascii_end().escape_ascii()
                );
                all.insert(format!("db {database} {}", key.escape_ascii()), shown);
            }
        }
        self.observe("SELECT 0");
        all
    }
}

pub(crate) fn dial(port: &str) -> Option<TcpStream> {
    let socket = TcpStream::connect(format!("127.0.0.1:{port}")).ok()?;
    socket.set_nodelay(true).ok()?;
    Some(socket)
}

/// Runs a command; `None` if the connection is closed or there is no reply in time.
pub(crate) fn ask(connection: &mut Connection, words: &[Vec<u8>]) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    encode(words, &mut bytes);
    connection.send(&bytes);
    match connection.receive(LONG) {
        Response::Reply(reply) => Some(reply),
        Response::Timeout | Response::Closed => None,
    }
}

/// Returns the strings of an array, sorted.
fn strings(reply: &[u8]) -> Vec<Vec<u8>> {
    let mut found: Vec<Vec<u8>> = match Value::parse(reply) {
        Ok(Value::Array(values) | Value::Set(values)) => {
            let texts = values.iter().map(|value| match value {
                Value::Bulk(text) => text.to_vec(),
                other => format!("{other:?}").into_bytes(),
            });
            texts.collect()
        }
        _ => Vec::new(),
    };
    found.sort_unstable();
    found
}

/// Sorts the elements of an array in groups of `at_once`.
fn sorted(reply: &[u8], at_once: usize) -> Vec<u8> {
    let Ok(Value::Array(values)) = Value::parse(reply) else { return reply.to_vec() };
    let mut parts: Vec<Vec<u8>> = Vec::new();
    for values in values.chunks(at_once) {
        let mut bytes = Vec::new();
        values.iter().for_each(|value| value.encode(&mut bytes));
        parts.push(bytes);
    }
    parts.sort_unstable();
    parts.concat()
}

/// Returns a hash by which long values can be told apart.
fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
