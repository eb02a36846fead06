//! Runs `ferrite server` with a real engine: its file, its log, its JSON events and its exit code.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use ferrite_testkit::engine::module;
use ferrite_testkit::process::{exit_within, is_alive, signal};
use ferrite_testkit::resp::Client;
use ferrite_testkit::wait::until_or;
use ferrite_testkit::{TIMEOUT, TempDir};
use serde_json::Value;

/// Additional keys for the sections of a test's `ferrite.toml`.
#[derive(Default)]
pub(crate) struct Setup<'a> {
    pub(crate) server: &'a str,
    pub(crate) network: &'a str,
    pub(crate) engine: &'a str,
}

impl Setup<'_> {
    pub(crate) fn text(&self, directory: &Path) -> String {
        let (directory, module) = (directory.display(), module());
        let Self { server, network, engine } = self;
        format!(
            "[server]\nmodule = \"{}\"\ndata_dir = \"{directory}\"\n{server}\n\
             [network]\n{network}\n[engine]\n{engine}\n",
            module.display()
        )
    }
}

/// A running `ferrite server --json`. Drop kills it and its engine.
pub(crate) struct Server {
    process: Child,
    lines: Receiver<String>,
    log: PathBuf,
    engines: Vec<u32>,
}

impl Server {
    /// Starts the server with the file of `setup`. The server's log goes into the directory.
    pub(crate) fn start(directory: &TempDir, setup: &Setup<'_>) -> Self {
        Self::start_with(directory, setup, |_| {})
    }

    /// Starts the server with an agent.
    pub(crate) fn start_with_agent(directory: &TempDir, setup: &Setup<'_>) -> Self {
        Self::start_with(directory, setup, |command| {
            command.arg("--agent");
        })
    }

    pub(crate) fn start_with(
        directory: &TempDir,
        setup: &Setup<'_>,
        more: impl FnOnce(&mut Command),
    ) -> Self {
        let file = directory.file("ferrite.toml", setup.text(directory.path()));
        let log = directory.path().join("log");
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.args(["server", "--json", "--config"]).arg(file);
        // Puts the server's private directory into ours, because a killed ferrite does not remove
        // it.
        command.env("XDG_RUNTIME_DIR", directory.path());
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(&log).expect("a log"));
        more(&mut command);
        let mut process = command.spawn().expect("ferrite starts");
        let output = process.stdout.take().expect("piped");
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            BufReader::new(output)
                .lines()
                .map_while(Result::ok)
                .try_for_each(|line| sender.send(line))
        });
        Self { process, lines, log, engines: Vec::new() }
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Returns the next event, which must have this name.
    pub(crate) fn event(&mut self, name: &str) -> Value {
        let line = self.lines.recv_timeout(TIMEOUT);
        let line = line.unwrap_or_else(|why| panic!("no {name} event: {why}; {}", self.log()));
        let event: Value = serde_json::from_str(&line)
            .unwrap_or_else(|why| panic!("{line}: {why}; {}", self.log()));
        assert_eq!(event["event"], name, "{event}; {}", self.log());
        if name == "ready" {
            self.engines.push(u32::try_from(event["pid"].as_u64().expect("an id")).expect("an id"));
        }
        event
    }

    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    pub(crate) fn signal(&self, name: &str) {
        signal(name, self.process.id());
    }

    pub(crate) fn until_logged(&self, text: &str) {
        until_or(TIMEOUT, text, || self.log().contains(text), || self.log());
    }

    /// Waits until the server ends. Returns the exit code and the rest of its standard output.
    pub(crate) fn end(&mut self) -> (Option<i32>, String) {
        let status = exit_within(&mut self.process, TIMEOUT);
        let status = status.unwrap_or_else(|| panic!("the server does not end: {}", self.log()));
        (status.code(), self.lines.iter().collect::<Vec<_>>().join("\n"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let running = self.process.try_wait().is_ok_and(|ended| ended.is_none());
        let _ = self.process.kill();
        let _ = self.process.wait();
        if running && let Some(engine) = self.engines.last().filter(|engine| is_alive(**engine)) {
            // An engine that ends by itself, as it should, may be gone by now.
            let _ = Command::new("kill").args(["-s", "KILL", &engine.to_string()]).status();
        }
    }
}

/// Creates the directory of a test.
pub(crate) fn directory() -> TempDir {
    TempDir::new("server")
}

/// Connects to the engine's Unix socket, which the event `ready` names.
pub(crate) fn connect(event: &Value) -> Client {
    Client::to_socket(Path::new(event["unix_socket"].as_str().expect("a path")))
}
