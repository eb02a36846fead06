//! `ferrite server` with real engines on a host without RDMA: Debian's Redis, and Valkey where the
//! lab has built it.
//!
//! What it says, how it ends, and that no engine is left. Over RDMA it is `lab_server`'s.

#[path = "server/scene.rs"]
mod scene;

use std::net::TcpStream;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use scene::{Directory, PATIENCE, Server, Setup, ask, free_port, is_alive, signal, until};
use serde_json::Value;

/// Saving takes longer than anybody waits.
const SLOW_SAVE: &str = "rdb-key-save-delay = 1000000";

fn has_device() -> bool {
    Path::new("/sys/class/infiniband").read_dir().is_ok_and(|mut devices| devices.next().is_some())
}

/// The engines there are, and those named in FERRITE_ENGINES, by their words in `server.engine`.
fn engines() -> Vec<String> {
    let cache = std::env::var_os("FERRITE_LAB_CACHE").map(PathBuf::from).or_else(|| {
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let cache = cache.or_else(|| Some(Path::new(&std::env::var_os("HOME")?).join(".cache")));
        cache.map(|cache| cache.join("ferrite-lab"))
    });
    let valkey =
        cache.map(|cache| cache.join("valkey/valkey-server")).filter(|server| server.exists());
    // As in the module's tests: paths of servers, separated by colons.
    let named = std::env::var_os("FERRITE_ENGINES").unwrap_or_default();
    // "" has one
    let named = std::env::split_paths(&named).filter(|path| !path.as_os_str().is_empty());
    let paths = valkey.into_iter().chain(named).map(|path| path.display().to_string());
    ["redis-server".to_owned()].into_iter().chain(paths).collect()
}

/// Ports of a test's own.
fn network() -> String {
    let (tcp, rdma) = (free_port(), free_port());
    format!("bind = \"127.0.0.1\"\nport = {tcp}\nrdma_listen = \"127.0.0.1:{rdma}\"")
}

fn ready(event: &Value) -> UnixStream {
    let socket =
        UnixStream::connect(event["unix_socket"].as_str().expect("a path")).expect("it listens");
    socket.set_read_timeout(Some(PATIENCE)).expect("a time limit");
    socket
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

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn serves_ends_well_and_keeps_the_data() {
    for engine in engines() {
        let directory = Directory::new();
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
        let private =
            std::fs::metadata(socket.parent().expect("a directory")).expect("it is there");
        assert_eq!(std::os::unix::fs::PermissionsExt::mode(&private.permissions()) & 0o777, 0o700);
        // By the module's port, through the proxy connection to the private socket.
        let module =
            TcpStream::connect(event["address"].as_str().expect("an address")).expect("it listens");
        module.set_read_timeout(Some(PATIENCE)).expect("a time limit");
        assert_eq!(ask(&module, &["SET", "key", "kept"]), "+OK");
        let own =
            TcpStream::connect(("127.0.0.1", event["tcp_port"].as_u64().expect("a port") as u16));
        assert_eq!(ask(own.expect("it listens"), &["GET", "key"]), "kept");
        first.signal("TERM");
        assert_eq!(first.event("ended")["code"], 0);
        assert_eq!(first.end(), (Some(0), String::new()));
        assert!(
            !socket.exists() && !socket.parent().is_some_and(Path::exists),
            "its directory is gone"
        );
        let log = first.log();
        for words in [
            "* SIGTERM received, shutting down",
            "DB saved on disk",
            "* the engine has ended with code 0",
        ] {
            assert!(log.contains(words), "{words}: {log}");
        }
        // SHUTDOWN by a client is an end as good.
        let mut second = Server::start(&directory, &setup);
        let event = second.event("ready");
        assert_eq!(ask(ready(&event), &["GET", "key"]), "kept");
        std::io::Write::write_all(&mut ready(&event), b"SHUTDOWN\r\n").expect("it listens");
        assert_eq!(second.event("ended")["code"], 0);
        assert_eq!(second.end().0, Some(0));
    }
}

#[test]
fn check_says_what_would_be_run_and_runs_nothing() {
    let directory = Directory::new();
    let network = network();
    let setup = Setup {
        network: &network,
        engine: "maxmemory = \"1gb\"\nrequirepass = \"hush\"",
        ..Setup::default()
    };
    let file = directory.file("ferrite.toml", &setup.text(directory.path()));
    let said = run(&["--check"], &file);
    let words = text(&said.stdout);
    assert_eq!(said.status.code(), Some(0), "{words}");
    for part in [
        "engine   /",
        "server v=",
        "loadmodule \"",
        " rdma-port ",
        "  maxmemory 1gb\n",
        "  requirepass …\n",
    ] {
        assert!(words.contains(part), "{part}: {words}");
    }
    assert!(!words.contains("hush"), "{words}");
    let object: Value =
        serde_json::from_slice(&run(&["--check", "--json"], &file).stdout).expect("JSON");
    assert!(
        object["configuration"]
            .as_array()
            .is_some_and(|lines| lines.contains(&"maxmemory 1gb".into()))
    );
    let socket = Path::new(object["unix_socket"].as_str().expect("a path"));
    assert!(!socket.parent().is_some_and(Path::exists), "nothing was made");
}

#[test]
fn a_wrong_file_is_named_with_its_line() {
    let directory = Directory::new();
    let file = directory.file("ferrite.toml", "[network]\n\nrdma_devcie = \"mlx5_0\"\n");
    let said = run(&["--json"], &file);
    assert_eq!(said.status.code(), Some(64));
    let words = format!(
        "{}:3: network.rdma_devcie: unknown key; the nearest known one is network.rdma_device",
        file.display()
    );
    assert!(text(&said.stderr).contains(&words), "{}", text(&said.stderr));
    let object: Value = serde_json::from_slice(&said.stdout).expect("JSON");
    assert_eq!(
        (object["error"]["kind"].as_str(), object["error"]["message"].as_str()),
        (Some("config"), Some(words.as_str()))
    );
    assert_eq!(run(&[], &directory.path().join("nowhere.toml")).status.code(), Some(64));
    assert_eq!(run(&["--no-such-option"], &file).status.code(), Some(64));
    assert_eq!(run(&["--help"], &file).status.code(), Some(0));
}

#[test]
fn what_is_missing_is_said_with_where_it_was_looked_for() {
    let directory = Directory::new();
    let file = directory.file("ferrite.toml", "");
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    let said = command
        .args(["server", "--config"])
        .arg(&file)
        .env("PATH", "/nowhere")
        .output()
        .expect("it starts");
    assert_eq!(said.status.code(), Some(71));
    assert!(
        text(&said.stderr).contains("looked for valkey-server and redis-server in PATH (/nowhere)")
    );
    let file = directory.file("ferrite.toml", "[server]\nmodule = \"/nowhere/ferrite.so\"\n");
    let said = run(&[], &file);
    assert_eq!(said.status.code(), Some(71));
    assert!(text(&said.stderr).contains("server.module: there is no file /nowhere/ferrite.so"));
}

#[test]
fn required_rdma_has_a_code_of_its_own() {
    if has_device() {
        return;
    }
    for engine in engines() {
        let directory = Directory::new();
        let (network, server) = (network(), format!("engine = \"{engine}\"\nrdma = \"require\""));
        let mut server = Server::start(
            &directory,
            &Setup { network: &network, server: &server, ..Setup::default() },
        );
        let (code, said) = server.end();
        assert_eq!(code, Some(69), "{}", server.log());
        let object: Value = serde_json::from_str(&said).expect("JSON");
        assert_eq!(object["error"]["kind"], "absent");
        let words = object["error"]["message"].as_str().expect("words");
        assert!(words.contains("RDMA is required") && words.contains("to do: "), "{words}");
    }
}

#[test]
fn forbidden_rdma_is_the_engine_alone() {
    let directory = Directory::new();
    let network = network() + "\nrdma_enabled = false";
    let mut server = Server::start(&directory, &Setup { network: &network, ..Setup::default() });
    let event = server.event("ready");
    assert_eq!((&event["status"], &event["module"]), (&"none".into(), &Value::Null), "{event}");
    assert_eq!(ask(ready(&event), &["MODULE", "LIST"]), "*0");
}

#[test]
fn an_engine_that_does_not_come_up_has_the_last_word() {
    let directory = Directory::new();
    let network = network();
    let wrong = Setup { network: &network, engine: "maxmemory = \"much\"", ..Setup::default() };
    let mut server = Server::start(&directory, &wrong);
    let (code, said) = server.end();
    assert_eq!(code, Some(1), "{}", server.log());
    let object: Value = serde_json::from_str(&said).expect("JSON");
    let words = object["error"]["message"].as_str().expect("words");
    assert!(words.contains("before it was ready, with code 1: "), "{words}");
    assert!(words.contains("maxmemory") && words.contains("must be a memory value"), "{words}");
    assert!(server.log().contains("must be a memory value"), "{}", server.log());
}

/// An engine quotes the line that it does not like; what has a password is not passed on.
#[test]
fn hides_passwords_that_the_engine_quotes() {
    let directory = Directory::new();
    let text = Setup {
        engine: "requirepass = \"one swordfish\"",
        network: &network(),
        ..Setup::default()
    };
    let file = directory.file("ferrite.toml", &text.text(directory.path()));
    let output = run(&["--json"], &file);
    let (said, log) = (self::text(&output.stdout), self::text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{log}");
    assert!(log.contains(">>> 'requirepass …'"), "{log}");
    assert!(!log.contains("swordfish") && !said.contains("swordfish"), "{log}{said}");
}

#[test]
fn an_engine_that_is_silent_is_ended() {
    let directory = Directory::new();
    let program = directory.file("silent", "#!/bin/sh\nexec sleep 600\n");
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .expect("a program");
    let server = format!("engine = \"{}\"\nstartup_timeout = \"1s\"", program.display());
    let mut server = Server::start(&directory, &Setup { server: &server, ..Setup::default() });
    let (code, said) = server.end();
    assert_eq!(code, Some(71), "{}", server.log());
    assert!(said.contains("the engine did not answer at ") && said.contains(" for 1 s"), "{said}");
}

/// Slower to load its data than it may be silent: it is not silent. systemd hears all of it.
#[test]
fn loading_is_not_silence_and_systemd_is_told() {
    let directory = Directory::new();
    let network = network();
    let setup = Setup { network: &network, ..Setup::default() };
    let mut first = Server::start(&directory, &setup);
    let event = first.event("ready");
    let script =
        "for i = 1, 700 do redis.call('SET', 'key' .. i, string.rep('x', 1000)) end return 1";
    assert_eq!(ask(ready(&event), &["EVAL", script, "0"]), ":1");
    first.signal("INT");
    assert_eq!(first.event("ended")["code"], 0);

    let notified = directory.path().join("notify");
    let systemd = UnixDatagram::bind(&notified).expect("a socket");
    systemd.set_read_timeout(Some(PATIENCE)).expect("a time limit");
    let next = || {
        let mut words = [0; 4096];
        let length = systemd.recv(&mut words).expect("it tells");
        text(&words[..length])
    };
    let mut second = Server::start_with(
        &directory,
        &Setup {
            server: "startup_timeout = \"5s\"",
            network: &network,
            engine: "key-load-delay = 10000\nloading-process-events-interval-bytes = 1024",
        },
        |command| {
            command.env("NOTIFY_SOCKET", &notified);
        },
    );
    let begun = Instant::now();
    assert_eq!(next(), "STATUS=the engine starts");
    let mut loading = 0;
    let ready = loop {
        let words = next();
        if words.starts_with("READY=1\nSTATUS=ready: ") {
            break words;
        }
        assert_eq!(words, "EXTEND_TIMEOUT_USEC=30000000\nSTATUS=the engine loads its data");
        loading += 1;
    };
    assert!(loading > 1 && begun.elapsed() > Duration::from_secs(5), "{loading}: {ready}");
    second.event("ready");
    second.signal("TERM");
    assert_eq!(next(), "STOPPING=1\nSTATUS=ending the engine");
    assert_eq!(second.end().0, Some(0));
}

#[test]
fn an_engine_with_a_password_is_ready_and_sighup_changes_nothing() {
    let directory = Directory::new();
    let network = network();
    // In the engine's own file, where we do not see it.
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
        event["reason"].as_str().is_some_and(|words| words.starts_with("listening on 127.0.0.1:")),
        "{event}"
    );
    assert!(ask(ready(&event), &["PING"]).starts_with("-NOAUTH"));
    server.signal("HUP");
    server.until_logged("SIGHUP: nothing is read again");
    assert!(ask(ready(&event), &["PING"]).starts_with("-NOAUTH"));
    server.signal("TERM");
    assert_eq!(server.event("ended")["code"], 0);

    // In our file, where we do.
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

/// With something to save.
fn slow_to_end(server: &mut Server) {
    let event = server.event("ready");
    let script = "for i = 1, 100 do redis.call('SET', 'key' .. i, i) end return 1";
    assert_eq!(ask(ready(&event), &["EVAL", script, "0"]), ":1");
    server.signal("TERM");
}

#[test]
fn a_second_signal_hurries() {
    let directory = Directory::new();
    let network = network();
    let mut server = Server::start(
        &directory,
        &Setup { network: &network, engine: SLOW_SAVE, ..Setup::default() },
    );
    slow_to_end(&mut server);
    server.until_logged("Saving the final RDB snapshot");
    server.signal("TERM");
    assert_eq!(server.event("ended")["code"], 137);
    assert_eq!(server.end().0, Some(137));
    assert!(server.log().contains("told again: the engine is killed"), "{}", server.log());
}

#[test]
fn an_engine_that_does_not_end_in_time_is_killed() {
    let directory = Directory::new();
    let network = network();
    let setup =
        Setup { server: "shutdown_timeout = \"500ms\"", network: &network, engine: SLOW_SAVE };
    let mut server = Server::start(&directory, &setup);
    slow_to_end(&mut server);
    assert_eq!(server.end().0, Some(137));
    assert!(server.log().contains("has not ended in 0.5 s: it is killed"), "{}", server.log());
}

#[test]
fn the_engine_ends_in_good_order_when_ferrite_is_killed() {
    let directory = Directory::new();
    let network = network();
    let setup = Setup { network: &network, ..Setup::default() };
    let mut server = Server::start(&directory, &setup);
    let event = server.event("ready");
    assert_eq!(ask(ready(&event), &["SET", "key", "kept"]), "+OK");
    let engine = u32::try_from(event["pid"].as_u64().expect("an id")).expect("an id");
    assert!(is_alive(engine));
    server.signal("KILL");
    until("the engine ends", || !is_alive(engine), || server.log());
    drop(server);
    let mut again = Server::start(&directory, &setup);
    let event = again.event("ready");
    assert_eq!(ask(ready(&event), &["GET", "key"]), "kept", "it has saved");
}

#[test]
fn a_killed_engine_is_our_end_or_is_started_again() {
    let directory = Directory::new();
    let network = network();
    let mut server = Server::start(&directory, &Setup { network: &network, ..Setup::default() });
    let kill = |event: &Value| {
        signal("KILL", u32::try_from(event["pid"].as_u64().expect("an id")).expect("an id"))
    };
    kill(&server.event("ready"));
    assert_eq!(server.end().0, Some(137), "{}", server.log());

    let policy = "restart = \"on-failure\"\nrestart_delay = \"100ms\"\nrestart_limit = 2";
    let setup = Setup { server: policy, network: &network, ..Setup::default() };
    let mut server = Server::start(&directory, &setup);
    let mut before = Value::Null;
    for (restart, delay) in [(1, 0.1), (2, 0.2)] {
        let event = server.event("ready");
        assert_ne!(event["pid"], before, "another engine");
        assert_eq!(ask(ready(&event), &["PING"]), "+PONG");
        before = event["pid"].clone();
        kill(&event);
        let event = server.event("restarting");
        assert_eq!(
            (event["restart"].as_u64(), event["delay_seconds"].as_f64()),
            (Some(restart), Some(delay))
        );
        assert_eq!(event["code"], 137);
    }
    kill(&server.event("ready"));
    let (code, said) = server.end();
    assert_eq!(code, Some(137), "{}", server.log());
    assert!(said.contains("the engine has ended by signal 9"), "{said}");
    assert!(server.log().contains("no more restarts: there were 2 in a row"), "{}", server.log());
}
