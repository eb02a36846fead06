//! [`Listener`]: accepts links and foreign peers over RDMA and TCP.

use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, AsRawFd as _, RawFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use rustls::ServerConfig;

use super::link::Link;
use crate::error::{Error, ErrorKind};
use crate::fabric::Fabric;
use crate::fabric::listener::{LinkRequest, ListenerShared};
use crate::link::core::keep;
use crate::mem::lock;
use crate::policy::{Attempts, Rdma};
use crate::wire::RefusalCode;

/// Accepts links of peers. Dropping the listener stops listening. Accepted links stay open.
///
/// ```no_run
/// # async fn show(fabric: ferrite_fabric::Fabric) -> Result<(), Box<dyn std::error::Error>> {
/// let mut listener = fabric.listen("0.0.0.0:7471".parse()?)?;
/// loop {
///     let link = listener.accept().await?;
///     println!("{:?} connected", link.peer_addr());
/// }
/// # }
/// ```
pub struct Listener {
    pub(super) fabric: Fabric,
    pub(super) shared: Arc<ListenerShared>,
    /// The number of the TCP half, if the listener accepts TCP.
    tcp: Option<u64>,
    local: SocketAddr,
    absence: Option<Error>,
}

/// Options of a listener.
///
/// ```
/// use ferrite_fabric::{ListenOptions, Rdma};
///
/// let options = ListenOptions::new().rdma(Rdma::Require); // no TCP connection is accepted
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
    rdma_by_tcp_first: bool,
}

impl ListenOptions {
    /// Returns the defaults: the fabric's settings, including those for TLS
    /// ([`Builder::tls`](crate::Builder::tls)).
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets whether links may use RDMA.
    pub fn rdma(mut self, rdma: Rdma) -> Self {
        self.rdma = Some(rdma);
        self
    }

    /// Treats every RDMA peer as a foreign peer, even if it sends a hello: see
    /// [`Listener::foreign_peers`]. For programs that speak only another protocol.
    pub fn foreign_peers_only(mut self) -> Self {
        self.foreign_peers_only = true;
        self
    }

    /// Accepts foreign peers from the start. Peers that connect before the program calls
    /// [`Listener::foreign_peers`] or [`Listener::foreign_tcp_peers`] wait for that call. Without
    /// this option, they are refused until then.
    pub fn accept_foreign_peers(mut self) -> Self {
        self.accept_foreign_peers = true;
        self
    }

    /// Restricts `[::]` to IPv6, so that another listener can use `0.0.0.0` with the same port. By
    /// default, `[::]` accepts both families.
    pub fn one_family(mut self) -> Self {
        self.one_family = true;
        self
    }

    /// Accepts RDMA only for links that begin over TCP ([`ConnectMode::TcpFirst`]), also if RDMA is
    /// required. Requests by RDMA CM are refused and counted
    /// ([`FabricStats::cm_requests_refused`]), because they do not say who the peer is. With TLS,
    /// the peers agree on each queue pair within an authenticated connection.
    ///
    /// [`ConnectMode::TcpFirst`]: crate::ConnectMode::TcpFirst
    /// [`FabricStats::cm_requests_refused`]: crate::FabricStats::cm_requests_refused
    pub fn rdma_by_tcp_first(mut self) -> Self {
        self.rdma_by_tcp_first = true;
        self
    }

    /// Sets TLS for TCP. Peers that connect over TCP without TLS are refused.
    pub fn tls(mut self, config: Arc<ServerConfig>) -> Self {
        self.tls = Some(config);
        self
    }

    /// Refuses connections that are not encrypted. RDMA payload is clear text, so only TCP with TLS
    /// is accepted: see [`ListenOptions::tls`].
    pub fn require_encryption(mut self) -> Self {
        self.require_encryption = true;
        self
    }
}

impl Fabric {
    /// Listens on an address of this host, for RDMA and TCP as configured. Port 0 picks a free
    /// port, which is the same for RDMA and TCP.
    ///
    /// - A loopback address accepts only TCP: RDMA has no loopback, and the kernel would open the
    ///   port to other hosts.
    /// - If the device that has the address is removed or reset, the listener continues with TCP.
    ///   It accepts RDMA again some seconds after the device is back. A listener that accepts only
    ///   RDMA ends.
    /// - A listener on all addresses (`0.0.0.0` or `[::]`) never loses RDMA.
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`](crate::ErrorKind::Misuse) if the address is in use.
    /// [`ErrorKind::Unreachable`](crate::ErrorKind::Unreachable) if this host does not have the
    /// address or, if RDMA is required, if no RDMA device has it.
    /// [`ErrorKind::Absent`](crate::ErrorKind::Absent) if RDMA is required but unavailable.
    pub fn listen(&self, local: SocketAddr) -> Result<Listener, Error> {
        self.listen_with(local, &ListenOptions::new())
    }

    /// Like [`Fabric::listen`], with options.
    ///
    /// # Errors
    /// Like [`Fabric::listen`].
    pub fn listen_with(
        &self,
        local: SocketAddr,
        options: &ListenOptions,
    ) -> Result<Listener, Error> {
        /// Number of attempts to find a free port. A port that is free for TCP may be in use for
        /// RDMA.
        const TRIES: usize = 8;
        let policy = options.rdma.unwrap_or(self.config().rdma);
        let policy = match policy.attempts(options.require_encryption)? {
            Attempts::Rdma => Rdma::Require,
            Attempts::RdmaThenTcp => Rdma::Prefer,
            Attempts::Tcp => Rdma::Forbid,
        };
        let tls = options.tls.clone().or_else(|| self.shared().tls.server.clone());
        if options.require_encryption && tls.is_none() {
            let what = "encryption is required, but TLS is not configured; set ListenOptions::tls";
            return Err(Error::new(ErrorKind::Misuse, what));
        }
        // Links that begin over TCP are upgraded by a migration.
        let can_migrate = match policy {
            Rdma::Prefer => true,
            Rdma::Require => options.rdma_by_tcp_first,
            Rdma::Forbid => false,
        };
        let mut listener = ListenerShared::new(local.ip(), can_migrate, options.foreign_peers_only);
        listener.refuses_cm = options.rdma_by_tcp_first;
        let listener = Arc::new(listener);
        {
            let mut queue = lock(&listener.queue);
            queue.foreign_peers.is_open =
                options.accept_foreign_peers || options.foreign_peers_only;
            queue.foreign_tcp_peers.is_open = options.accept_foreign_peers;
        }
        let one_family = options.one_family && local.is_ipv6();
        let mut last = None;
        for _ in 0..TRIES {
            let opened = self.shared().with_poller(|poller, shared| {
                let (tcp, bound) = match policy {
                    Rdma::Require if !options.rdma_by_tcp_first => (None, local),
                    _ => {
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
                    Err(error) if policy == Rdma::Require => {
                        tcp.into_iter().for_each(|tcp| poller.stop_listening_tcp(tcp));
                        return Err(error);
                    }
                    // Another program uses the port for RDMA.
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
                    // If the whole fabric has no RDMA, the builder has already logged that.
                    let is_news = self.absence().is_none() && !self.shared().is_quiet;
                    if let Some(error) = absence.as_ref().filter(|_| is_news) {
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
    /// Logs the devices that cannot isolate peers of other protocols, and the consequences.
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
                "{local}: {devices} cannot restrict memory to one connection, because they have \
                 no type 2 memory windows. A Valkey Over RDMA client that finds another client's \
                 memory key (rkey) can send commands as that client. The setting \
                 `rdma-shared-windows yes` accepts this risk; with `no`, these devices reject all \
                 Valkey Over RDMA clients"
            );
        } else {
            tracing::warn!(
                "{local}: {devices} cannot restrict memory to one connection, because they have \
                 no type 2 memory windows. Valkey Over RDMA clients are rejected there, because \
                 of the setting `rdma-shared-windows no`; other peers are accepted"
            );
        }
    }
}

impl Listener {
    /// Returns the descriptors that hold the listener's port: the TCP socket, and the connection
    /// manager's channel for RDMA. A process that forks without exec needs them. A child that
    /// inherits them keeps the port after its parent has ended.
    #[must_use]
    pub fn descriptors(&self) -> Vec<RawFd> {
        self.fabric.shared().with_poller(|poller, _| {
            let tcp = self.tcp.and_then(|id| poller.listening_descriptor(id));
            // This is also true while the RDMA half waits for its device to come back.
            let has_rdma = lock(&self.shared.rdma).is_some();
            let cm =
                poller.cm.as_ref().filter(|_| has_rdma).map(|channel| channel.as_fd().as_raw_fd());
            tcp.into_iter().chain(cm).collect()
        })
    }

    /// Returns the address that the listener is bound to.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Returns why the listener could not accept RDMA when it was opened, if RDMA is preferred.
    #[must_use]
    pub fn absence(&self) -> Option<&Error> {
        self.absence.as_ref()
    }

    /// Lets `admit` decide about each new link, before the link is accepted. A peer that it does
    /// not admit receives the code and the text (at most [`Refusal::TEXT_BYTES_MAX`] bytes) as the
    /// reason. Links that continue after the loss of their path are not asked about.
    ///
    /// The driver calls `admit` for each request, so it must not wait, nor call this fabric.
    ///
    /// [`Refusal::TEXT_BYTES_MAX`]: crate::wire::Refusal::TEXT_BYTES_MAX
    pub fn admit_if<A>(&self, admit: A)
    where
        A: Fn(&LinkRequest<'_>) -> Result<(), (RefusalCode, String)> + Send + Sync + 'static,
    {
        *lock(&self.shared.admit) = Some(Arc::new(admit));
    }

    /// Waits for the next link. Safe to cancel: a link that was not taken stays in the queue.
    pub fn accept(&mut self) -> Accepting<'_> {
        Accepting(self)
    }

    /// Returns the next link, if one is waiting.
    ///
    /// # Errors
    /// Fails if the listener accepts only RDMA and its device has disappeared.
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
        drop(listening); // destroys the CM identifier while the poller is not locked
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
