//! The purpose of outgoing connections, and the parameters of connecting over TCP.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_channel::oneshot;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;

use crate::error::Error;
use crate::link::name::LinkName;
use crate::link::shared::LinkShared;
use crate::policy::{Fallback, Rdma};
use crate::wire::Resume;

/// The sender for the future that waits for a link.
pub(crate) type Reply = oneshot::Sender<Opened>;
pub(crate) type Opened = Result<Arc<LinkShared>, Error>;

/// The purpose of an outgoing connection.
pub(crate) enum Purpose {
    /// A new link. If RDMA was preferred but is unavailable or failed, the [`Fallback`] says why.
    Link(Reply, Option<Fallback>),
    /// A new link that is to be upgraded to RDMA at once.
    Rdma(Reply, Rdma),
    /// Resuming a link that has lost its path.
    Resume(LinkName, Resume),
}

/// The parameters of an outgoing connection.
pub(crate) struct Dial {
    pub(crate) peer: SocketAddr,
    pub(crate) local: Option<SocketAddr>,
    pub(crate) deadline: Instant,
    pub(crate) tls: Option<(Arc<ClientConfig>, ServerName<'static>)>,
    pub(crate) purpose: Purpose,
}

/// How to connect over TCP.
pub(crate) struct OverTcp {
    pub(crate) peer: SocketAddr,
    pub(crate) local: Option<SocketAddr>,
    pub(crate) timeout: Duration,
    pub(crate) tls: Option<(Arc<ClientConfig>, ServerName<'static>)>,
    pub(crate) policy: Rdma,
    /// Whether to upgrade to RDMA right after the handshake.
    pub(crate) upgrade: bool,
}

impl OverTcp {
    pub(crate) fn dial(self, now: Instant, reply: Reply, fallback: Option<Fallback>) -> Dial {
        let Self { peer, local, timeout, tls, policy, upgrade } = self;
        let purpose = match fallback {
            None if upgrade => Purpose::Rdma(reply, policy),
            // With a fallback, RDMA is unavailable or RDMA CM has failed, so the upgrade is tried
            // later.
            fallback => Purpose::Link(reply, fallback),
        };
        Dial { peer, local, deadline: now + timeout, tls, purpose }
    }
}
