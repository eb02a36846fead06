//! An engine with an RDMA listener, and client programs of Valkey and of Ferrite.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use ferrite_proto::resp::Value as Reply;
use ferrite_testkit::process::{self, exit_within};
use ferrite_testkit::{Engine, Random, Start, until};
use serde_json::Value;

const HOST: &str = "10.0.0.1";
/// The address of Ferrite's clients. It is on the second host, so that bytes cross the network.
pub(crate) const CLIENT_HOST: &str = "10.0.0.2";
const VALKEY_PORT: &str = "6390";
const GATEWAY_PORT: &str = "6391";
const MODULE_PORT: &str = "6392";

/// The RDMA listener.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ServerKind {
    /// Valkey's server itself.
    Valkey,
    /// Ferrite's gateway, with these options, in front of Valkey's server.
    Gateway(&'static [&'static str]),
    /// Ferrite's module in Valkey's server.
    Module,
}

/// A running server; drop kills it.
pub(crate) struct TestServer {
    programs: PathBuf,
    kind: ServerKind,
    port: &'static str,
    engine: Engine,
    gateway: Option<Process>,
}

impl TestServer {
    pub(crate) fn new(kind: ServerKind) -> Self {
        let programs = std::env::var_os("FERRITE_VALKEY")
            .expect("FERRITE_VALKEY is not set: run these tests with `cargo xtask interop`");
        let programs = PathBuf::from(programs);
        // Valkey's server listens for RDMA before it answers on its socket; the gateway reports
        // when it listens.
        let engine = start_engine(&programs, kind);
        let (port, gateway) = match kind {
            ServerKind::Valkey => (VALKEY_PORT, None),
            ServerKind::Gateway(more) => (GATEWAY_PORT, Some(gateway(&engine.socket(), more))),
            ServerKind::Module => (MODULE_PORT, None),
        };
        Self { programs, kind, port, engine, gateway }
    }

    /// Returns the address for clients.
    pub(crate) fn address(&self) -> String {
        format!("{HOST}:{}", self.port)
    }

    /// Returns the transport of Ferrite's clients. With gateway and module they use Ferrite's
    /// protocol.
    pub(crate) fn transport(&self) -> &'static str {
        match self.kind {
            ServerKind::Valkey => "RDMA (Valkey)",
            ServerKind::Gateway(_) | ServerKind::Module => "RDMA (Ferrite)",
        }
    }

    /// Returns the name that `ferrite-cli` shows for the server.
    pub(crate) fn description(&self) -> &'static str {
        match self.kind {
            ServerKind::Valkey => "a Valkey Over RDMA server",
            ServerKind::Gateway(_) => "a Ferrite gateway",
            ServerKind::Module => "a Ferrite module",
        }
    }

    /// Runs `ferrite bench kv`, which must succeed. Returns its report.
    pub(crate) fn bench_kv(&self, more: &[&str], limit: Duration) -> Value {
        let address = self.address();
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command
            .args(["bench", "kv", &address, "--rdma", "require", "--local", CLIENT_HOST, "--json"])
            .args(more)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let (output, code) = Process::start(&mut command).end(b"", limit);
        assert_eq!(code, Some(0), "bench kv {more:?}: {}", text(&output));
        self.until("clients are gone", limit, || self.info("connected_clients") == 1);
        serde_json::from_slice(&output).expect("one line of JSON")
    }

    /// Runs ferrite-cli over RDMA, which must succeed. Returns its output.
    pub(crate) fn ferrite_cli(&self, arguments: &[&str], input: &[u8], limit: Duration) -> Vec<u8> {
        let (output, code) =
            Process::start(&mut self.ferrite_cli_command(arguments)).end(input, limit);
        assert_eq!(code, Some(0), "ferrite-cli {arguments:?}: {}", text(&output));
        output
    }

    /// Runs ferrite-cli, which must succeed. Returns what it prints on stderr.
    pub(crate) fn ferrite_cli_stderr(&self, arguments: &[&str], limit: Duration) -> String {
        let mut client = Process::start(self.ferrite_cli_command(arguments).stderr(Stdio::piped()));
        let (_, code) = client.end(b"", limit);
        let mut output = String::new();
        client.0.stderr.take().expect("piped").read_to_string(&mut output).expect("UTF-8");
        assert_eq!(code, Some(0), "ferrite-cli {arguments:?}: {output}");
        output
    }

    /// Starts a ferrite-cli that keeps running; drop kills it.
    pub(crate) fn start_ferrite_cli(&self, arguments: &[&str]) -> RunningClient {
        RunningClient::start(&mut self.ferrite_cli_command(arguments))
    }

    fn ferrite_cli_command(&self, arguments: &[&str]) -> Command {
        // `ferrite-cli` belongs to another package, so cargo sets no variable for it. It is built
        // into the same directory.
        let program = Path::new(env!("CARGO_BIN_EXE_ferrite")).with_file_name("ferrite-cli");
        let mut command = Command::new(program);
        command
            .args(["-h", HOST, "-p", self.port, "--local", CLIENT_HOST, "--rdma", "require"])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        command
    }

    /// Runs valkey-cli, which must succeed. Returns its output.
    pub(crate) fn cli(&self, arguments: &[&str], input: &[u8], limit: Duration) -> Vec<u8> {
        self.run("valkey-cli", &[&["--rdma"], arguments].concat(), input, limit)
    }

    /// Returns the error with which the server rejects a client. valkey-cli exits with code 0 even
    /// then.
    pub(crate) fn refusal(&self, arguments: &[&str], limit: Duration) -> String {
        let output = text(&self.cli(arguments, b"", limit));
        assert!(output.starts_with("ERR "), "{output}");
        output
    }

    /// Starts a valkey-cli that keeps running; drop kills it.
    pub(crate) fn start_cli(&self, arguments: &[&str]) -> RunningClient {
        RunningClient::start(&mut self.client("valkey-cli", &[&["--rdma"], arguments].concat()))
    }

    /// Runs one of Valkey's programs, which must succeed. Returns its output.
    pub(crate) fn run(
        &self,
        program: &str,
        arguments: &[&str],
        input: &[u8],
        limit: Duration,
    ) -> Vec<u8> {
        let mut client = Process::start(&mut self.client(program, arguments));
        let (output, code) = client.end(input, limit);
        assert_eq!(code, Some(0), "{program} {arguments:?}: {}", text(&output));
        output
    }

    /// Runs valkey-benchmark. Each test must finish, and no client may be left.
    pub(crate) fn benchmark(&self, tests: &[&str], more: &[&str], limit: Duration) {
        let names = tests.join(",").to_lowercase();
        let arguments = [&["--rdma", "--csv", "-t", &names], more].concat();
        let output = text(&self.run("valkey-benchmark", &arguments, b"", limit));
        for test in tests {
            assert!(output.contains(&format!("\n\"{test}")), "{output}");
        }
        self.until("clients are gone", limit, || self.info("connected_clients") == 1);
    }

    fn client(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.programs.join(program));
        // The options of valkey-cli come before the command.
        command
            .args(["-h", HOST, "-p", self.port])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        command
    }

    /// Runs a command through the engine's Unix socket. Returns the bytes of a string, or a line
    /// without its type character. Returns no bytes for null.
    pub(crate) fn engine(&self, arguments: &[&str]) -> Vec<u8> {
        let reply = self.engine.client().raw(arguments);
        match Reply::parse(&reply) {
            Ok(Reply::Bulk(value) | Reply::Simple(value)) => value.into(),
            Ok(Reply::Null) => Vec::new(),
            Ok(Reply::Integer(number)) => number.to_string().into(),
            _ => panic!("{arguments:?}: {}", text(&reply)),
        }
    }

    /// Returns a number of the section `clients` of INFO.
    pub(crate) fn info(&self, name: &str) -> u64 {
        self.info_of("clients", name)
    }

    /// Returns a number of a section of INFO.
    pub(crate) fn info_of(&self, section: &str, name: &str) -> u64 {
        let info = text(&self.engine(&["INFO", section]));
        let value = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value.unwrap_or_else(|| panic!("no {name} in {info}")).parse().expect("a number")
    }

    pub(crate) fn until(&self, what: &str, limit: Duration, done: impl FnMut() -> bool) {
        until(limit, what, done);
    }

    pub(crate) fn stop_engine(&mut self) {
        self.engine.kill();
    }

    pub(crate) fn restart_engine(&mut self) {
        self.engine.restart();
    }

    /// Stops the gateway, which must run with `--json`. Returns its last event.
    pub(crate) fn end_gateway(mut self, limit: Duration) -> Value {
        let mut gateway = self.gateway.take().expect("a gateway");
        gateway.signal("TERM");
        let (output, code) = gateway.end(b"", limit);
        assert_eq!(code, Some(0));
        serde_json::from_slice(&output).expect("one line of JSON")
    }
}

/// Starts Valkey's server with its own RDMA listener, with the module's, or without any.
fn start_engine(programs: &Path, kind: ServerKind) -> Engine {
    let valkey = ["--rdma-bind", HOST, "--rdma-port", VALKEY_PORT];
    let module = ["rdma-bind", HOST, "rdma-port", MODULE_PORT, "rdma", "require"];
    let (more, module): (&[&str], Option<&[&str]>) = match kind {
        ServerKind::Valkey => (&valkey, None),
        ServerKind::Gateway(_) => (&[], None),
        ServerKind::Module => (&[], Some(&module)),
    };
    Engine::start(&Start {
        program: &programs.join("valkey-server"),
        options: &[&["--protected-mode", "no"], more].concat(),
        module,
    })
}

/// Starts a gateway and waits until it listens.
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
        // Reads one byte at a time, so that the rest is left for `end_gateway`.
        let stdout = process.0.stdout.as_mut().expect("piped");
        while !line.ends_with('\n') {
            let mut byte = [0];
            stdout.read_exact(&mut byte).expect("the line \"listening\"");
            line.push(byte[0].into());
        }
    } else {
        let mut stderr = BufReader::new(process.0.stderr.take().expect("piped"));
        stderr.read_line(&mut line).expect("the line \"listening\"");
        // Later lines go to the test's stderr, which is shown when the test fails.
        thread::spawn(move || std::io::copy(&mut stderr, &mut std::io::stderr()));
    }
    assert!(line.contains("rxe1"), "the gateway does not listen: {line}");
    process
}

/// A child process; drop kills it.
struct Process(Child);

impl Process {
    fn start(command: &mut Command) -> Self {
        let child = command.spawn();
        Self(child.unwrap_or_else(|error| panic!("{command:?}: {error}")))
    }

    /// Writes the process's input and waits for its end. Returns its output and its exit code. The
    /// code is `None` if a signal ended it.
    fn end(&mut self, input: &[u8], limit: Duration) -> (Vec<u8>, Option<i32>) {
        let mut stdin = self.0.stdin.take().expect("piped");
        let mut stdout = self.0.stdout.take().expect("piped");
        let input = input.to_vec();
        thread::spawn(move || stdin.write_all(&input)); // fails if the process ends early
        let reader = thread::spawn(move || {
            let mut output = Vec::new();
            stdout.read_to_end(&mut output).map(|_| output)
        });
        let code = self.wait(limit);
        if code.is_none() {
            self.kill();
        }
        let output = reader.join().expect("no panic").expect("a pipe");
        let code = code
            .unwrap_or_else(|| panic!("still running after {limit:?}; output: {}", text(&output)));
        (output, code)
    }

    /// Waits until the process ends. Returns its exit code, or `None` if it is still running. The
    /// code is `None` if a signal ended it.
    fn wait(&mut self, limit: Duration) -> Option<Option<i32>> {
        exit_within(&mut self.0, limit).map(|status| status.code())
    }

    fn signal(&self, name: &str) {
        process::signal(name, self.0.id());
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

/// A client that keeps running.
pub(crate) struct RunningClient {
    child: Process,
    lines: Receiver<String>,
}

impl RunningClient {
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

    /// Returns the next lines that the client prints.
    pub(crate) fn lines(&mut self, count: usize, limit: Duration) -> Vec<String> {
        let line = |_| self.lines.recv_timeout(limit).expect("a line of output");
        (0..count).map(line).collect()
    }

    pub(crate) fn signal(&self, name: &str) {
        self.child.signal(name);
    }

    /// Waits until the client ends by itself. Returns its exit code, or `None` if it is still
    /// running or a signal ended it.
    pub(crate) fn finish(&mut self, limit: Duration) -> Option<i32> {
        self.child.wait(limit).flatten()
    }
}

/// Returns bytes that depend on the seed.
pub(crate) fn bytes(seed: usize, count: usize) -> Vec<u8> {
    Random::new(seed as u64).bytes(count)
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
