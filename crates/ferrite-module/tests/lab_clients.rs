//! What clients of Valkey Over RDMA cost an engine with the module while they are silent, in the
//! lab's guest: 200 by default, `cargo xtask lab-test lab_clients --memory 6G --timeout 1500
//! --runner "env FERRITE_CLIENTS=5000" -- --no-capture` for more.
#![expect(clippy::print_stderr, reason = "its figures")]

mod scene;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_fabric::{Config, ConnectOptions, Fabric, Rdma};
use ferrite_proto::Role;
use ferrite_session::{ValkeyConfig, ValkeyStream, client_config};
use scene::{REDIS, Server, Start};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;

const HOST: &str = "10.0.0.1";
const PORT: &str = "6390";
/// That connect, or ask, at the same time: thousands at once are more than Soft-RoCE acknowledges
/// in half a second, and those that it does not are given up.
const AT_A_TIME: usize = 16;
/// A window of 64 KiB, and what else may be pinned for a client.
const PINNED_MAX: u64 = 80 << 10;

fn clients() -> usize {
    std::env::var("FERRITE_CLIENTS").ok().map_or(200, |count| count.parse().expect("a number"))
}

/// A client that speaks when it has come and when it is told to, and answers keepalives in between.
async fn client(
    fabric: Fabric,
    come: mpsc::UnboundedSender<()>,
    mut told: watch::Receiver<bool>,
    turns: Arc<Semaphore>,
) {
    let options = ConnectOptions::new().local("10.0.0.2:0".parse().expect("an address"));
    let peer = format!("{HOST}:{PORT}").parse().expect("an address");
    let raw = fabric.connect_raw(peer, &options).await.expect("a connection");
    let mut stream =
        ValkeyStream::new(raw, Role::Client, &ValkeyConfig::default()).expect("a window");
    ask(&mut stream).await;
    come.send(()).expect("somebody counts");
    tokio::select! {
        read = stream.read_u8() => panic!("a client that was silent: {read:?}"),
        _ = told.wait_for(|told| *told) => {}
    }
    let _turn = turns.acquire().await.expect("turns");
    ask(&mut stream).await;
}

async fn ask(stream: &mut ValkeyStream) {
    stream.write_all(b"*1\r\n$4\r\nPING\r\n").await.expect("a command");
    let mut answer = [0; 7];
    stream.read_exact(&mut answer).await.expect("an answer");
    assert_eq!(&answer, b"+PONG\r\n");
}

#[test]
fn a_silent_client_costs_its_window() {
    let count = clients();
    let arguments =
        ["rdma-bind", HOST, "rdma-port", PORT, "rdma", "require", "rdma-device", "rxe1"];
    let arguments = [&arguments[..], &["max-clients", "16000", "rx-size", "64kb"]].concat();
    let options = ["--port", "0", "--protected-mode", "no", "--maxclients", "20000"];
    let mut server = Server::start(&Start {
        program: Path::new(REDIS),
        arguments: &arguments,
        options: &options,
    });
    let before = server.count("rdma_memory_registered_bytes");
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let config = Config { busy_poll_us: 0, ..client_config() };
        let fabric = Fabric::system().rdma(Rdma::Require).device("rxe2").config(config).build();
        let fabric = fabric.expect("a fabric");
        let driver = tokio::spawn(fabric.drive());
        let (begun, mut clients) = (Instant::now(), JoinSet::new());
        let ((come, mut coming), (tell, told)) = (mpsc::unbounded_channel(), watch::channel(false));
        let turns = Arc::new(Semaphore::new(AT_A_TIME));
        for came in 0..count {
            while clients.len() < count.min(came + AT_A_TIME) {
                clients.spawn(client(
                    fabric.clone(),
                    come.clone(),
                    told.clone(),
                    Arc::clone(&turns),
                ));
            }
            tokio::select! {
                come = coming.recv() => come.expect("a client"),
                Some(ended) = clients.join_next() => {
                    let info: String = server.ask(&["INFO", "ferrite"]);
                    panic!("after {came} clients: {ended:?}\n{info}\n{}", server.log());
                }
            }
            if (came + 1) % 500 == 0 {
                eprintln!("{} clients after {:.0?}", came + 1, begun.elapsed());
            }
        }
        let pinned = server.count("rdma_memory_registered_bytes").saturating_sub(before);
        let each = pinned / count as u64;
        let windows = server.count("rdma_memory_windows_bytes") / count as u64;
        eprintln!("{count} clients: {each} bytes pinned for each, {windows} of it its window");
        assert_eq!(server.count("sessions_rdma_valkey"), count as u64);
        assert!(each <= PINNED_MAX && windows >= 64 << 10, "{each}, {windows}");
        tell.send(true).expect("they listen");
        while let Some(ended) = clients.join_next().await {
            ended.expect("it lived");
        }
        drop(fabric);
        let ended = tokio::time::timeout(Duration::from_secs(120), driver).await;
        ended.expect("a fabric that ends").expect("no panic").expect("it drove");
    });
    server.assert_well();
    server.until("sessions end", || server.count("sessions") == 0);
    assert_eq!(server.count("rdma_memory_windows_bytes"), 0);
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}
