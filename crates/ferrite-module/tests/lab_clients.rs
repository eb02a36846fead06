//! What clients of Valkey Over RDMA cost an engine with the module while they are silent, in the lab's guest: 200 by default,
//! `cargo xtask lab-test lab_clients --timeout 1500 --runner "env FERRITE_CLIENTS=5000" -- --no-capture` for more.
#![expect(clippy::print_stderr, reason = "its figures")]

mod scene;

use std::path::Path;
use std::time::{Duration, Instant};

use ferrite_fabric::{Config, ConnectOptions, Engine, Rdma};
use ferrite_proto::Role;
use ferrite_session::{ValkeyConfig, ValkeyStream, client_config};
use scene::{REDIS, Server, Start};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;

const HOST: &str = "10.0.0.1";
const PORT: &str = "6390";
/// That connect at the same time.
const AT_A_TIME: usize = 16;
/// A window of 64 KiB, and what else may be pinned for a client.
const PINNED_MAX: u64 = 80 << 10;

fn clients() -> usize {
    std::env::var("FERRITE_CLIENTS").ok().map_or(200, |count| count.parse().expect("a number"))
}

async fn connect(engine: Engine) -> ValkeyStream {
    let options = ConnectOptions::new().local("10.0.0.2:0".parse().expect("an address"));
    let peer = format!("{HOST}:{PORT}").parse().expect("an address");
    let bare = engine.connect_bare(peer, &options).await.expect("a connection");
    ValkeyStream::new(bare, Role::Client, &ValkeyConfig::default()).expect("a window")
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
    let arguments = ["rdma-bind", HOST, "rdma-port", PORT, "rdma", "require", "rdma-device", "rxe1"];
    let arguments =
        [&arguments[..], &["max-clients", "16000", "rx-size", "64kb", "call-lane", "yes"]].concat();
    let options = ["--port", "0", "--protected-mode", "no", "--maxclients", "20000"];
    let mut server =
        Server::start(&Start { program: Path::new(REDIS), arguments: &arguments, options: &options });
    let before = server.count("rdma_memory_registered_bytes");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let config = Config { busy_poll_us: 0, ..client_config() };
        let engine = Engine::system().rdma(Rdma::Require).device("rxe2").config(config).build();
        let engine = engine.expect("an engine");
        let driver = tokio::spawn(engine.drive());
        let (begun, mut streams, mut connecting) = (Instant::now(), Vec::new(), JoinSet::new());
        while streams.len() < count {
            while connecting.len() < AT_A_TIME.min(count - streams.len()) {
                connecting.spawn(connect(engine.clone()));
            }
            let mut stream = connecting.join_next().await.expect("some are").expect("no panic");
            ask(&mut stream).await;
            streams.push(stream);
            if streams.len() % 500 == 0 {
                eprintln!("{} clients after {:.0?}", streams.len(), begun.elapsed());
            }
        }
        let pinned = server.count("rdma_memory_registered_bytes").saturating_sub(before);
        let each = pinned / count as u64;
        let windows = server.count("rdma_memory_windows_bytes") / count as u64;
        eprintln!("{count} clients: {each} bytes pinned for each, {windows} of it its window");
        assert_eq!(server.count("sessions_rdma_valkey"), count as u64);
        assert!(each <= PINNED_MAX && windows >= 64 << 10, "{each}, {windows}");
        // All of them live.
        for stream in &mut streams {
            ask(stream).await;
        }
        drop((streams, engine));
        let ended = tokio::time::timeout(Duration::from_secs(120), driver).await;
        ended.expect("an engine that ends").expect("no panic").expect("it drove");
    });
    server.assert_well();
    server.until("sessions end", || server.count("sessions") == 0);
    assert_eq!(server.count("rdma_memory_windows_bytes"), 0);
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}
