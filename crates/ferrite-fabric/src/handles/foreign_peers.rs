//! Foreign peers are peers that do not speak our protocol. A program that knows their protocol
//! serves them.

use std::fmt;
use std::sync::Arc;

use ferrite_verbs::ConnectionRequest;
use futures_channel::oneshot;

use super::connecting::ConnectingRaw;
use super::listener::Listener;
use crate::error::Error;
use crate::fabric::Fabric;
use crate::fabric::listener::{ForeignTcpPeer, ListenerShared};
use crate::mem::lock;

impl Listener {
    /// Accepts RDMA peers that do not send a hello, such as clients of other protocols, instead of
    /// refusing them.
    #[must_use]
    pub fn foreign_peers(&self) -> ForeignPeers {
        lock(&self.shared.queue).foreign_peers.is_open = true;
        ForeignPeers { listener: Arc::clone(&self.shared), fabric: self.fabric.clone() }
    }

    /// Accepts TCP peers that do not send a hello, instead of refusing them. This has an effect
    /// only if the listener accepts TCP without TLS.
    #[must_use]
    pub fn foreign_tcp_peers(&self) -> ForeignTcpPeers {
        lock(&self.shared.queue).foreign_tcp_peers.is_open = true;
        ForeignTcpPeers(Arc::clone(&self.shared))
    }
}

/// The requests of RDMA peers that send no hello, for a program that knows their protocol.
///
/// ```no_run
/// # async fn show(listener: ferrite_fabric::Listener) -> Result<(), ferrite_fabric::Error> {
/// let foreign_peers = listener.foreign_peers();
/// let request = foreign_peers.next().await?;
/// println!("{:?} sent {} bytes", request.id.peer_addr(), request.private_data.len());
/// let connection = foreign_peers.accept(request).await?;
/// # drop(connection); Ok(()) }
/// ```
pub struct ForeignPeers {
    listener: Arc<ListenerShared>,
    fabric: Fabric,
}

impl ForeignPeers {
    /// Waits for the next request. Dropping the request refuses the peer.
    ///
    /// # Errors
    /// Fails if the listener accepts only RDMA and its device has disappeared.
    pub async fn next(&self) -> Result<ConnectionRequest, Error> {
        self.listener.next_peer(|queue| &mut queue.foreign_peers).await
    }

    /// Accepts the peer as a raw connection, without our framing. The handshake starts at once.
    /// Dropping the future closes the connection.
    ///
    /// # Errors
    /// Fails if there are too many connections or handshakes, if the device has no more queue
    /// pairs, or if the peer is gone.
    pub fn accept(&self, request: ConnectionRequest) -> ConnectingRaw {
        let (reply, receiver) = oneshot::channel();
        self.fabric.shared().with_poller(|poller, shared| {
            poller.now = std::time::Instant::now();
            poller.accept_foreign_peer(shared, request, reply);
        });
        ConnectingRaw::new(self.fabric.clone(), receiver)
    }
}

impl Drop for ForeignPeers {
    fn drop(&mut self) {
        lock(&self.listener.queue).foreign_peers.close();
    }
}

impl fmt::Debug for ForeignPeers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForeignPeers").finish_non_exhaustive()
    }
}

/// TCP peers without a hello.
///
/// ```no_run
/// # async fn show(listener: ferrite_fabric::Listener) -> Result<(), ferrite_fabric::Error> {
/// let foreign_peers = listener.foreign_tcp_peers();
/// let foreign_peer = foreign_peers.next().await?;
/// println!("{} sent {} bytes", foreign_peer.peer, foreign_peer.heard.len());
/// # Ok(()) }
/// ```
pub struct ForeignTcpPeers(Arc<ListenerShared>);

impl ForeignTcpPeers {
    /// Waits for the next peer.
    ///
    /// # Errors
    /// Fails if the listener accepts only RDMA, which has no TCP peers, and its device has
    /// disappeared.
    pub async fn next(&self) -> Result<ForeignTcpPeer, Error> {
        self.0.next_peer(|queue| &mut queue.foreign_tcp_peers).await
    }
}

impl Drop for ForeignTcpPeers {
    fn drop(&mut self) {
        lock(&self.0.queue).foreign_tcp_peers.close();
    }
}

impl fmt::Debug for ForeignTcpPeers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForeignTcpPeers").finish_non_exhaustive()
    }
}
