//! No acknowledged write is lost when an engine shuts down or hands over, over RDMA.
//! `FERRITE_SHUTDOWNS=50` for as many rounds of each (`cargo xtask lab-test lab_shutdown --runner
//! "env FERRITE_SHUTDOWNS=50"`).

mod scene;
mod shutdown;

use std::path::Path;

use ferrite_fabric::{Config, Fabric, Rdma};
use ferrite_proto::resp::{Limits, ReplyFramer, encode_command};
use ferrite_session::{Connector, Session, SessionTransport};
use scene::{REDIS, Server};
use shutdown::{Increment, Way, failover_keeps_what_was_acknowledged, keeps_what_was_acknowledged};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::runtime::Runtime;

const FIRST: [&str; 8] =
    ["rdma-bind", "10.0.0.1", "rdma-port", "6390", "rdma", "require", "rdma-device", "rxe1"];
const SECOND: [&str; 8] =
    ["rdma-bind", "10.0.0.1", "rdma-port", "6391", "rdma", "require", "rdma-device", "rxe1"];

/// A client on the other host.
fn connect(server: &Server) -> Increment {
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
        let mut heard = Vec::new();
        loop {
            let framed = ReplyFramer::new(Limits::default()).feed(&heard).expect("a reply");
            if framed.complete {
                return heard.starts_with(b":");
            }
            if !session.read_buf(&mut heard).await.is_ok_and(|count| count > 0) {
                return false;
            }
        }
    })
}

fn keeps(way: Way) {
    keeps_what_was_acknowledged(Path::new(REDIS), &FIRST, way, &connect);
}

fn fails_over() {
    failover_keeps_what_was_acknowledged(Path::new(REDIS), [&FIRST, &SECOND], &connect);
}

shutdown::shutdown_tests!();
