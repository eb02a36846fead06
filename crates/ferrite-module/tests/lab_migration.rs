//! Sessions to the module that lose their RDMA path, on Soft-RoCE devices in the lab's guest
//! (`cargo xtask lab-test migration`). The engine is on 10.0.0.1 (rxe1), the clients on 10.0.0.2
//! (rxe2).

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;

use ferrite_fabric::{Config, Fabric};
use ferrite_session::{Connector, Session, SessionTransport, TransportObserver, client_config};
use ferrite_testkit::engine::REDIS;
use ferrite_testkit::lab::{
    OWN, PEER, UsedTransport, any_port, lose_paths, module_sessions, verbs,
};
use ferrite_testkit::numbered::NumberedCommands;
use ferrite_testkit::{Engine, Start};

const PORT: u16 = 6390;
const SESSIONS: usize = 3;

#[test]
fn sessions_to_the_module_survive_the_loss_of_rdma() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let arguments =
            ["rdma-bind", PEER.1, "rdma-port", &PORT.to_string(), "rdma-device", PEER.0];
        let options = ["--port", "0", "--protected-mode", "no"];
        let module = Some(&arguments[..]);
        let start = Start { program: Path::new(REDIS), module, options: &options };
        let mut engine = Engine::start(&start);
        let config = Config { busy_poll_us: 0, ..client_config() };
        let builder = Fabric::builder(&verbs()).device(OWN.0).config(config);
        let client = builder.command_threads().build().expect("a fabric");
        tokio::spawn(client.drive());
        let connector = Connector::new(&client).local(any_port(OWN));
        let address = SocketAddr::new(any_port(PEER).ip(), PORT);
        let mut sessions = Vec::new();
        for _ in 0..SESSIONS {
            sessions.push(connector.connect(address).await.expect("a session"));
        }
        let observers: Vec<_> = sessions.iter().map(Session::observer).collect();
        let addresses = |listed: &[(String, String)]| {
            listed.iter().map(|(address, _)| address.clone()).collect::<BTreeSet<_>>()
        };
        engine.wait_until("a list of all sessions", || module_sessions(&engine).len() == SESSIONS);
        let first = addresses(&module_sessions(&engine));
        let commands = NumberedCommands::start(sessions, "module");
        let both_sides = || {
            let ours: Vec<_> = observers.iter().map(TransportObserver::transport).collect();
            if ours.iter().any(|transport| *transport != ours[0]) {
                return UsedTransport::Both;
            }
            let theirs = module_sessions(&engine);
            assert_eq!(addresses(&theirs), first, "a session keeps its address");
            match (ours[0], UsedTransport::of_module_sessions(&theirs)) {
                (SessionTransport::FerriteRdma, UsedTransport::Rdma) => UsedTransport::Rdma,
                (SessionTransport::Tcp, UsedTransport::Tcp) => UsedTransport::Tcp,
                _ => UsedTransport::Both,
            }
        };
        lose_paths(commands, both_sides, "module").await;
        engine.assert_healthy();
    });
}
