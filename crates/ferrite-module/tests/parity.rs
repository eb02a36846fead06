//! Sends the same commands to two equal engines, to one over its own TCP port and to the other
//! through the module. The replies must be equal byte for byte, unless two engines can never agree.
//!
//! ```text
//!   spec: COMMAND, COMMAND DOCS ─► generate: argument lists ─┐
//!   scripts: written by hand ────────────────────────────────┼─► Comparison
//!   keys: every type, created before each command ───────────┘      │
//!                                                                   ├─► engine A, own port ──────┐
//!   states: standalone, cluster, replica, loading, …                └─► engine B, module's port ─┤
//!                                                                                 differences ◄──┘
//! ```
#![allow(dead_code, reason = "each test binary uses a part of it")]

mod differences;
mod generate;
mod keys;
mod scripts;
mod spec;
pub(crate) mod states;

use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use self::differences::{Rule, is_generated, rule, same};
pub(crate) use self::generate::Amount;
use self::generate::Words;
use self::keys::Tags;
use self::scripts::{Expect, Script, Sent};
use self::spec::Spec;
use ferrite_testkit::resp::{Connection, Response, Transport, encode};
use ferrite_testkit::{Engine, Start, free_port};

/// How long a reply may take.
const LONG: Duration = Duration::from_secs(20);
/// After this time without a reply, none is expected any more.
const SHORT: Duration = Duration::from_millis(300);

/// How the module is reached.
pub(crate) struct Way<'a> {
    /// Arguments of the module, apart from the port.
    pub(crate) arguments: &'a [&'a str],
    /// Connects a client to this port of the module.
    pub(crate) dial: &'a dyn Fn(&str) -> Box<dyn Transport>,
    /// The pace of states that do not set one. Round trips are slow in the lab.
    pub(crate) pace: Pace,
    pub(crate) amount: Amount,
}

/// An engine with the module.
pub(crate) struct Node {
    pub(crate) server: Engine,
    port: String,
    module_port: String,
}

impl Node {
    /// Starts an engine and waits until its port is open. At that time, the engine may still load
    /// its data, so commands may fail.
    fn spawn(program: &Path, way: &Way<'_>, options: &[&str]) -> Self {
        let (port, module_port) = (free_port().to_string(), free_port().to_string());
        let arguments = [way.arguments, &["rdma-port", &module_port]].concat();
        let own = [
            "--port",
            &port,
            "--bind",
            "127.0.0.1",
            "--protected-mode",
            "no",
            "--enable-debug-command",
            "yes",
        ];
        // Limits strings to 1 MiB and disables statistics of times, so that replies can be
        // compared.
        let comparable = [
            "--proto-max-bulk-len",
            "1mb",
            "--slowlog-log-slower-than",
            "-1",
            "--latency-tracking",
            "no",
        ];
        let options = [&own[..], &comparable, options].concat();
        let server = Engine::spawn(&Start { program, module: Some(&arguments), options: &options });
        let node = Self { server, port, module_port };
        node.server.wait_until("an open port", || {
            TcpStream::connect(("127.0.0.1", node.number())).is_ok()
        });
        node
    }

    fn number(&self) -> u16 {
        self.port.parse().expect("a port")
    }

    /// Connects a client to the engine's own port.
    fn connection(&self) -> Connection {
        let socket = TcpStream::connect(("127.0.0.1", self.number()));
        let socket = socket.unwrap_or_else(|error| {
            panic!("cannot connect to the engine: {error}; {}", tail(&self.server))
        });
        socket.set_nodelay(true).expect("TCP_NODELAY");
        Connection::new(Box::new(socket))
    }

    /// Runs a command at the engine's own port.
    fn ask(&self, line: &str) -> Vec<u8> {
        ask(&mut self.connection(), line)
    }

    /// Waits until the reply to a command contains `part`.
    fn wait_until(&self, what: &str, line: &str, part: &str) {
        self.server.wait_until(what, || String::from_utf8_lossy(&self.ask(line)).contains(part));
    }
}

fn ask(connection: &mut Connection, line: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(&words(line), &mut bytes);
    connection.send(&bytes);
    match connection.receive(LONG) {
        Response::Reply(reply) => reply,
        other => panic!("{line}: no reply, but {other:?}"),
    }
}

fn words(line: &str) -> Words {
    line.split(' ').map(|word| word.as_bytes().to_vec()).collect()
}

/// Returns the end of an engine's log, or the part around a crash.
fn tail(server: &Engine) -> String {
    let log = server.log();
    let lines: Vec<_> = log.lines().collect();
    let crash = lines.iter().position(|line| line.contains("BUG REPORT"));
    let from = crash.unwrap_or(lines.len()).saturating_sub(20).min(lines.len().saturating_sub(60));
    lines[from..lines.len().min(from + 80)].join("\n")
}

/// Returns the name and version of an engine.
pub(crate) fn name(program: &Path) -> String {
    let version = std::process::Command::new(program)
        .arg("--version")
        .output()
        .expect("the engine's version")
        .stdout;
    let version = String::from_utf8_lossy(&version).into_owned();
    let number = version
        .split("v=")
        .nth(1)
        .and_then(|rest| rest.split(' ').next())
        .unwrap_or_default()
        .to_owned();
    format!("{} {number}", version.split(' ').next().unwrap_or_default())
}

/// How the cases of a command are sent.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Pace {
    /// Each after the reply to the previous one.
    OneByOne,
    /// All at once, except for commands that block.
    Pipelined,
}

/// Two engines in one state, and the differences that were found.
pub(crate) struct Comparison<'a> {
    way: &'a Way<'a>,
    label: String,
    nodes: [Node; 2],
    /// The first commands of each new connection.
    greeting: Vec<Words>,
    pace: Pace,
    amount: Amount,
    tags: Tags,
    /// Commands to run before and after the keys are created. `None` if there are no keys.
    remake: Option<[&'a [&'a str]; 2]>,
    admins: [Connection; 2],
    commands: usize,
    cases: usize,
    differences: Vec<String>,
}

impl<'a> Comparison<'a> {
    fn new(way: &'a Way<'a>, label: String, nodes: [Node; 2]) -> Self {
        let admins = [nodes[0].connection(), nodes[1].connection()];
        Self {
            way,
            label,
            nodes,
            greeting: Vec::new(),
            pace: way.pace,
            amount: way.amount,
            tags: keys::PLAIN,
            remake: None,
            admins,
            commands: 0,
            cases: 0,
            differences: Vec::new(),
        }
    }

    /// Connects a client to each engine and sends the greeting.
    fn open(&mut self) -> [Connection; 2] {
        let mut connections = [
            self.nodes[0].connection(),
            Connection::new((self.way.dial)(&self.nodes[1].module_port)),
        ];
        for words in self.greeting.clone() {
            let responses = self.both(&mut connections, &words, LONG);
            self.check(&words, Rule::Type, &responses);
        }
        connections
    }

    fn both(
        &self,
        connections: &mut [Connection; 2],
        words: &Words,
        limit: Duration,
    ) -> [Response; 2] {
        send(connections, words);
        receive(connections, limit)
    }

    /// Runs a command, which must succeed, at the own ports of both engines.
    fn order(&mut self, line: &str) {
        for (node, admin) in self.nodes.iter().zip(&mut self.admins) {
            let reply = ask(admin, line);
            let reply = String::from_utf8_lossy(&reply);
            assert!(!reply.starts_with('-'), "{line}: {reply}; {}", tail(&node.server));
        }
    }

    /// Returns how many clients are blocked at each engine.
    fn blocked_clients(&mut self) -> [u64; 2] {
        self.admins.each_mut().map(|admin| {
            let info = ask(admin, "INFO clients");
            let info = String::from_utf8_lossy(&info);
            let count = info.lines().find_map(|line| line.strip_prefix("blocked_clients:"));
            count.and_then(|count| count.parse().ok()).expect("a number in INFO")
        })
    }

    /// If more clients than `before` are blocked at the engine with the direct connection, waits
    /// until that is true at the other engine, too. Waits for a second at most, because a real
    /// difference is found later.
    fn wait_until_both_block(&mut self, before: [u64; 2]) {
        // An engine may read this first query before a command that was sent earlier. It reads the
        // next query after that command.
        self.blocked_clients();
        let started = Instant::now();
        loop {
            let [direct, other] = self.blocked_clients();
            if direct <= before[0]
                || other > before[1]
                || started.elapsed() > Duration::from_secs(1)
            {
                return;
            }
        }
    }

    /// Creates all keys again, if the state has any.
    fn make_keys(&mut self) {
        let Some([before, after]) = self.remake else { return };
        let mut all: Vec<Words> = before.iter().map(|line| words(line)).collect();
        all.push(words("FLUSHALL"));
        all.extend(keys::commands(self.tags));
        all.extend(after.iter().map(|line| words(line)));
        let mut bytes = Vec::new();
        all.iter().for_each(|words| encode(words, &mut bytes));
        self.admins.iter_mut().for_each(|admin| admin.send(&bytes));
        for words in &all {
            for (node, admin) in self.nodes.iter().zip(&mut self.admins) {
                let response = admin.receive(LONG);
                let is_ok = matches!(&response, Response::Reply(reply) if reply[0] != b'-');
                assert!(is_ok, "{}: {response:?}; {}", show(words), tail(&node.server));
            }
        }
    }

    /// Compares all commands of the engine that are generated.
    fn all_commands(&mut self, in_cluster: bool) {
        let specs = self.specs();
        for spec in specs.iter().filter(|spec| is_generated(spec, in_cluster)) {
            self.command(spec);
        }
    }

    fn specs(&self) -> Vec<Spec> {
        spec::commands(&mut self.nodes[0].connection())
    }

    /// Compares all cases of one command.
    fn command(&mut self, spec: &Spec) {
        let cases = generate::cases(spec, self.tags, self.amount);
        self.commands += 1;
        self.make_keys();
        let rule = rule(spec);
        let mut connections = self.open();
        let waits = spec.waits();
        let limit = if waits { SHORT } else { LONG };
        if self.pace == Pace::OneByOne || waits {
            for words in &cases {
                let responses = self.both(&mut connections, words, limit);
                self.check(words, rule, &responses);
                if !matches!(responses, [Response::Reply(_), Response::Reply(_)]) {
                    assert!(
                        waits || responses[0] == Response::Closed,
                        "{}: {} {responses:?}",
                        self.label,
                        show(words)
                    );
                    connections = self.open();
                }
            }
        } else {
            let mut bytes = Vec::new();
            cases.iter().for_each(|words| encode(words, &mut bytes));
            connections.iter_mut().for_each(|connection| connection.send(&bytes));
            for words in &cases {
                let responses = receive(&mut connections, limit);
                self.check(words, rule, &responses);
            }
        }
        self.assert_alive(&spec.name);
    }

    /// Compares a script.
    fn script(&mut self, script: &Script) {
        // The previous script may have killed all clients.
        self.admins = self.nodes.each_ref().map(Node::connection);
        self.make_keys();
        let mut first = self.open();
        let mut second = self.open();
        for (text, line) in script.lines() {
            let connections = if line.second { &mut second } else { &mut first };
            let bytes = match &line.sent {
                Some(Sent::Words(words)) => {
                    let mut bytes = Vec::new();
                    encode(words, &mut bytes);
                    bytes
                }
                Some(Sent::Raw(bytes)) => bytes.clone(),
                None => Vec::new(),
            };
            connections.iter_mut().for_each(|connection| connection.send(&bytes));
            let rule = if line.by_type { Rule::Type } else { Rule::Exact };
            let title = words(&format!("{}: {text}", script.name));
            match line.expect {
                Expect::Replies(count) => (0..count).for_each(|_| {
                    let responses = receive(connections, LONG);
                    assert_ne!(
                        responses,
                        [Response::Timeout, Response::Timeout],
                        "{}: {}",
                        self.label,
                        show(&title)
                    );
                    self.check(&title, rule, &responses);
                }),
                Expect::End => {
                    let responses = connections
                        .each_mut()
                        .map(|connection| connection.receive_until_close(LONG));
                    assert_ne!(
                        responses,
                        [Response::Timeout, Response::Timeout],
                        "{}: {}",
                        self.label,
                        show(&title)
                    );
                    self.check(&title, rule, &responses);
                }
                Expect::Quiet => {
                    let responses = receive(connections, SHORT);
                    let quiet = responses == [Response::Timeout, Response::Timeout];
                    assert!(quiet, "{}: {text}: {responses:?}", self.label);
                }
            }
        }
        self.assert_alive(script.name);
    }

    /// Compares two responses and notes a difference.
    fn check(&mut self, words: &Words, rule: Rule, responses: &[Response; 2]) {
        self.cases += 1;
        let equal = match responses {
            [Response::Reply(one), Response::Reply(other)] => same(rule, one, other),
            [one, other] => one == other,
        };
        if !equal {
            let [tcp, module] = responses;
            self.differences
                .push(format!("{}\n    TCP    {tcp:?}\n    module {module:?}", show(words)));
        }
        assert!(self.differences.len() < 30, "too many differences: {}", self.report());
    }

    /// Asserts that no engine has exited or crashed.
    fn assert_alive(&mut self, after: &str) {
        for node in &mut self.nodes {
            let ended = node.server.has_exited();
            let log = node.server.log();
            let bad = ["BUG REPORT", "a bug: panic", "crashed by signal", "ASSERTION FAILED"]
                .iter()
                .any(|sign| log.contains(sign));
            assert!(
                !ended && !bad,
                "{}: an engine died after {after}:\n{}",
                self.label,
                tail(&node.server)
            );
        }
    }

    fn report(&self) -> String {
        format!(
            "{}: {} differences:\n{}",
            self.label,
            self.differences.len(),
            self.differences.join("\n")
        )
    }

    /// Prints what was compared. Panics if there were differences, or if nothing was compared.
    fn finish(&self) {
        assert!(self.differences.is_empty(), "{}", self.report());
        assert!(self.cases > 0, "{}: nothing was compared", self.label);
        eprintln!("{}: {} commands, {} replies compared", self.label, self.commands, self.cases);
    }
}

fn send(connections: &mut [Connection; 2], words: &Words) {
    let mut bytes = Vec::new();
    encode(words, &mut bytes);
    connections.iter_mut().for_each(|connection| connection.send(&bytes));
}

/// Receives a response from both engines. If only one is silent, it gets more time. An engine that
/// is late on a busy machine is not a difference, but an engine that never replies is.
fn receive(connections: &mut [Connection; 2], limit: Duration) -> [Response; 2] {
    let mut responses = connections.each_mut().map(|connection| connection.receive(limit));
    if responses.contains(&Response::Timeout) && responses[0] != responses[1] {
        for (connection, response) in connections.iter_mut().zip(&mut responses) {
            if *response == Response::Timeout {
                *response = connection.receive(LONG);
            }
        }
    }
    responses
}

fn show(words: &Words) -> String {
    let words = words.iter().map(|word| {
        let text = word[..word.len().min(80)].escape_ascii().to_string();
        if word.is_empty() { "\"\"".into() } else { text }
    });
    words.collect::<Vec<_>>().join(" ")
}
