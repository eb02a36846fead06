//! The server side of sessions: accepts all kinds of clients, and connects each session to the
//! engine's socket.
//!
//! ```text
//!   Ferrite peer (RDMA, or TCP) ──► Stream ───────┐
//!   Valkey client (RDMA) ─────────► ValkeyStream ─┼─► pump ──► the engine's Unix or TCP socket
//!   any client (TCP) ─────────────────────────────┘
//! ```
//!
//! A gateway inside the engine ([`Gateway::inside`]) runs its sessions on the engine's threads, and
//! runs commands in-process where it can (`in_process.rs`).

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

use crate::ending::{Shutdown, wait_for_end};
use crate::engine::{EngineAccess, EngineAddress, EngineSocket};
use crate::in_process::{self, CommandPaths, ProxyConnection, ServeOutcome};
use crate::in_process_engine::{Client, InProcessEngine};
use crate::polled_when_woken::PolledWhenWoken;
use crate::pump::{BUFFER, pump_after};
use crate::sessions::{ClientTransport, OpenSession, SessionInfo, Sessions};
use crate::stream::{ValkeyConfig, ValkeyStream};

/// The error that engines send beyond `maxclients`, word for word.
const MAX_CLIENTS_ERROR: &str = "-ERR max number of clients reached\r\n";
/// How long a client may take to read the last bytes before its connection is closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// The idle time after which the kernel probes a TCP client.
const TCP_KEEPALIVE: Duration = Duration::from_secs(300);
/// The number of sessions after which keepalives to clients of Valkey Over RDMA become rarer.
/// Clients get one every 3 s at first, every 6 s beyond this number and every 9 s beyond twice this
/// number. A server with thousands of clients would do little else otherwise. Even the longest
/// interval is shorter than the 10 s after which our own client probes a silent server.
const SESSIONS_PER_KEEPALIVE_STEP: usize = 1000;
/// The buffer of a pinned session, for each direction. It is small because the client may not have
/// authenticated.
const PINNED_BUFFER: usize = 28 << 10;

/// The settings of a [`Gateway`].
#[derive(Debug, Clone)]
pub struct GatewayConfig {
    /// The address of the engine.
    pub engine: EngineAddress,
    /// How long connecting to the engine may take (default 5 s).
    pub engine_timeout: Duration,
    /// The maximum number of sessions; further clients are rejected (default 10,000).
    pub max_clients: usize,
    /// Whether to reject clients from other hosts while the engine requires no password (default
    /// true). To the engine, all clients of the gateway seem to come from this host, so its own
    /// protected mode would accept them.
    pub protected_mode: bool,
    /// How long sessions may take to finish pending commands when the gateway shuts down (default
    /// 5 s).
    pub drain_timeout: Duration,
    /// Whether the engine keeps running when the gateway shuts down, so that waiting for its
    /// replies makes sense (default true). False if both shut down together.
    pub engine_keeps_running: bool,
    /// The settings for clients of Valkey Over RDMA.
    pub valkey: ValkeyConfig,
    /// The name of the sender in errors to rejected clients (default `Ferrite gateway`).
    pub name: &'static str,
    /// The advice in protected mode's error: how to allow clients from other hosts without a
    /// password. The default is for `ferrite gateway`.
    pub unprotect_hint: &'static str,
}

impl GatewayConfig {
    /// Returns the default settings for a gateway in front of this engine.
    #[must_use]
    pub fn new(engine: EngineAddress) -> Self {
        Self {
            engine,
            engine_timeout: Duration::from_secs(5),
            max_clients: 10_000,
            protected_mode: true,
            drain_timeout: Duration::from_secs(5),
            engine_keeps_running: true,
            valkey: ValkeyConfig::default(),
            name: "Ferrite gateway",
            unprotect_hint: "start the gateway with --protected-mode no",
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

/// The counters of a gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct GatewayStats {
    /// Sessions that are open now.
    pub sessions: usize,
    /// Clients that have connected with Valkey Over RDMA.
    pub valkey_sessions: u64,
    /// Ferrite peers that have connected.
    pub ferrite_sessions: u64,
    /// Other clients that have connected, over TCP.
    pub tcp_sessions: u64,
    /// Clients that were rejected.
    pub refused: u64,
    /// Clients that got no session because connecting to the engine failed.
    pub engine_failures: u64,
    /// Sessions that were asked to end ([`Gateway::kill`]).
    pub killed: u64,
    /// Bytes sent to the engine.
    pub to_engine_bytes: u64,
    /// Bytes sent to clients.
    pub to_client_bytes: u64,
    /// Commands that were called in-process.
    pub called: u64,
    /// Commands of in-process sessions that went over their proxy connections.
    pub proxied: u64,
    /// Sessions that were pinned to the proxy path.
    pub pinned: u64,
    /// Sessions that were ended because all sessions together held more memory than the engine's
    /// `maxmemory-clients`.
    pub evicted: u64,
}

/// Serves clients over RDMA and TCP with an engine that need not support RDMA. Clones share one
/// gateway.
#[derive(Clone)]
pub struct Gateway {
    config: Arc<RwLock<Arc<GatewayConfig>>>,
    counters: Arc<Counters>,
    sessions: Arc<Sessions>,
    inside: Option<Arc<dyn InProcessEngine>>,
}

impl Gateway {
    /// Creates a gateway in front of an engine. [`Gateway::serve`] starts it.
    #[must_use]
    pub fn new(config: GatewayConfig) -> Self {
        let config = Arc::new(RwLock::new(Arc::new(config)));
        Self { config, counters: Arc::default(), sessions: Arc::default(), inside: None }
    }

    /// Creates a gateway inside the engine. It runs commands in-process where it can.
    #[must_use]
    pub fn inside(config: GatewayConfig, engine: Arc<dyn InProcessEngine>) -> Self {
        Self { inside: Some(engine), ..Self::new(config) }
    }

    /// Returns the current settings.
    #[must_use]
    pub fn config(&self) -> Arc<GatewayConfig> {
        Arc::clone(&self.config.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Changes the settings for clients that connect from now on.
    pub fn reconfigure(&self, change: impl FnOnce(&mut GatewayConfig)) {
        let mut config = self.config.write().unwrap_or_else(PoisonError::into_inner);
        change(Arc::make_mut(&mut config));
    }

    /// Returns the counters of the gateway.
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
            pinned: of(&paths.pinned),
            evicted: of(&self.sessions.evicted),
        }
    }

    /// Returns the open sessions, the oldest first.
    #[must_use]
    pub fn sessions(&self) -> Vec<SessionInfo> {
        self.sessions.all()
    }

    /// Asks a session to end, by its number ([`SessionInfo::id`]). Returns false if there is no
    /// such session.
    #[expect(clippy::must_use_candidate, reason = "called for its effect")]
    pub fn kill(&self, id: u64) -> bool {
        self.sessions.kill(id)
    }

    /// Accepts clients until `end` is ready, then lets sessions finish pending commands. The caller
    /// must drive the listener's fabric in the meantime.
    ///
    /// # Errors
    /// Returns an error if the listener fails.
    pub async fn serve(
        &self,
        mut listener: Listener,
        end: impl Future<Output = ()>,
    ) -> Result<(), Error> {
        let (shutdown, signal) = watch::channel(false);
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
                        let session = self.clone().session(
                            Stream::new(link),
                            ends,
                            transport,
                            signal.clone(),
                        );
                        self.spawn(&mut sessions, session);
                    }
                    Err(error) => break Err(error),
                },
                request = foreign_peers.next() => match request {
                    Ok(request) => {
                        let connecting = foreign_peers.accept(request);
                        let session = self.clone().valkey_session(connecting, signal.clone());
                        self.spawn(&mut sessions, session);
                    }
                    Err(error) => break Err(error),
                },
                foreign_peer = foreign_tcp_peers.next() => match foreign_peer {
                    Ok(foreign_peer) => {
                        self.counters.tcp_sessions.fetch_add(1, Ordering::Relaxed);
                        let session = self.clone().tcp_session(foreign_peer, signal.clone());
                        self.spawn(&mut sessions, session);
                    }
                    Err(error) => break Err(error),
                },
                Some(_) = sessions.join_next() => {}
            }
        };
        drop((foreign_peers, foreign_tcp_peers, listener));
        let _ = shutdown.send(true);
        let drained = async { while sessions.join_next().await.is_some() {} };
        // Dropping `sessions` aborts those that have not finished in time.
        let _ = timeout(self.config().drain_timeout, drained).await;
        served
    }

    /// Runs a session: as a task of this runtime, or where the surrounding engine runs it.
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
            let _ = ended.await; // nothing is ever sent: dropping the sender is the signal
        });
    }

    /// Returns the settings for the next client of Valkey Over RDMA.
    fn valkey_config(&self) -> ValkeyConfig {
        let mut config = self.config().valkey.clone();
        let step = (1 + self.sessions.count() / SESSIONS_PER_KEEPALIVE_STEP).min(3);
        config.proto.keepalive_interval *= step as u32;
        config
    }

    async fn valkey_session(self, connecting: ConnectingRaw, signal: watch::Receiver<bool>) {
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
                self.session(stream, ends, transport, signal).await;
            }
            Err(error) => {
                self.counters.refused.fetch_add(1, Ordering::Relaxed);
                static LINES: LogLimit = LogLimit::new();
                if let Some(others) = LINES.pass() {
                    tracing::warn!(%error, "cannot accept a client{others}");
                }
            }
        }
    }

    async fn tcp_session(self, foreign_peer: ForeignTcpPeer, signal: watch::Receiver<bool>) {
        let ForeignTcpPeer { socket, heard, peer, accepted, handed_over, .. } = foreign_peer;
        let local = socket.local_addr().ok();
        let _ = enable_keepalive(&socket); // the session also works without keepalive
        let Ok(socket) = TcpStream::from_std(socket) else { return };
        // Not an engine's socket, but it must be shut down in the same way when it is dropped.
        let socket = EngineSocket::Tcp(socket);
        let (reader, writer) = tokio::io::split(socket);
        let mut client = tokio::io::join(io::Cursor::new(heard).chain(reader), writer);
        if self.inside.as_ref().is_some_and(|inside| inside.was_full(accepted, handed_over)) {
            self.counters.refused.fetch_add(1, Ordering::Relaxed);
            return refuse(&mut client, MAX_CLIENTS_ERROR).await;
        }
        self.session(client, (Some(peer), local), ClientTransport::Tcp, signal).await;
    }

    async fn session<C>(
        self,
        mut client: C,
        (peer, local): (Option<SocketAddr>, Option<SocketAddr>),
        transport: ClientTransport,
        signal: watch::Receiver<bool>,
    ) where
        C: Client + 'static,
    {
        let config = self.config();
        let is_guarded = config.protected_mode && !is_local(peer, local, transport.is_rdma());
        let (open, before) = self.sessions.begin(peer, local, transport);
        let shutdown = Shutdown { signal, engine_keeps_running: config.engine_keeps_running };
        let mut first = Vec::new();
        let connected = if before >= config.max_clients {
            self.counters.refused.fetch_add(1, Ordering::Relaxed);
            Err(MAX_CLIENTS_ERROR.to_owned())
        } else if let Some(is_open) =
            self.inside.as_ref().and_then(|inside| inside.is_open_to_all())
        {
            // The session connects to the engine only after the client's first bytes. So a silent
            // client does not count towards `maxclients`, and its `timeout` is enforced here.
            let limits =
                self.inside.as_ref().map(|inside| inside.client_limits()).unwrap_or_default();
            match is_open && is_guarded {
                true => Err(self.protected_mode_error(&config)),
                false
                    if read_first_bytes(
                        &mut client,
                        &mut first,
                        &open,
                        &shutdown,
                        limits.silent_time,
                    )
                    .await =>
                {
                    self.connect_engine(&config, false).await
                }
                false => return,
            }
        } else {
            self.connect_engine(&config, is_guarded).await
        };
        match (connected, &self.inside) {
            (Ok(proxy), None) => {
                pass_through(client, proxy, Vec::new(), BUFFER, open, shutdown).await;
            }
            (Ok(proxy), Some(inside)) => {
                open.entry.is_called.store(true, Ordering::Relaxed);
                let record = open
                    .entry
                    .record
                    .get_or_init(|| inside.new_client(peer, Arc::clone(&open.entry.ended)));
                let engine = (&**inside, &**record);
                let outcome = tokio::select! {
                    biased; // a session that must end runs no further command
                    () = PolledWhenWoken::new(wait_for_end(&open, shutdown.clone())) => {
                        Ok(ServeOutcome::Closed)
                    }
                    outcome = in_process::serve(
                        (&mut client, &first),
                        proxy,
                        engine,
                        (&open, &self.counters.paths),
                    ) => outcome,
                };
                open.entry.is_called.store(false, Ordering::Relaxed);
                match outcome {
                    // Runs on the runtime's own thread, to save the engine's time.
                    Ok(ServeOutcome::Pinned { proxy, unsent }) => {
                        let passing =
                            pass_through(client, proxy, unsent, PINNED_BUFFER, open, shutdown);
                        let _ = tokio::spawn(passing).await;
                    }
                    Ok(ServeOutcome::Closed) | Err(_) => {
                        let _ = timeout(CLOSE_TIMEOUT, client.shutdown()).await;
                    }
                }
            }
            (Err(refusal), _) => refuse(&mut client, &refusal).await,
        }
    }

    /// Counts a rejected client, and returns the error that protected mode sends to it.
    fn protected_mode_error(&self, config: &GatewayConfig) -> String {
        let GatewayConfig { name, unprotect_hint, .. } = config;
        self.counters.refused.fetch_add(1, Ordering::Relaxed);
        format!(
            "-DENIED The {name} is in protected mode, because the engine behind it requires no \
             password. In the engine, give the user default a password (requirepass), or turn it \
             off (ACL SETUSER default off) and add a user; or {unprotect_hint} to allow access without \
             a password.\r\n"
        )
    }

    /// Connects a client to the engine, or returns the error to send to the client. To the engine,
    /// every client of the gateway seems local, so a guarded client is rejected if the engine
    /// requires no password.
    async fn connect_engine(
        &self,
        config: &GatewayConfig,
        is_guarded: bool,
    ) -> Result<ProxyConnection, String> {
        let GatewayConfig { engine: address, name, .. } = config;
        let connected = async {
            let mut engine = EngineSocket::connect(address).await?;
            let access = if is_guarded { Some(engine.probe_access().await?) } else { None };
            Ok::<_, io::Error>((engine, access))
        };
        let timed_out = || {
            let message = format!("no answer within {:?}", config.engine_timeout);
            io::Error::new(io::ErrorKind::TimedOut, message)
        };
        let connected =
            timeout(config.engine_timeout, connected).await.unwrap_or_else(|_| Err(timed_out()));
        match connected {
            Ok((engine, None | Some(EngineAccess::NeedsPassword))) => {
                Ok(ProxyConnection::new(engine, self.inside.clone()))
            }
            Ok((_, Some(EngineAccess::Open))) => Err(self.protected_mode_error(config)),
            Ok((_, Some(EngineAccess::Refused(reply)))) => {
                self.counters.engine_failures.fetch_add(1, Ordering::Relaxed);
                static LINES: LogLimit = LogLimit::new();
                if let Some(others) = LINES.pass() {
                    let reply = reply.trim_end();
                    tracing::warn!(engine = %address, reply, "the engine rejects a client{others}");
                }
                Err(reply)
            }
            Err(error) => {
                self.counters.engine_failures.fetch_add(1, Ordering::Relaxed);
                static LINES: LogLimit = LogLimit::new();
                if let Some(others) = LINES.pass() {
                    tracing::warn!(
                        engine = %address,
                        %error,
                        "cannot connect to the engine{others}"
                    );
                }
                // The client may not have logged in, so it does not learn the engine's address or
                // the system's error.
                let why = match error.kind() {
                    io::ErrorKind::TimedOut => "the engine did not answer in time",
                    _ => "cannot connect to the engine",
                };
                Err(format!("-ERR {name}: {why}\r\n"))
            }
        }
    }
}

/// Enables TCP keepalive, as engines do by default (`tcp-keepalive 300`). Without it, a client that
/// vanishes without closing would keep its session forever.
fn enable_keepalive(socket: &std::net::TcpStream) -> rustix::io::Result<()> {
    sockopt::set_tcp_keepidle(socket, TCP_KEEPALIVE)?;
    sockopt::set_tcp_keepintvl(socket, TCP_KEEPALIVE / 3)?;
    sockopt::set_tcp_keepcnt(socket, 3)?;
    sockopt::set_socket_keepalive(socket, true)
}

/// Sends a client the reason for its rejection, and closes the connection.
async fn refuse<C: AsyncWrite + Unpin>(client: &mut C, why: &str) {
    let closing = async {
        client.write_all(why.as_bytes()).await?;
        client.shutdown().await
    };
    let _ = timeout(CLOSE_TIMEOUT, closing).await;
}

/// Waits for the first bytes of a client. Returns false if the client disconnects first, sends
/// nothing for `silent_time` (zero means no limit), or the session must end.
async fn read_first_bytes<C: Client>(
    client: &mut C,
    first: &mut Vec<u8>,
    open: &OpenSession,
    shutdown: &Shutdown,
    silent_time: Duration,
) -> bool {
    tokio::select! {
        read = client.read_buf(first) => return read.is_ok_and(|count| count > 0),
        () = wait_for_end(open, shutdown.clone()) => {}
        () = sleep(silent_time), if !silent_time.is_zero() => {}
    }
    let _ = timeout(CLOSE_TIMEOUT, client.shutdown()).await;
    false
}

/// Returns whether a client is on this host, for protected mode. Over TCP, the handshake has proven
/// the client's address to the kernel. Over RDMA, the client itself has told the connection manager
/// its address, so no such client counts as local.
fn is_local(peer: Option<SocketAddr>, local: Option<SocketAddr>, is_rdma: bool) -> bool {
    let (peer, local) =
        (peer.map(|peer| peer.ip().to_canonical()), local.map(|local| local.ip().to_canonical()));
    !is_rdma && peer.is_some_and(|peer| peer.is_loopback() || Some(peer) == local)
}

/// Copies bytes between a client and its connection to the engine, until one of them ends or the
/// session must end. The engine gets the bytes in `unsent` first.
async fn pass_through<C>(
    mut client: C,
    mut engine: ProxyConnection,
    unsent: Vec<u8>,
    buffer_bytes: usize,
    open: OpenSession,
    shutdown: Shutdown,
) where
    C: AsyncRead + AsyncWrite + Unpin,
{
    let moved = &open.entry.moved;
    tokio::select! {
        // An error is ignored: clients that disconnect are not worth a log line.
        _ = pump_after(&unsent, &mut client, &mut engine, moved, buffer_bytes) => {}
        () = wait_for_end(&open, shutdown) => {
            let _ = timeout(CLOSE_TIMEOUT, client.shutdown()).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trusts_only_tcp_addresses_to_be_local() {
        let at = |address: &str| Some(address.parse::<SocketAddr>().expect("valid address"));
        let here = at("10.0.0.1:6380");
        for peer in
            ["127.0.0.1:9", "[::1]:9", "10.0.0.1:9", "[::ffff:127.0.0.1]:9", "[::ffff:10.0.0.1]:9"]
        {
            assert!(is_local(at(peer), here, false), "{peer}");
            assert!(!is_local(at(peer), here, true), "{peer} is claimed by the client itself");
        }
        assert!(!is_local(at("10.0.0.2:9"), here, false));
        assert!(!is_local(None, None, false) && !is_local(None, here, false), "unknown address");
    }
}
