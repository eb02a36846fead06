//! The module in a real engine with RDMA, in the lab's guest (`cargo xtask lab-test module`):
//! Debian's Redis on 10.0.0.1 (rxe1), clients on 10.0.0.2 (rxe2). Tests with sessions check by INFO
//! that these used RDMA.
#![expect(clippy::print_stderr, reason = "shows the progress of longer tests")]

mod lab_module {
    mod clients;
}

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use ferrite_fabric::{Config, Fabric, ListenOptions, Rdma};
use ferrite_proto::resp::encode_command;
use ferrite_session::{Connector, Session, SessionTransport};
use ferrite_testkit::engine::REDIS;
use ferrite_testkit::{Engine, Start, TIMEOUT, free_port};
use redis::aio::MultiplexedConnection;
use redis::{AsyncCommands as _, AsyncConnectionConfig, RedisConnectionInfo, Value};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

const HOST: &str = "10.0.0.1";
const PORT: &str = "6390";
const LONG: Duration = Duration::from_secs(150);

fn start(more: &[&str], options: &[&str]) -> Engine {
    let arguments =
        [&["rdma-bind", HOST, "rdma-port", PORT, "rdma", "require", "rdma-device", "rxe1"], more]
            .concat();
    let options = [&["--port", "0", "--protected-mode", "no"], options].concat();
    Engine::start(&Start { program: Path::new(REDIS), module: Some(&arguments), options: &options })
}

/// Runs a test's clients on the other host's device. They must finish in time and leave no verbs
/// objects behind.
fn run(test: impl AsyncFnOnce(&Connector)) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let config = Config { busy_poll_us: 0, ..Config::default() };
        let fabric = Fabric::system().rdma(Rdma::Require).device("rxe2").config(config).build();
        let fabric = fabric.expect("a fabric");
        let driver = tokio::spawn(fabric.drive());
        let local = "10.0.0.2:0".parse().expect("an address");
        let connector = Connector::new(&fabric).rdma(Rdma::Require).local(local);
        drop(fabric);
        tokio::time::timeout(LONG, test(&connector)).await.expect("the clients finish in time");
        drop(connector);
        let ended = tokio::time::timeout(TIMEOUT, driver).await;
        ended.expect("the fabric stops in time").expect("no panic").expect("no fabric error");
    });
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

fn address() -> SocketAddr {
    format!("{HOST}:{PORT}").parse().expect("an address")
}

/// Opens a session, which must be over RDMA.
async fn session(connector: &Connector) -> Session {
    let session = connector.connect(address()).await.expect("a session");
    assert_eq!(session.transport(), SessionTransport::FerriteRdma);
    session
}

async fn try_connection(
    connector: &Connector,
    info: RedisConnectionInfo,
) -> redis::RedisResult<MultiplexedConnection> {
    let config = AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(60)));
    let (connection, driver) =
        MultiplexedConnection::new_with_config(&info, session(connector).await, config).await?;
    tokio::spawn(driver);
    Ok(connection)
}

async fn connection(connector: &Connector) -> MultiplexedConnection {
    try_connection(connector, RedisConnectionInfo::default()).await.expect("a connection")
}

/// A session with raw protocol access, since a multiplexed connection cannot handle messages
/// without a request.
struct Raw(Session);

impl Raw {
    /// Sends an inline command.
    async fn send_inline(&mut self, line: &str) {
        self.0.write_all(format!("{line}\r\n").as_bytes()).await.expect("the session is open");
        self.0.flush().await.expect("the session is open");
    }

    /// Sends a command as an array of words, as client libraries do.
    async fn send(&mut self, line: &str) {
        let (words, mut bytes): (Vec<_>, _) = (line.split(' ').collect(), Vec::new());
        encode_command(words, &mut bytes);
        self.0.write_all(&bytes).await.expect("the session is open");
        self.0.flush().await.expect("the session is open");
    }

    /// Reads until the received text ends with `end`.
    async fn read_until(&mut self, end: &str) -> String {
        let mut received = String::new();
        while !received.ends_with(end) {
            received.push(self.0.read_u8().await.expect("a byte").into());
        }
        received
    }
}

/// Asserts that there were this many sessions, all over RDMA and without errors.
fn assert_over_rdma(server: &mut Engine, sessions: u64) {
    server.assert_healthy();
    assert_eq!(
        server.count("begun_ferrite"),
        sessions,
        "{}",
        server.ask::<String>(&["INFO", "ferrite"])
    );
    for nothing in [
        "begun_tcp",
        "refused",
        "engine_failures",
        "rdma_tcp_bytes",
        "rdma_completion_errors",
        "rdma_failed_links",
    ] {
        assert_eq!(server.count(nothing), 0, "{nothing}");
    }
    assert!(server.count("rdma_recv_ops") > 0);
    server.wait_until("the end of all sessions", || server.count("sessions") == 0);
}

#[test]
fn listens_over_rdma_and_reports_it() {
    let mut server = start(&[], &[]);
    assert_eq!(server.info("status"), "listening");
    assert_eq!(
        (server.info("devices").as_str(), server.info("address")),
        ("rxe1", format!("{HOST}:{PORT}"))
    );
    assert!(server.log().contains("ferrite: listening on 10.0.0.1:6390 over RDMA (rxe1); "));
    let doctor: String = server.ask(&["FERRITE", "DOCTOR"]);
    assert!(doctor.contains("[ ok ] 10.0.0.1:6390: RDMA on rxe1"), "{doctor}");
    run(async |connector| {
        let mut connection = connection(connector).await;
        assert_eq!(
            redis::cmd("PING").query_async::<String>(&mut connection).await.expect("PING"),
            "PONG"
        );
        let listed: String = redis::cmd("FERRITE")
            .arg("CLIENTS")
            .query_async(&mut connection)
            .await
            .expect("CLIENTS");
        assert_eq!(listed.lines().count(), 1, "{listed}");
        for part in
            ["addr=10.0.0.2:", "laddr=10.0.0.1:", "transport=rdma-ferrite", "device=rxe1", " path="]
        {
            assert!(listed.contains(part), "{listed}");
        }
        let info: String =
            redis::cmd("INFO").arg("ferrite").query_async(&mut connection).await.expect("INFO");
        assert!(
            info.contains("ferrite_sessions_rdma_ferrite:1")
                && info.contains("ferrite_rdma_connections:1"),
            "{info}"
        );
    });
    assert_over_rdma(&mut server, 1);
    assert!(server.count("rdma_memory_registered_bytes") > 0);
    assert!(server.shut_down("NOSAVE").success());
}

/// Starts an engine that must refuse to load the module, and returns its log.
fn log_of_failed_load(arguments: &[&str], options: &[&str]) -> String {
    let start = Start { program: Path::new(REDIS), module: Some(arguments), options };
    let (status, log) = Engine::run_until_exit(&start);
    assert!(!status.success() && log.contains("ferrite: not loaded: "), "{log}");
    log
}

/// An operator who names a device wants RDMA, so the module does not fall back to TCP.
#[test]
fn refuses_to_load_with_a_wrong_device() {
    let no_port = ["--port", "0"];
    let log = log_of_failed_load(&["rdma-bind", HOST, "rdma-device", "mlx5_0"], &no_port);
    assert!(log.contains("no RDMA device mlx5_0; devices: rxe"), "{log}");
    assert!(log.contains("; to do: name one of these devices"), "{log}");
    // The address is from `rdma-bind` or, without it, from the engine's `bind`.
    let tcp = free_port().to_string();
    for (arguments, options) in [
        (&["rdma-device", "rxe2", "rdma-bind", HOST][..], &no_port[..]),
        (&["rdma-device", "rxe2"], &["--port", &tcp, "--bind", HOST]),
        (&["rdma-device", "rxe2"], &["--port", &tcp, "--bind", &format!("{HOST} 127.0.0.1")]),
    ] {
        let log = log_of_failed_load(arguments, options);
        assert!(log.contains("10.0.0.1 is an address of device rxe1, but only rxe2"), "{log}");
        assert!(log.contains("to do: "), "{log}");
    }
}

/// A port that another program uses for RDMA is no reason for a fallback to TCP, although TCP could
/// use the port.
#[test]
fn refuses_to_load_if_only_the_rdma_port_is_in_use() {
    let other = Fabric::system().rdma(Rdma::Require).device("rxe1").build().expect("a fabric");
    let at = SocketAddr::new(address().ip(), free_port());
    let taken =
        other.listen_with(at, &ListenOptions::new().rdma(Rdma::Require)).expect("a free port");
    drop(std::net::TcpListener::bind(at).expect("TCP can use the port"));
    let [port, tcp] = [at.port(), free_port()].map(|port| port.to_string());
    for (arguments, options) in [
        (&["rdma-port", &port, "rdma-bind", HOST][..], &["--port", "0"][..]),
        (&["rdma-port", &port], &["--port", &tcp, "--bind", HOST]),
    ] {
        let log = log_of_failed_load(arguments, options);
        let why = format!("not loaded: cannot listen on {at}: ");
        assert!(log.contains(&why) && log.contains("in use"), "{log}");
    }
    drop((taken, other));
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

/// Runs a command of the lab's guest.
fn sh(line: &str) {
    let status = std::process::Command::new("sh").args(["-c", line]).status().expect("sh");
    assert!(status.success(), "{line}");
}

/// On drop, takes the interface up and creates the device again if it is missing.
struct RestoreDevice;

impl Drop for RestoreDevice {
    fn drop(&mut self) {
        let line = "ip link set h1 up; rdma link show rxe1/1 >/dev/null 2>&1 ||
                    rdma link add rxe1 type rxe netdev h1";
        let _ = std::process::Command::new("sh").args(["-c", line]).status();
    }
}

/// A line of the module in the log of Redis is a warning (`#`) or a notice (`*`).
const WARNING: char = '#';
const NOTICE: char = '*';

/// Waits for a line of the module with this level and a text that begins with `text`.
#[track_caller]
fn wait_for_line(server: &Engine, level: char, text: &str) {
    server.wait_for_log(&format!(" {level} <module> ferrite: {text}"));
}

#[test]
fn names_a_device_that_goes_and_returns() {
    let _restore = RestoreDevice;
    let arguments = ["rdma-bind", HOST, "rdma-port", PORT];
    let options = ["--port", "0", "--protected-mode", "no"];
    let start = Start { program: Path::new(REDIS), module: Some(&arguments), options: &options };
    let mut server = Engine::start(&start);
    let doctor = |server: &Engine| server.ask::<String>(&["FERRITE", "DOCTOR"]);
    let fine = "[ ok ] all RDMA devices in use are present";
    assert!(doctor(&server).contains(fine), "{}", doctor(&server));
    sh("ip link set h1 down");
    wait_for_line(&server, WARNING, "RDMA device rxe1: port 1 went down");
    assert!(doctor(&server).contains("[warn] rxe1: port 1 is down"), "{}", doctor(&server));
    sh("ip link set h1 up");
    wait_for_line(&server, NOTICE, "RDMA device rxe1: port 1 is up again");
    server.wait_until("a port that is up", || doctor(&server).contains(fine));
    let gone = "; its links end or continue over TCP";
    assert!(!server.log().contains(gone), "{}", server.log());
    sh("rdma link delete rxe1");
    server.wait_for_log(gone);
    let log = server.log();
    let lines: Vec<_> = log.lines().filter(|line| line.contains(gone)).collect();
    let start = format!(" {WARNING} <module> ferrite: RDMA device rxe1: ");
    assert!(lines.len() == 1 && lines[0].contains(&start), "{lines:?}");
    server.wait_until("a doctor that names the device", || {
        doctor(&server).contains("[warn] rxe1 was removed or failed")
    });
    sh("rdma link add rxe1 type rxe netdev h1");
    wait_for_line(&server, NOTICE, "RDMA device rxe1 is back and in use again");
    server.wait_until("a doctor without a warning", || doctor(&server).contains(fine));
    server.assert_healthy();
}

#[test]
fn the_engines_passwords_and_acls_apply() {
    let mut server = start(&[], &["--requirepass", "secret"]);
    let mut own = server_connection(&server, "secret");
    let () = redis::cmd("ACL")
        .arg(&["SETUSER", "reader", "on", ">pw", "~public:*", "+get", "+ping"])
        .query(&mut own)
        .expect("ACL");
    run(async |connector| {
        let mut anonymous = Raw(session(connector).await);
        anonymous.send_inline("GET a").await;
        assert_eq!(anonymous.read_until("\r\n").await, "-NOAUTH Authentication required.\r\n");
        let wrong = RedisConnectionInfo::default().set_password("wrong");
        assert!(try_connection(connector, wrong).await.is_err());
        let right = RedisConnectionInfo::default().set_password("secret");
        let mut admin = try_connection(connector, right).await.expect("a login");
        let () = admin.set("public:a", 1).await.expect("SET");
        let reader = RedisConnectionInfo::default().set_username("reader").set_password("pw");
        let mut reader = try_connection(connector, reader).await.expect("a login");
        assert_eq!(reader.get::<_, i64>("public:a").await.expect("GET"), 1);
        for refused in [reader.get::<_, Value>("private").await, reader.set("public:a", 2).await] {
            assert_eq!(refused.expect_err("not allowed").code(), Some("NOPERM"));
        }
    });
    let info: String = redis::cmd("INFO").arg("ferrite").query(&mut own).expect("INFO");
    assert!(
        info.contains("ferrite_begun_ferrite:4") && info.contains("ferrite_begun_tcp:0"),
        "{info}"
    );
    server.assert_healthy();
}

fn server_connection(server: &Engine, password: &str) -> redis::Connection {
    let mut own = server.connection().expect("a connection");
    let () = redis::cmd("AUTH").arg(password).query(&mut own).expect("AUTH");
    own
}

/// While the engine is in protected mode and has no password, clients of other hosts are rejected
/// with a reason.
#[test]
fn the_engines_protected_mode_applies() {
    let mut server = start(&[], &["--protected-mode", "yes"]);
    run(async |connector| {
        let mut rejected = session(connector).await;
        let mut reply = String::new();
        let _ = rejected.read_to_string(&mut reply).await;
        assert!(reply.starts_with("-DENIED The Ferrite module is in protected mode"), "{reply}");
        assert_eq!(server.count("refused"), 1);
        let () = server.ask(&["CONFIG", "SET", "protected-mode", "no"]);
        let mut accepted = connection(connector).await;
        let () = redis::cmd("PING").query_async(&mut accepted).await.expect("PING");
        let () = server.ask(&["CONFIG", "SET", "protected-mode", "yes"]);
        let () = redis::cmd("PING").query_async(&mut accepted).await.expect("an open session");
    });
    assert_eq!(server.count("begun_ferrite"), 2);
    server.assert_healthy();
}

/// The engine rejects a value of more than 512 MB by its header, while the client still writes it.
#[test]
fn writers_of_too_large_values_read_why_they_were_rejected() {
    let mut server = start(&[], &[]);
    run(async |connector| {
        let (mut reader, mut writer) = tokio::io::split(session(connector).await);
        let writing = async {
            writer.write_all(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$536870913\r\n").await?;
            for _ in 0..64 {
                writer.write_all(&[b'x'; 64 << 10]).await?; // fails once the server has closed
            }
            Ok::<_, std::io::Error>(())
        };
        let mut reply = String::new();
        let (_, read) = tokio::join!(writing, reader.read_to_string(&mut reply));
        read.expect("the end of the stream");
        assert_eq!(reply, "-ERR Protocol error: invalid bulk length\r\n");
    });
    assert_eq!((server.count("begun_ferrite"), server.count("begun_tcp")), (1, 0));
    server.assert_healthy();
}

#[test]
fn kill_ends_one_session() {
    let mut server = start(&["max-clients", "2"], &[]);
    run(async |connector| {
        let mut first = Raw(session(connector).await);
        first.send_inline("PING").await;
        first.read_until("+PONG\r\n").await;
        let mut second = Raw(session(connector).await);
        second.send_inline("PING").await;
        second.read_until("+PONG\r\n").await;
        let mut third = session(connector).await;
        let mut reply = String::new();
        let _ = third.read_to_string(&mut reply).await;
        assert_eq!(reply, "-ERR max number of clients reached\r\n");
        let () = server.ask(&["FERRITE", "KILL", "1"]);
        assert_eq!(first.0.read(&mut [0; 16]).await.expect("an orderly close"), 0);
        server.wait_until("only one session is left", || server.count("sessions") == 1);
        second.send_inline("PING").await;
        second.read_until("+PONG\r\n").await;
        let mut fourth = Raw(session(connector).await);
        fourth.send_inline("PING").await;
        fourth.read_until("+PONG\r\n").await;
    });
    assert_eq!(
        (server.count("killed"), server.count("refused"), server.count("begun_ferrite")),
        (1, 1, 4)
    );
    server.assert_healthy();
}

/// The engine forks a child to save. Registered memory must stay where the device knows it.
#[test]
fn background_saves_do_not_corrupt_values() {
    let mut server = start(&[], &["--rdb-key-save-delay", "1000"]);
    run(async |connector| {
        let mut connection = connection(connector).await;
        for round in 0..5_u64 {
            let _: redis::Value = server.ask(&["BGSAVE"]);
            for number in 0..200_u64 {
                let value = vec![(round * 7 + number) as u8; 10_000 + number as usize];
                let key = format!("key {number}");
                let () = connection.set(&key, &value).await.expect("SET");
                let read: Vec<u8> = connection.get(&key).await.expect("GET");
                assert!(read == value, "round {round}, {number}");
            }
            server.wait_until("the end of the save", || {
                server.ask::<String>(&["INFO", "persistence"]).contains("rdb_bgsave_in_progress:0")
            });
        }
    });
    assert!(server.ask::<String>(&["INFO", "persistence"]).contains("rdb_last_bgsave_status:ok"));
    assert!(server.ask::<String>(&["INFO", "persistence"]).contains("rdb_saves:5"));
    assert_over_rdma(&mut server, 1);
}

/// The engine shuts down in time, and clients notice it.
#[test]
fn shuts_down_during_traffic() {
    for how in ["NOSAVE", "TERM"] {
        let mut server = start(&[], &[]);
        run(async |connector| {
            let mut tasks = Vec::new();
            for _ in 0..8 {
                let mut connection = connection(connector).await;
                tasks.push(tokio::spawn(async move {
                    let mut done = 0_u64;
                    while connection.incr::<_, _, i64>("counter", 1).await.is_ok() {
                        done += 1;
                    }
                    done
                }));
            }
            let mut waiting = Raw(session(connector).await);
            waiting.send_inline("BLPOP list 0").await;
            server.wait_until("traffic", || server.ask::<i64>(&["INCRBY", "counter", "0"]) > 100);
            assert_eq!(server.count("rdma_connections"), 9);
            let started = std::time::Instant::now();
            let status = if how == "TERM" {
                server.signal("TERM");
                server.wait()
            } else {
                server.shut_down(how)
            };
            eprintln!("{how}: {:?}", started.elapsed());
            assert!(status.success(), "{how}: {status}; {}", server.log());
            assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
            for task in tasks {
                let done = tokio::time::timeout(TIMEOUT, task)
                    .await
                    .expect("the client notices the shutdown")
                    .expect("no panic");
                assert!(done > 0);
            }
            let mut rest = Vec::new();
            let ended = tokio::time::timeout(TIMEOUT, waiting.0.read_to_end(&mut rest)).await;
            let _ = ended.expect("the client notices the shutdown");
        });
        let log = server.log();
        assert!(!log.contains("panic") && !log.contains("BUG REPORT"), "{log}");
    }
}
