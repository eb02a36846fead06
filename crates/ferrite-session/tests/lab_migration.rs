//! Sessions to a gateway that lose their RDMA path, on Soft-RoCE devices in the lab's guest (`cargo
//! xtask lab-test migration`).
//!
//! The clients are on 10.0.0.2 (rxe2), the gateway on 10.0.0.1 (rxe1). TCP between the two uses the
//! guest's loopback, so that a fault of an interface or of a wire affects RDMA alone.

use ferrite_fabric::{Config, Fabric, ListenOptions};
use ferrite_session::{
    Connector, EngineAddress, Gateway, GatewayConfig, Session, SessionTransport, TransportObserver,
    client_config, server_config,
};
use ferrite_testkit::Engine;
use ferrite_testkit::lab::{OWN, PEER, UsedTransport, any_port, lose_paths, verbs};
use ferrite_testkit::numbered::NumberedCommands;
use ferrite_testkit::wait::until_async;
use tokio::sync::oneshot;

const SESSIONS: usize = 3;

fn used_transport(transports: &[SessionTransport]) -> UsedTransport {
    let rdma = transports.iter().filter(|it| **it == SessionTransport::FerriteRdma).count();
    match rdma {
        0 => UsedTransport::Tcp,
        all if all == transports.len() => UsedTransport::Rdma,
        _ => UsedTransport::Both,
    }
}

fn fabric((device, _): (&str, &str), config: Config) -> Fabric {
    let config = Config { busy_poll_us: 0, ..config };
    let builder = Fabric::builder(&verbs()).device(device).config(config);
    let fabric = builder.command_threads().build().expect("a fabric");
    tokio::spawn(fabric.drive());
    fabric
}

#[test]
fn sessions_to_a_gateway_survive_the_loss_of_rdma() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let redis = Engine::redis(&[]);
        let (server, client) = (fabric(PEER, server_config()), fabric(OWN, client_config()));
        // Listens on all addresses, so that the listener outlives its device.
        let options = ListenOptions::new().accept_foreign_peers();
        let listener = server.listen_with("0.0.0.0:0".parse().expect("an address"), &options);
        let listener = listener.expect("listen");
        let mut address = any_port(PEER);
        address.set_port(listener.local_addr().port());
        let gateway = Gateway::new(GatewayConfig {
            protected_mode: false,
            ..GatewayConfig::new(EngineAddress::Unix(redis.socket()))
        });
        let (end, ended) = oneshot::channel::<()>();
        let serving = tokio::spawn({
            let gateway = gateway.clone();
            async move { gateway.serve(listener, async { drop(ended.await) }).await }
        });
        let connector = Connector::new(&client).local(any_port(OWN));
        let mut sessions = Vec::new();
        for _ in 0..SESSIONS {
            sessions.push(connector.connect(address).await.expect("a session"));
        }
        let observers: Vec<_> = sessions.iter().map(Session::observer).collect();
        until_async("the gateway to list all sessions", async || {
            gateway.sessions().len() == SESSIONS
        })
        .await;
        let peers: Vec<_> = gateway.sessions().iter().map(|session| session.peer).collect();
        let commands = NumberedCommands::start(sessions, "gateway");
        let both_sides = || {
            let ours = observers.iter().map(TransportObserver::transport);
            let theirs = gateway.sessions().into_iter().map(|session| {
                assert!(peers.contains(&session.peer), "{peers:?} {session:?}");
                session.transport
            });
            used_transport(&ours.chain(theirs).collect::<Vec<_>>())
        };
        lose_paths(commands, both_sides, "gateway").await;
        let _ = end.send(());
        serving.await.expect("no panic").expect("the gateway ends");
    });
}
