//! Sessions of `ferrite relay` to the module that lose their RDMA path, on Soft-RoCE devices in the
//! lab's guest (`cargo xtask lab-test migration`). The engine is on 10.0.0.1 (rxe1), the relay on
//! 10.0.0.2 (rxe2). Each program uses both devices.

mod metrics {
    pub(crate) mod harness;
}

use std::collections::BTreeSet;
use std::path::Path;

use ferrite_testkit::engine::REDIS;
use ferrite_testkit::lab::{OWN, PEER, UsedTransport, lose_paths, module_sessions};
use ferrite_testkit::numbered::NumberedCommands;
use ferrite_testkit::{Engine, Start};
use metrics::harness::Running;
use tokio::net::TcpStream;

const PORT: &str = "6390";
const SESSIONS: usize = 3;

#[test]
fn sessions_of_a_relay_survive_the_loss_of_rdma() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let arguments = ["rdma-bind", PEER.1, "rdma-port", PORT];
        let options = ["--port", "0", "--protected-mode", "no"];
        let start =
            Start { program: Path::new(REDIS), module: Some(&arguments), options: &options };
        let mut engine = Engine::start(&start);
        let to = format!("{}:{PORT}", PEER.1);
        let relay = Running::start(&[
            "relay",
            "--to",
            &to,
            "--listen",
            "127.0.0.1:0",
            "--local",
            OWN.1,
            "--rdma",
            "prefer",
        ]);
        let mut clients = Vec::new();
        for _ in 0..SESSIONS {
            clients.push(TcpStream::connect(&relay.address).await.expect("a connection"));
        }
        // For a moment, the relay has one more session: at its start it asks whether the server
        // answers. Each client has a session of its own once it has replies.
        let commands = NumberedCommands::start(clients, "relay");
        commands.wait_for(1, "at first").await;
        engine.wait_until("a list of all sessions", || module_sessions(&engine).len() == SESSIONS);
        let addresses = |sessions: &[(String, String)]| {
            sessions.iter().map(|(address, _)| address.clone()).collect::<BTreeSet<_>>()
        };
        let first = addresses(&module_sessions(&engine));
        let used_transport = || {
            let mut sessions = module_sessions(&engine);
            sessions.retain(|(address, _)| first.contains(address));
            assert_eq!(addresses(&sessions), first, "a session keeps its address");
            UsedTransport::of_module_sessions(&sessions)
        };
        lose_paths(commands, used_transport, "relay").await;
        engine.assert_healthy();
    });
}
