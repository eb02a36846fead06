//! Clients of every kind in front, an engine behind: each session has a connection of its own to
//! the engine's socket.
//!
//! ```text
//!   Ferrite peer (RDMA, or TCP) ──► Stream ───────┐
//!   Valkey client (RDMA) ─────────► ValkeyStream ─┼─► pump ──► the engine's Unix or TCP socket
//!   any client (TCP) ─────────────────────────────┘
//! ```
//!
//! A gateway that is inside the engine ([`Gateway::inside`]) runs sessions where the engine says,
//! and asks it first (`in_process.rs`).

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use ferrite_fabric::{ConnectingRaw, Error, ForeignTcpPeer, Listener, LogLimit, Stream};
use ferrite_proto::Role;
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::ending::{Ending, over};
use crate::engine::{EngineAddress, EngineSocket, ProxyConnection};
use crate::in_process::{self, Client, CommandPaths, InProcessEngine, Left};
use crate::pump::{BUFFER, pump_after};
use crate::sessions::{ClientTransport, Open, SessionInfo, Sessions};
use crate::stream::{ValkeyConfig, ValkeyStream};

/// As the engine says it.
const FULL: &str = "-ERR max number of clients reached\r\n";
/// How long a client that is refused may take to hear why.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// A client over TCP that was silent for so long is looked for.
const KEEPALIVE: Duration = Duration::from_secs(300);
/// So many clients of Valkey's protocol are told every 3 s that we live. Those that come then are
/// told half as often, and beyond twice as many a third: a server of thousands would do little
/// else. It is less than a client of ours waits before it asks.
const OFTEN_TOLD: usize = 1000;
/// The buffers of a pinned session, each way: its client may not have authenticated.
const PINNED_BUFFER: usize = 28 << 10;

/// How a [`Gateway`] behaves.
#[derive(Debug, Clone)]
pub struct GatewayConfig {
    /// The engine behind it.
    pub engine: EngineAddress,
    /// How long connecting to it may take. 5 s.
    pub engine_timeout: Duration,
    /// Sessions at a time; more are told so. 10,000.
    pub max_clients: usize,
    /// Refuse clients of other hosts while the engine asks for no password: behind the gateway they
    /// would look as if they came from this host, which the engine's own protected mode lets pass.
    /// On.
    pub protected_mode: bool,
    /// How long sessions may take to finish what is under way when the gateway ends. 5 s.
    pub drain_timeout: Duration,
    /// The engine goes on when the gateway ends, so that it is worth waiting for its answers. On;
    /// not where both end together.
    pub engine_stays: bool,
    /// For clients of Valkey's protocol.
    pub valkey: ValkeyConfig,
    /// Who speaks when a client is turned away. `Ferrite gateway`.
    pub name: &'static str,
    /// What to do to let clients of other hosts pass without a password, as protected mode says it.
    /// For `ferrite gateway`.
    pub open_up: &'static str,
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
            engine_stays: true,
            valkey: ValkeyConfig::default(),
            name: "Ferrite gateway",
            open_up: "start the gateway with --protected-mode no",
        }
    }
}

#[derive(Debug, Default)]
struct Counters {
    valkey_sessions: AtomicU64,
    ferrite_sessions: AtomicU64,
    tcp_sessions: AtomicU64,
    refused: AtomicU64,
    engine_failures: AtomicU64,
    paths: CommandPaths,
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
    /// Sessions that were asked to end ([`Gateway::kill`]).
    pub killed: u64,
    /// Bytes to the engine.
    pub to_engine_bytes: u64,
    /// Bytes to clients.
    pub to_client_bytes: u64,
    /// Commands that the engine around us answered by a call.
    pub called: u64,
    /// Commands of such sessions that went over a connection of theirs.
    pub proxied: u64,
    /// Sessions that went over to a connection of theirs for good.
    pub stayed: u64,
    /// Sessions that were ended because all together held more than the engine's
    /// `maxmemory-clients`.
    pub evicted: u64,
}

/// Serves clients by an engine that knows nothing of RDMA. Clones are the same gateway.
#[derive(Clone)]
pub struct Gateway {
    config: Arc<RwLock<Arc<GatewayConfig>>>,
    counters: Arc<Counters>,
    sessions: Arc<Sessions>,
    inside: Option<Arc<dyn InProcessEngine>>,
}

impl Gateway {
    /// A gateway that does nothing yet.
    #[must_use]
    pub fn new(config: GatewayConfig) -> Self {
        let config = Arc::new(RwLock::new(Arc::new(config)));
        Self { config, counters: Arc::default(), sessions: Arc::default(), inside: None }
    }

    /// A gateway inside the engine, which answers what it can without a socket.
    #[must_use]
    pub fn inside(config: GatewayConfig, engine: Arc<dyn InProcessEngine>) -> Self {
        Self { inside: Some(engine), ..Self::new(config) }
    }

    /// How it behaves now.
    #[must_use]
    pub fn config(&self) -> Arc<GatewayConfig> {
        Arc::clone(&self.config.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Changes how it behaves towards those who come from now on.
    pub fn reconfigure(&self, change: impl FnOnce(&mut GatewayConfig)) {
        let mut config = self.config.write().unwrap_or_else(PoisonError::into_inner);
        change(Arc::make_mut(&mut config));
    }

    /// What it has done so far.
    #[must_use]
    pub fn stats(&self) -> GatewayStats {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Counters {
            valkey_sessions,
            ferrite_sessions,
            tcp_sessions,
            refused,
            engine_failures,
            paths,
        } = &*self.counters;
        let (to_engine_bytes, to_client_bytes) = self.sessions.moved();
        GatewayStats {
            sessions: self.sessions.count(),
            valkey_sessions: of(valkey_sessions),
            ferrite_sessions: of(ferrite_sessions),
            tcp_sessions: of(tcp_sessions),
            refused: of(refused),
            engine_failures: of(engine_failures),
            killed: of(&self.sessions.killed),
            to_engine_bytes,
            to_client_bytes,
            called: of(&paths.called),
            proxied: of(&paths.proxied),
            stayed: of(&paths.pinned),
            evicted: of(&self.sessions.evicted),
        }
    }

    /// The sessions that are open, the oldest first.
    #[must_use]
    pub fn sessions(&self) -> Vec<SessionInfo> {
        self.sessions.all()
    }

    /// Asks a session to end, by its number ([`SessionInfo::id`]); whether there is one.
    #[expect(clippy::must_use_candidate, reason = "called for its effect")]
    pub fn kill(&self, id: u64) -> bool {
        self.sessions.kill(id)
    }

    /// Takes clients until `end` is ready; then lets sessions finish what is under way. Somebody
    /// must drive the listener's engine meanwhile.
    ///
    /// # Errors
    /// The listener fails.
    pub async fn serve(
        &self,
        mut listener: Listener,
        end: impl Future<Output = ()>,
    ) -> Result<(), Error> {
        let (ending, ended) = watch::channel(false);
        let mut sessions = JoinSet::new();
        let (foreign_peers, foreign_tcp_peers) =
            (listener.foreign_peers(), listener.foreign_tcp_peers());
        let mut end = std::pin::pin!(end);
        let served = loop {
            tokio::select! {
                () = &mut end => break Ok(()),
                link = listener.accept() => match link {
                    Ok(link) => {
                        self.counters.ferrite_sessions.fetch_add(1, Ordering::Relaxed);
                        let ends = (link.peer_addr(), link.local_addr());
                        let transport = ClientTransport::Ferrite(link.clone());
                        self.spawn(&mut sessions, self.clone().session(Stream::new(link), ends, transport, ended.clone()));
                    }
                    Err(error) => break Err(error),
                },
                request = foreign_peers.next() => match request {
                    Ok(request) => {
                        let connecting = foreign_peers.accept(request);
                        self.spawn(&mut sessions, self.clone().valkey_session(connecting, ended.clone()));
                    }
                    Err(error) => break Err(error),
                },
                foreign_peer = foreign_tcp_peers.next() => match foreign_peer {
                    Ok(foreign_peer) => {
                        self.counters.tcp_sessions.fetch_add(1, Ordering::Relaxed);
                        self.spawn(&mut sessions, self.clone().tcp_session(foreign_peer, ended.clone()));
                    }
                    Err(error) => break Err(error),
                },
                Some(_) = sessions.join_next() => {}
            }
        };
        drop((foreign_peers, foreign_tcp_peers, listener));
        let _ = ending.send(true);
        let drained = async { while sessions.join_next().await.is_some() {} };
        let _ = timeout(self.config().drain_timeout, drained).await; // those that are left end here
        served
    }

    /// Where sessions run: here, or where the engine around us says.
    fn spawn(
        &self,
        sessions: &mut JoinSet<()>,
        session: impl Future<Output = ()> + Send + 'static,
    ) {
        let Some(inside) = &self.inside else {
            sessions.spawn(session);
            return;
        };
        let (end, ended) = oneshot::channel::<()>();
        inside.spawn(Box::pin(async move {
            session.await;
            drop(end);
        }));
        sessions.spawn(async {
            let _ = ended.await; // it never says more than that
        });
    }

    /// For the next client.
    fn valkey_config(&self) -> ValkeyConfig {
        let mut config = self.config().valkey.clone();
        config.proto.keepalive_interval *= (1 + self.sessions.count() / OFTEN_TOLD).min(3) as u32;
        config
    }

    async fn valkey_session(self, connecting: ConnectingRaw, ended: watch::Receiver<bool>) {
        let config = self.valkey_config();
        let stream = async {
            let raw = connecting.await?;
            let (ends, transport) =
                ((raw.peer_addr(), raw.local_addr()), ClientTransport::Valkey(raw.device()));
            Ok::<_, Error>((ValkeyStream::open(raw, Role::Server, &config).await?, ends, transport))
        };
        match stream.await {
            Ok((stream, ends, transport)) => {
                self.counters.valkey_sessions.fetch_add(1, Ordering::Relaxed);
                self.session(stream, ends, transport, ended).await;
            }
            Err(error) => {
                self.counters.refused.fetch_add(1, Ordering::Relaxed);
                static LINES: LogLimit = LogLimit::new();
                if let Some(others) = LINES.pass() {
                    tracing::warn!(%error, "a client could not be taken{others}");
                }
            }
        }
    }

    async fn tcp_session(self, foreign_peer: ForeignTcpPeer, ended: watch::Receiver<bool>) {
        let ForeignTcpPeer { socket, heard, peer, accepted, handed_over, .. } = foreign_peer;
        let local = socket.local_addr().ok();
        let _ = keep_alive(&socket); // else it is as if there was none
        let Ok(socket) = TcpStream::from_std(socket) else { return };
        let socket = EngineSocket::Tcp(socket); // a client's, but it ends alike
        let (reader, writer) = tokio::io::split(socket);
        let mut client = tokio::io::join(io::Cursor::new(heard).chain(reader), writer);
        if self.inside.as_ref().is_some_and(|inside| inside.was_full(accepted, handed_over)) {
            self.counters.refused.fetch_add(1, Ordering::Relaxed);
            return refuse(&mut client, FULL).await;
        }
        self.session(client, (Some(peer), local), ClientTransport::Tcp, ended).await;
    }

    async fn session<C>(
        self,
        mut client: C,
        (peer, local): (Option<SocketAddr>, Option<SocketAddr>),
        transport: ClientTransport,
        ended: watch::Receiver<bool>,
    ) where
        C: Client + 'static,
    {
        let config = self.config();
        let is_guarded = config.protected_mode && !is_local(peer, local, transport.is_rdma());
        let (open, before) = self.sessions.begin(peer, local, transport);
        let ending = Ending { ended, engine_stays: config.engine_stays };
        let mut first = Vec::new();
        let begun = if before >= config.max_clients {
            self.counters.refused.fetch_add(1, Ordering::Relaxed);
            Err(FULL.to_owned())
        } else if let Some(is_open) =
            self.inside.as_ref().and_then(|inside| inside.is_open_to_all())
        {
            // A silent client is no client of the engine's yet: it takes no place there, and its
            // time is limited here.
            let limits =
                self.inside.as_ref().map(|inside| inside.client_limits()).unwrap_or_default();
            match is_open && is_guarded {
                true => Err(self.denied(&config)),
                false
                    if first_bytes(&mut client, &mut first, &open, &ending, limits.silent_time)
                        .await =>
                {
                    self.engine_for(&config, false).await
                }
                false => return,
            }
        } else {
            self.engine_for(&config, is_guarded).await
        };
        match (begun, &self.inside) {
            (Ok(proxy), None) => {
                pass_through(client, proxy, Vec::new(), BUFFER, open, ending).await
            }
            (Ok(proxy), Some(inside)) => {
                open.entry.is_called.store(true, Ordering::Relaxed);
                let record = open
                    .entry
                    .record
                    .get_or_init(|| inside.new_client(peer, Arc::clone(&open.entry.ended)));
                let engine = (&**inside, &**record);
                let left = tokio::select! {
                    biased; // a session that is to end does nothing more
                    () = over(&open, ending.clone()) => Ok(Left::Nothing),
                    left = in_process::serve((&mut client, &first), proxy, engine, (&open, &self.counters.paths)) => left,
                };
                open.entry.is_called.store(false, Ordering::Relaxed);
                match left {
                    // In the runtime's own thread, which has the time for it.
                    Ok(Left::Pinned { proxy, unsent }) => {
                        let passing =
                            pass_through(client, proxy, unsent, PINNED_BUFFER, open, ending);
                        let _ = tokio::spawn(passing).await;
                    }
                    Ok(Left::Nothing) | Err(_) => {
                        let _ = timeout(LAST_WORDS, client.shutdown()).await;
                    }
                }
            }
            (Err(refusal), _) => refuse(&mut client, &refusal).await,
        }
    }

    /// What protected mode tells a client.
    fn denied(&self, config: &GatewayConfig) -> String {
        let GatewayConfig { name, open_up, .. } = config;
        self.counters.refused.fetch_add(1, Ordering::Relaxed);
        format!(
            "-DENIED The {name} is in protected mode, because the engine behind it asks for no password. Set one \
             in the engine (requirepass, or an ACL), or {open_up} to allow access without one.\r\n"
        )
    }

    /// A connection to the engine for a client, or what the client is told. Behind the gateway
    /// every client looks local to the engine, so a guarded one is refused where the engine asks
    /// for no password.
    async fn engine_for(
        &self,
        config: &GatewayConfig,
        is_guarded: bool,
    ) -> Result<ProxyConnection, String> {
        let GatewayConfig { engine: address, name, .. } = config;
        let connected = async {
            let mut engine = EngineSocket::connect(address).await?;
            let is_denied = is_guarded && engine.is_open_to_all().await?;
            Ok::<_, io::Error>((engine, is_denied))
        };
        let late = || io::Error::new(io::ErrorKind::TimedOut, "it does not answer");
        let connected =
            timeout(config.engine_timeout, connected).await.unwrap_or_else(|_| Err(late()));
        match connected {
            Ok((engine, false)) => Ok(ProxyConnection::new(engine, self.inside.clone())),
            Ok((_, true)) => Err(self.denied(config)),
            Err(error) => {
                self.counters.engine_failures.fetch_add(1, Ordering::Relaxed);
                static LINES: LogLimit = LogLimit::new();
                if let Some(others) = LINES.pass() {
                    tracing::warn!(engine = %address, %error, "cannot connect to the engine{others}");
                }
                // Whoever has not logged in is not told where the engine is, nor what the system
                // says.
                let why = match error.kind() {
                    io::ErrorKind::TimedOut => "the engine did not answer in time",
                    _ => "cannot connect to the engine",
                };
                Err(format!("-ERR {name}: {why}\r\n"))
            }
        }
    }
}

/// Has the kernel look whether a client is still there: one that left without a word would have its
/// session for ever. As engines do it by default (`tcp-keepalive 300`).
fn keep_alive(socket: &std::net::TcpStream) -> rustix::io::Result<()> {
    sockopt::set_tcp_keepidle(socket, KEEPALIVE)?;
    sockopt::set_tcp_keepintvl(socket, KEEPALIVE / 3)?;
    sockopt::set_tcp_keepcnt(socket, 3)?;
    sockopt::set_socket_keepalive(socket, true)
}

/// Tells a client why it has no session.
async fn refuse<C: AsyncWrite + Unpin>(client: &mut C, why: &str) {
    let said = async {
        client.write_all(why.as_bytes()).await?;
        client.shutdown().await
    };
    let _ = timeout(LAST_WORDS, said).await;
}

/// Waits for the first bytes of a client; false if it ends before, says nothing for this time
/// (unless that is zero), or the session is over.
async fn first_bytes<C: Client>(
    client: &mut C,
    first: &mut Vec<u8>,
    open: &Open,
    ending: &Ending,
    silent_time: Duration,
) -> bool {
    tokio::select! {
        read = client.read_buf(first) => return read.is_ok_and(|count| count > 0),
        () = over(open, ending.clone()) => {}
        () = sleep(silent_time), if !silent_time.is_zero() => {}
    }
    let _ = timeout(LAST_WORDS, client.shutdown()).await;
    false
}

/// Whether a client is on this host, for protected mode. Over RDMA its address is what the
/// connection manager was told by the client itself: nobody is local there. Over TCP the kernel has
/// had an answer from that address.
fn is_local(peer: Option<SocketAddr>, local: Option<SocketAddr>, is_rdma: bool) -> bool {
    let (peer, local) =
        (peer.map(|peer| peer.ip().to_canonical()), local.map(|local| local.ip().to_canonical()));
    !is_rdma && peer.is_some_and(|peer| peer.is_loopback() || Some(peer) == local)
}

/// A client and its connection to the engine, which gets these bytes first, until one of them ends
/// or the session is over.
async fn pass_through<C>(
    mut client: C,
    mut engine: ProxyConnection,
    unsent: Vec<u8>,
    buffer_bytes: usize,
    open: Open,
    ending: Ending,
) where
    C: AsyncRead + AsyncWrite + Unpin,
{
    let moved = &open.entry.moved;
    tokio::select! {
        // a client that breaks off is no event
        _ = pump_after(&unsent, &mut client, &mut engine, moved, buffer_bytes) => {}
        () = over(&open, ending) => {
            let _ = timeout(LAST_WORDS, client.shutdown()).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_kernels_word_makes_a_client_local() {
        let at = |address: &str| Some(address.parse::<SocketAddr>().expect("an address"));
        let here = at("10.0.0.1:6380");
        for peer in
            ["127.0.0.1:9", "[::1]:9", "10.0.0.1:9", "[::ffff:127.0.0.1]:9", "[::ffff:10.0.0.1]:9"]
        {
            assert!(is_local(at(peer), here, false), "{peer}");
            assert!(!is_local(at(peer), here, true), "{peer} is what the client says");
        }
        assert!(!is_local(at("10.0.0.2:9"), here, false));
        assert!(!is_local(None, None, false) && !is_local(None, here, false), "when in doubt, no");
    }
}
