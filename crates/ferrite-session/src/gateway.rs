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
//! runs commands in-process where it can (`in_process.rs`). Sessions that are pinned to the proxy
//! path leave the engine's threads.

mod config;
mod session;
mod stats;

use std::future::Future;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, RwLock};

use ferrite_fabric::{Error, Listener, Stream};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

pub use self::config::GatewayConfig;
use self::stats::Counters;
pub use self::stats::GatewayStats;
use crate::in_process_engine::InProcessEngine;
use crate::sessions::{ClientTransport, Killed, SessionInfo, Sessions};

/// Connects clients over RDMA and TCP to an engine, which need not support RDMA itself. Clones
/// share one gateway.
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

    /// Changes the settings for clients that connect from now on. Only the drain timeout applies to
    /// all sessions.
    pub fn reconfigure(&self, change: impl FnOnce(&mut GatewayConfig)) {
        let mut config = self.config.write().unwrap_or_else(PoisonError::into_inner);
        change(Arc::make_mut(&mut config));
    }

    /// Returns the open sessions, the oldest first.
    #[must_use]
    pub fn sessions(&self) -> Vec<SessionInfo> {
        self.sessions.all()
    }

    /// Returns the engine's client id of a session, by the session's number ([`SessionInfo::id`]).
    /// Returns `None` if there is no such session, or its client is not known.
    #[must_use]
    pub fn client_id(&self, id: u64) -> Option<u64> {
        self.sessions.client_id(id)
    }

    /// Asks a session to end, by its number ([`SessionInfo::id`]). Returns false if there is no
    /// such session.
    #[expect(clippy::must_use_candidate, reason = "called for its effect")]
    pub fn kill(&self, id: u64) -> bool {
        self.sessions.kill(id, None).is_some()
    }

    /// Asks a session to end, at the request of the engine's client `caller`. Returns `None` if
    /// there is no such session. If the session belongs to `caller` itself, it ends when the engine
    /// has sent the reply and closed the client.
    #[expect(clippy::must_use_candidate, reason = "called for its effect")]
    pub fn kill_for(&self, id: u64, caller: u64) -> Option<Killed> {
        self.sessions.kill(id, Some(caller))
    }

    /// Accepts clients until `end` is ready or the listener fails. Then lets sessions finish
    /// pending commands, at most for [`GatewayConfig::drain_timeout`]. The caller must drive the
    /// listener's fabric in the meantime.
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
        // Dropping `sessions` aborts those that have not finished in time. Sessions inside the
        // engine continue until the engine drops them.
        let _ = timeout(self.config().drain_timeout, drained).await;
        served
    }

    /// Runs a session as a task of this runtime, or, if the gateway is inside the engine, where the
    /// engine runs it.
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
}
