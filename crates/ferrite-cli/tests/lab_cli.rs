//! Tests of ferrite-cli over RDMA, in the lab's guest (`cargo xtask lab-test ferrite-cli::`).
//! ferrite-cli connects from 10.0.0.2 (rxe2) to a gateway on 10.0.0.1 (rxe1) with a real
//! `redis-server`.
#![expect(clippy::print_stdout, reason = "prints the numbers of equal and different cases")]

mod compare {
    pub(crate) mod engine;
    pub(crate) mod harness;
    pub(crate) mod table;
}

use compare::engine;
use compare::harness::{HUMAN, HUMAN3, JSON, Program as CliProgram, RAW, judge};
use compare::table::cases;
use std::process::Command;

use ferrite_fabric::wire::Program;
use ferrite_fabric::{Config, Fabric, ListenOptions, Rdma};
use ferrite_session::{EngineAddress, Gateway, GatewayConfig, server_config};
use ferrite_testkit::{Engine, TIMEOUT, Terminal, free_port};
use ferrite_verbs::Verbs;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

const CLI: &str = env!("CARGO_BIN_EXE_ferrite-cli");

/// A gateway in this process, with a server behind it.
struct TestServer {
    redis: Engine,
    runtime: Runtime,
    port: String,
    end: oneshot::Sender<()>,
    serving: JoinHandle<()>,
}

impl TestServer {
    fn start() -> Self {
        Self::start_with(|config| GatewayConfig { protected_mode: false, ..config })
    }

    /// Starts a gateway whose default settings `change` has changed.
    fn start_with(change: impl FnOnce(GatewayConfig) -> GatewayConfig) -> Self {
        let redis = engine::start(&[]);
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("build the runtime");
        let entered = runtime.enter();
        let verbs = Verbs::system().expect("load rdma-core");
        let fabric = Fabric::builder(&verbs).device("rxe1").rdma(Rdma::Require);
        let config = Config { program: Program::GATEWAY, ..server_config() };
        let fabric = fabric.config(config).build().expect("build the fabric");
        tokio::spawn(fabric.drive());
        let options = ListenOptions::new().accept_foreign_peers();
        let address = "10.0.0.1:0".parse().expect("valid address");
        let listener = fabric.listen_with(address, &options).expect("listen");
        let port = listener.local_addr().port().to_string();
        let engine = EngineAddress::Unix(redis.socket());
        let gateway = Gateway::new(change(GatewayConfig::new(engine)));
        let (end, ended) = oneshot::channel();
        let serving = tokio::spawn(async move {
            let served = gateway.serve(listener, async { drop(ended.await) }).await;
            served.expect("gateway ends without an error");
        });
        drop(entered);
        Self { redis, runtime, port, end, serving }
    }

    /// Returns ferrite-cli with options that require RDMA.
    fn over_rdma(&self) -> CliProgram {
        CliProgram { connect_options: self.rdma_options(), ..CliProgram::ours(&self.redis) }
    }

    fn rdma_options(&self) -> Vec<String> {
        let options =
            ["-h", "10.0.0.1", "-p", &self.port, "--local", "10.0.0.2", "--rdma", "require"];
        options.map(str::to_owned).into()
    }

    fn end(self) {
        let _ = self.end.send(());
        let ended =
            self.runtime.block_on(async { tokio::time::timeout(TIMEOUT, self.serving).await });
        ended.expect("gateway ends in time").expect("gateway does not panic");
    }
}

/// ferrite-cli over RDMA prints the same as redis-cli at the server's Unix socket.
#[test]
fn compare() {
    let server = TestServer::start();
    let cases = cases();
    let mut wrong = String::new();
    for style in [RAW, HUMAN, JSON, HUMAN3] {
        let cases: Vec<_> = cases.iter().filter(|case| !case.is_left_out(style.0)).collect();
        engine::empty(&server.redis);
        let theirs = CliProgram::theirs(&server.redis).outputs(style, &cases);
        engine::empty(&server.redis);
        let ours = server.over_rdma().outputs(style, &cases);
        wrong += &judge(style.0, "RDMA", &cases, &theirs, &ours);
    }
    assert!(wrong.is_empty(), "{wrong}");
    server.end();
}

/// Reports the transport, and carries large values and many commands at once.
#[test]
fn runs_all_modes_over_rdma() {
    let server = TestServer::start();
    let program = server.over_rdma();
    let run = |words: &[&str], input: &[u8]| {
        let output = program.run_with_stdin(words, input.to_vec());
        let stderr = String::from_utf8(output.stderr).expect("UTF-8");
        assert!(output.status.success(), "{words:?}: {stderr}");
        (output.stdout, stderr)
    };
    let (pong, stderr) = run(&["--verbose", "PING"], b"");
    assert_eq!(pong, b"PONG\n");
    assert_eq!(stderr, "over RDMA, device rxe2, to a Ferrite gateway\n");
    let large: Vec<u8> = (0..3_000_000_u32).map(|at| (at % 251) as u8).collect();
    assert_eq!(run(&["-x", "SET", "large"], &large).0, b"OK\n");
    let (received, stderr) = run(&["GET", "large"], b"");
    assert!(received.strip_suffix(b"\n") == Some(&large), "{} bytes", received.len());
    assert_eq!(stderr, "", "the transport is not reported without --verbose");
    let quiet = [&b"CLIENT REPLY OFF\nSET quiet "[..], &vec![b'q'; 3_000_000], b"\n"].concat();
    assert_eq!(run(&[], &quiet).0, b"", "no reply");
    assert_eq!(run(&["STRLEN", "quiet"], b"").0, b"3000000\n", "SET has run before the exit");
    let many: String = (0..20_000).map(|key| format!("SET key:{key} {key}\r\n")).collect();
    let (counted, _) = run(&["--pipe"], many.as_bytes());
    assert!(counted.ends_with(b"errors: 0, replies: 20000\n"), "{}", counted.escape_ascii());
    let (scanned, _) = run(&["--scan", "--count", "1000"], b"");
    assert_eq!(scanned.split(|byte| *byte == b'\n').count(), 20_003);
    let (latency, _) = run(&["--latency", "--json", "-i", "0.2"], b"");
    assert!(latency.starts_with(b"{\"min\": "), "{}", latency.escape_ascii());
    server.end();
}

/// A URI requires RDMA, and names an unreachable server before a reachable one. TLS together with
/// RDMA is rejected, because TLS works only over TCP.
#[test]
fn connects_by_uri() {
    let server = TestServer::start();
    let run = |uri: &str, more: &[&str]| {
        let connect_options = ["-u", uri, "--local", "10.0.0.2"].map(str::to_owned).into();
        let program = CliProgram { connect_options, ..CliProgram::ours(&server.redis) };
        let output = program.run_with_stdin(&[more, &["CLIENT", "INFO"]].concat(), Vec::new());
        let [stdout, stderr] =
            [output.stdout, output.stderr].map(|text| String::from_utf8(text).expect("UTF-8"));
        (output.status.code(), stdout, stderr)
    };
    let uri = format!("redis+rdma://10.0.0.1:1,10.0.0.1:{}/2?rdma=require", server.port);
    let (code, info, stderr) = run(&uri, &["--verbose"]);
    assert!(code == Some(0) && info.contains(" db=2 "), "{info}{stderr}");
    assert_eq!(stderr, "over RDMA, device rxe2, to a Ferrite gateway\n");
    let (code, _, stderr) = run(&uri, &["--tls"]);
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stderr.contains("TLS works only over TCP"), "{stderr}");
    server.end();
}

/// A rejected client prints the server's reason, not only that the connection was lost.
#[test]
fn prints_why_it_was_rejected() {
    // With -e, an error reply goes to stderr, and the exit code is 1.
    let rejection = |server: &TestServer, words: &[&str], input: &[u8]| {
        let output = server.over_rdma().run_with_stdin(&[&["-e"], words].concat(), input.to_vec());
        let [stdout, stderr] =
            [output.stdout, output.stderr].map(|text| String::from_utf8(text).expect("UTF-8"));
        assert_eq!((output.status.code(), stdout.as_str()), (Some(1), ""), "{words:?}: {stderr}");
        stderr
    };
    let protected = TestServer::start_with(|config| config);
    let denied = rejection(&protected, &["PING"], b"");
    assert!(denied.starts_with("DENIED The Ferrite gateway is in protected mode"), "{denied}");
    protected.end();

    let unprotected = |config| GatewayConfig { protected_mode: false, ..config };
    let full =
        TestServer::start_with(|config| GatewayConfig { max_clients: 0, ..unprotected(config) });
    assert_eq!(rejection(&full, &["PING"], b""), "ERR max number of clients reached\n");
    full.end();

    let mut server = TestServer::start_with(unprotected);
    // The engine rejects a value by its header, while ferrite-cli still writes the value.
    server.redis.client().ok(&["CONFIG", "SET", "proto-max-bulk-len", "1mb"]);
    let too_large = rejection(&server, &["-x", "SET", "key"], &vec![b'x'; 4 << 20]);
    assert_eq!(too_large, "ERR Protocol error: invalid bulk length\n");
    server.redis.kill();
    let missing = rejection(&server, &["PING"], b"");
    assert_eq!(missing, "ERR Ferrite gateway: cannot connect to the engine\n");
    server.end();
}

/// The prompt shows the transport, and `:transport` shows details.
#[test]
fn shows_the_transport_in_the_prompt() {
    let server = TestServer::start();
    let mut command = Command::new(CLI);
    command.args(server.rdma_options()).env("FERRITECLI_HISTFILE", "/dev/null");
    let mut terminal = Terminal::start(&command, 120, 40);
    let screen = &mut terminal.screen;
    let place = format!("10.0.0.1:{}", server.port);
    screen.expect_next("over RDMA, device rxe2, to a Ferrite gateway");
    screen.expect_next(&format!("{place} RDMA> "));
    for (typed, shown) in [
        ("SELECT 2\r", format!("{place}[2] RDMA> ")),
        ("MULTI\r", format!("{place}[2] RDMA(TX)> ")),
        ("DISCARD\r", format!("{place}[2] RDMA> ")),
        (":transport\r", "over RDMA, device rxe2, to a Ferrite gateway".to_owned()),
    ] {
        screen.type_keys(typed);
        screen.expect_next(&shown);
    }
    screen.type_keys("exit\r");
    assert!(terminal.finish().0.success());
    server.end();
}

/// The server has no RDMA. If RDMA is required, connecting fails. If RDMA is preferred, ferrite-cli
/// uses TCP and reports the reason.
#[test]
fn falls_back_to_tcp() {
    let port = free_port().to_string();
    let redis = engine::start(&["--bind", "10.0.0.1", "--protected-mode", "no", "--port", &port]);
    let run = |more: &[&str]| {
        let options = ["-h", "10.0.0.1", "-p", &port, "--local", "10.0.0.2", "-t", "2"];
        let connect_options = options.map(str::to_owned).into();
        let program = CliProgram { connect_options, ..CliProgram::ours(&redis) };
        let output = program.run_with_stdin(&[more, &["PING"]].concat(), Vec::new());
        let stderr = String::from_utf8(output.stderr).expect("UTF-8");
        (output.status.code(), String::from_utf8(output.stdout).expect("UTF-8"), stderr)
    };
    let (code, _, stderr) = run(&["--rdma", "require"]);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(
        stderr.starts_with("Could not connect to Redis at 10.0.0.1:")
            && stderr.contains("over RDMA"),
        "{stderr}"
    );
    let (code, pong, stderr) = run(&["--rdma", "prefer"]);
    assert_eq!((code, pong.as_str()), (Some(0), "PONG\n"), "{stderr}");
    assert!(
        stderr.starts_with("over TCP, because RDMA is unavailable: ")
            && stderr.lines().count() == 1,
        "{stderr}"
    );
    assert_eq!(run(&[]), (Some(0), "PONG\n".into(), String::new()));

    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite-cli"));
    command.args(["-h", "10.0.0.1", "-p", &port, "--local", "10.0.0.2", "-t", "2"]);
    command.args(["--rdma", "prefer"]).env("FERRITECLI_HISTFILE", "/dev/null");
    let mut terminal = Terminal::start(&command, 1000, 40);
    terminal.screen.expect_next("over TCP, because RDMA is unavailable: ");
    terminal.screen.expect_next(&format!("10.0.0.1:{port} TCP> "));
    terminal.screen.type_keys("exit\r");
    assert!(terminal.finish().0.success());
}

/// The fix for a missing permission.
const PERMISSION: &str = "(to do: add the user to the group of the files in /dev/infiniband \
                          (usually rdma), or write a udev rule (KERNEL==\"uverbs*|rdma_cm\", \
                          MODE=\"0666\"); then log in again, or restart the service)";
/// Makes the device files usable for everybody.
const OPEN: &str = "chmod 666 /dev/infiniband/*";

/// Returns ferrite-cli as a user without rights, in a mount namespace of its own. The shell command
/// `prepare` runs before, as root.
fn as_nobody(prepare: &str, words: &[&str]) -> Command {
    let nobody = "exec setpriv --reuid=65534 --regid=65534 --clear-groups";
    let line = format!("{prepare} && {nobody} {CLI} {}", words.join(" "));
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &line]).env_remove("REDISCLI_AUTH");
    command
}

/// Runs ferrite-cli as a user without rights. Returns its exit code, its stdout and its stderr.
fn run_as_nobody(prepare: &str, words: &[&str]) -> (Option<i32>, String, String) {
    let output = as_nobody(prepare, words).output().expect("start unshare");
    let [stdout, stderr] =
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).expect("UTF-8"));
    (output.status.code(), stdout, stderr)
}

/// Runs PING as a user without rights on a terminal, where RDMA is preferred. Returns the lines
/// before the reply.
fn lines_on_terminal(prepare: &str, words: &[&str]) -> Vec<String> {
    let command = as_nobody(prepare, &[words, &["PING"]].concat());
    let (status, text) = Terminal::start(&command, 2000, 30).finish();
    assert!(status.success(), "{text}");
    let mut lines: Vec<_> = text.lines().map(|line| line.trim_end().to_owned()).collect();
    assert_eq!(lines.pop().as_deref(), Some("PONG"), "{text}");
    lines
}

/// Returns the number of MiB that a message names as needed in all.
fn needed_mib(message: &str) -> u64 {
    let number = message.split("about ").nth(1).and_then(|rest| rest.split(' ').next());
    let number = number.and_then(|number| number.parse().ok());
    number.unwrap_or_else(|| panic!("expected `about N MiB` in: {message}"))
}

/// With the usual limit of locked memory, ferrite-cli can use one of the two devices. If it
/// connects over the other device, it names the limit, the whole memory that it needs, and the fix.
#[test]
fn names_the_whole_memory_that_is_needed() {
    let limit = |mib: u64| format!("{OPEN} && ulimit -l {}", mib << 10);
    let parts = [
        "the locked-memory limit is 8 MiB",
        " MiB are needed in all, for 2 devices",
        "(to do: raise the locked-memory limit: LimitMEMLOCK=infinity in the systemd unit",
    ];
    let check = |line: &str| {
        assert!(parts.iter().all(|part| line.matches(part).count() == 1), "{line}");
        needed_mib(line)
    };
    let server = TestServer::start();
    let ping = |mib: u64, local: &str| {
        let options = ["-h", "10.0.0.1", "-p", &server.port, "--local", local];
        let words = [&options[..], &["--rdma", "require", "--verbose", "PING"]].concat();
        run_as_nobody(&limit(mib), &words)
    };
    let pong = |device: &str| {
        let transport = format!("over RDMA, device {device}, to a Ferrite gateway\n");
        (Some(0), "PONG\n".to_owned(), transport)
    };
    assert_eq!(ping(8, "10.0.0.2"), pong("rxe2"));
    let (code, stdout, stderr) = ping(8, "10.0.0.1");
    assert_eq!((code, stdout.as_str()), (Some(69), ""), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    let needed = check(&stderr);
    assert!(needed > 8, "{stderr}");
    assert_eq!(ping(needed, "10.0.0.1"), pong("rxe1"));
    assert_eq!(ping(needed, "10.0.0.2"), pong("rxe2"));
    server.end();

    let port = free_port().to_string();
    let _redis = engine::start(&["--bind", "10.0.0.1", "--protected-mode", "no", "--port", &port]);
    let options = ["-h", "10.0.0.1", "-p", &port, "--local", "10.0.0.1"];
    for (explicit, begin) in [
        (&[][..], "warning: using TCP without encryption, "),
        (&["--rdma", "prefer"], "over TCP, because RDMA is unavailable: "),
    ] {
        let lines = lines_on_terminal(&limit(8), &[&options, explicit].concat());
        let [line] = &lines[..] else { panic!("expected one line: {lines:?}") };
        assert!(line.starts_with(begin), "{line}");
        assert_eq!(check(line), needed, "{line}");
    }
}

#[test]
fn explains_a_missing_permission() {
    // Copies of the device files that only root may use.
    let close = "cp -a /dev/infiniband /tmp/closed-$$ && chmod 600 /tmp/closed-$$/* &&
                 mount --bind /tmp/closed-$$ /dev/infiniband";
    let port = free_port().to_string();
    let _redis = engine::start(&["--bind", "10.0.0.1", "--protected-mode", "no", "--port", &port]);
    let options = ["-h", "10.0.0.1", "-p", &port, "--local", "10.0.0.2"];
    let required = [&options[..], &["--rdma", "require", "PING"]].concat();
    let (code, stdout, stderr) = run_as_nobody(close, &required);
    assert_eq!((code, stdout.as_str()), (Some(69), ""), "{stderr}");
    let lines = lines_on_terminal(close, &options);
    for message in [&[stderr.trim_end().to_owned()], &lines[..]] {
        let [line] = message else { panic!("expected one line: {message:?}") };
        assert!(line.contains("permission denied on /dev/infiniband/uverbs0"), "{line}");
        assert!(line.contains(PERMISSION), "{line}");
        assert!(!line.contains("modprobe"), "{line}");
    }
}
