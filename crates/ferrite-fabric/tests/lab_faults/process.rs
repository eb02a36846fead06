//! Peers in processes of their own, which serve links until their input is closed.

use std::io::Read as _;
use std::net::SocketAddr;

use ferrite_fabric::Config;
use ferrite_testkit::lab::{Host, PEER, TEST_TIMEOUT, any_port};
use ferrite_testkit::process::{PeerProcess, report};
use ferrite_testkit::within;
use futures_channel::oneshot;

use crate::pair::{Event, serve_all};

/// Returns a future that is ready when the parent closes the stdin of this child process.
pub(crate) fn end_of_input() -> oneshot::Receiver<()> {
    let (sender, receiver) = oneshot::channel();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        let _ = sender.send(());
    });
    receiver
}

/// Plays a peer that serves links until its input is closed, then reports how each link ended.
pub(crate) fn serve_as_peer(config: Config) {
    serve_as_peer_after(config, || ());
}

/// Like [`serve_as_peer`], but calls `prepare` once the peer listens.
pub(crate) fn serve_as_peer_after(config: Config, prepare: impl FnMut()) {
    serve_at(any_port(PEER), config, prepare);
}

/// Like [`serve_as_peer_after`], but listens on `at`.
pub(crate) fn serve_at(at: SocketAddr, config: Config, mut prepare: impl FnMut()) {
    let host = Host::new(&[PEER.0], config);
    let serving = serve_all(host.fabric.clone(), at, end_of_input(), |event| match event {
        Event::Listening(addr) => {
            prepare();
            report("listening", addr);
        }
        Event::ListenerLost(error) => report("listener", format!("{error:?}")),
    });
    for end in within(TEST_TIMEOUT * 4, "serving", serving) {
        match end {
            Ok(echoed) => report("closed", echoed),
            Err(error) => report("failed", format!("{error:?}")),
        }
    }
    host.finish();
}

/// Starts a peer in a process. Returns the process and the address on which it listens.
pub(crate) fn peer(test: &str) -> (PeerProcess, SocketAddr) {
    let process = PeerProcess::start(test, "serve");
    let addr = process.expect_line("listening").parse().expect("an address");
    (process, addr)
}
