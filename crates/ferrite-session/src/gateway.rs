//! Clients of every kind in front, an engine behind: each session has a connection of its own to the engine's socket.
//!
//! ```text
//!   Ferrite peer (RDMA, or TCP) ──► Stream ───────┐
//!   Valkey client (RDMA) ─────────► ValkeyStream ─┼─► pump ──► the engine's Unix or TCP socket
//!   any client (TCP) ─────────────────────────────┘
//! ```

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use ferrite_fabric::{ConnectingBare, Error, Listener, Stream, TcpStranger};
use ferrite_proto::Role;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::engine::{EngineAddress, EngineSocket};
use crate::pump::{Moved, pump};
use crate::stream::{ValkeyConfig, ValkeyStream};

/// How long a client that is refused may take to hear why.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// A session that has moved nothing for this long has nothing under way.
const QUIET: Duration = Duration::from_millis(100);

/// How a [`Gateway`] behaves.
#[derive(Debug, Clone)]
pub struct GatewayConfig {
    /// The engine behind it.
    pub engine: EngineAddress,
    /// How long connecting to it may take. 5 s.
    pub engine_timeout: Duration,
    /// Sessions at a time; more are told so. 10,000.
    pub max_clients: usize,
    /// Refuse clients of other hosts while the engine asks for no password: behind the gateway they would look as if they
    /// came from this host, which the engine's own protected mode lets pass. On.
    pub protected_mode: bool,
    /// How long sessions may take to finish what is under way when the gateway ends. 5 s.
    pub drain_timeout: Duration,
    /// For clients of Valkey's protocol.
    pub valkey: ValkeyConfig,
}

impl GatewayConfig {
    /// In front of this engine.
    #[must_use]
    pub fn new(engine: EngineAddress) -> Self {
        Self {
            engine,
            engine_timeout: Duration::from_secs(5),
            max_clients: 10_000,
            protected_mode: true,
            drain_timeout: Duration::from_secs(5),
            valkey: ValkeyConfig::default(),
        }
    }
}

#[derive(Debug, Default)]
struct Counters {
    sessions: AtomicUsize,
    valkey_sessions: AtomicU64,
    ferrite_sessions: AtomicU64,
    tcp_sessions: AtomicU64,
    refused: AtomicU64,
    engine_failures: AtomicU64,
    to_engine: AtomicU64,
    to_client: AtomicU64,
}

/// What a gateway has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct GatewayStats {
    /// Sessions now.
    pub sessions: usize,
    /// Sessions that were begun by clients of Valkey's protocol.
    pub valkey_sessions: u64,
    /// Sessions that were begun by Ferrite peers.
    pub ferrite_sessions: u64,
    /// Sessions that were begun by other clients, over TCP.
    pub tcp_sessions: u64,
    /// Clients that were turned away, with a reason.
    pub refused: u64,
    /// Clients for whom the engine was not to be had.
    pub engine_failures: u64,
    /// Bytes to the engine, of sessions that have ended.
    pub to_engine_bytes: u64,
    /// Bytes to clients, of sessions that have ended.
    pub to_client_bytes: u64,
}

/// Serves clients by an engine that knows nothing of RDMA.
#[derive(Debug, Clone)]
pub struct Gateway {
    config: Arc<GatewayConfig>,
    counters: Arc<Counters>,
}

impl Gateway {
    /// A gateway that does nothing yet.
    #[must_use]
    pub fn new(config: GatewayConfig) -> Self {
        Self { config: Arc::new(config), counters: Arc::default() }
    }

    /// What it has done so far.
    #[must_use]
    pub fn stats(&self) -> GatewayStats {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Counters { valkey_sessions, ferrite_sessions, tcp_sessions, refused, engine_failures, .. } =
            &*self.counters;
        GatewayStats {
            sessions: self.counters.sessions.load(Ordering::Relaxed),
            valkey_sessions: of(valkey_sessions),
            ferrite_sessions: of(ferrite_sessions),
            tcp_sessions: of(tcp_sessions),
            refused: of(refused),
            engine_failures: of(engine_failures),
            to_engine_bytes: of(&self.counters.to_engine),
            to_client_bytes: of(&self.counters.to_client),
        }
    }

    /// Takes clients until `end` is ready; then lets sessions finish what is under way. Somebody must drive the listener's
    /// engine meanwhile.
    ///
    /// # Errors
    /// The listener fails.
    pub async fn serve(&self, mut listener: Listener, end: impl Future<Output = ()>) -> Result<(), Error> {
        let (ending, ended) = watch::channel(false);
        let mut sessions = JoinSet::new();
        let (strangers, tcp_strangers) = (listener.strangers(), listener.tcp_strangers());
        let mut end = std::pin::pin!(end);
        let served = loop {
            tokio::select! {
                () = &mut end => break Ok(()),
                link = listener.accept() => match link {
                    Ok(link) => {
                        self.counters.ferrite_sessions.fetch_add(1, Ordering::Relaxed);
                        let (peer, local) = (link.peer_addr(), link.local_addr());
                        sessions.spawn(self.clone().session(Stream::new(link), peer, local, ended.clone()));
                    }
                    Err(error) => break Err(error),
                },
                request = strangers.next() => match request {
                    Ok(request) => {
                        let connecting = strangers.accept(request);
                        sessions.spawn(self.clone().valkey_session(connecting, ended.clone()));
                    }
                    Err(error) => break Err(error),
                },
                stranger = tcp_strangers.next() => match stranger {
                    Ok(stranger) => {
                        self.counters.tcp_sessions.fetch_add(1, Ordering::Relaxed);
                        sessions.spawn(self.clone().tcp_session(stranger, ended.clone()));
                    }
                    Err(error) => break Err(error),
                },
                Some(_) = sessions.join_next() => {}
            }
        };
        drop((strangers, tcp_strangers, listener));
        let _ = ending.send(true);
        let drained = async { while sessions.join_next().await.is_some() {} };
        let _ = timeout(self.config.drain_timeout, drained).await; // those that are left end here
        served
    }

    async fn valkey_session(self, connecting: ConnectingBare, ended: watch::Receiver<bool>) {
        let stream = connecting.await.and_then(|bare| {
            let (peer, local) = (bare.peer_addr(), bare.local_addr());
            Ok((ValkeyStream::new(bare, Role::Server, &self.config.valkey)?, peer, local))
        });
        match stream {
            Ok((stream, peer, local)) => {
                self.counters.valkey_sessions.fetch_add(1, Ordering::Relaxed);
                self.session(stream, peer, local, ended).await;
            }
            Err(error) => {
                self.counters.refused.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(%error, "a client could not be taken");
            }
        }
    }

    async fn tcp_session(self, stranger: TcpStranger, ended: watch::Receiver<bool>) {
        let TcpStranger { socket, heard, peer } = stranger;
        let local = socket.local_addr().ok();
        let Ok(socket) = TcpStream::from_std(socket) else { return };
        let (reader, writer) = socket.into_split();
        let client = tokio::io::join(io::Cursor::new(heard).chain(reader), writer);
        self.session(client, Some(peer), local, ended).await;
    }

    async fn session<C>(
        self,
        mut client: C,
        peer: Option<SocketAddr>,
        local: Option<SocketAddr>,
        ended: watch::Receiver<bool>,
    ) where
        C: AsyncRead + AsyncWrite + Unpin,
    {
        let before = self.counters.sessions.fetch_add(1, Ordering::Relaxed);
        let moved = Moved::default();
        let begun = if before >= self.config.max_clients {
            self.counters.refused.fetch_add(1, Ordering::Relaxed);
            Err("-ERR max number of clients reached\r\n".to_owned())
        } else {
            self.engine_for(peer, local).await
        };
        match begun {
            Ok(mut engine) => {
                tokio::select! {
                    // A client that breaks off is no event.
                    _ = pump(&mut client, &mut engine, &moved) => {}
                    () = quiet(&moved, ended) => {
                        let _ = timeout(LAST_WORDS, client.shutdown()).await;
                    }
                }
            }
            Err(refusal) => {
                let said = async {
                    client.write_all(refusal.as_bytes()).await?;
                    client.shutdown().await
                };
                let _ = timeout(LAST_WORDS, said).await;
            }
        }
        self.counters.to_engine.fetch_add(moved.to_engine.into_inner(), Ordering::Relaxed);
        self.counters.to_client.fetch_add(moved.to_client.into_inner(), Ordering::Relaxed);
        self.counters.sessions.fetch_sub(1, Ordering::Relaxed);
    }

    /// A connection to the engine for this client, or what the client is told.
    async fn engine_for(
        &self,
        peer: Option<SocketAddr>,
        local: Option<SocketAddr>,
    ) -> Result<EngineSocket, String> {
        let address = &self.config.engine;
        let connected = async {
            let mut engine = EngineSocket::connect(address).await?;
            let is_local = peer.is_some_and(|peer| peer.ip().is_loopback())
                || peer.map(|peer| peer.ip()) == local.map(|local| local.ip());
            let denied = self.config.protected_mode && !is_local && engine.is_open_to_all().await?;
            Ok::<_, io::Error>((engine, denied))
        };
        let late = || io::Error::new(io::ErrorKind::TimedOut, "it does not answer");
        let connected = timeout(self.config.engine_timeout, connected).await.unwrap_or_else(|_| Err(late()));
        match connected {
            Ok((engine, false)) => Ok(engine),
            Ok((_, true)) => {
                self.counters.refused.fetch_add(1, Ordering::Relaxed);
                Err("-DENIED The Ferrite gateway is in protected mode, because the engine behind it asks for no \
                     password. Set one in the engine (requirepass, or an ACL), or start the gateway with \
                     --protected-mode no if everybody who can reach it may do everything.\r\n"
                    .into())
            }
            Err(error) => {
                self.counters.engine_failures.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(engine = %address, %error, "the engine is not to be had");
                Err(format!("-ERR Ferrite gateway: the engine at {address}: {error}\r\n"))
            }
        }
    }
}

/// Ready when the gateway ends and nothing has moved for a moment.
async fn quiet(moved: &Moved, mut ended: watch::Receiver<bool>) {
    let _ = ended.wait_for(|ended| *ended).await; // a gateway that is gone has ended
    let (mut last, mut since) = (moved.total(), Instant::now());
    while since.elapsed() < QUIET {
        sleep(QUIET / 5).await;
        let now = moved.total();
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
}
