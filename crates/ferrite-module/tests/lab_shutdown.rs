//! No acknowledged write is lost when an engine shuts down or fails over. The clients use RDMA. For
//! 50 rounds of each test: `cargo xtask lab-test lab_shutdown --runner "env FERRITE_SHUTDOWNS=50"`.

mod shutdown;

use std::path::Path;

use ferrite_fabric::{Config, Fabric, Rdma};
use ferrite_proto::resp::{Limits, ReplyFramer, encode_command};
use ferrite_session::{Connector, Session, SessionTransport};
use ferrite_testkit::Engine;
use ferrite_testkit::engine::REDIS;
use shutdown::{
    Increment, Way, failover_keeps_acknowledged_writes, shutdown_keeps_acknowledged_writes,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::runtime::Runtime;

const FIRST: [&str; 8] =
    ["rdma-bind", "10.0.0.1", "rdma-port", "6390", "rdma", "require", "rdma-device", "rxe1"];
const SECOND: [&str; 8] =
    ["rdma-bind", "10.0.0.1", "rdma-port", "6391", "rdma", "require", "rdma-device", "rxe1"];

/// Connects a client from the address of the other host.
fn connect(server: &Engine) -> Increment {
    let address = server.info("address").parse().expect("an address");
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let mut session = runtime.block_on(async {
        let config = Config { busy_poll_us: 0, ..Config::default() };
        let fabric = Fabric::system().rdma(Rdma::Require).device("rxe2").config(config).build();
        let fabric = fabric.expect("a fabric");
        tokio::spawn(fabric.drive());
        let local = "10.0.0.2:0".parse().expect("an address");
        let connector = Connector::new(&fabric).rdma(Rdma::Require).local(local);
        connector.connect(address).await.expect("a session")
    });
    assert_eq!(session.transport(), SessionTransport::FerriteRdma);
    Box::new(move |key| increment(&runtime, &mut session, key))
}

fn increment(runtime: &Runtime, session: &mut Session, key: &str) -> bool {
    runtime.block_on(async {
        let mut bytes = Vec::new();
        encode_command(["INCR", key], &mut bytes);
        if session.write_all(&bytes).await.is_err() {
            return false;
        }
        let mut received = Vec::new();
        loop {
            let framed = ReplyFramer::new(Limits::default()).feed(&received).expect("a reply");
            if framed.complete {
                return received.starts_with(b":");
            }
            if !session.read_buf(&mut received).await.is_ok_and(|count| count > 0) {
                return false;
            }
        }
    })
}

fn test_shutdown(way: Way) {
    shutdown_keeps_acknowledged_writes(Path::new(REDIS), &FIRST, way, &connect);
}

fn test_failover() {
    failover_keeps_acknowledged_writes(Path::new(REDIS), [&FIRST, &SECOND], &connect);
}

shutdown::shutdown_tests!();
