//! One session of a gateway, from the accepted connection to its end: admission, the connection to
//! the engine, and the choice between the in-process path and the proxy path.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ferrite_fabric::{ConnectingRaw, Error, ForeignTcpPeer, LogLimit};
use ferrite_proto::Role;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::{Gateway, GatewayConfig};
use crate::ending::{Shutdown, wait_for_end};
use crate::engine::{EngineAccess, EngineSocket, probe_access};
use crate::in_process::{self, ProxyConnection, ServeOutcome};
use crate::in_process_engine::Client;
use crate::polled_when_woken::PolledWhenWoken;
use crate::pump::{BUFFER, pump_after};
use crate::sessions::{ClientTransport, OpenSession};
use crate::stream::{ValkeyConfig, ValkeyStream};
use crate::tcp_keepalive::enable_tcp_keepalive;

/// The error that engines send beyond `maxclients`, word for word.
const MAX_CLIENTS_ERROR: &str = "-ERR max number of clients reached\r\n";
/// How long a client may take to read the last bytes before its connection is closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// The number of sessions from which on new clients of Valkey Over RDMA get keepalives less often.
/// By default a client gets one every 3 s. A client that connects while there are at least this
/// many sessions gets one every 6 s, and with at least twice as many every 9 s. At a fixed
/// interval, a server with thousands of clients would do little but send keepalives. Even the
/// longest interval is shorter than the 10 s after which our own client probes a silent server.
const SESSIONS_PER_KEEPALIVE_STEP: usize = 1000;
/// The buffer of a pinned session, for each direction. It is small because the client may not have
/// authenticated.
const PINNED_BUFFER: usize = 28 << 10;

impl Gateway {
    /// Returns the settings for the next client of Valkey Over RDMA.
    fn valkey_config(&self) -> ValkeyConfig {
        let mut config = self.config().valkey.clone();
        let step = (1 + self.sessions.count() / SESSIONS_PER_KEEPALIVE_STEP).min(3);
        config.proto.keepalive_interval *= step as u32;
        config
    }

    pub(super) async fn valkey_session(
        self,
        connecting: ConnectingRaw,
        signal: watch::Receiver<bool>,
    ) {
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

    pub(super) async fn tcp_session(
        self,
        foreign_peer: ForeignTcpPeer,
        signal: watch::Receiver<bool>,
    ) {
        let ForeignTcpPeer { socket, heard, peer, accepted, handed_over, .. } = foreign_peer;
        let local = socket.local_addr().ok();
        enable_tcp_keepalive(&socket);
        let Ok(socket) = TcpStream::from_std(socket) else { return };
        // This is a client's socket. [`EngineSocket`] is used because it shuts the socket down when
        // it is dropped.
        let socket = EngineSocket::Tcp(socket);
        let (reader, writer) = tokio::io::split(socket);
        let mut client = tokio::io::join(io::Cursor::new(heard).chain(reader), writer);
        if self.inside.as_ref().is_some_and(|inside| inside.was_full(accepted, handed_over)) {
            self.counters.refused.fetch_add(1, Ordering::Relaxed);
            return refuse(&mut client, MAX_CLIENTS_ERROR).await;
        }
        self.session(client, (Some(peer), local), ClientTransport::Tcp, signal).await;
    }

    pub(super) async fn session<C>(
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
                    // A pinned session runs on the runtime's own thread, so that it takes no time
                    // from the engine's threads.
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
             password. In the engine, give the user default a password (requirepass), or disable \
             this user (ACL SETUSER default off) and add another; or {unprotect_hint} to allow \
             access without a password.\r\n"
        )
    }

    /// Connects a client to the engine, or returns the error to send to the client.
    ///
    /// If protected mode applies to the client (`is_guarded`) and the engine requires no password,
    /// the client is rejected. The engine's own protected mode would not reject the client, because
    /// every client of the gateway seems local to the engine.
    async fn connect_engine(
        &self,
        config: &GatewayConfig,
        is_guarded: bool,
    ) -> Result<ProxyConnection, String> {
        let GatewayConfig { engine: address, name, .. } = config;
        let connected = async {
            let mut engine = EngineSocket::connect(address).await?;
            let access = if is_guarded { Some(probe_access(&mut engine).await?) } else { None };
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

/// Copies bytes between a client and its connection to the engine, until the engine closes the
/// connection, a connection fails, or the session must end. The engine gets the bytes in `unsent`
/// first.
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
