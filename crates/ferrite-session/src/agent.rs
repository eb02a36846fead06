//! The agent: carries TCP connections between the programs of a group of hosts, over one link for
//! each pair of hosts. Without TLS, each pair has two links, one for each direction. Programs and
//! engines are not changed.
//!
//! ```text
//! client, replica, bus ─► 127.1.0.2:7001 ─► agent ══ one link, many streams ══► agent ─► engine
//!                         alias of host 2   host 1                             host 2
//! ```
//!
//! Each host has a loopback address, its alias, which all hosts know it by. Engines bind the alias
//! of their host. On each other host, the agent listens at this alias. The engine sees the alias of
//! the program's host, and the program's port.
//!
//! In transparent mode there are no aliases: the kernel redirects connections to peers to one
//! listener of the agent. The engine sees the program's own address and port.
//!
//! | file | what it is |
//! |---|---|
//! | `config.rs` | the settings |
//! | `peer_links.rs` | which link is used, and when to connect; no I/O |
//! | `identity.rs` | mutual TLS: which peer a certificate belongs to |
//! | `admission.rs` | which streams of a peer are accepted; no I/O |
//! | `peers.rs`, `peer.rs`, `links.rs` | peers with their links; connects, accepts, runs links |
//! | `local.rs`, `transparent.rs` | connections of local programs; those that are redirected |
//! | `marks.rs` | sockets that are not redirected |
//! | `descriptors.rs` | how many descriptors connections may take; no I/O |
//! | `user.rs` | which user of this host has opened a connection |
//! | `delivery.rs`, `engine_access.rs` | streams of peers, to engines; protected mode |
//! | `socket.rs` | a local connection, which ends as its stream ends |
//! | `stats.rs` | counters |

mod admission;
mod config;
mod delivery;
mod descriptors;
mod engine_access;
mod identity;
mod links;
mod local;
mod marks;
mod peer;
mod peer_links;
mod peers;
mod socket;
mod stats;
mod transparent;
mod user;

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use ferrite_config::ports::PortSet;
use ferrite_fabric::{Error, Fabric, Listener};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

use self::admission::Admission;
pub use self::config::{AgentConfig, AgentPeer, PeerAddress, Transparent};
use self::descriptors::Descriptors;
use self::engine_access::EngineAccessProbe;
pub use self::identity::AgentTls;
use self::marks::OwnAddresses;
pub use self::marks::{DELIVERY_MARK, DIRECT_MARK, MARK_BITS};
use self::peer::Peer;
use self::peer_links::Sharing;
use self::peers::Peers;
use self::stats::Counters;
pub use self::stats::{AgentPeerStats, AgentStats};
pub use self::transparent::Delivery;
use self::user::Users;

/// Maximum number of connections that wait to be accepted at a port: the default of engines
/// (`tcp-backlog`).
const BACKLOG: u32 = 511;

/// How many links may have an unfinished handshake, however few descriptors there are.
const UNFINISHED_MIN: usize = 8;

/// A task that runs until it ends, or until the agent does.
type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// An agent. [`Agent::serve`] runs it.
#[derive(Debug)]
pub struct Agent {
    shared: Arc<Shared>,
    tasks: mpsc::UnboundedReceiver<Task>,
}

/// Shows and changes a running agent. Clones share it.
#[derive(Debug, Clone)]
pub struct AgentHandle {
    shared: Arc<Shared>,
}

/// The listeners for local programs.
#[derive(Debug)]
pub struct LocalListeners {
    /// The listeners at the aliases of the peers.
    aliases: Vec<(Arc<Peer>, TcpListener)>,
    /// In transparent mode, the listener for redirected connections.
    redirected: Option<TcpListener>,
    /// Connections of programs that were redirected before [`Agent::serve`], and their sources.
    early: Vec<(TcpStream, SocketAddr)>,
}

/// What the tasks of an agent share.
#[derive(Debug)]
struct Shared {
    fabric: Fabric,
    config: RwLock<Arc<AgentConfig>>,
    ports: PortSet,
    /// The local address from which this agent opens links.
    local: Option<SocketAddr>,
    /// Mutual TLS with all peers.
    tls: Option<AgentTls>,
    admission: Admission,
    access: EngineAccessProbe,
    peers: Peers,
    /// The local addresses of direct connections, in transparent mode.
    own_addresses: OwnAddresses,
    descriptors: Arc<Descriptors>,
    users: Users,
    counters: Counters,
    next_link: AtomicU64,
    /// The last port at which a connection of a peer was delivered, or 0.
    delivered_port: AtomicU16,
    is_ending: AtomicBool,
    tasks: mpsc::UnboundedSender<Task>,
}

impl Agent {
    /// Creates an agent. The fabric needs at least three channels for each link. The caller drives
    /// it.
    ///
    /// # Errors
    /// Returns what is wrong with the settings.
    pub fn new(fabric: Fabric, config: AgentConfig) -> Result<Self, String> {
        config.check()?;
        let (sender, tasks) = mpsc::unbounded_channel();
        // A handshake, and then the upgrade to RDMA if the called side requires RDMA.
        let longest_attempt = 2 * fabric.config().connection_timeout;
        let sharing = Sharing { instance: fabric.instance(), longest_attempt };
        let peers = Peers::new(&config, config.tls.is_some().then_some(sharing));
        let AgentConfig { alias, deliver, own, .. } = config.clone();
        let shared = Shared {
            fabric,
            ports: config.ports.clone(),
            local: config.local,
            tls: config.tls.clone(),
            admission: Admission { alias, deliver, own },
            config: RwLock::new(Arc::new(config)),
            access: EngineAccessProbe::default(),
            peers,
            own_addresses: OwnAddresses::default(),
            descriptors: Arc::default(),
            users: Users::default(),
            counters: Counters::default(),
            next_link: AtomicU64::new(1),
            delivered_port: AtomicU16::new(0),
            is_ending: AtomicBool::new(false),
            tasks: sender,
        };
        Ok(Self { shared: Arc::new(shared), tasks })
    }

    /// Returns a handle.
    #[must_use]
    pub fn handle(&self) -> AgentHandle {
        AgentHandle { shared: Arc::clone(&self.shared) }
    }

    /// Listens for local programs: at the aliases of all peers, or, in transparent mode, at a free
    /// port of 127.0.0.1. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// Returns the address that cannot be listened on, with the system's error.
    pub fn listen(&self) -> Result<LocalListeners, (SocketAddr, io::Error)> {
        if self.shared.is_transparent() {
            let redirected = Some(transparent::listen()?);
            return Ok(LocalListeners { aliases: Vec::new(), redirected, early: Vec::new() });
        }
        let mut aliases = Vec::new();
        for peer in self.shared.peers.configured() {
            for port in self.shared.ports.iter() {
                let listener = listen_at((peer.alias, port).into())?;
                aliases.push((Arc::clone(&peer), listener));
            }
        }
        Ok(LocalListeners { aliases, redirected: None, early: Vec::new() })
    }

    /// Carries connections until `end` is ready, or a listener for links fails. Then accepts
    /// nothing new, and lets connections end, at most for [`AgentConfig::drain_timeout`]. After
    /// that, resets the connections that are still open. Dropping this future resets all
    /// connections.
    ///
    /// # Errors
    /// Returns an error if a listener for links fails.
    pub async fn serve(
        mut self,
        programs: LocalListeners,
        listeners: Vec<Listener>,
        end: impl Future<Output = ()>,
    ) -> Result<(), Error> {
        let mut tasks = JoinSet::new();
        let mut local = JoinSet::new();
        for (peer, listener) in programs.aliases {
            local.spawn(local::accept(Arc::clone(&self.shared), peer, listener));
        }
        if let Some(listener) = programs.redirected {
            local.spawn(transparent::accept(Arc::clone(&self.shared), listener, programs.early));
        }
        listeners.iter().for_each(|listener| links::check_requests(&self.shared, listener));
        let mut accepting = JoinSet::new();
        for listener in listeners {
            accepting.spawn(links::accept(Arc::clone(&self.shared), listener));
        }
        for peer in self.shared.peers.configured() {
            let shared = Arc::clone(&self.shared);
            if peer.address().is_name() {
                local.spawn(links::follow_name(Arc::clone(&shared), Arc::clone(&peer)));
            }
            tasks.spawn(async move {
                let _ = links::link_to(&shared, &peer).await;
            });
        }
        let mut end = std::pin::pin!(end);
        let served = loop {
            tokio::select! {
                () = &mut end => break Ok(()),
                Some(Ok(error)) = accepting.join_next() => break Err(error),
                Some(task) = self.tasks.recv() => { tasks.spawn(task); }
                Some(_) = tasks.join_next() => {}
            }
        };
        drop((local, accepting)); // closes the listeners
        self.shared.is_ending.store(true, Ordering::Relaxed);
        self.shared.peers.all().iter().for_each(|peer| peer.go_away());
        let drained = async {
            loop {
                tokio::select! {
                    biased; // starts waiting tasks first, because the drain must wait for them, too
                    Some(task) = self.tasks.recv() => { tasks.spawn(task); }
                    ended = tasks.join_next() => if ended.is_none() { break },
                }
            }
        };
        // At the end of this function, dropping `tasks` ends the tasks that still run, which resets
        // their connections.
        let _ = timeout(self.shared.config().drain_timeout, drained).await;
        served
    }
}

impl AgentHandle {
    /// Changes the settings for new connections. Only protected mode, direct connections and the
    /// drain timeout can change; changes of other settings have no effect.
    pub fn reconfigure(&self, change: impl FnOnce(&mut AgentConfig)) {
        let mut config = self.shared.config.write().unwrap_or_else(PoisonError::into_inner);
        change(Arc::make_mut(&mut config));
    }

    /// Limits the connections so that a quarter of these descriptors is left for links, the cluster
    /// bus and the admin port. Direct connections take at most half of them, and links whose
    /// handshake has not finished a sixteenth. Must be called before [`Agent::serve`]; otherwise
    /// there is no limit.
    pub fn limit_descriptors(&self, free: usize) {
        self.shared.descriptors.set_free(free);
        self.shared.fabric.limit_unfinished_tcp((free / 16).max(UNFINISHED_MIN));
    }

    /// Returns the state and the counters.
    #[must_use]
    pub fn stats(&self) -> AgentStats {
        let all = self.shared.peers.all();
        let peers = self.shared.peers.stats();
        let mut stats = AgentStats { peers, ..self.shared.counters.stats() };
        let at_limits = all.iter().map(|peer| peer.refused_at_limits()).sum();
        stats.refused.push(("limit", at_limits));
        let fabric = self.shared.fabric.stats();
        stats.links_refused.push(("tls", fabric.tls_failures));
        stats.links_refused.push(("cm", fabric.cm_requests_refused));
        stats
    }

    /// Checks that there is a link to each peer of the settings. If there is none, tries to open
    /// one first.
    ///
    /// # Errors
    /// Returns the peers without a link, with the cause as far as it is known.
    pub async fn check_links(&self) -> Result<(), String> {
        let mut missing = Vec::new();
        for peer in &self.shared.peers.configured() {
            if links::link_to(&self.shared, peer).await.is_none() {
                let why = peer.error().unwrap_or_else(|| "no answer yet".into());
                missing.push(format!("no link to {peer}: {why}"));
            }
        }
        if missing.is_empty() { Ok(()) } else { Err(missing.join("; ")) }
    }
}

impl Shared {
    fn config(&self) -> Arc<AgentConfig> {
        Arc::clone(&self.config.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Runs a task until it ends, or until the agent does.
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let _ = self.tasks.send(Box::pin(task)); // without a receiver, the agent has ended
    }

    fn is_transparent(&self) -> bool {
        self.peers.is_transparent()
    }

    fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }
}

fn listen_at(address: SocketAddr) -> Result<TcpListener, (SocketAddr, io::Error)> {
    let listen = || {
        let socket = TcpSocket::new_v4()?;
        socket.set_reuseaddr(true)?; // connections of an earlier agent may linger
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    listen().map_err(|error| (address, error))
}
