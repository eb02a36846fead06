//! `ferrite server` with real engines on a host without RDMA: Debian's Redis, and Valkey where the
//! lab has built it.
//!
//! Checks its messages, its exit codes, and that it leaves no engine behind. `lab_server` tests it
//! over RDMA.

mod server {
    pub(crate) mod harness;
    mod reload;
    mod start;
    mod stop;
}

use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use ferrite_testkit::port::link_local_address;
use ferrite_testkit::resp::Client;
use ferrite_testkit::wait::until_or;
use ferrite_testkit::{Screen, TIMEOUT, engine, free_port};
use serde_json::Value;
use server::harness::{Server, Setup, connect, directory};

fn has_device() -> bool {
    Path::new("/sys/class/infiniband").read_dir().is_ok_and(|mut devices| devices.next().is_some())
}

/// Returns the paths of the available engines, as values for `server.engine`.
fn engines() -> Vec<String> {
    engine::engines().iter().map(|path| path.display().to_string()).collect()
}

/// Returns a `[network]` section with free ports.
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

/// Returns the process id of the engine from the event `ready`.
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
        // The command goes through the module's port.
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

/// A host name is accepted wherever an address is. A Kubernetes Service with the name `ferrite`
/// sets FERRITE_PORT, which must not break the start.
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

/// The engine and the module listen on a link-local address, which names its interface.
#[test]
fn listens_on_addresses_with_an_interface() {
    let Some(address) = link_local_address() else { return }; // this host has no IPv6
    let (directory, tcp, rdma) = (directory(), free_port(), free_port());
    let network = format!(
        "port = {tcp}\nbind = [\"127.0.0.1\", \"[{address}]\"]\n\
         rdma_listen = \"[{address}]:{rdma}\""
    );
    let setup = Setup { network: &network, ..Setup::default() };
    let mut server = Server::start(&directory, &setup);
    let event = server.event("ready");
    let (ip, _) = address.split_once('%').expect("an interface");
    let listens = event["address"].as_str().is_some_and(|text| text.contains(&format!("[{ip}%")));
    assert!(listens, "{event}");
    for port in [tcp, rdma] {
        std::net::TcpStream::connect((address.as_str(), port)).expect("it listens");
    }
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

/// Loading takes longer than `startup_timeout`, which limits only the time without an answer.
/// systemd is notified of each step.
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
        // At first the engine does not report its progress.
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
    // The password is in the engine's own file. ferrite passes that file on, but does not look for
    // the password in it.
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

    // The password is in ferrite.toml, where ferrite looks for it.
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

/// With `log_format = "json"` every line of the log is an object, even the lines of the engine.
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

/// The configuration file belongs to another engine that runs already. ferrite does not touch the
/// pid file and the log file of that engine.
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
        assert!(info.contains("maxmemory_human:77.00M"), "the other lines apply: {info}");
        server.signal("TERM");
        assert_eq!(server.event("ended")["code"], 0);
        assert_eq!(std::fs::read_to_string(&pid_file).expect("a file"), "4711\n");
        assert!(!log_file.exists(), "{engine}");
        assert!(server.log().contains("User requested shutdown"), "{}", server.log());
    }
}

/// The configuration in the first version of the documentation reaches the module unchanged.
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
