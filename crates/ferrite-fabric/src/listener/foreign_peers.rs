//! Peers that are none of ours: who knows their protocol answers them.

use std::fmt;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use ferrite_verbs::ConnectionRequest;
use futures_channel::oneshot;

use super::{Listener, ListenerShared};
use crate::connect::ConnectingRaw;
use crate::error::Error;
use crate::fabric::Fabric;
use crate::mem::lock;

impl Listener {
    /// Takes peers that do not say hello, such as clients of other protocols, instead of refusing
    /// them.
    #[must_use]
    pub fn foreign_peers(&self) -> ForeignPeers {
        lock(&self.shared.queue).foreign_peers.are_welcome = true;
        ForeignPeers { listener: Arc::clone(&self.shared), fabric: self.fabric.clone() }
    }

    /// Takes peers that do not say hello over TCP, instead of refusing them: in clear text, where
    /// TCP is listened to at all.
    #[must_use]
    pub fn foreign_tcp_peers(&self) -> ForeignTcpPeers {
        lock(&self.shared.queue).foreign_tcp_peers.are_welcome = true;
        ForeignTcpPeers(Arc::clone(&self.shared))
    }
}

/// Peers without a hello: their requests, to be answered by whoever knows their protocol.
///
/// ```no_run
/// # async fn show(listener: ferrite_fabric::Listener) -> Result<(), ferrite_fabric::Error> {
/// let foreign peers = listener.foreign peers();
/// let request = foreign peers.next().await?;
/// println!("{:?} brought {} bytes", request.id.peer_addr().unwrap_or(listener.local_addr()), request.private_data.len());
/// let bare = foreign peers.accept(request).await?;
/// # drop(bare); Ok(()) }
/// ```
pub struct ForeignPeers {
    listener: Arc<ListenerShared>,
    fabric: Fabric,
}

impl ForeignPeers {
    /// The next request. Dropping it refuses the peer.
    ///
    /// # Errors
    /// When the listener's device has gone.
    pub async fn next(&self) -> Result<ConnectionRequest, Error> {
        self.listener.guest(|queue| &mut queue.foreign_peers).await
    }

    /// Takes the peer: a connection without anything of ours on it. Begins at once; dropping the
    /// future gives it up.
    ///
    /// # Errors
    /// There are too many, the device has no more, or the peer has gone.
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
        lock(&self.listener.queue).foreign_peers.turn_away();
    }
}

impl fmt::Debug for ForeignPeers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForeignPeers").finish_non_exhaustive()
    }
}

/// A TCP connection of a peer that is no Ferrite peer.
#[derive(Debug)]
pub struct ForeignTcpPeer {
    /// The connection, in non-blocking mode.
    pub socket: TcpStream,
    /// What it has said so far: taken from the connection already.
    pub heard: Vec<u8>,
    /// Where it is.
    pub peer: SocketAddr,
    /// When it came.
    pub accepted: Instant,
    /// When it had said something, or was given up as a peer of ours.
    pub handed_over: Instant,
}

/// Peers without a hello that came over TCP.
///
/// ```no_run
/// # async fn show(listener: ferrite_fabric::Listener) -> Result<(), ferrite_fabric::Error> {
/// let foreign peers = listener.foreign_tcp_peers();
/// let foreign peer = foreign peers.next().await?;
/// println!("{} said {} bytes", foreign peer.peer, foreign peer.heard.len());
/// # Ok(()) }
/// ```
pub struct ForeignTcpPeers(Arc<ListenerShared>);

impl ForeignTcpPeers {
    /// The next of them.
    ///
    /// # Errors
    /// When the listener has failed.
    pub async fn next(&self) -> Result<ForeignTcpPeer, Error> {
        self.0.guest(|queue| &mut queue.foreign_tcp_peers).await
    }
}

impl Drop for ForeignTcpPeers {
    fn drop(&mut self) {
        lock(&self.0.queue).foreign_tcp_peers.turn_away();
    }
}

impl fmt::Debug for ForeignTcpPeers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForeignTcpPeers").finish_non_exhaustive()
    }
}
