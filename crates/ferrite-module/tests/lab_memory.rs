//! The attack of `host_memory` in the lab's guest, where receive memory is pinned (`cargo xtask
//! lab-test lab_memory`). In addition, clients of Valkey Over RDMA send commands without a password
//! and read nothing.
#![expect(clippy::print_stderr, reason = "the figures are for people to judge")]

mod client;
mod memory {
    pub(crate) mod attack;
    pub(crate) mod honest;
    pub(crate) mod run;
}

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ferrite_fabric::{Config, ConnectOptions, Fabric, Rdma};
use ferrite_proto::Role;
use ferrite_session::{ValkeyConfig, ValkeyStream, client_config};
use ferrite_testkit::engine::REDIS;
use ferrite_testkit::{Engine, Start, TIMEOUT};
use memory::run::{self, PASSWORD};
use tokio::io::AsyncWriteExt as _;
use tokio::sync::watch;
use tokio::task::JoinSet;

const HOST: &str = "10.0.0.1";
const PORT: &str = "6390";
const CLIENTS: usize = 50;

/// Sends commands as long as the server accepts them, and never reads.
async fn flood(fabric: Fabric, connected: Arc<AtomicUsize>) {
    let options = ConnectOptions::new().local("10.0.0.2:0".parse().expect("an address"));
    let target = format!("{HOST}:{PORT}").parse().expect("an address");
    let raw = fabric.connect_raw(target, &options).await.expect("a connection");
    let mut stream =
        ValkeyStream::open(raw, Role::Client, &ValkeyConfig::default()).await.expect("a window");
    let commands = b"*1\r\n$4\r\nPING\r\n".repeat(1000);
    connected.fetch_add(1, Ordering::Relaxed);
    while stream.write_all(&commands).await.is_ok() {}
    std::future::pending::<()>().await; // keeps the connection open
}

#[test]
fn clients_without_a_password_pin_little_memory() {
    let arguments = ["rdma-bind", HOST, "rdma-port", PORT, "rdma", "prefer", "rdma-device", "rxe1"];
    let options = ["--port", "0", "--requirepass", PASSWORD];
    let mut server = Engine::start(&Start {
        program: Path::new(REDIS),
        module: Some(&arguments),
        options: &options,
    });
    let (stop, mut stopped) = watch::channel(false);
    let connected = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&connected);
    let flooding = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let config = Config { busy_poll_us: 0, ..client_config() };
            let fabric = Fabric::system().rdma(Rdma::Require).device("rxe2").config(config).build();
            let fabric = fabric.expect("a fabric");
            let driver = tokio::spawn(fabric.drive());
            let mut clients: JoinSet<()> =
                (0..CLIENTS).map(|_| flood(fabric.clone(), Arc::clone(&counter))).collect();
            tokio::select! {
                _ = stopped.wait_for(|stopped| *stopped) => {}
                Some(ended) = clients.join_next() => panic!("a client has ended: {ended:?}"),
            }
            clients.shutdown().await;
            drop(fabric);
            let ended = tokio::time::timeout(TIMEOUT, driver).await;
            ended.expect("the fabric stops in time").expect("no panic").expect("no fabric error");
        });
    });
    server.wait_until("clients over RDMA", || {
        assert!(!flooding.is_finished(), "the clients were rejected: {}", server.log());
        connected.load(Ordering::Relaxed) == CLIENTS
    });
    run::attack(&mut server, run::plan());
    let _ = stop.send(true);
    flooding.join().expect("no panic");
    server.assert_healthy();
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}
