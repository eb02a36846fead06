//! Where peers come in.

mod foreign_peers;
pub(crate) mod rdma;

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd as _, AsRawFd as _, RawFd};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use ferrite_verbs::ConnectionRequest;
use rustls::ServerConfig;

use crate::error::{Error, ErrorKind};
use crate::fabric::Fabric;
use crate::link::Link;
use crate::link::shared::LinkShared;
use crate::link::state::{Wakes, keep};
use crate::mem::lock;
use crate::policy::Rdma;

pub use foreign_peers::{ForeignPeers, ForeignTcpPeer, ForeignTcpPeers};
use rdma::Half;

/// Links that are open and that nobody has accepted yet.
const BACKLOG: usize = 1024;
/// Requests of peers without a hello that nobody has looked at yet.
const FOREIGN_PEERS: usize = 64;
/// The same over TCP, where they cost less.
const FOREIGN_TCP_PEERS: usize = 1024;

pub(crate) struct ListenerShared {
    queue: Mutex<Queue>,
    /// Where RDMA comes in, if it does.
    rdma: Mutex<Option<Half>>,
    /// Where it listens.
    ip: IpAddr,
    /// TCP is taken too: links can go on there, and so can the listener.
    pub(crate) moves: bool,
    /// Nobody is taken for a Ferrite peer over RDMA, hello or not.
    pub(crate) foreign_peers_only: bool,
}

#[derive(Default)]
struct Queue {
    links: VecDeque<Arc<LinkShared>>,
    waiting: Wakes,
    foreign_peers: AcceptQueue<ConnectionRequest>,
    foreign_tcp_peers: AcceptQueue<ForeignTcpPeer>,
    failure: Option<Error>,
}

/// Peers without a hello, of one kind.
struct AcceptQueue<T> {
    here: VecDeque<T>,
    /// Whether somebody takes them.
    are_welcome: bool,
    waiting: Wakes,
}

impl<T> Default for AcceptQueue<T> {
    fn default() -> Self {
        Self { here: VecDeque::new(), are_welcome: false, waiting: Wakes::new() }
    }
}

impl<T> AcceptQueue<T> {
    fn have_room(&self, most: usize) -> bool {
        self.are_welcome && self.here.len() < most
    }

    fn push(&mut self, guest: T, wakes: &mut Wakes) {
        self.here.push_back(guest);
        wakes.append(&mut self.waiting);
    }

    /// Nobody takes them any more.
    fn turn_away(&mut self) {
        self.are_welcome = false;
        self.here.clear();
    }
}

impl ListenerShared {
    /// The next guest of a kind.
    async fn guest<T>(&self, of: fn(&mut Queue) -> &mut AcceptQueue<T>) -> Result<T, Error> {
        std::future::poll_fn(|cx| {
            let mut queue = lock(&self.queue);
            if let Some(guest) = of(&mut queue).here.pop_front() {
                return Poll::Ready(Ok(guest));
            }
            if let Some(error) = &queue.failure {
                return Poll::Ready(Err(error.clone()));
            }
            keep(&mut of(&mut queue).waiting, cx.waker());
            Poll::Pending
        })
        .await
    }

    /// Whether a connection that came for this address is for the listener. The kernel is not
    /// always so strict: a listener on 127.0.0.1 hears of whoever calls any address of the device
    /// that the kernel chose for it.
    pub(crate) fn is_at(&self, local: Option<SocketAddr>) -> bool {
        let ip = self.ip.to_canonical();
        ip.is_unspecified() || local.is_some_and(|local| local.ip().to_canonical() == ip)
    }

    pub(crate) fn is_full(&self) -> bool {
        lock(&self.queue).links.len() >= BACKLOG
    }

    pub(crate) fn arrived(&self, link: Arc<LinkShared>, wakes: &mut Wakes) {
        let mut queue = lock(&self.queue);
        queue.links.push_back(link);
        wakes.append(&mut queue.waiting);
    }

    /// Keeps a request without a hello for whoever takes them; gives it back if nobody does.
    pub(crate) fn foreign_peer(
        &self,
        request: ConnectionRequest,
        wakes: &mut Wakes,
    ) -> Result<(), Box<ConnectionRequest>> {
        let mut queue = lock(&self.queue);
        if !queue.foreign_peers.have_room(FOREIGN_PEERS) {
            return Err(Box::new(request));
        }
        queue.foreign_peers.push(request, wakes);
        Ok(())
    }

    pub(crate) fn accepts_foreign_tcp_peers(&self) -> bool {
        lock(&self.queue).foreign_tcp_peers.have_room(FOREIGN_TCP_PEERS)
    }

    pub(crate) fn foreign_tcp_peer(&self, foreign_peer: ForeignTcpPeer, wakes: &mut Wakes) {
        lock(&self.queue).foreign_tcp_peers.push(foreign_peer, wakes);
    }

    pub(crate) fn fail(&self, error: Error) {
        let wakes = {
            let mut queue = lock(&self.queue);
            queue.failure = Some(error);
            let mut wakes = std::mem::take(&mut queue.waiting);
            wakes.append(&mut queue.foreign_peers.waiting);
            wakes.append(&mut queue.foreign_tcp_peers.waiting);
            wakes
        };
        wakes.into_iter().for_each(Waker::wake);
    }
}

/// Takes links of peers. Dropping it stops listening; links that were accepted stay.
///
/// ```no_run
/// # async fn show(fabric: ferrite_fabric::Fabric) -> Result<(), Box<dyn std::error::Error>> {
/// let mut listener = fabric.listen("0.0.0.0:7471".parse()?)?;
/// loop {
///     let link = listener.accept().await?;
///     println!("{:?} came", link.peer_addr());
/// }
/// # }
/// ```
pub struct Listener {
    fabric: Fabric,
    shared: Arc<ListenerShared>,
    /// Where TCP comes in.
    tcp: Option<u64>,
    local: SocketAddr,
    absence: Option<Error>,
}

/// How to listen.
///
/// ```
/// use ferrite_fabric::{ListenOptions, Rdma};
///
/// let options = ListenOptions::new().rdma(Rdma::Require); // no TCP connection is taken
/// ```
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct ListenOptions {
    rdma: Option<Rdma>,
    tls: Option<Arc<ServerConfig>>,
    require_encryption: bool,
    foreign_peers_only: bool,
    accept_foreign_peers: bool,
    one_family: bool,
}

impl ListenOptions {
    /// As the fabric's settings say, and TCP in clear text.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether RDMA may carry links.
    pub fn rdma(mut self, rdma: Rdma) -> Self {
        self.rdma = Some(rdma);
        self
    }

    /// Every peer that comes over RDMA is a foreign peer, what it says of itself notwithstanding:
    /// see [`Listener::foreign peers`]. For who speaks another protocol and nothing else.
    pub fn foreign_peers_only(mut self) -> Self {
        self.foreign_peers_only = true;
        self
    }

    /// Foreign peers are welcome from the start: who takes them ([`Listener::foreign peers`],
    /// [`Listener::foreign_tcp_peers`]) finds those that came before it was ready. Otherwise they
    /// are refused until then.
    pub fn accept_foreign_peers(mut self) -> Self {
        self.accept_foreign_peers = true;
        self
    }

    /// `[::]` takes IPv6 alone, so that another listener can have `0.0.0.0` at the same port.
    /// Otherwise it takes both.
    pub fn one_family(mut self) -> Self {
        self.one_family = true;
        self
    }

    /// TLS on TCP: peers without it are refused there.
    pub fn tls(mut self, config: Arc<ServerConfig>) -> Self {
        self.tls = Some(config);
        self
    }

    /// Nothing in clear text. RDMA payload is, so only TCP with TLS is taken: see
    /// [`ListenOptions::tls`].
    pub fn require_encryption(mut self) -> Self {
        self.require_encryption = true;
        self
    }
}

impl Fabric {
    /// Listens on an address of this host, for RDMA and TCP as the settings say; port 0 picks one,
    /// the same for both. A loopback address takes TCP alone: RDMA has none, and the kernel would
    /// open the port to other hosts. A listener on the address of a device that is removed or reset
    /// goes on with TCP, and takes RDMA again some seconds after the device is back; one for RDMA
    /// alone ends. One on all addresses (`0.0.0.0` or `[::]`) is never lost.
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`](crate::ErrorKind::Misuse) if the address is in use or not of this
    /// host. Where RDMA is required: [`ErrorKind::Absent`](crate::ErrorKind::Absent) without a
    /// connection manager, [`ErrorKind::Unreachable`](crate::ErrorKind::Unreachable) if no RDMA
    /// device has the address.
    pub fn listen(&self, local: SocketAddr) -> Result<Listener, Error> {
        self.listen_with(local, &ListenOptions::new())
    }

    /// The same, with options.
    ///
    /// # Errors
    /// As [`Fabric::listen`].
    pub fn listen_with(
        &self,
        local: SocketAddr,
        options: &ListenOptions,
    ) -> Result<Listener, Error> {
        /// A port that TCP has free may be taken for RDMA.
        const TRIES: usize = 8;
        let policy = match options.rdma.unwrap_or(self.config().rdma) {
            Rdma::Require if options.require_encryption => {
                let what = "encryption and RDMA are both required: RDMA payload is clear text";
                return Err(Error::new(ErrorKind::Misuse, what));
            }
            _ if options.require_encryption => Rdma::Forbid,
            policy => policy,
        };
        let tls = options.tls.clone().or_else(|| self.shared().tls.server.clone());
        if options.require_encryption && tls.is_none() {
            let what =
                "encryption is required, and there is no TLS configuration (ListenOptions::tls)";
            return Err(Error::new(ErrorKind::Misuse, what));
        }
        let listener = Arc::new(ListenerShared {
            queue: Mutex::default(),
            rdma: Mutex::default(),
            ip: local.ip(),
            moves: policy == Rdma::Prefer,
            foreign_peers_only: options.foreign_peers_only,
        });
        {
            let mut queue = lock(&listener.queue);
            queue.foreign_peers.are_welcome =
                options.accept_foreign_peers || options.foreign_peers_only;
            queue.foreign_tcp_peers.are_welcome = options.accept_foreign_peers;
        }
        let one_family = options.one_family && local.is_ipv6();
        let mut last = None;
        for _ in 0..TRIES {
            let opened = self.shared().with_poller(|poller, shared| {
                let (tcp, bound) = match policy {
                    Rdma::Require => (None, local),
                    Rdma::Prefer | Rdma::Forbid => {
                        let (tcp, bound) = poller.listen_tcp(
                            shared,
                            (local, one_family),
                            tls.clone(),
                            &listener,
                        )?;
                        (Some(tcp), bound)
                    }
                };
                let cm = match policy {
                    Rdma::Forbid => Ok(None),
                    Rdma::Prefer | Rdma::Require => {
                        poller.listen_cm(shared, (bound, one_family), &listener).map(Some)
                    }
                };
                let (has_rdma, bound, absence) = match cm {
                    Ok(Some(bound)) => (true, bound, None),
                    Ok(None) => (false, bound, None),
                    Err(error) if policy == Rdma::Require => return Err(error),
                    // Somebody else has the port.
                    Err(error) if error.kind() == ErrorKind::Misuse => {
                        tcp.into_iter().for_each(|tcp| poller.stop_listening_tcp(tcp));
                        return Err(error);
                    }
                    Err(error) => (false, bound, Some(error)),
                };
                Ok((has_rdma, tcp, bound, absence))
            });
            match opened {
                Ok((has_rdma, tcp, local, absence)) => {
                    if let Some(error) = &absence {
                        tracing::warn!("{local} takes TCP only, not RDMA: {}", error.with_remedy());
                    }
                    if has_rdma && (options.accept_foreign_peers || options.foreign_peers_only) {
                        self.warn_of_shared_memory(local);
                    }
                    return Ok(Listener {
                        fabric: self.clone(),
                        shared: listener,
                        tcp,
                        local,
                        absence,
                    });
                }
                Err(error)
                    if policy == Rdma::Prefer
                        && local.port() == 0
                        && error.kind() == ErrorKind::Misuse =>
                {
                    last = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
        Err(last.unwrap_or_else(|| {
            Error::new(ErrorKind::System, "no port is free for both RDMA and TCP")
        }))
    }
}

impl Fabric {
    /// Says which devices cannot keep peers of other protocols apart, and what follows from that.
    fn warn_of_shared_memory(&self, local: SocketAddr) {
        let devices = &self.shared().devices;
        let without: Vec<_> = devices
            .iter()
            .filter(|device| !device.has_windows())
            .map(|device| device.name.as_str())
            .collect();
        if without.is_empty() {
            return;
        }
        let devices = without.join(", ");
        if self.config().shared_windows {
            tracing::warn!(
                "{local}: {devices} cannot open memory to one connection alone (no memory windows of type 2): a client of \
                 Valkey Over RDMA that finds another's key can write commands in its name (rdma-shared-windows yes)"
            );
        } else {
            tracing::warn!(
                "{local}: {devices} cannot open memory to one connection alone (no memory windows of type 2): clients of \
                 Valkey Over RDMA are refused there, others are not (rdma-shared-windows no)"
            );
        }
    }
}

impl Listener {
    /// The descriptors that hold its port: of the TCP socket, and of the connection manager for
    /// RDMA. For a process that forks without exec: a child that keeps them keeps the port when its
    /// parent has ended.
    #[must_use]
    pub fn descriptors(&self) -> Vec<RawFd> {
        self.fabric.shared().with_poller(|poller, _| {
            let tcp = self.tcp.and_then(|id| poller.listening_descriptor(id));
            let has_rdma = lock(&self.shared.rdma).is_some(); // or had, and will have it again
            let cm =
                poller.cm.as_ref().filter(|_| has_rdma).map(|channel| channel.as_fd().as_raw_fd());
            tcp.into_iter().chain(cm).collect()
        })
    }

    /// Where it listens.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Why it takes no RDMA, if RDMA is preferred.
    #[must_use]
    pub fn absence(&self) -> Option<&Error> {
        self.absence.as_ref()
    }

    /// The next link. Safe to drop: a link that nobody took stays in line.
    pub fn accept(&mut self) -> Accepting<'_> {
        Accepting(self)
    }

    /// The next link, if there is one.
    ///
    /// # Errors
    /// When the listener's device has gone.
    pub fn try_accept(&mut self) -> Result<Option<Link>, Error> {
        self.next(None)
    }

    pub(crate) fn next(&self, waker: Option<&Waker>) -> Result<Option<Link>, Error> {
        let mut queue = lock(&self.shared.queue);
        if let Some(link) = queue.links.pop_front() {
            drop(queue);
            return Ok(Some(Link::new(link, self.fabric.clone())));
        }
        if let Some(error) = &queue.failure {
            return Err(error.clone());
        }
        if let Some(waker) = waker {
            keep(&mut queue.waiting, waker);
        }
        Ok(None)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let listening = self.fabric.shared().with_poller(|poller, _| {
            if let Some(tcp) = self.tcp {
                poller.stop_listening_tcp(tcp);
            }
            poller.stop_listening_cm(&self.shared)
        });
        drop(listening); // its identifier, without the poller's lock
        for link in std::mem::take(&mut lock(&self.shared.queue).links) {
            link.close();
        }
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").field("local", &self.local).finish_non_exhaustive()
    }
}

/// See [`Listener::accept`].
#[derive(Debug)]
#[must_use = "futures do nothing unless awaited"]
pub struct Accepting<'a>(&'a mut Listener);

impl Future for Accepting<'_> {
    type Output = Result<Link, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.0.next(Some(cx.waker())) {
            Ok(Some(link)) => Poll::Ready(Ok(link)),
            Ok(None) => Poll::Pending,
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

impl fmt::Debug for ListenerShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ListenerShared").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_for_its_own_address_alone() {
        let at = |ip: &str| ListenerShared {
            queue: Mutex::default(),
            rdma: Mutex::default(),
            ip: ip.parse().expect("an address"),
            moves: false,
            foreign_peers_only: false,
        };
        let called =
            |address: &str| Some(SocketAddr::new(address.parse().expect("an address"), 6380));
        assert!(
            at("10.0.0.1").is_at(called("10.0.0.1"))
                && at("10.0.0.1").is_at(called("::ffff:10.0.0.1"))
        );
        assert!(
            !at("10.0.0.1").is_at(called("10.0.0.2")) && !at("127.0.0.1").is_at(called("10.0.0.1"))
        );
        assert!(!at("10.0.0.1").is_at(None), "when in doubt, no");
        for all in ["0.0.0.0", "::"] {
            assert!(
                at(all).is_at(called("10.0.0.1")) && at(all).is_at(called("2001:db8::1")),
                "{all}"
            );
        }
    }
}
