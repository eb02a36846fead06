//! Peers that are none of ours: who knows their protocol answers them.

use std::fmt;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use ferrite_verbs::ConnectionRequest;
use futures_channel::oneshot;

use super::{Listener, ListenerShared};
use crate::connect::ConnectingBare;
use crate::engine::Engine;
use crate::error::Error;
use crate::mem::lock;

impl Listener {
    /// Takes peers that do not say hello, such as clients of other protocols, instead of refusing them.
    #[must_use]
    pub fn strangers(&self) -> Strangers {
        lock(&self.shared.queue).strangers.are_welcome = true;
        Strangers { listener: Arc::clone(&self.shared), engine: self.engine.clone() }
    }

    /// Takes peers that do not say hello over TCP, instead of refusing them: in clear text, where TCP is listened to at all.
    #[must_use]
    pub fn tcp_strangers(&self) -> TcpStrangers {
        lock(&self.shared.queue).tcp_strangers.are_welcome = true;
        TcpStrangers(Arc::clone(&self.shared))
    }
}

/// Peers without a hello: their requests, to be answered by whoever knows their protocol.
///
/// ```no_run
/// # async fn show(listener: ferrite_fabric::Listener) -> Result<(), ferrite_fabric::Error> {
/// let strangers = listener.strangers();
/// let request = strangers.next().await?;
/// println!("{:?} brought {} bytes", request.id.peer_addr().unwrap_or(listener.local_addr()), request.private_data.len());
/// let bare = strangers.accept(request).await?;
/// # drop(bare); Ok(()) }
/// ```
pub struct Strangers {
    listener: Arc<ListenerShared>,
    engine: Engine,
}

impl Strangers {
    /// The next request. Dropping it refuses the peer.
    ///
    /// # Errors
    /// When the listener's device has gone.
    pub async fn next(&self) -> Result<ConnectionRequest, Error> {
        self.listener.guest(|queue| &mut queue.strangers).await
    }

    /// Takes the peer: a connection without anything of ours on it. Begins at once; dropping the future gives it up.
    ///
    /// # Errors
    /// There are too many, the device has no more, or the peer has gone.
    pub fn accept(&self, request: ConnectionRequest) -> ConnectingBare {
        let (reply, receiver) = oneshot::channel();
        self.engine.shared().with_poller(|poller, shared| {
            poller.now = std::time::Instant::now();
            poller.accept_stranger(shared, request, reply);
        });
        ConnectingBare::new(self.engine.clone(), receiver)
    }
}

impl Drop for Strangers {
    fn drop(&mut self) {
        lock(&self.listener.queue).strangers.turn_away();
    }
}

impl fmt::Debug for Strangers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Strangers").finish_non_exhaustive()
    }
}

/// A TCP connection of a peer that is no Ferrite peer.
#[derive(Debug)]
pub struct TcpStranger {
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
/// let strangers = listener.tcp_strangers();
/// let stranger = strangers.next().await?;
/// println!("{} said {} bytes", stranger.peer, stranger.heard.len());
/// # Ok(()) }
/// ```
pub struct TcpStrangers(Arc<ListenerShared>);

impl TcpStrangers {
    /// The next of them.
    ///
    /// # Errors
    /// When the listener has failed.
    pub async fn next(&self) -> Result<TcpStranger, Error> {
        self.0.guest(|queue| &mut queue.tcp_strangers).await
    }
}

impl Drop for TcpStrangers {
    fn drop(&mut self) {
        lock(&self.0.queue).tcp_strangers.turn_away();
    }
}

impl fmt::Debug for TcpStrangers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpStrangers").finish_non_exhaustive()
    }
}
