//! A test suite for multiplexed links that runs on every transport: TCP, the fake provider, and
//! Soft-RoCE in the lab.
//!
//! A test is an async function of a [`Harness`], which tokio runs on two threads. The programs at
//! both ends of a stream are tasks with in-memory pipes, or with TCP sockets where a reset matters.

pub(crate) mod ends;
pub(crate) mod load;
pub(crate) mod streams;

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use ferrite_fabric::{ConnectOptions, Fabric, Link, Listener, Transport};
use ferrite_session::mux::protocol::{Class, Config, Route};
use ferrite_session::mux::{
    Multiplexer, MuxFailure, MuxHandle, MuxIncoming, MuxSocket, Side, multiplex,
};
use ferrite_testkit::wait::until_async;
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};
use tokio::task::JoinHandle;

/// Longer than any test of the suite takes, even on a busy machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
/// The bytes that a pipe holds.
const PIPE_BYTES: usize = 8 << 10;

/// Two hosts, each with a fabric.
pub(crate) struct Harness {
    /// The fabrics, which other threads drive. The second one listens.
    pub(crate) fabrics: [Fabric; 2],
    pub(crate) addresses: [SocketAddr; 2],
    /// Whether links use RDMA, so that they can be moved.
    pub(crate) has_rdma: bool,
}

/// Runs a test, which must end within `limit`.
pub(crate) fn run(harness: &Harness, limit: Duration, test: impl AsyncFnOnce(&Harness)) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("build the runtime").block_on(async {
        tokio::time::timeout(limit, test(harness)).await.expect("the test ends in time");
    });
}

/// One end of a multiplexed link.
pub(crate) struct Peer<S> {
    pub(crate) link: Link,
    pub(crate) handle: MuxHandle<S>,
    pub(crate) incoming: MuxIncoming<S>,
    pub(crate) driver: JoinHandle<Result<(), MuxFailure>>,
}

impl Harness {
    /// Connects a link. The caller keeps the listener, so that the link can reconnect.
    pub(crate) async fn link(&self) -> ([Link; 2], Listener) {
        let mut listener = self.fabrics[1].listen(self.addresses[1]).expect("listen");
        let options = ConnectOptions::new().local(self.addresses[0]);
        let connecting = self.fabrics[0].connect_with(listener.local_addr(), &options);
        let (one, two) = tokio::join!(connecting, listener.accept());
        let links = [one.expect("connect"), two.expect("accept")];
        if self.has_rdma {
            wait_for(&links, Transport::Rdma).await;
        }
        (links, listener)
    }

    /// Connects a multiplexed link.
    pub(crate) async fn pair<S: MuxSocket>(&self, config: &Config) -> ([Peer<S>; 2], Listener) {
        let ([one, two], listener) = self.link().await;
        let peers = [(one, Side::Caller), (two, Side::Called)].map(|(link, side)| {
            let Multiplexer { handle, incoming, driver } =
                multiplex(link.clone(), side, config).expect("a multiplexer");
            Peer { link, handle, incoming, driver: tokio::spawn(driver.run()) }
        });
        (peers, listener)
    }
}

/// Waits until both ends of a link use a transport.
pub(crate) async fn wait_for(links: &[Link; 2], transport: Transport) {
    until_async(&format!("both ends on {transport}"), async || {
        let failures = [0, 1].map(|at| links[at].failure());
        assert!(failures.iter().all(Option::is_none), "{failures:?}");
        links.iter().all(|link| link.transport() == transport)
    })
    .await;
}

/// Ends both multiplexers in an orderly way.
pub(crate) async fn finish<S>([one, two]: [Peer<S>; 2]) {
    one.handle.go_away();
    two.handle.go_away();
    one.driver.await.expect("no panic").expect("an orderly end");
    two.driver.await.expect("no panic").expect("an orderly end");
    for state in [one.handle.state(), two.handle.state()] {
        assert_eq!((state.streams, state.held_bytes), (0, 0), "{state:?}");
    }
}

/// A local connection in memory, and whether it was reset.
pub(crate) struct Pipe {
    io: DuplexStream,
    is_reset: Arc<AtomicBool>,
}

/// The program's end of a [`Pipe`].
pub(crate) struct Program {
    pub(crate) io: DuplexStream,
    is_reset: Arc<AtomicBool>,
}

impl Program {
    pub(crate) fn is_reset(&self) -> bool {
        self.is_reset.load(Ordering::SeqCst)
    }
}

/// Returns both ends of a local connection.
pub(crate) fn pipe() -> (Program, Pipe) {
    let (program, io) = tokio::io::duplex(PIPE_BYTES);
    let is_reset = Arc::new(AtomicBool::new(false));
    (Program { io: program, is_reset: Arc::clone(&is_reset) }, Pipe { io, is_reset })
}

impl MuxSocket for Pipe {
    fn reset(self) {
        self.is_reset.store(true, Ordering::SeqCst);
    }
}

impl AsyncRead for Pipe {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, out)
    }
}

impl AsyncWrite for Pipe {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// Returns a route whose destination has this port.
pub(crate) fn route(port: u16) -> Route {
    Route {
        destination: SocketAddr::from(([10, 0, 0, 2], port)),
        source: SocketAddr::from(([10, 0, 0, 1], 40_000)),
    }
}

/// Opens a stream of the class *interactive* between two programs.
pub(crate) async fn connect(peers: &mut [Peer<Pipe>; 2], port: u16) -> [Program; 2] {
    let (one, socket) = pipe();
    let opened = peers[0].handle.open(Class::Interactive, route(port), socket).await;
    let stream = opened.map_err(|(_, error)| error).expect("a stream");
    let incoming = peers[1].incoming.next().await.expect("the stream");
    assert_eq!((incoming.id(), incoming.route()), (stream, route(port)));
    let (two, socket) = pipe();
    incoming.accept(socket);
    [one, two]
}

/// Makes every test of the suite a test of the calling target.
macro_rules! run_suite {
    ($run:path) => {
        run_suite!(@ $run, streams:
            carries_bytes_and_half_closes,
            passes_refusals_on,
            bytes_wait_for_a_slow_connect,
            unread_streams_hold_up_no_others,
            refuses_streams_beyond_the_limits);
        run_suite!(@ $run, ends:
            a_reset_connection_is_reset_at_the_other_end,
            a_closed_connection_ends_at_the_other_end,
            streams_are_reset_when_the_link_is_lost,
            drains_after_go_away,
            hostile_records_end_the_link);
    };
    (@ $run:path, $module:ident: $($test:ident),*) => {
        mod $module {
            $(#[test] fn $test() { $run(crate::mux::$module::$test); })*
        }
    };
}
pub(crate) use run_suite;
