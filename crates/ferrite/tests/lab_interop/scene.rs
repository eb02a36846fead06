//! An engine, what is in front of it, and programs as clients: Valkey's and ours.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

const HOST: &str = "10.0.0.1";
/// Where our own clients come from, so that bytes cross the wire.
pub(crate) const CLIENT_HOST: &str = "10.0.0.2";
const VALKEY_PORT: &str = "6390";
const GATEWAY_PORT: &str = "6391";
const MODULE_PORT: &str = "6392";
const SETUP: Duration = Duration::from_secs(20);

/// Who listens for RDMA.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Way {
    /// Valkey's server itself.
    Valkey,
    /// Ferrite's gateway in front of it, with these options.
    Gateway(&'static [&'static str]),
    /// Ferrite's module in it.
    Module,
}

/// A server of the one kind or the other, which ends with the test.
pub(crate) struct Scene {
    programs: PathBuf,
    directory: PathBuf,
    way: Way,
    port: &'static str,
    engine: Process,
    gateway: Option<Process>,
}

impl Scene {
    pub(crate) fn new(way: Way) -> Self {
        let programs = std::env::var_os("FERRITE_VALKEY")
            .expect("FERRITE_VALKEY does not say where Valkey's programs are: these tests are run by `cargo xtask interop`");
        let programs = PathBuf::from(programs);
        let directory = std::env::temp_dir().join(format!("interop-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory");
        let socket = directory.join("engine.sock");
        let engine = start_engine(&programs, &directory, way);
        let (port, gateway) = match way {
            Way::Valkey => (VALKEY_PORT, None),
            Way::Gateway(more) => (GATEWAY_PORT, Some(gateway(&socket, more))),
            Way::Module => (MODULE_PORT, None),
        };
        let scene = Self { programs, directory, way, port, engine, gateway };
        scene.until_the_engine_answers();
        scene
    }

    /// The gateway says when it listens; Valkey's server does so before it answers at its socket.
    fn until_the_engine_answers(&self) {
        self.until("the engine answers", SETUP, || UnixStream::connect(self.socket()).is_ok());
    }

    /// Where clients come in.
    pub(crate) fn address(&self) -> String {
        format!("{HOST}:{}", self.port)
    }

    /// What carries our own clients' sessions: with a gateway of ours they speak our protocol.
    pub(crate) fn transport(&self) -> &'static str {
        match self.way {
            Way::Valkey => "RDMA (Valkey)",
            Way::Gateway(_) | Way::Module => "RDMA (Ferrite)",
        }
    }

    /// What `ferrite bench kv` reports, which must end well.
    pub(crate) fn bench_kv(&self, more: &[&str], limit: Duration) -> Value {
        let address = self.address();
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command
            .args(["bench", "kv", &address, "--rdma", "require", "--local", CLIENT_HOST, "--json"])
            .args(more)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let (said, code) = Process::start(&mut command).end(b"", limit);
        assert_eq!(code, Some(0), "bench kv {more:?}: {}", text(&said));
        self.until("clients are gone", limit, || self.info("connected_clients") == 1);
        serde_json::from_slice(&said).expect("one line of JSON")
    }

    /// What ferrite-cli prints, over RDMA; it must end well.
    pub(crate) fn ferrite_cli(&self, arguments: &[&str], input: &[u8], limit: Duration) -> Vec<u8> {
        let (said, code) = Process::start(&mut self.ferrite_cli_with(arguments)).end(input, limit);
        assert_eq!(code, Some(0), "ferrite-cli {arguments:?}: {}", text(&said));
        said
    }

    /// What it says beside that.
    pub(crate) fn ferrite_cli_said(&self, arguments: &[&str], limit: Duration) -> String {
        let mut client = Process::start(self.ferrite_cli_with(arguments).stderr(Stdio::piped()));
        let (_, code) = client.end(b"", limit);
        let mut said = String::new();
        client.0.stderr.take().expect("piped").read_to_string(&mut said).expect("UTF-8");
        assert_eq!(code, Some(0), "ferrite-cli {arguments:?}: {said}");
        said
    }

    /// A ferrite-cli that goes on; it ends when dropped.
    pub(crate) fn start_ferrite_cli(&self, arguments: &[&str]) -> Talking {
        Talking::start(&mut self.ferrite_cli_with(arguments))
    }

    fn ferrite_cli_with(&self, arguments: &[&str]) -> Command {
        // Of another package, so that cargo does not name it here; it is built beside ours.
        let program = Path::new(env!("CARGO_BIN_EXE_ferrite")).with_file_name("ferrite-cli");
        let mut command = Command::new(program);
        command
            .args(["-h", HOST, "-p", self.port, "--local", CLIENT_HOST, "--rdma", "require"])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        command
    }

    /// What valkey-cli prints, which must end well.
    pub(crate) fn cli(&self, arguments: &[&str], input: &[u8], limit: Duration) -> Vec<u8> {
        self.run("valkey-cli", &[&["--rdma"], arguments].concat(), input, limit)
    }

    /// What the server answers when it refuses; the client takes it for a success.
    pub(crate) fn refusal(&self, arguments: &[&str], limit: Duration) -> String {
        let said = text(&self.cli(arguments, b"", limit));
        assert!(said.starts_with("ERR "), "{said}");
        said
    }

    /// A valkey-cli that goes on; it ends when dropped.
    pub(crate) fn start_cli(&self, arguments: &[&str]) -> Talking {
        Talking::start(&mut self.client("valkey-cli", &[&["--rdma"], arguments].concat()))
    }

    /// What one of Valkey's programs prints, which must end well.
    pub(crate) fn run(
        &self,
        program: &str,
        arguments: &[&str],
        input: &[u8],
        limit: Duration,
    ) -> Vec<u8> {
        let mut client = Process::start(&mut self.client(program, arguments));
        let (said, code) = client.end(input, limit);
        assert_eq!(code, Some(0), "{program} {arguments:?}: {}", text(&said));
        said
    }

    /// Many clients at once; each of the tests must come to its end, and nobody be left.
    pub(crate) fn benchmark(&self, tests: &[&str], more: &[&str], limit: Duration) {
        let names = tests.join(",").to_lowercase();
        let arguments = [&["--rdma", "--csv", "-t", &names], more].concat();
        let said = text(&self.run("valkey-benchmark", &arguments, b"", limit));
        for test in tests {
            assert!(said.contains(&format!("\n\"{test}")), "{said}");
        }
        self.until("clients are gone", limit, || self.info("connected_clients") == 1);
    }

    fn client(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.programs.join(program));
        // Their options come before the command that valkey-cli takes.
        command
            .args(["-h", HOST, "-p", self.port])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        command
    }

    /// The engine's own answer, by its Unix socket: a string's bytes, or a line without its first
    /// character.
    pub(crate) fn engine(&self, arguments: &[&str]) -> Vec<u8> {
        let mut request = format!("*{}\r\n", arguments.len());
        for argument in arguments {
            request += &format!("${}\r\n{argument}\r\n", argument.len());
        }
        let mut socket = UnixStream::connect(self.socket()).expect("the engine is there");
        socket.set_read_timeout(Some(SETUP)).expect("a time limit");
        socket.write_all(request.as_bytes()).expect("it listens");
        let mut socket = BufReader::new(socket);
        let mut line = String::new();
        socket.read_line(&mut line).expect("an answer");
        let line = line.trim_end();
        match line.split_at(1) {
            ("$", "-1") => Vec::new(),
            ("$", length) => {
                let mut value = vec![0; length.parse().expect("a length")];
                socket.read_exact(&mut value).expect("as much as it said");
                value
            }
            ("+" | ":", rest) => rest.into(),
            _ => panic!("{arguments:?}: {line}"),
        }
    }

    /// One of the numbers that the engine counts of its clients.
    pub(crate) fn info(&self, name: &str) -> u64 {
        self.info_of("clients", name)
    }

    /// One of the numbers in a section of INFO.
    pub(crate) fn info_of(&self, section: &str, name: &str) -> u64 {
        let info = text(&self.engine(&["INFO", section]));
        let value = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value.unwrap_or_else(|| panic!("no {name} in {info}")).parse().expect("a number")
    }

    pub(crate) fn until(&self, what: &str, limit: Duration, mut done: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !done() {
            assert!(begun.elapsed() < limit, "{what}: not after {limit:?}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    pub(crate) fn stop_engine(&mut self) {
        self.engine.kill();
    }

    pub(crate) fn restart_engine(&mut self) {
        self.engine.kill();
        let _ = std::fs::remove_file(self.socket()); // one that is killed leaves it behind
        self.engine = start_engine(&self.programs, &self.directory, self.way);
        self.until_the_engine_answers();
    }

    /// Asks the gateway to end: what it says then. It must be one that speaks JSON.
    pub(crate) fn end_gateway(mut self, limit: Duration) -> Value {
        let mut gateway = self.gateway.take().expect("there is one");
        gateway.signal("TERM");
        let (said, code) = gateway.end(b"", limit);
        assert_eq!(code, Some(0));
        serde_json::from_slice(&said).expect("one line of JSON")
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("engine.sock")
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.engine.kill();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn start_engine(programs: &Path, directory: &Path, way: Way) -> Process {
    let mut server = Command::new(programs.join("valkey-server"));
    server.args(["--port", "0", "--save", "", "--appendonly", "no", "--protected-mode", "no"]);
    server.arg("--unixsocket").arg(directory.join("engine.sock")).arg("--dir").arg(directory);
    match way {
        Way::Valkey => {
            server.args(["--rdma-bind", HOST, "--rdma-port", VALKEY_PORT]);
        }
        Way::Gateway(_) => {}
        Way::Module => {
            server.arg("--loadmodule").arg(module());
            server.args(["rdma-bind", HOST, "rdma-port", MODULE_PORT, "rdma", "require"]);
        }
    }
    Process::start(server.stdin(Stdio::null()))
}

/// The module, which lies beside this test when it was built with it.
fn module() -> PathBuf {
    let module =
        std::env::current_exe().expect("a test has a file").with_file_name("libferrite_module.so");
    assert!(
        module.exists(),
        "{} is not built: these tests are run by `cargo xtask interop`",
        module.display()
    );
    module
}

/// A gateway that listens.
fn gateway(engine: &Path, more: &[&str]) -> Process {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    command.args([
        "gateway",
        "--listen",
        &format!("{HOST}:{GATEWAY_PORT}"),
        "--protected-mode",
        "no",
    ]);
    command.arg("--engine").arg(format!("unix:{}", engine.display())).args(more);
    let json = more.contains(&"--json");
    if json {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
    } else {
        command.stdin(Stdio::null()).stderr(Stdio::piped());
    }
    let mut process = Process::start(&mut command);
    let mut line = String::new();
    if json {
        // A byte at a time: the rest of it is for who ends it.
        let stdout = process.0.stdout.as_mut().expect("piped");
        while !line.ends_with('\n') {
            let mut byte = [0];
            stdout.read_exact(&mut byte).expect("it says that it listens");
            line.push(byte[0].into());
        }
    } else {
        let mut stderr = BufReader::new(process.0.stderr.take().expect("piped"));
        stderr.read_line(&mut line).expect("it says that it listens");
        // What it says later is ours to see when a test fails.
        thread::spawn(move || std::io::copy(&mut stderr, &mut std::io::stderr()));
    }
    assert!(line.contains("rxe1"), "the gateway does not listen: {line}");
    process
}

/// A program that is ended with the test.
struct Process(Child);

impl Process {
    fn start(command: &mut Command) -> Self {
        let child = command.spawn();
        Self(child.unwrap_or_else(|error| panic!("{command:?}: {error}")))
    }

    /// Gives it its input, and takes what it says until it ends; its exit code, unless a signal
    /// ended it.
    fn end(&mut self, input: &[u8], limit: Duration) -> (Vec<u8>, Option<i32>) {
        let mut stdin = self.0.stdin.take().expect("piped");
        let mut stdout = self.0.stdout.take().expect("piped");
        let input = input.to_vec();
        thread::spawn(move || stdin.write_all(&input)); // one that ends early does not read it all
        let reader = thread::spawn(move || {
            let mut said = Vec::new();
            stdout.read_to_end(&mut said).map(|_| said)
        });
        let code = self.wait(limit);
        if code.is_none() {
            self.kill();
        }
        let said = reader.join().expect("it does not panic").expect("a pipe");
        let code = code
            .unwrap_or_else(|| panic!("not at its end after {limit:?}; it said: {}", text(&said)));
        (said, code)
    }

    /// How it ended: `None` when it did not.
    fn wait(&mut self, limit: Duration) -> Option<Option<i32>> {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait().expect("it is ours") {
                return Some(status.code());
            }
            if begun.elapsed() > limit {
                return None;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn signal(&self, name: &str) {
        let id = self.0.id().to_string();
        let sent = Command::new("kill").args(["-s", name, &id]).status().expect("kill");
        assert!(sent.success(), "SIG{name} to {id}");
    }

    fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A client that goes on.
pub(crate) struct Talking {
    child: Process,
    lines: Receiver<String>,
}

impl Talking {
    fn start(command: &mut Command) -> Self {
        let mut child = Process::start(command);
        drop(child.0.stdin.take());
        let stdout = BufReader::new(child.0.stdout.take().expect("piped"));
        let (sender, lines) = channel();
        thread::spawn(move || {
            stdout.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        Self { child, lines }
    }

    /// The next lines that it prints.
    pub(crate) fn lines(&mut self, count: usize, limit: Duration) -> Vec<String> {
        let line = |_| self.lines.recv_timeout(limit).expect("it says something");
        (0..count).map(line).collect()
    }

    pub(crate) fn signal(&self, name: &str) {
        self.child.signal(name);
    }

    /// Its exit code once it has ended by itself; `None` if it has not.
    pub(crate) fn finish(&mut self, limit: Duration) -> Option<i32> {
        self.child.wait(limit).flatten()
    }
}

/// Bytes that look like nothing in particular.
pub(crate) fn bytes(seed: usize, count: usize) -> Vec<u8> {
    let mut state = seed as u64 * 2 + 1;
    let next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(count).collect()
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
