//! The state that a listener shares with the poller: links and foreign peers that wait to be
//! accepted.

use std::collections::VecDeque;
use std::fmt;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::time::Instant;

use ferrite_verbs::{CmKey, ConnectionRequest};
use rustls::pki_types::CertificateDer;

use crate::error::Error;
use crate::link::core::{Wakes, keep};
use crate::link::shared::LinkShared;
use crate::mem::lock;
use crate::wire::RefusalCode;

/// Maximum number of open links that wait for the program to accept them. Also the backlog of the
/// RDMA listener in the kernel.
pub(crate) const BACKLOG: usize = 1024;
/// Maximum number of RDMA requests of foreign peers that wait to be accepted.
const FOREIGN_PEERS: usize = 64;
/// Maximum number of TCP connections of foreign peers that wait to be accepted. They cost less than
/// RDMA requests.
const FOREIGN_TCP_PEERS: usize = 1024;

/// A peer that asks for a new link.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct LinkRequest<'a> {
    /// The peer's address. A peer that connects by RDMA CM has not proven that it has this address.
    pub peer: Option<SocketAddr>,
    /// The verified certificates of the peer, its own first. Empty without mutual TLS.
    pub certificates: &'a [CertificateDer<'static>],
}

/// Decides whether a peer may have a link.
pub(crate) type Admit = dyn Fn(&LinkRequest<'_>) -> Result<(), (RefusalCode, String)> + Send + Sync;

pub(crate) struct ListenerShared {
    pub(crate) queue: Mutex<Queue>,
    /// The RDMA half, if the listener accepts RDMA.
    pub(crate) rdma: Mutex<Option<Half>>,
    /// The address that the listener is bound to.
    ip: IpAddr,
    /// Whether RDMA is preferred, so that the listener also accepts TCP. Links can then migrate to
    /// TCP, and the listener survives the loss of its device.
    pub(crate) can_migrate: bool,
    /// Whether every RDMA peer counts as a foreign peer, even if it sends a hello.
    pub(crate) foreign_peers_only: bool,
    /// Whether links begin over TCP alone, so that requests by RDMA CM are refused.
    pub(crate) refuses_cm: bool,
    /// The program's check of new links; without one, all are accepted.
    pub(crate) admit: Mutex<Option<Arc<Admit>>>,
}

#[derive(Default)]
pub(crate) struct Queue {
    pub(crate) links: VecDeque<Arc<LinkShared>>,
    pub(crate) waiting: Wakes,
    pub(crate) foreign_peers: AcceptQueue<ConnectionRequest>,
    pub(crate) foreign_tcp_peers: AcceptQueue<ForeignTcpPeer>,
    pub(crate) failure: Option<Error>,
}

/// Waiting foreign peers, over RDMA or over TCP.
pub(crate) struct AcceptQueue<T> {
    peers: VecDeque<T>,
    /// Whether the program accepts foreign peers over this transport. Otherwise they are refused.
    pub(crate) is_open: bool,
    waiting: Wakes,
}

impl<T> Default for AcceptQueue<T> {
    fn default() -> Self {
        Self { peers: VecDeque::new(), is_open: false, waiting: Wakes::new() }
    }
}

impl<T> AcceptQueue<T> {
    fn has_room(&self, max: usize) -> bool {
        self.is_open && self.peers.len() < max
    }

    fn push(&mut self, peer: T, wakes: &mut Wakes) {
        self.peers.push_back(peer);
        wakes.append(&mut self.waiting);
    }

    /// Rejects all waiting and future peers, because nobody accepts them any more.
    pub(crate) fn close(&mut self) {
        self.is_open = false;
        self.peers.clear();
    }
}

impl ListenerShared {
    pub(crate) fn new(ip: IpAddr, can_migrate: bool, foreign_peers_only: bool) -> Self {
        Self {
            queue: Mutex::default(),
            rdma: Mutex::default(),
            ip,
            can_migrate,
            foreign_peers_only,
            refuses_cm: false,
            admit: Mutex::default(),
        }
    }

    /// Asks the program whether a peer may have a link.
    pub(crate) fn admit(&self, request: &LinkRequest<'_>) -> Result<(), (RefusalCode, String)> {
        let admit = lock(&self.admit).clone();
        admit.map_or(Ok(()), |admit| admit(request))
    }

    /// Waits for the next foreign peer in one of the queues.
    pub(crate) async fn next_peer<T>(
        &self,
        of: fn(&mut Queue) -> &mut AcceptQueue<T>,
    ) -> Result<T, Error> {
        std::future::poll_fn(|cx| {
            let mut queue = lock(&self.queue);
            if let Some(peer) = of(&mut queue).peers.pop_front() {
                return Poll::Ready(Ok(peer));
            }
            if let Some(error) = &queue.failure {
                return Poll::Ready(Err(error.clone()));
            }
            keep(&mut of(&mut queue).waiting, cx.waker());
            Poll::Pending
        })
        .await
    }

    /// Returns whether a connection to this address is meant for the listener. The kernel puts a
    /// listener on 127.0.0.1 on a device of its choice, and then also delivers connections to other
    /// addresses of that device.
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

    /// Queues the request of a foreign peer. Returns the request if nobody accepts foreign peers,
    /// or if too many foreign peers are waiting.
    pub(crate) fn foreign_peer(
        &self,
        request: ConnectionRequest,
        wakes: &mut Wakes,
    ) -> Result<(), Box<ConnectionRequest>> {
        let mut queue = lock(&self.queue);
        if !queue.foreign_peers.has_room(FOREIGN_PEERS) {
            return Err(Box::new(request));
        }
        queue.foreign_peers.push(request, wakes);
        Ok(())
    }

    pub(crate) fn accepts_foreign_tcp_peers(&self) -> bool {
        lock(&self.queue).foreign_tcp_peers.has_room(FOREIGN_TCP_PEERS)
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

/// The RDMA half of a listener.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Half {
    Listening(CmKey),
    /// The device is gone. The number identifies the entry among the lost listeners.
    Lost(u64),
}

/// A TCP connection of a foreign peer.
#[derive(Debug)]
pub struct ForeignTcpPeer {
    /// The connection, in non-blocking mode.
    pub socket: TcpStream,
    /// The bytes that were already read from the connection.
    pub heard: Vec<u8>,
    /// The peer's address.
    pub peer: SocketAddr,
    /// When the connection was accepted.
    pub accepted: Instant,
    /// When the fabric handed the connection over. Either the first bytes were not a hello, or the
    /// fabric stopped waiting for a hello.
    pub handed_over: Instant,
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
    fn accepts_only_connections_to_its_own_address() {
        let at = |ip: &str| ListenerShared::new(ip.parse().expect("an address"), false, false);
        let called =
            |address: &str| Some(SocketAddr::new(address.parse().expect("an address"), 6380));
        assert!(
            at("10.0.0.1").is_at(called("10.0.0.1"))
                && at("10.0.0.1").is_at(called("::ffff:10.0.0.1"))
        );
        assert!(
            !at("10.0.0.1").is_at(called("10.0.0.2")) && !at("127.0.0.1").is_at(called("10.0.0.1"))
        );
        assert!(!at("10.0.0.1").is_at(None), "an unknown address is refused");
        for all in ["0.0.0.0", "::"] {
            assert!(
                at(all).is_at(called("10.0.0.1")) && at(all).is_at(called("2001:db8::1")),
                "{all}"
            );
        }
    }
}
