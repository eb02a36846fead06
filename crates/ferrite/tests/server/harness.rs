//! Runs `ferrite server` with a real engine: its file, its log, its JSON events and its exit code.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::Value;

/// For steps that take a moment, on a busy machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the module. The build of ferrite-module's tests puts it into this test's directory.
pub(crate) fn module() -> PathBuf {
    let module =
        std::env::current_exe().expect("a test has a file").with_file_name("libferrite_module.so");
    assert!(module.exists(), "{} is not built: cargo build -p ferrite-module", module.display());
    module
}

/// Returns a free port outside of the kernel's ephemeral range. Before the engine listens, an
/// ephemeral port may be taken by a client, or even connect to itself.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let port =
            10_000 + (std::process::id().wrapping_mul(37).wrapping_add(number) % 20_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// A temporary directory of a test; removed on drop.
pub(crate) struct Directory(PathBuf);

impl Directory {
    pub(crate) fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir()
            .join(format!("ferrite-server-test-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a directory");
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file in the directory.
    pub(crate) fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, text).expect("a file");
        path
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

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
    /// Starts it with the file of `setup`. Its log goes into the directory.
    pub(crate) fn start(directory: &Directory, setup: &Setup<'_>) -> Self {
        Self::start_with(directory, setup, |_| {})
    }

    pub(crate) fn start_with(
        directory: &Directory,
        setup: &Setup<'_>,
        more: impl FnOnce(&mut Command),
    ) -> Self {
        let file = directory.file("ferrite.toml", &setup.text(directory.path()));
        let log = directory.path().join("log");
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.args(["server", "--json", "--config"]).arg(file);
        // Its private directory inside ours, because a killed ferrite does not remove it.
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
        until(text, || self.log().contains(text), || self.log());
    }

    /// Waits for its end. Returns the exit code and the rest of its standard output.
    pub(crate) fn end(&mut self) -> (Option<i32>, String) {
        let started = Instant::now();
        let status = loop {
            if let Some(status) = self.process.try_wait().expect("a child process") {
                break status;
            }
            assert!(started.elapsed() < TIMEOUT, "it does not end: {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        };
        (status.code(), self.lines.iter().collect::<Vec<_>>().join("\n"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let running = self.process.try_wait().is_ok_and(|ended| ended.is_none());
        let _ = self.process.kill();
        let _ = self.process.wait();
        if running && let Some(engine) = self.engines.last().filter(|engine| is_alive(**engine)) {
            signal("KILL", *engine);
        }
    }
}

pub(crate) fn signal(name: &str, id: u32) {
    let sent = Command::new("kill").args(["-s", name, &id.to_string()]).status().expect("kill");
    assert!(sent.success(), "SIG{name} to {id}");
}

/// Returns whether a process runs. A zombie does not count.
pub(crate) fn is_alive(id: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{id}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

pub(crate) fn until(what: &str, mut done: impl FnMut() -> bool, log: impl Fn() -> String) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < TIMEOUT, "{what}: not in time; {}", log());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Runs a command. Returns a bulk string without its header, or a one-line reply with its type
/// character.
pub(crate) fn ask(mut engine: impl std::io::Read + std::io::Write, arguments: &[&str]) -> String {
    let mut request = format!("*{}\r\n", arguments.len());
    for argument in arguments {
        request += &format!("${}\r\n{argument}\r\n", argument.len());
    }
    engine.write_all(request.as_bytes()).expect("it listens");
    let mut engine = BufReader::new(engine);
    let mut line = String::new();
    engine.read_line(&mut line).expect("an answer");
    let Some(length) = line.strip_prefix('$').and_then(|length| length.trim_end().parse().ok())
    else {
        return line.trim_end().into();
    };
    let mut text = vec![0; length];
    engine.read_exact(&mut text).expect("the announced length");
    String::from_utf8(text).expect("UTF-8")
}
