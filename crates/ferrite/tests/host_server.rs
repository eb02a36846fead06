//! `ferrite server` with real engines on a host without RDMA: Debian's Redis, and Valkey where the
//! lab has built it.
//!
//! Checks its messages, its exit codes, and that no engine is left behind. `lab_server` tests it
//! over RDMA.

mod server {
    pub(crate) mod harness;
}

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use ferrite_testkit::process::{is_alive, signal};
use ferrite_testkit::resp::Client;
use ferrite_testkit::wait::until_or;
use ferrite_testkit::{Screen, TIMEOUT, engine, free_port};
use serde_json::Value;
use server::harness::{Server, Setup, connect, directory};

/// Makes saving take longer than any test waits.
const SLOW_SAVE: &str = "rdb-key-save-delay = 1000000";

fn has_device() -> bool {
    Path::new("/sys/class/infiniband").read_dir().is_ok_and(|mut devices| devices.next().is_some())
}

/// Returns the available engines, as values for `server.engine`.
fn engines() -> Vec<String> {
    engine::engines().iter().map(|path| path.display().to_string()).collect()
}

/// Returns a `[network]` section with ports of the test's own.
fn network() -> String {
    let (tcp, rdma) = (free_port(), free_port());
    format!("bind = \"127.0.0.1\"\nport = {tcp}\nrdma_listen = \"127.0.0.1:{rdma}\"")
}

fn run(arguments: &[&str], file: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    command
        .arg("server")
        .args(arguments)
        .arg("--config")
        .arg(file)
        .output()
        .expect("ferrite starts")
}

/// Returns the process id of the engine, which the event `ready` has.
fn pid(event: &Value) -> u32 {
    u32::try_from(event["pid"].as_u64().expect("an id")).expect("an id")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn serves_clients_and_saves_the_data_when_it_stops() {
    for engine in engines() {
        let directory = directory();
        let (network, server) = (network(), format!("engine = \"{engine}\""));
        let setup = Setup { network: &network, server: &server, ..Setup::default() };
        let mut first = Server::start(&directory, &setup);
        let event = first.event("ready");
        if !has_device() {
            assert_eq!(event["status"], "tcp-only", "{event}");
            assert!(event["reason"].as_str().is_some_and(|why| why.contains("to do: ")), "{event}");
            first.until_logged("over TCP only, no RDMA: ");
        }
        let socket = PathBuf::from(event["unix_socket"].as_str().expect("a path"));
        let private = std::fs::metadata(socket.parent().expect("a directory")).expect("it exists");
        assert_eq!(std::os::unix::fs::PermissionsExt::mode(&private.permissions()) & 0o777, 0o700);
        // Through the module's port and the proxy connection to the private socket.
        Client::to_tcp(event["address"].as_str().expect("an address")).ok(&["SET", "key", "kept"]);
        let own = ("127.0.0.1", event["tcp_port"].as_u64().expect("a port") as u16);
        assert_eq!(Client::to_tcp(own).text(&["GET", "key"]), "kept");
        first.signal("TERM");
        assert_eq!(first.event("ended")["code"], 0);
        assert_eq!(first.end(), (Some(0), String::new()));
        assert!(
            !socket.exists() && !socket.parent().is_some_and(Path::exists),
            "its directory is removed"
        );
        let log = first.log();
        for line in [
            " INFO SIGTERM received, shutting down",
            "DB saved on disk",
            " INFO the engine exited with code 0",
        ] {
            assert!(log.contains(line), "{line}: {log}");
        }
        // SHUTDOWN by a client also ends with code 0.
        let mut second = Server::start(&directory, &setup);
        let event = second.event("ready");
        assert_eq!(connect(&event).text(&["GET", "key"]), "kept");
        connect(&event).send(&[vec!["SHUTDOWN"]]);
        assert_eq!(second.event("ended")["code"], 0);
        assert_eq!(second.end().0, Some(0));
    }
}

#[test]
fn check_prints_the_configuration_and_starts_nothing() {
    let directory = directory();
    let network = network();
    let setup = Setup {
        network: &network,
        engine: "maxmemory = \"1gb\"\nrequirepass = \"hush\"",
        ..Setup::default()
    };
    let file = directory.file("ferrite.toml", setup.text(directory.path()));
    let output = run(&["--check"], &file);
    let stdout = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{stdout}");
    for part in [
        "engine   /",
        "server v=",
        "loadmodule \"",
        " rdma-port ",
        "  maxmemory 1gb\n",
        "  requirepass …\n",
    ] {
        assert!(stdout.contains(part), "{part}: {stdout}");
    }
    assert!(!stdout.contains("hush"), "{stdout}");
    for (mode, is_warned) in [(0o644, true), (0o600, false)] {
        std::fs::set_permissions(&file, Permissions::from_mode(mode)).expect("permitted");
        let log = text(&run(&["--check"], &file).stderr);
        let warning = "all users of this host can read the value of requirepass";
        assert_eq!(log.contains(warning), is_warned, "{log}");
        assert!(!log.contains("hush"), "{log}");
    }
    let object: Value =
        serde_json::from_slice(&run(&["--check", "--json"], &file).stdout).expect("JSON");
    assert!(
        object["configuration"]
            .as_array()
            .is_some_and(|lines| lines.contains(&"maxmemory 1gb".into()))
    );
    let socket = Path::new(object["unix_socket"].as_str().expect("a path"));
    assert!(!socket.parent().is_some_and(Path::exists), "no directory was created");
}

#[test]
fn errors_in_the_file_name_file_and_line() {
    let directory = directory();
    let file = directory.file("ferrite.toml", "[network]\n\nrdma_devcie = \"mlx5_0\"\n");
    let output = run(&["--json"], &file);
    assert_eq!(output.status.code(), Some(2));
    let message = format!(
        "{}:3: network.rdma_devcie: unknown key; the nearest known one is network.rdma_device",
        file.display()
    );
    assert!(text(&output.stderr).contains(&message), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout).lines().count(), 1, "{}", text(&output.stdout));
    let object: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(
        (object["error"]["kind"].as_str(), object["error"]["message"].as_str()),
        (Some("config"), Some(message.as_str()))
    );
    assert_eq!(run(&[], &directory.path().join("nowhere.toml")).status.code(), Some(2));
    assert_eq!(run(&["--no-such-option"], &file).status.code(), Some(2));
    assert_eq!(run(&["--help"], &file).status.code(), Some(0));
}

#[test]
fn names_the_places_where_engine_and_module_were_searched() {
    let directory = directory();
    let file = directory.file("ferrite.toml", "");
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    let output = command
        .args(["server", "--config"])
        .arg(&file)
        .env("PATH", "/nowhere")
        .output()
        .expect("ferrite starts");
    assert_eq!(output.status.code(), Some(71));
    assert!(
        text(&output.stderr)
            .contains("looked for valkey-server and redis-server in PATH (/nowhere)")
    );
    let file = directory.file("ferrite.toml", "[server]\nmodule = \"/nowhere/ferrite.so\"\n");
    let output = run(&[], &file);
    assert_eq!(output.status.code(), Some(71));
    assert!(text(&output.stderr).contains("server.module: no such file: /nowhere/ferrite.so"));
}

#[test]
fn exits_with_69_if_rdma_is_required_and_unavailable() {
    if has_device() {
        return;
    }
    for engine in engines() {
        let directory = directory();
        let (network, server) = (network(), format!("engine = \"{engine}\"\nrdma = \"require\""));
        let mut server = Server::start(
            &directory,
            &Setup { network: &network, server: &server, ..Setup::default() },
        );
        let (code, stdout) = server.end();
        assert_eq!(code, Some(69), "{}", server.log());
        let object: Value = serde_json::from_str(&stdout).expect("JSON");
        assert_eq!(object["error"]["kind"], "absent");
        let message = object["error"]["message"].as_str().expect("a message");
        assert!(message.contains("RDMA is required") && message.contains("to do: "), "{message}");
    }
}

/// A check that passes means a start that works: this one does not.
#[test]
fn check_exits_with_69_if_rdma_is_required_and_unavailable() {
    if has_device() {
        return;
    }
    let directory = directory();
    let setup = Setup { server: "rdma = \"require\"", ..Setup::default() };
    let file = directory.file("ferrite.toml", setup.text(directory.path()));
    let output = run(&["--check"], &file);
    assert_eq!(output.status.code(), Some(69), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("RDMA is required (server.rdma): no RDMA "));
}

/// Names are accepted where addresses are. A Service of Kubernetes with the name `ferrite` sets
/// FERRITE_PORT, which must not break the start.
#[test]
fn listens_on_names_beside_variables_of_kubernetes() {
    let (directory, rdma) = (directory(), free_port());
    let network = format!("port = 0\nbind = \"localhost\"\nrdma_listen = \"localhost:{rdma}\"");
    let setup = Setup { network: &network, ..Setup::default() };
    let mut server = Server::start_with(&directory, &setup, |command| {
        command.env("FERRITE_PORT", "tcp://10.96.0.7:6380").env("FERRITE_BUSY_POL_US", "5");
    });
    let event = server.event("ready");
    let address = format!("127.0.0.1:{rdma}");
    assert!(event["address"].as_str().is_some_and(|text| text.contains(&address)), "{event}");
    server.until_logged("FERRITE_BUSY_POL_US is ignored");
    server.signal("TERM");
    assert_eq!(server.event("ended")["code"], 0);
}

#[test]
fn runs_the_engine_without_the_module_if_rdma_is_disabled() {
    let directory = directory();
    let network = network() + "\nrdma_enabled = false";
    let mut server = Server::start(&directory, &Setup { network: &network, ..Setup::default() });
    let event = server.event("ready");
    assert_eq!((&event["status"], &event["module"]), (&"none".into(), &Value::Null), "{event}");
    assert_eq!(connect(&event).text(&["MODULE", "LIST"]), "*0");
}

#[test]
fn reports_the_message_of_an_engine_that_does_not_start() {
    let directory = directory();
    let network = network();
    let wrong = Setup { network: &network, engine: "maxmemory = \"much\"", ..Setup::default() };
    let mut server = Server::start(&directory, &wrong);
    let (code, stdout) = server.end();
    assert_eq!(code, Some(1), "{}", server.log());
    let object: Value = serde_json::from_str(&stdout).expect("JSON");
    let message = object["error"]["message"].as_str().expect("a message");
    assert!(message.contains("exited with code 1 before it was ready: "), "{message}");
    assert!(message.contains("maxmemory"), "{message}");
    assert!(message.contains("must be a memory value"), "{message}");
    assert!(server.log().contains("must be a memory value"), "{}", server.log());
}

/// An engine quotes the line that it rejects. ferrite hides the password in it.
#[test]
fn hides_passwords_that_the_engine_quotes() {
    let directory = directory();
    let text = Setup {
        engine: "requirepass = \"one swordfish\"",
        network: &network(),
        ..Setup::default()
    };
    let file = directory.file("ferrite.toml", text.text(directory.path()));
    let output = run(&["--json"], &file);
    let (stdout, log) = (self::text(&output.stdout), self::text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{log}");
    assert!(log.contains(">>> 'requirepass …'"), "{log}");
    assert!(!log.contains("swordfish") && !stdout.contains("swordfish"), "{log}{stdout}");
}

/// Writes a program that stands in for an engine.
fn program(directory: &ferrite_testkit::TempDir, script: &str) -> PathBuf {
    let program = directory.file("program", format!("#!/bin/sh\n{script}\n"));
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .expect("a program");
    program
}

/// A program that is no engine, or an engine that prints its version, ends at once with code 0.
#[test]
fn reports_an_engine_that_ends_with_code_0_before_it_is_ready() {
    let directory = directory();
    let program = program(&directory, "cat >/dev/null; echo these are its last words");
    let server = format!("engine = \"{}\"", program.display());
    let mut server = Server::start(&directory, &Setup { server: &server, ..Setup::default() });
    let (code, stdout) = server.end();
    assert_eq!(code, Some(71), "{}", server.log());
    let words = "the engine exited with code 0 before it was ready: these are its last words";
    assert!(stdout.contains(words), "{stdout}");
}

#[test]
fn stops_an_engine_that_does_not_answer() {
    let directory = directory();
    let program = program(&directory, "exec sleep 600");
    let server = format!("engine = \"{}\"\nstartup_timeout = \"1s\"", program.display());
    let mut server = Server::start(&directory, &Setup { server: &server, ..Setup::default() });
    let (code, stdout) = server.end();
    assert_eq!(code, Some(71), "{}", server.log());
    assert!(stdout.contains("the engine did not answer at "), "{stdout}");
    assert!(stdout.contains(" for 1 s"), "{stdout}");
}

/// Loading takes longer than `startup_timeout`, which limits silence only. systemd is notified of
/// each step.
#[test]
fn waits_for_loading_and_notifies_systemd() {
    let directory = directory();
    let network = network();
    let setup = Setup { network: &network, ..Setup::default() };
    let mut first = Server::start(&directory, &setup);
    let event = first.event("ready");
    let script =
        "for i = 1, 700 do redis.call('SET', 'key' .. i, string.rep('x', 1000)) end return 1";
    assert_eq!(connect(&event).text(&["EVAL", script, "0"]), ":1");
    first.signal("INT");
    assert_eq!(first.event("ended")["code"], 0);

    let notified = directory.path().join("notify");
    let systemd = UnixDatagram::bind(&notified).expect("a socket");
    systemd.set_read_timeout(Some(TIMEOUT)).expect("a time limit");
    let next = || {
        let mut message = [0; 4096];
        let length = systemd.recv(&mut message).expect("a notification");
        text(&message[..length])
    };
    let (screen, terminal) = Screen::open(100, 30);
    let mut second = Server::start_with(
        &directory,
        &Setup {
            server: "startup_timeout = \"5s\"",
            network: &network,
            engine: "key-load-delay = 10000\nloading-process-events-interval-bytes = 1024",
        },
        |command| {
            command.env("NOTIFY_SOCKET", &notified).stderr(terminal);
        },
    );
    let started = Instant::now();
    assert_eq!(next(), "STATUS=starting the engine");
    let mut loading = 0;
    let ready = loop {
        let message = next();
        if message.starts_with("READY=1\nSTATUS=ready: ") {
            break message;
        }
        let expected = "EXTEND_TIMEOUT_USEC=30000000\nSTATUS=the engine is loading its data";
        let progress = message.strip_prefix(expected).unwrap_or_else(|| panic!("{message}"));
        // At first the engine does not say how far it is.
        assert!(progress.is_empty() || progress.contains(" %, "), "{message}");
        loading += usize::from(!progress.is_empty());
    };
    assert!(loading > 1 && started.elapsed() > Duration::from_secs(5), "{loading}: {ready}");
    second.event("ready");
    // A terminal shows the progress in one line, which the next line of the log erases.
    screen.expect("\r\x1b[Kthe engine is loading its data: ");
    let is_erased = || {
        let shown = screen.text();
        shown.rsplit_once(" s left").is_some_and(|(_, after)| after.starts_with("\r\x1b[K"))
    };
    until_or(TIMEOUT, "the progress is erased", is_erased, || screen.text());
    second.signal("TERM");
    assert_eq!(next(), "STOPPING=1\nSTATUS=stopping the engine");
    assert_eq!(second.end().0, Some(0));
}

#[test]
fn engine_with_a_password_becomes_ready() {
    let directory = directory();
    let network = network();
    // The password is in the engine's own file, which ferrite does not read.
    let log = directory.path().join("another-log");
    let engine = format!("requirepass hush\nlogfile {}\ndaemonize yes\n", log.display());
    let engine = directory.file("engine.conf", &engine);
    let server = format!("engine_config = \"{}\"", engine.display());
    let mut server = Server::start(
        &directory,
        &Setup { server: &server, network: &network, ..Setup::default() },
    );
    let event = server.event("ready");
    assert_eq!(event["status"], "unknown", "{event}");
    assert!(
        event["reason"].as_str().is_some_and(|text| text.starts_with("listening on 127.0.0.1:")),
        "{event}"
    );
    assert!(connect(&event).text(&["PING"]).starts_with("-NOAUTH"));
    server.signal("TERM");
    assert_eq!(server.event("ended")["code"], 0);

    // The password is in ferrite.toml, which ferrite reads.
    let mut server = Server::start(
        &directory,
        &Setup { network: &network, engine: "requirepass = \"hush\"", ..Setup::default() },
    );
    let event = server.event("ready");
    assert!(
        event["engine"]
            .as_str()
            .is_some_and(|name| name.starts_with("Redis ") || name.starts_with("Valkey "))
    );
    assert_ne!(event["status"], "unknown", "{event}");
}

/// SIGHUP applies what can change, names what cannot, and keeps everything if the file is wrong.
#[test]
fn sighup_applies_settings_that_can_change() {
    for engine in engines() {
        let (directory, network) = (directory(), network());
        let own = format!("engine = \"{engine}\"");
        let setup = Setup { server: &own, network: &network, ..Setup::default() };
        let mut server = Server::start(&directory, &setup);
        let event = server.event("ready");
        let max = || connect(&event).text(&["CONFIG", "GET", "ferrite.max-clients"]);
        assert!(max().contains("10000"), "{}", max());
        let changed = format!(
            "{network}\nrdma_gid_index = 2\n[network.rdma]\nmax_connections = 77\n\
             slice_us = \"1ms\"\n[observability]\nlog_level = \"debug\""
        );
        let own = format!("{own}\nrestart = \"on-failure\"");
        let setup = Setup { server: &own, network: &changed, engine: "maxmemory-samples = 3" };
        directory.file("ferrite.toml", setup.text(directory.path()));
        server.signal("HUP");
        server.until_logged("max-clients is now 77 (was 10000)");
        server.until_logged("restart to apply these changed settings: rdma-gid-index");
        server.until_logged("needs a new start or CONFIG SET in the engine: maxmemory-samples");
        assert!(max().contains("77"), "{}", max());
        let slice = connect(&event).text(&["CONFIG", "GET", "ferrite.slice-us"]);
        assert!(slice.contains("1000"), "{slice}");
        assert!(server.log().contains("restart is now on-failure (was no)"), "{}", server.log());
        directory.file("ferrite.toml", "[network]\nport = \"x\"");
        server.signal("HUP");
        server.until_logged("but no setting was changed: ");
        assert!(max().contains("77"), "{}", max());
        server.signal("TERM");
        assert_eq!(server.event("ended")["code"], 0);
    }
}

/// Settings that SIGHUP has changed stay when the engine is started again.
#[test]
fn settings_of_sighup_survive_a_restart_of_the_engine() {
    let (directory, network) = (directory(), network());
    let own = "restart = \"on-failure\"\nrestart_delay = \"100ms\"";
    let write = |network: &str| {
        let setup = Setup { server: own, network, ..Setup::default() };
        directory.file("ferrite.toml", setup.text(directory.path()));
    };
    let setup = Setup { server: own, network: &network, ..Setup::default() };
    let mut server = Server::start(&directory, &setup);
    let event = server.event("ready");
    write(&format!("{network}\n[network.rdma]\nmax_connections = 77"));
    server.signal("HUP");
    server.until_logged("max-clients is now 77 (was 10000)");
    signal("KILL", pid(&event));
    server.event("restarting");
    let event = server.event("ready");
    let max = connect(&event).text(&["CONFIG", "GET", "ferrite.max-clients"]);
    assert!(max.contains("77"), "{max}");
}

/// The log does not claim what the engine did not take, and the next SIGHUP tries again.
#[test]
fn sighup_tries_again_what_the_engine_did_not_take() {
    let (directory, network) = (directory(), network());
    let mut server = Server::start(&directory, &Setup { network: &network, ..Setup::default() });
    let event = server.event("ready");
    let changed = format!("{network}\n[network.rdma]\nmax_connections = 77");
    let setup = Setup { network: &changed, ..Setup::default() };
    directory.file("ferrite.toml", setup.text(directory.path()));
    let mut client = connect(&event);
    client.ok(&["CONFIG", "SET", "requirepass", "secret"]);
    server.signal("HUP");
    server.until_logged("CONFIG SET ferrite.max-clients 77 failed: -NOAUTH");
    server.until_logged("SIGHUP received: no setting was changed");
    assert!(!server.log().contains("max-clients is now"), "{}", server.log());
    client.ok(&["CONFIG", "SET", "requirepass", ""]);
    server.signal("HUP");
    server.until_logged("max-clients is now 77 (was 10000)");
    let max = client.text(&["CONFIG", "GET", "ferrite.max-clients"]);
    assert!(max.contains("77"), "{max}");
}

/// With `log_format = "json"` every line of the log is an object, also those of the engine.
#[test]
fn log_can_be_json() {
    let (directory, network) = (directory(), network());
    let network = format!("{network}\n[observability]\nlog_format = \"json\"");
    let mut server = Server::start(&directory, &Setup { network: &network, ..Setup::default() });
    server.event("ready");
    server.signal("TERM");
    assert_eq!(server.event("ended")["code"], 0);
    assert_eq!(server.end().0, Some(0));
    let log = server.log();
    let lines: Vec<Value> =
        log.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    for line in &lines {
        assert!(line["time"].is_string() && line["level"].is_string(), "{line}");
        assert!(line["message"].is_string(), "{line}");
    }
    assert!(lines.iter().any(|line| line["source"] == "engine"), "{log}");
    let ready = |line: &Value| line["message"].as_str().is_some_and(|it| it.starts_with("ready: "));
    assert!(lines.iter().any(|line| ready(line) && line["level"] == "INFO"), "{log}");
}

/// Writes data and sends SIGTERM: with [`SLOW_SAVE`] the engine does not stop by itself.
fn begin_slow_stop(server: &mut Server) {
    let event = server.event("ready");
    let script = "for i = 1, 100 do redis.call('SET', 'key' .. i, i) end return 1";
    assert_eq!(connect(&event).text(&["EVAL", script, "0"]), ":1");
    server.signal("TERM");
}

#[test]
fn second_signal_kills_the_engine() {
    let directory = directory();
    let network = network();
    let mut server = Server::start(
        &directory,
        &Setup { network: &network, engine: SLOW_SAVE, ..Setup::default() },
    );
    begin_slow_stop(&mut server);
    server.until_logged("Saving the final RDB snapshot");
    server.signal("TERM");
    assert_eq!(server.event("ended")["code"], 137);
    assert_eq!(server.end().0, Some(137));
    let line = "second signal received, killing the engine";
    assert!(server.log().contains(line), "{}", server.log());
}

#[test]
fn kills_an_engine_that_does_not_stop_in_time() {
    let directory = directory();
    let network = network();
    let setup =
        Setup { server: "shutdown_timeout = \"500ms\"", network: &network, engine: SLOW_SAVE };
    let mut server = Server::start(&directory, &setup);
    begin_slow_stop(&mut server);
    assert_eq!(server.end().0, Some(137));
    assert!(server.log().contains("did not stop within 0.5 s, killing it"), "{}", server.log());
}

#[test]
fn engine_saves_and_stops_when_ferrite_is_killed() {
    let directory = directory();
    let network = network();
    let setup = Setup { network: &network, ..Setup::default() };
    let mut server = Server::start(&directory, &setup);
    let event = server.event("ready");
    assert_eq!(connect(&event).text(&["SET", "key", "kept"]), "+OK");
    let engine = u32::try_from(event["pid"].as_u64().expect("an id")).expect("an id");
    assert!(is_alive(engine));
    server.signal("KILL");
    until_or(TIMEOUT, "the engine ends", || !is_alive(engine), || server.log());
    drop(server);
    let mut second = Server::start(&directory, &setup);
    let event = second.event("ready");
    assert_eq!(connect(&event).text(&["GET", "key"]), "kept", "the engine has saved");
}

#[test]
fn exits_or_restarts_after_the_engine_was_killed() {
    let directory = directory();
    let network = network();
    let mut server = Server::start(&directory, &Setup { network: &network, ..Setup::default() });
    let kill = |event: &Value| signal("KILL", pid(event));
    kill(&server.event("ready"));
    assert_eq!(server.end().0, Some(137), "{}", server.log());

    let policy = "restart = \"on-failure\"\nrestart_delay = \"100ms\"\nrestart_limit = 2";
    let setup = Setup { server: policy, network: &network, ..Setup::default() };
    let mut server = Server::start(&directory, &setup);
    let mut last_pid = Value::Null;
    for (restart, delay) in [(1, 0.1), (2, 0.2)] {
        let event = server.event("ready");
        assert_ne!(event["pid"], last_pid, "a new engine");
        assert_eq!(connect(&event).text(&["PING"]), "+PONG");
        last_pid = event["pid"].clone();
        kill(&event);
        let event = server.event("restarting");
        assert_eq!(
            (event["restart"].as_u64(), event["delay_seconds"].as_f64()),
            (Some(restart), Some(delay))
        );
        assert_eq!(event["code"], 137);
    }
    kill(&server.event("ready"));
    assert_eq!(server.event("ended")["code"], 137);
    let (code, stdout) = server.end();
    assert_eq!(code, Some(137), "{}", server.log());
    assert_eq!(stdout.lines().count(), 1, "{stdout}");
    let why = "the engine was killed by signal 9: the kernel does this if memory runs out";
    assert!(stdout.contains(why), "{stdout}");
    assert!(server.log().contains("giving up after 2 restarts in a row"), "{}", server.log());
}

/// The file of another engine that runs already: ferrite leaves its pid file and its log file
/// alone.
#[test]
fn ignores_pid_file_and_log_file_of_the_engines_file() {
    for engine in engines() {
        let directory = directory();
        let pid_file = directory.file("other.pid", "4711\n");
        let log_file = directory.path().join("other.log");
        let lines = format!(
            "pidfile {}\nlogfile {}\nmaxmemory 77mb\n",
            pid_file.display(),
            log_file.display()
        );
        let nested = directory.file("nested.conf", &lines);
        let lines = format!("{lines}include {}\n", nested.display());
        let file = directory.file("engine.conf", &lines);
        let network = network();
        let server = format!("engine = \"{engine}\"\nengine_config = \"{}\"", file.display());
        let mut server = Server::start(
            &directory,
            &Setup { server: &server, network: &network, ..Setup::default() },
        );
        let event = server.event("ready");
        assert_eq!(std::fs::read_to_string(&pid_file).expect("a file"), "4711\n");
        let info = connect(&event).ask(&["INFO", "memory"]);
        assert!(info.contains("maxmemory_human:77.00M"), "the rest of the file counts: {info}");
        server.signal("TERM");
        assert_eq!(server.event("ended")["code"], 0);
        assert_eq!(std::fs::read_to_string(&pid_file).expect("a file"), "4711\n");
        assert!(!log_file.exists(), "{engine}");
        assert!(server.log().contains("User requested shutdown"), "{}", server.log());
    }
}

/// The configuration of the first documentation, as it is written there, reaches the module.
#[test]
fn settings_of_the_first_documentation_reach_the_module() {
    let first = include_str!("../../ferrite-config/src/file/tests/first_documentation.toml");
    let (_, first) = first.split_once("[network]\n").expect("a section");
    let directory = directory();
    let network = format!("{}\n{first}", network());
    let mut server = Server::start(&directory, &Setup { network: &network, ..Setup::default() });
    let mut client = connect(&server.event("ready"));
    for (name, value) in [
        ("rdma-device", "mlx5_0"),
        ("rdma-gid-index", "3"),
        ("max-clients", "1000"),
        ("max-mr-size", "1073741824"),
        ("send-queue-depth", "256"),
        ("poll-batch", "64"),
        ("busy-poll-us", "100"),
        ("huge-pages", "yes"),
        ("recv-buffer-size", "4096"),
        ("connection-retries", "3"),
    ] {
        let reply = client.ask(&["CONFIG", "GET", &format!("ferrite.{name}")]);
        assert_eq!(reply.lines().last(), Some(value), "{name}");
    }
    server.signal("TERM");
    assert_eq!(server.event("ended")["code"], 0);
}
