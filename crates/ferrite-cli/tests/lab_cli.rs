//! The program over RDMA, in the lab's guest (`cargo xtask lab-test ferrite-cli::`): through a
//! gateway on 10.0.0.1 (rxe1), called from 10.0.0.2 (rxe2), with a real `redis-server` behind it.
#![expect(clippy::print_stdout, reason = "the counts are what is asked for")]

#[path = "compare/harness.rs"]
mod harness;
#[path = "compare/redis.rs"]
mod redis;
#[path = "compare/table.rs"]
mod table;

use std::time::Duration;

use ferrite_fabric::{Fabric, ListenOptions, Rdma};
use ferrite_session::{EngineAddress, Gateway, GatewayConfig};
use ferrite_verbs::Verbs;
use harness::{HUMAN, HUMAN3, JSON, Program, RAW, judge};
use redis::Redis;
use table::cases;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

const PATIENCE: Duration = Duration::from_secs(30);

/// A gateway in this process, before a server.
struct Scene {
    redis: Redis,
    runtime: Runtime,
    port: String,
    end: oneshot::Sender<()>,
    serving: JoinHandle<()>,
}

impl Scene {
    fn start(name: &str) -> Self {
        let redis = Redis::start(name);
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let entered = runtime.enter();
        let verbs = Verbs::system().expect("rdma-core");
        let fabric =
            Fabric::builder(&verbs).device("rxe1").rdma(Rdma::Require).build().expect("a fabric");
        tokio::spawn(fabric.drive());
        let options = ListenOptions::new().accept_foreign_peers();
        let at = "10.0.0.1:0".parse().expect("an address");
        let listener = fabric.listen_with(at, &options).expect("it listens");
        let port = listener.local_addr().port().to_string();
        let address = EngineAddress::Unix(redis.socket.clone());
        let gateway =
            Gateway::new(GatewayConfig { protected_mode: false, ..GatewayConfig::new(address) });
        let (end, ended) = oneshot::channel();
        let serving = tokio::spawn(async move {
            gateway.serve(listener, async { drop(ended.await) }).await.expect("it served");
        });
        drop(entered);
        Self { redis, runtime, port, end, serving }
    }

    /// ferrite-cli over RDMA, or not at all.
    fn over_rdma(&self) -> Program {
        let reach =
            ["-h", "10.0.0.1", "-p", &self.port, "--local", "10.0.0.2", "--rdma", "require"];
        Program { reach: reach.map(str::to_owned).into(), ..Program::ours(&self.redis) }
    }

    fn end(self) {
        let _ = self.end.send(());
        let ended =
            self.runtime.block_on(async { tokio::time::timeout(PATIENCE, self.serving).await });
        ended.expect("in time").expect("no panic");
    }
}

/// The table of commands over RDMA, against redis-cli at the server's own socket.
#[test]
fn compare() {
    let scene = Scene::start("compare");
    let cases = cases();
    let mut wrong = String::new();
    for style in [RAW, HUMAN, JSON, HUMAN3] {
        let cases: Vec<_> = cases.iter().filter(|case| !case.is_left_out(style.0)).collect();
        scene.redis.empty();
        let theirs = Program::theirs(&scene.redis).outputs(style, &cases);
        scene.redis.empty();
        let ours = scene.over_rdma().outputs(style, &cases);
        wrong += &judge(style.0, "RDMA", &cases, &theirs, &ours);
    }
    assert!(wrong.is_empty(), "{wrong}");
    scene.end();
}

/// It says what carries it; large values both ways, and many commands at once.
#[test]
fn modes() {
    let scene = Scene::start("modes");
    let program = scene.over_rdma();
    let run = |words: &[&str], input: &[u8]| {
        let output = program.fed(words, input.to_vec());
        let said = String::from_utf8(output.stderr).expect("UTF-8");
        assert!(output.status.success(), "{words:?}: {said}");
        (output.stdout, said)
    };
    let (pong, said) = run(&["--verbose", "PING"], b"");
    assert_eq!(pong, b"PONG\n");
    assert_eq!(said, "over RDMA, device rxe2, to a Ferrite module or gateway\n");
    let large: Vec<u8> = (0..3_000_000_u32).map(|at| (at % 251) as u8).collect();
    assert_eq!(run(&["-x", "SET", "large"], &large).0, b"OK\n");
    let (came, said) = run(&["GET", "large"], b"");
    assert!(came.strip_suffix(b"\n") == Some(&large), "{} bytes", came.len());
    assert_eq!(said, "", "nobody asked");
    let quiet = [&b"CLIENT REPLY OFF\nSET quiet "[..], &vec![b'q'; 3_000_000], b"\n"].concat();
    assert_eq!(run(&[], &quiet).0, b"", "no reply");
    assert_eq!(run(&["STRLEN", "quiet"], b"").0, b"3000000\n", "it is carried out before the end");
    let many: String = (0..20_000).map(|key| format!("SET key:{key} {key}\r\n")).collect();
    let (counted, _) = run(&["--pipe"], many.as_bytes());
    assert!(counted.ends_with(b"errors: 0, replies: 20000\n"), "{}", counted.escape_ascii());
    let (scanned, _) = run(&["--scan", "--count", "1000"], b"");
    assert_eq!(scanned.split(|byte| *byte == b'\n').count(), 20_003);
    let (latency, _) = run(&["--latency", "--json", "-i", "0.2"], b"");
    assert!(latency.starts_with(b"{\"min\": "), "{}", latency.escape_ascii());
    scene.end();
}

/// A server without RDMA: required, that is an error; preferred, TCP carries it and the reason is
/// told.
#[test]
fn falls_back() {
    let free = std::net::TcpListener::bind("10.0.0.1:0").and_then(|bound| bound.local_addr());
    let port = free.expect("a free port").port().to_string();
    let redis = Redis::start_with(
        "falls",
        &["--bind", "10.0.0.1", "--protected-mode", "no", "--port", &port],
    );
    let run = |more: &[&str]| {
        let reach = ["-h", "10.0.0.1", "-p", &port, "--local", "10.0.0.2", "-t", "2"];
        let program = Program { reach: reach.map(str::to_owned).into(), ..Program::ours(&redis) };
        let output = program.fed(&[more, &["PING"]].concat(), Vec::new());
        let said = String::from_utf8(output.stderr).expect("UTF-8");
        (output.status.code(), String::from_utf8(output.stdout).expect("UTF-8"), said)
    };
    let (code, _, said) = run(&["--rdma", "require"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.starts_with("Could not connect to Redis at 10.0.0.1:") && said.contains("over RDMA"),
        "{said}"
    );
    let (code, pong, said) = run(&["--rdma", "prefer"]);
    assert_eq!((code, pong.as_str()), (Some(0), "PONG\n"), "{said}");
    assert!(
        said.starts_with("over TCP: RDMA is unavailable: ") && said.lines().count() == 1,
        "{said}"
    );
    assert_eq!(run(&[]), (Some(0), "PONG\n".into(), String::new()));
}
