//! The same commands at two equal engines: at one over its own TCP port, at the other through the
//! module. Every reply must be the same, to the byte where two engines can be.
//!
//! ```text
//!   spec: COMMAND, COMMAND DOCS ─► generate: argument lists ─┐
//!   scripts: by hand ────────────────────────────────────────┼─► Bench ─┬─► engine A, its own port ──┬─► differences
//!   keys: every type, made anew before each command ─────────┘          └─► engine B, the module's ──┘
//!                                                 states: standalone, cluster, replica, loading …
//! ```
#![allow(dead_code, reason = "each test binary uses a part of it")]

mod differences;
mod generate;
mod keys;
mod scripts;
mod spec;
pub(crate) mod states;
pub(crate) mod wire;

use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use self::differences::{Rule, is_generated, rule, same};
pub(crate) use self::generate::Amount;
use self::generate::Words;
use self::keys::Tags;
use self::scripts::{Expect, Script, Sent};
use self::spec::Spec;
use self::wire::{Heard, Transport, Wire, encode};
use crate::server::{Server, Start, free_port};

/// As long as an answer may take.
const LONG: Duration = Duration::from_secs(20);
/// What has not been said by then will not be said.
const SHORT: Duration = Duration::from_millis(300);

/// How the module is reached.
pub(crate) struct Way<'a> {
    /// Arguments of the module, beside the port.
    pub(crate) arguments: &'a [&'a str],
    /// A client at this port of the module.
    pub(crate) dial: &'a dyn Fn(&str) -> Box<dyn Transport>,
    /// Where the state does not say: round trips are dear in the lab.
    pub(crate) pace: Pace,
    pub(crate) amount: Amount,
}

/// An engine with the module.
pub(crate) struct Node {
    pub(crate) server: Server,
    port: String,
    module_port: String,
}

impl Node {
    /// Which may not answer yet.
    fn begin(program: &Path, way: &Way<'_>, options: &[&str]) -> Self {
        let (port, module_port) = (free_port(), free_port());
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
        // Strings of at most 1 MiB, and nothing about times.
        let quiet = [
            "--proto-max-bulk-len",
            "1mb",
            "--slowlog-log-slower-than",
            "-1",
            "--latency-tracking",
            "no",
        ];
        let options = [&own[..], &quiet, options].concat();
        let server = Server::spawn(&Start { program, arguments: &arguments, options: &options });
        let node = Self { server, port, module_port };
        node.server
            .wait_until("it listens", || TcpStream::connect(("127.0.0.1", node.number())).is_ok());
        node
    }

    fn number(&self) -> u16 {
        self.port.parse().expect("a port")
    }

    /// A client at the engine's own port.
    fn wire(&self) -> Wire {
        let socket = TcpStream::connect(("127.0.0.1", self.number()));
        let socket = socket.unwrap_or_else(|error| panic!("{error}; {}", tail(&self.server)));
        socket.set_nodelay(true).expect("a socket");
        Wire::new(Box::new(socket))
    }

    /// What it answers at its own port.
    fn ask(&self, line: &str) -> Vec<u8> {
        ask(&mut self.wire(), line)
    }

    fn wait_until(&self, what: &str, line: &str, part: &str) {
        self.server.wait_until(what, || String::from_utf8_lossy(&self.ask(line)).contains(part));
    }
}

fn ask(wire: &mut Wire, line: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(&words(line), &mut bytes);
    wire.send(&bytes);
    match wire.hear(LONG) {
        Heard::Reply(reply) => reply,
        other => panic!("{line}: {other:?}"),
    }
}

fn words(line: &str) -> Words {
    line.split(' ').map(|word| word.as_bytes().to_vec()).collect()
}

/// The last of an engine's log.
fn tail(server: &Server) -> String {
    let log = server.log();
    let lines: Vec<_> = log.lines().collect();
    let crash = lines.iter().position(|line| line.contains("BUG REPORT"));
    let from = crash.unwrap_or(lines.len()).saturating_sub(20).min(lines.len().saturating_sub(60));
    lines[from..lines.len().min(from + 80)].join("\n")
}

/// The engines there are: those of the other tests.
pub(crate) fn name(program: &Path) -> String {
    let version = std::process::Command::new(program)
        .arg("--version")
        .output()
        .expect("the engine is there")
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
    /// Each after the answer to the one before.
    OneByOne,
    /// All at once, but for commands that wait.
    Pipelined,
}

/// Two engines in one state, and what was found.
pub(crate) struct Bench<'a> {
    way: &'a Way<'a>,
    label: String,
    nodes: [Node; 2],
    /// What each new connection says first.
    greeting: Vec<Words>,
    pace: Pace,
    amount: Amount,
    tags: Tags,
    /// Before and after keys are made; without it they are not.
    remake: Option<[&'a [&'a str]; 2]>,
    admins: [Wire; 2],
    commands: usize,
    cases: usize,
    differences: Vec<String>,
}

impl<'a> Bench<'a> {
    fn new(way: &'a Way<'a>, label: String, nodes: [Node; 2]) -> Self {
        let admins = [nodes[0].wire(), nodes[1].wire()];
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

    /// A client each, greeted.
    fn open(&mut self) -> [Wire; 2] {
        let mut wires =
            [self.nodes[0].wire(), Wire::new((self.way.dial)(&self.nodes[1].module_port))];
        for words in self.greeting.clone() {
            let heard = self.both(&mut wires, &words, LONG);
            self.judge(&words, Rule::Type, &heard);
        }
        wires
    }

    fn both(&self, wires: &mut [Wire; 2], words: &Words, limit: Duration) -> [Heard; 2] {
        send(wires, words);
        hear(wires, limit)
    }

    /// To both engines at their own ports: an order that must succeed.
    fn order(&mut self, line: &str) {
        for (node, admin) in self.nodes.iter().zip(&mut self.admins) {
            let reply = ask(admin, line);
            let reply = String::from_utf8_lossy(&reply);
            assert!(!reply.starts_with('-'), "{line}: {reply}; {}", tail(&node.server));
        }
    }

    /// How many clients wait at each.
    fn waiting(&mut self) -> [u64; 2] {
        self.admins.each_mut().map(|admin| {
            let info = ask(admin, "INFO clients");
            let info = String::from_utf8_lossy(&info);
            let count = info.lines().find_map(|line| line.strip_prefix("blocked_clients:"));
            count.and_then(|count| count.parse().ok()).expect("INFO has it")
        })
    }

    /// If one more than `before` waits at the engine that was asked directly, then at the other,
    /// too: for a second at most, what never comes is found later.
    fn until_both_wait(&mut self, before: [u64; 2]) {
        // the engine may see this question before what was sent before it, but not the next
        self.waiting();
        let begun = Instant::now();
        loop {
            let [direct, other] = self.waiting();
            if direct <= before[0] || other > before[1] || begun.elapsed() > Duration::from_secs(1)
            {
                return;
            }
        }
    }

    /// All keys anew, if the state has any.
    fn make_keys(&mut self) {
        let Some([before, after]) = self.remake else { return };
        let mut all: Vec<Words> = before.iter().map(|line| words(line)).collect();
        all.push(words("FLUSHALL"));
        all.extend(keys::making(self.tags));
        all.extend(after.iter().map(|line| words(line)));
        let mut bytes = Vec::new();
        all.iter().for_each(|words| encode(words, &mut bytes));
        self.admins.iter_mut().for_each(|admin| admin.send(&bytes));
        for words in &all {
            for (node, admin) in self.nodes.iter().zip(&mut self.admins) {
                let heard = admin.hear(LONG);
                let well = matches!(&heard, Heard::Reply(reply) if reply[0] != b'-');
                assert!(well, "{}: {heard:?}; {}", show(words), tail(&node.server));
            }
        }
    }

    /// All commands of the engine, those that are generated.
    fn all_commands(&mut self, in_cluster: bool) {
        let specs = self.specs();
        for spec in specs.iter().filter(|spec| is_generated(spec, in_cluster)) {
            self.command(spec);
        }
    }

    fn specs(&self) -> Vec<Spec> {
        spec::commands(&mut self.nodes[0].wire())
    }

    fn command(&mut self, spec: &Spec) {
        let cases = generate::cases(spec, self.tags, self.amount);
        self.commands += 1;
        self.make_keys();
        let rule = rule(spec);
        let mut wires = self.open();
        let waits = spec.waits();
        let limit = if waits { SHORT } else { LONG };
        if self.pace == Pace::OneByOne || waits {
            for words in &cases {
                let heard = self.both(&mut wires, words, limit);
                self.judge(words, rule, &heard);
                if !matches!(heard, [Heard::Reply(_), Heard::Reply(_)]) {
                    assert!(
                        waits || heard[0] == Heard::End,
                        "{}: {} {heard:?}",
                        self.label,
                        show(words)
                    );
                    wires = self.open();
                }
            }
        } else {
            let mut bytes = Vec::new();
            cases.iter().for_each(|words| encode(words, &mut bytes));
            wires.iter_mut().for_each(|wire| wire.send(&bytes));
            for words in &cases {
                let heard = hear(&mut wires, limit);
                self.judge(words, rule, &heard);
            }
        }
        self.assert_alive(&spec.name);
    }

    fn script(&mut self, script: &Script) {
        // the script before may have killed all clients
        self.admins = self.nodes.each_ref().map(Node::wire);
        self.make_keys();
        let mut first = self.open();
        let mut second = self.open();
        for (text, line) in script.lines() {
            let wires = if line.second { &mut second } else { &mut first };
            let bytes = match &line.sent {
                Some(Sent::Words(words)) => {
                    let mut bytes = Vec::new();
                    encode(words, &mut bytes);
                    bytes
                }
                Some(Sent::Raw(bytes)) => bytes.clone(),
                None => Vec::new(),
            };
            wires.iter_mut().for_each(|wire| wire.send(&bytes));
            let rule = if line.by_type { Rule::Type } else { Rule::Exact };
            let said = words(&format!("{}: {text}", script.name));
            match line.expect {
                Expect::Replies(count) => (0..count).for_each(|_| {
                    let heard = hear(wires, LONG);
                    assert_ne!(
                        heard,
                        [Heard::Silence, Heard::Silence],
                        "{}: {}",
                        self.label,
                        show(&said)
                    );
                    self.judge(&said, rule, &heard);
                }),
                Expect::End => {
                    let heard = wires.each_mut().map(|wire| wire.hear_the_end(LONG));
                    assert_ne!(
                        heard,
                        [Heard::Silence, Heard::Silence],
                        "{}: {}",
                        self.label,
                        show(&said)
                    );
                    self.judge(&said, rule, &heard);
                }
                Expect::Quiet => {
                    let heard = hear(wires, SHORT);
                    let quiet = heard == [Heard::Silence, Heard::Silence];
                    assert!(quiet, "{}: {text}: {heard:?}", self.label);
                }
            }
        }
        self.assert_alive(script.name);
    }

    fn judge(&mut self, words: &Words, rule: Rule, heard: &[Heard; 2]) {
        self.cases += 1;
        let equal = match heard {
            [Heard::Reply(one), Heard::Reply(other)] => same(rule, one, other),
            [one, other] => one == other,
        };
        if !equal {
            let [tcp, module] = heard;
            self.differences
                .push(format!("{}\n    TCP    {tcp:?}\n    module {module:?}", show(words)));
        }
        assert!(self.differences.len() < 30, "too many differences: {}", self.report());
    }

    /// No engine has ended or crashed.
    fn assert_alive(&mut self, after: &str) {
        for node in &mut self.nodes {
            let ended = node.server.has_ended();
            let log = node.server.log();
            let bad = ["BUG REPORT", "a bug: panic", "crashed by signal", "ASSERTION FAILED"]
                .iter()
                .any(|sign| log.contains(sign));
            assert!(
                !ended && !bad,
                "{}: an engine died of {after}:\n{}",
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

    /// Says what was compared; whatever was different is a failure.
    fn end(&self) {
        assert!(self.differences.is_empty(), "{}", self.report());
        assert!(self.cases > 0, "{}: nothing was compared", self.label);
        eprintln!("{}: {} commands, {} replies compared", self.label, self.commands, self.cases);
    }
}

fn send(wires: &mut [Wire; 2], words: &Words) {
    let mut bytes = Vec::new();
    encode(words, &mut bytes);
    wires.iter_mut().for_each(|wire| wire.send(&bytes));
}

/// What both say. Where only one is silent the other has shown that there is something to hear: an
/// engine that is late on a busy machine is not a difference, one that never answers is.
fn hear(wires: &mut [Wire; 2], limit: Duration) -> [Heard; 2] {
    let mut heard = wires.each_mut().map(|wire| wire.hear(limit));
    if heard.contains(&Heard::Silence) && heard[0] != heard[1] {
        for (wire, heard) in
            wires.iter_mut().zip(&mut heard).filter(|(_, heard)| **heard == Heard::Silence)
        {
            *heard = wire.hear(LONG);
        }
    }
    heard
}

fn show(words: &Words) -> String {
    let words = words.iter().map(|word| {
        let text = word[..word.len().min(80)].escape_ascii().to_string();
        if word.is_empty() { "\"\"".into() } else { text }
    });
    words.collect::<Vec<_>>().join(" ")
}
