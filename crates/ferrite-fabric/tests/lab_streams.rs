//! The stream test suite on Soft-RoCE devices in the lab's guest (`cargo xtask lab-test streams`).

mod streams;

use std::io::ErrorKind;
use std::process::Command;

use ferrite_fabric::{Config, ConnectOptions, Fabric, Stream};
use ferrite_verbs::Verbs;
use streams::{Host, StreamFixture, Test, run_suite};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

/// Runs a test on the guest's two hosts and checks that it leaks no objects.
fn run(test: impl Test) {
    let emulated = std::env::var("FERRITE_LAB_KERNEL").is_ok_and(|kernel| kernel != "uml");
    let hosts = [Host::new("rxe1", "10.0.0.1"), Host::new("rxe2", "10.0.0.2")];
    streams::run(
        Some(Verbs::system().expect("rdma-core")),
        hosts,
        if emulated { 20 } else { 2 },
        test,
    );
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

run_suite!(crate::run);

/// The environment variable that tells the child of the test below where to connect.
const PEER: &str = "FERRITE_LAB_STREAM_PEER";

/// A killed process has not announced the end of its stream, so its peer must get an error.
#[test]
fn killed_peer_is_an_error() {
    if let Ok(peer) = std::env::var(PEER) {
        return write_until_killed(&peer);
    }
    run(async |fixture: StreamFixture| {
        let fabrics = fixture.fabrics(&Config::default());
        let mut child = Command::new(std::env::current_exe().expect("the test's own path"))
            .args(["--exact", "killed_peer_is_an_error"])
            .env(PEER, fabrics.listener.local_addr().to_string())
            .spawn()
            .expect("a child");
        let (mut stream, _) = fabrics.listener.accept().await.expect("connection of the child");
        stream.read_exact(&mut [0; 100_000]).await.expect("data of the child");
        child.kill().expect("kill the child");
        child.wait().expect("wait for the child");
        let error = loop {
            match stream.read(&mut [0; 10_000]).await {
                Ok(0) => panic!("the stream ended although the peer did not end it"),
                Ok(_) => {} // received before the kill
                Err(error) => break error,
            }
        };
        assert!(
            matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::TimedOut),
            "{error:?}"
        );
        drop(stream);
        fabrics.clear().await;
    });
}

fn write_until_killed(peer: &str) {
    let fabric = Fabric::builder(&Verbs::system().expect("rdma-core")).device("rxe2").build();
    let fabric = fabric.expect("a fabric");
    let options = ConnectOptions::new().local(([10, 0, 0, 2], 0).into());
    fabric.block_on(async {
        let peer = peer.parse().expect("an address");
        let mut stream = Stream::connect_with(&fabric, peer, &options).await.expect("connect");
        loop {
            stream.write_all(&[7; 1000]).await.expect("write");
        }
    });
}
