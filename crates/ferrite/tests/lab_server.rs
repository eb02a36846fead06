//! `ferrite server` over RDMA, in the lab's virtual machine (`cargo xtask lab-test lab_server`):
//! Debian's Redis on 10.0.0.1 (rxe1), a client on 10.0.0.2 (rxe2).

mod server {
    pub(crate) mod harness;
}

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use ferrite_client::redis::{self, AsyncCommands as _, AsyncConnectionConfig};
use ferrite_client::{Client, Connection};
use ferrite_fabric::{Config, Fabric, Rdma};
use ferrite_testkit::TIMEOUT;
use ferrite_testkit::lab::slowdown;
use ferrite_testkit::process::signal;
use ferrite_testkit::wait::until_or;
use serde_json::Value;
use server::harness::{Server, Setup, connect, directory};

const ADDRESS: &str = "10.0.0.1:6395";
const NETWORK: &str = "port = 0\nrdma_device = \"rxe1\"\nrdma_listen = \"10.0.0.1:6395\"";
/// Accepts clients of other hosts without a password. Only the test can reach the lab's network.
const OPEN: &str = "protected-mode = false";
const LONG: Duration = Duration::from_secs(120);

/// Runs `test` with a client on the second host, over RDMA. The test must end in time and release
/// all verbs objects.
fn client(test: impl AsyncFnOnce(&mut Connection)) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let config = Config { busy_poll_us: 0, ..Config::default() };
        let fabric = Fabric::system().rdma(Rdma::Require).device("rxe2").config(config).build();
        let fabric = fabric.expect("a fabric");
        let driver = tokio::spawn(fabric.drive());
        let (server, local) =
            (ADDRESS.parse().expect("an address"), "10.0.0.2:0".parse().expect("an address"));
        let config = AsyncConnectionConfig::new().set_response_timeout(Some(LONG));
        let client = Client::builder(&fabric, server)
            .rdma(Rdma::Require)
            .local(local)
            .config(config)
            .build();
        drop(fabric);
        let done = tokio::time::timeout(LONG, async {
            let mut connection = client.connect().await.expect("a connection");
            assert_eq!(connection.transport_info().transport.to_string(), "RDMA (Ferrite)");
            test(&mut connection).await;
        });
        done.await.expect("in time");
        drop(client);
        let ended = tokio::time::timeout(TIMEOUT, driver).await;
        ended.expect("the fabric stops in time").expect("no panic").expect("no error");
    });
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

/// Runs a command to its end. Returns its exit code, its stdout and its stderr.
fn run(command: &mut Command) -> (Option<i32>, String, String) {
    let output = command.output().expect("the program starts");
    let [stdout, stderr] =
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).expect("UTF-8"));
    (output.status.code(), stdout, stderr)
}

fn assert_listens_over_rdma(event: &Value) {
    assert_eq!(
        (&event["status"], &event["address"]),
        (&"listening".into(), &ADDRESS.into()),
        "{event}"
    );
    assert_eq!(event["devices"], serde_json::json!(["rxe1"]), "{event}");
    assert_eq!(event["reason"], Value::Null, "{event}");
}

/// Returns a counter of INFO ferrite, read through the engine's own socket. The counter may be
/// missing or out of date while the transport's thread is slow.
fn counter(event: &Value, field: &str) -> Option<u64> {
    let info = connect(event).text(&["INFO", "ferrite"]);
    let prefix = format!("ferrite_{field}:");
    let value = info.lines().find_map(|line| line.strip_prefix(&prefix));
    value.and_then(|number| number.trim().parse().ok())
}

#[test]
fn serves_rdma_clients_and_keeps_their_data() {
    let directory = directory();
    let setup = Setup { server: "rdma = \"require\"", network: NETWORK, engine: OPEN };
    let large = vec![7_u8; 3 << 20];
    let mut first = Server::start(&directory, &setup);
    let event = first.event("ready");
    assert_listens_over_rdma(&event);
    first.until_logged("clients at 10.0.0.1:6395 over RDMA (rxe1)");
    client(async |connection| {
        let () = connection.set("key", "kept").await.expect("SET");
        let () = connection.set("large", &large).await.expect("SET");
    });
    let begun = (counter(&event, "begun_ferrite"), counter(&event, "begun_tcp"));
    assert_eq!(begun, (Some(1), Some(0)));
    let all = || counter(&event, "rdma_recv_bytes").is_some_and(|bytes| bytes > 3 << 20);
    until_or(TIMEOUT, "the device has counted all bytes", all, || first.log());
    first.signal("TERM");
    assert_eq!(first.event("ended")["code"], 0);
    assert_eq!(first.end(), (Some(0), String::new()));

    let mut second = Server::start(&directory, &setup);
    assert_listens_over_rdma(&second.event("ready"));
    client(async |connection| {
        assert_eq!(connection.get::<_, String>("key").await.expect("GET"), "kept");
        assert!(connection.get::<_, Vec<u8>>("large").await.expect("GET") == large);
        // The server stops while a client waits. The client gets an error, and the engine exits
        // with code 0.
        second.signal("TERM");
        let reply =
            redis::cmd("BLPOP").arg("nothing").arg(0).query_async::<redis::Value>(connection).await;
        reply.expect_err("the server has stopped");
    });
    assert_eq!(second.event("ended")["code"], 0);
    assert_eq!(second.end().0, Some(0));
}

/// The module names itself in its hello, so that the client does not take it for a gateway.
#[test]
fn ferrite_cli_names_the_module() {
    let directory = directory();
    let setup = Setup { server: "rdma = \"require\"", network: NETWORK, engine: OPEN };
    let mut server = Server::start(&directory, &setup);
    assert_listens_over_rdma(&server.event("ready"));
    let program = Path::new(env!("CARGO_BIN_EXE_ferrite")).with_file_name("ferrite-cli");
    let uri = format!("redis+rdma://{ADDRESS}?rdma=require");
    let words = ["-u", &uri, "--local", "10.0.0.2", "--verbose", "PING"];
    let (_, stdout, stderr) = run(Command::new(program).args(words));
    assert_eq!(
        (stdout.as_str(), stderr.as_str()),
        ("PONG\n", "over RDMA, device rxe2, to a Ferrite module\n")
    );
    server.signal("TERM");
    assert_eq!(server.event("ended")["code"], 0);
}

/// The user may give the port of the module instead of that of a benchmark.
#[test]
fn bench_fabric_names_the_module_within_its_timeout() {
    /// How long `ferrite bench fabric` waits for the server's first answer.
    const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
    let directory = directory();
    let setup = Setup { server: "rdma = \"require\"", network: NETWORK, engine: OPEN };
    let mut server = Server::start(&directory, &setup);
    assert_listens_over_rdma(&server.event("ready"));
    let started = Instant::now();
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    command.args(["bench", "fabric", ADDRESS, "--local", "10.0.0.2"]);
    let (code, _, message) = run(&mut command);
    assert!(started.elapsed() < ANSWER_TIMEOUT * slowdown(), "{:?}", started.elapsed());
    assert_eq!(code, Some(1), "{message}");
    let peer = format!("{ADDRESS}: the peer is a Redis or Valkey server");
    assert!(message.contains(&peer) && message.contains("`ferrite bench kv`"), "{message}");
    assert!(message.contains("it answered \"-ERR "), "{message}");
    server.signal("TERM");
    assert_eq!(server.event("ended")["code"], 0);
}

/// The kernel frees the verbs objects of the killed engine, so that the next one can create them.
#[test]
fn restarted_engine_listens_over_rdma_again() {
    let directory = directory();
    let policy = "rdma = \"require\"\nrestart = \"on-failure\"\nrestart_delay = \"200ms\"";
    let setup = Setup { server: policy, network: NETWORK, engine: OPEN };
    let mut server = Server::start(&directory, &setup);
    let event = server.event("ready");
    assert_listens_over_rdma(&event);
    signal("KILL", u32::try_from(event["pid"].as_u64().expect("an id")).expect("an id"));
    assert_eq!(server.event("restarting")["code"], 137);
    assert_listens_over_rdma(&server.event("ready"));
    client(async |connection| {
        let () = connection.set("key", "value").await.expect("SET");
    });
    server.signal("TERM");
    assert_eq!(server.event("ended")["code"], 0);
}

/// If RDMA is required and the device is missing, the server does not fall back to TCP.
#[test]
fn exits_with_69_if_the_device_does_not_exist() {
    let directory = directory();
    let network = NETWORK.replace("rxe1", "rxe77");
    let setup = Setup { server: "rdma = \"require\"", network: &network, engine: OPEN };
    let mut server = Server::start(&directory, &setup);
    let (code, stdout) = server.end();
    assert_eq!(code, Some(69), "{}", server.log());
    assert!(stdout.contains("RDMA is required") && stdout.contains("rxe77"), "{stdout}");
}

/// A start would fail with this code, so the check does, too.
#[test]
fn check_exits_with_69_if_the_device_does_not_exist() {
    let directory = directory();
    let network = NETWORK.replace("rxe1", "rxe77");
    let setup = Setup { server: "rdma = \"require\"", network: &network, engine: OPEN };
    let file = directory.file("ferrite.toml", setup.text(directory.path()));
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    let (code, _, message) = run(command.args(["server", "--check", "--config"]).arg(file));
    assert_eq!(code, Some(69), "{message}");
    let why = "RDMA is required (server.rdma): no RDMA device rxe77; devices: rxe1, rxe2; to do: ";
    assert!(message.contains(why), "{message}");
}

/// The engine runs as a user who may not use the device files, so the module cannot open a device.
#[test]
fn exits_with_69_without_the_permission() {
    let directory = directory();
    std::fs::set_permissions(directory.path(), Permissions::from_mode(0o777)).expect("a mode");
    let setup = Setup { server: "rdma = \"require\"", network: NETWORK, engine: OPEN };
    let file = directory.file("ferrite.toml", setup.text(directory.path()));
    // Copies of the device files that only root may use.
    let close = "cp -a /dev/infiniband /tmp/closed-$$ && chmod 600 /tmp/closed-$$/* &&
                 mount --bind /tmp/closed-$$ /dev/infiniband";
    let nobody = "exec setpriv --reuid=65534 --regid=65534 --clear-groups";
    let program = env!("CARGO_BIN_EXE_ferrite");
    for check in ["", "--check"] {
        let line =
            format!("{close} && {nobody} {program} server {check} --config {}", file.display());
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &line]).env("XDG_RUNTIME_DIR", directory.path());
        let (code, _, log) = run(&mut command);
        assert_eq!(code, Some(69), "{log}");
        let last = log.lines().last().unwrap_or_default();
        for part in [
            "RDMA is required",
            "permission denied on /dev/infiniband/uverbs0",
            "to do: add the user to the group of the files in /dev/infiniband (usually rdma), or \
             write a udev rule (KERNEL==\"uverbs*|rdma_cm\", MODE=\"0666\"); then log in again, or \
             restart the service",
        ] {
            assert!(last.contains(part), "{part} is not in: {log}");
        }
        assert!(!log.contains("modprobe"), "{log}");
    }
}

/// An address in use is an ordinary failure: RDMA is available.
#[test]
fn exits_with_1_if_the_address_is_in_use() {
    let (directory, other) = (directory(), directory());
    let setup = Setup { server: "rdma = \"require\"", network: NETWORK, engine: OPEN };
    let mut first = Server::start(&directory, &setup);
    assert_listens_over_rdma(&first.event("ready"));
    let mut second = Server::start(&other, &setup);
    let (code, stdout) = second.end();
    assert_eq!(code, Some(1), "{}", second.log());
    assert!(
        stdout.contains("the module is not loaded: ") && stdout.contains("already in use"),
        "{stdout}"
    );
    first.signal("TERM");
    assert_eq!(first.event("ended")["code"], 0);
}
