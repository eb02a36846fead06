//! An engine with the call path, and clients at the module's port and at the engine's own socket.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::path::Path;

use ferrite_proto::resp::Value;
use ferrite_testkit::resp::Client;
use ferrite_testkit::{Engine, Start, free_port};

/// Starts an engine with the call path enabled, and with these options of its own.
pub(crate) fn start(program: &Path, options: &[&str]) -> Engine {
    let port = free_port().to_string();
    let arguments = ["rdma-port", &port, "rdma-bind", "127.0.0.1", "call-path", "yes"];
    let options = [&["--enable-debug-command", "yes", "--port", "0"], options].concat();
    Engine::start(&Start { program, module: Some(&arguments), options: &options })
}

/// Connects to the module's port, where commands are called in-process.
pub(crate) fn of_module(server: &Engine) -> Client {
    Client::to_tcp(server.info("address"))
}

/// Two clients of one engine: one through the module, one at the engine's own socket.
pub(crate) struct Pair {
    pub(crate) module: Client,
    pub(crate) native: Client,
}

impl Pair {
    pub(crate) fn new(server: &Engine) -> Self {
        Self { module: of_module(server), native: server.client() }
    }

    /// Runs a command with both clients, asserts that the replies are equal, and returns the reply
    /// as text.
    pub(crate) fn same<W: AsRef<[u8]> + std::fmt::Debug>(&mut self, words: &[W]) -> String {
        let reply = self.module.ask(words);
        assert_eq!(reply, self.native.ask(words), "{words:?}");
        reply
    }

    /// Connects both clients, each to its own empty database, so that the writes of one do not
    /// change the replies of the other.
    pub(crate) fn in_two_databases(server: &Engine) -> Self {
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
    let Ok(Value::Array(rows)) = Value::parse(&table) else {
        panic!("the reply to COMMAND is not an array")
    };
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
pub(crate) fn calls(server: &Engine, act: impl FnOnce()) -> u64 {
    let before = server.count("commands_called");
    act();
    server.count("commands_called") - before
}

/// Splits a line into words.
pub(crate) fn words(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}
