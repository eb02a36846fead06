//! `ferrite server` with RDMA, in the lab's guest (`cargo xtask lab-test lab_server`): Debian's
//! Redis on 10.0.0.1 (rxe1), a client from 10.0.0.2 (rxe2).

#[path = "server/scene.rs"]
mod scene;

use std::os::unix::net::UnixStream;
use std::time::Duration;

use ferrite_client::redis::{self, AsyncCommands as _, AsyncConnectionConfig};
use ferrite_client::{Client, Connection};
use ferrite_fabric::{Config, Fabric, Rdma};
use scene::{Directory, PATIENCE, Server, Setup, ask, signal, until};
use serde_json::Value;

const ADDRESS: &str = "10.0.0.1:6395";
const NETWORK: &str = "port = 0\nrdma_device = \"rxe1\"\nrdma_listen = \"10.0.0.1:6395\"";
/// Clients of other hosts, and no password: the lab is nobody else's.
const OPEN: &str = "protected-mode = false";
const LONG: Duration = Duration::from_secs(120);

/// Runs what a client on the other host does, over RDMA, which must end in time; nothing may be
/// left of its devices.
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
        let ended = tokio::time::timeout(PATIENCE, driver).await;
        ended.expect("a fabric that ends").expect("no panic").expect("it drove");
    });
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

fn assert_over_rdma(event: &Value) {
    assert_eq!(
        (&event["status"], &event["address"]),
        (&"listening".into(), &ADDRESS.into()),
        "{event}"
    );
    assert_eq!(event["devices"], serde_json::json!(["rxe1"]), "{event}");
    assert_eq!(event["reason"], Value::Null, "{event}");
}

/// A number of INFO ferrite, by the engine's own socket. Where the transport's thread is slow, it
/// is not there yet, or an old one.
fn count(event: &Value, field: &str) -> Option<u64> {
    let socket =
        UnixStream::connect(event["unix_socket"].as_str().expect("a path")).expect("it listens");
    socket.set_read_timeout(Some(PATIENCE)).expect("a time limit");
    let info = ask(socket, &["INFO", "ferrite"]);
    let wanted = format!("ferrite_{field}:");
    let found = info.lines().find_map(|line| line.strip_prefix(&wanted));
    found.and_then(|number| number.trim().parse().ok())
}

#[test]
fn clients_over_rdma_and_what_they_wrote_is_kept() {
    let directory = Directory::new();
    let setup = Setup { server: "rdma = \"require\"", network: NETWORK, engine: OPEN };
    let large = vec![7_u8; 3 << 20];
    let mut first = Server::start(&directory, &setup);
    let event = first.event("ready");
    assert_over_rdma(&event);
    first.until_logged("clients at 10.0.0.1:6395 over RDMA (rxe1)");
    client(async |connection| {
        let () = connection.set("key", "kept").await.expect("SET");
        let () = connection.set("large", &large).await.expect("SET");
    });
    assert_eq!((count(&event, "begun_ferrite"), count(&event, "begun_tcp")), (Some(1), Some(0)));
    let all = || count(&event, "rdma_recv_bytes").is_some_and(|bytes| bytes > 3 << 20);
    until("the device has counted it all", all, || first.log());
    first.signal("TERM");
    assert_eq!(first.event("ended")["code"], 0);
    assert_eq!(first.end(), (Some(0), String::new()));

    let mut second = Server::start(&directory, &setup);
    assert_over_rdma(&second.event("ready"));
    client(async |connection| {
        assert_eq!(connection.get::<_, String>("key").await.expect("GET"), "kept");
        assert!(connection.get::<_, Vec<u8>>("large").await.expect("GET") == large);
        // The end while a client is there: it hears of it, and the engine ends as well as without.
        second.signal("TERM");
        let gone =
            redis::cmd("BLPOP").arg("nothing").arg(0).query_async::<redis::Value>(connection).await;
        gone.expect_err("the server has ended");
    });
    assert_eq!(second.event("ended")["code"], 0);
    assert_eq!(second.end().0, Some(0));
}

/// The kernel takes the devices' objects of the one that was killed; the next one has them again.
#[test]
fn a_killed_engine_is_back_over_rdma() {
    let directory = Directory::new();
    let policy = "rdma = \"require\"\nrestart = \"on-failure\"\nrestart_delay = \"200ms\"";
    let setup = Setup { server: policy, network: NETWORK, engine: OPEN };
    let mut server = Server::start(&directory, &setup);
    let event = server.event("ready");
    assert_over_rdma(&event);
    signal("KILL", u32::try_from(event["pid"].as_u64().expect("an id")).expect("an id"));
    assert_eq!(server.event("restarting")["code"], 137);
    assert_over_rdma(&server.event("ready"));
    client(async |connection| {
        let () = connection.set("key", "value").await.expect("SET");
    });
    server.signal("TERM");
    assert_eq!(server.event("ended")["code"], 0);
}

/// A device that is not there is no reason to take TCP, where RDMA is required.
#[test]
fn a_device_that_is_not_there_has_its_code() {
    let directory = Directory::new();
    let network = NETWORK.replace("rxe1", "rxe77");
    let setup = Setup { server: "rdma = \"require\"", network: &network, engine: OPEN };
    let mut server = Server::start(&directory, &setup);
    let (code, said) = server.end();
    assert_eq!(code, Some(69), "{}", server.log());
    assert!(said.contains("RDMA is required") && said.contains("rxe77"), "{said}");
}

/// An address that another has is a failure like others, and not the absence of RDMA.
#[test]
fn an_address_in_use_is_no_absence() {
    let (directory, other) = (Directory::new(), Directory::new());
    let setup = Setup { server: "rdma = \"require\"", network: NETWORK, engine: OPEN };
    let mut first = Server::start(&directory, &setup);
    assert_over_rdma(&first.event("ready"));
    let mut second = Server::start(&other, &setup);
    let (code, said) = second.end();
    assert_eq!(code, Some(1), "{}", second.log());
    assert!(
        said.contains("the module is not loaded: ") && said.contains("already in use"),
        "{said}"
    );
    first.signal("TERM");
    assert_eq!(first.event("ended")["code"], 0);
}
