//! How much pinned memory silent clients of Valkey Over RDMA cost an engine with the module, in the
//! lab's guest. There are 200 clients by default; for more: `cargo xtask lab-test lab_clients
//! --memory 6G --timeout 1500 --runner "env FERRITE_CLIENTS=5000" -- --no-capture`.
#![expect(clippy::print_stderr, reason = "prints the figures")]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_fabric::{Config, ConnectOptions, Fabric, Rdma};
use ferrite_proto::Role;
use ferrite_session::{ValkeyConfig, ValkeyStream, client_config};
use ferrite_testkit::engine::REDIS;
use ferrite_testkit::{Engine, Start};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;

const HOST: &str = "10.0.0.1";
const PORT: &str = "6390";
/// How many clients connect or send a command at the same time. Soft-RoCE cannot acknowledge
/// thousands within half a second, and unacknowledged connections are given up.
const AT_A_TIME: usize = 16;
/// The most pinned memory per client: a window of 64 KiB, and a little more.
const PINNED_MAX: u64 = 80 << 10;

fn clients() -> usize {
    std::env::var("FERRITE_CLIENTS").ok().map_or(200, |count| count.parse().expect("a number"))
}

/// A client that sends a command after the connect and another at the end. In between it only
/// receives keepalives.
async fn client(
    fabric: Fabric,
    connected: mpsc::UnboundedSender<()>,
    mut ending: watch::Receiver<bool>,
    permits: Arc<Semaphore>,
) {
    let options = ConnectOptions::new().local("10.0.0.2:0".parse().expect("an address"));
    let server = format!("{HOST}:{PORT}").parse().expect("an address");
    let raw = fabric.connect_raw(server, &options).await.expect("a connection");
    let mut stream =
        ValkeyStream::new(raw, Role::Client, &ValkeyConfig::default()).expect("a window");
    ask(&mut stream).await;
    connected.send(()).expect("a receiver");
    tokio::select! {
        read = stream.read_u8() => panic!("unexpected bytes or end: {read:?}"),
        _ = ending.wait_for(|ending| *ending) => {}
    }
    let _permit = permits.acquire().await.expect("a permit");
    ask(&mut stream).await;
}

async fn ask(stream: &mut ValkeyStream) {
    stream.write_all(b"*1\r\n$4\r\nPING\r\n").await.expect("a command");
    let mut reply = [0; 7];
    stream.read_exact(&mut reply).await.expect("a reply");
    assert_eq!(&reply, b"+PONG\r\n");
}

#[test]
fn a_silent_client_pins_little_more_than_its_window() {
    let count = clients();
    let arguments =
        ["rdma-bind", HOST, "rdma-port", PORT, "rdma", "require", "rdma-device", "rxe1"];
    let arguments = [&arguments[..], &["max-clients", "16000", "rx-size", "64kb"]].concat();
    let options = ["--port", "0", "--protected-mode", "no", "--maxclients", "20000"];
    let mut server = Engine::start(&Start {
        program: Path::new(REDIS),
        module: Some(&arguments),
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
        let (started, mut clients) = (Instant::now(), JoinSet::new());
        let (connected, mut connections) = mpsc::unbounded_channel();
        let (end, ending) = watch::channel(false);
        let permits = Arc::new(Semaphore::new(AT_A_TIME));
        for number in 0..count {
            while clients.len() < count.min(number + AT_A_TIME) {
                clients.spawn(client(
                    fabric.clone(),
                    connected.clone(),
                    ending.clone(),
                    Arc::clone(&permits),
                ));
            }
            tokio::select! {
                connection = connections.recv() => connection.expect("a client"),
                Some(ended) = clients.join_next() => {
                    let info: String = server.ask(&["INFO", "ferrite"]);
                    panic!("after {number} clients: {ended:?}\n{info}\n{}", server.log());
                }
            }
            if (number + 1) % 500 == 0 {
                eprintln!("{} clients after {:.0?}", number + 1, started.elapsed());
            }
        }
        let pinned = server.count("rdma_memory_registered_bytes").saturating_sub(before);
        let each = pinned / count as u64;
        let windows = server.count("rdma_memory_windows_bytes") / count as u64;
        eprintln!("{count} clients: {each} pinned bytes per client, {windows} of them its window");
        assert_eq!(server.count("sessions_rdma_valkey"), count as u64);
        assert!(each <= PINNED_MAX && windows >= 64 << 10, "{each}, {windows}");
        end.send(true).expect("running clients");
        while let Some(ended) = clients.join_next().await {
            ended.expect("no panic of a client");
        }
        drop(fabric);
        let ended = tokio::time::timeout(Duration::from_secs(120), driver).await;
        ended.expect("the fabric stops in time").expect("no panic").expect("no fabric error");
    });
    server.assert_healthy();
    server.wait_until("the end of all sessions", || server.count("sessions") == 0);
    assert_eq!(server.count("rdma_memory_windows_bytes"), 0);
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}
