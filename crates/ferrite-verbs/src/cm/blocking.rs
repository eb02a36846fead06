//! Blocking handshakes with a deadline: resolve, connect, accept.
//!
//! Each outgoing connection has its own event channel, so every event on that channel belongs to
//! the connection. An accepted connection shares the channel of its listener. Callers with many
//! connections use the events directly.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::{CmEvent, CmEventKind, CmId, ConnectParams, ConnectionRequest, EventChannel};
use crate::error::{Error, ErrorKind};
use crate::mr::Access;
use crate::qp::{QueuePair, State};
use crate::table::Verbs;

/// Resolves the device and the path for `peer`, from `local` if given. The caller then creates the
/// queue pair on that device ([`CmId::device`]) and calls [`connect`].
///
/// # Errors
/// [`ErrorKind::NoRoute`], [`ErrorKind::Timeout`], or an error that says why RDMA is unavailable.
pub fn resolve(
    verbs: &Verbs,
    local: Option<SocketAddr>,
    peer: SocketAddr,
    timeout: Duration,
) -> Result<CmId, Error> {
    // The kernel can miss the moment at which a neighbour's hardware address becomes known. It then
    // checks again only when its own timeout ends. So the first attempt has a short timeout, and
    // each further attempt a longer one.
    const FIRST_TRY: Duration = Duration::from_millis(250);
    let deadline = Instant::now() + timeout;
    let mut attempt_timeout = FIRST_TRY;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let last = attempt_timeout >= left;
        match resolve_once(verbs, local, peer, attempt_timeout.min(left)) {
            Err(error)
                if !last && matches!(error.kind(), ErrorKind::NoRoute | ErrorKind::Timeout) =>
            {
                attempt_timeout *= 2;
            }
            result => return result,
        }
    }
}

fn resolve_once(
    verbs: &Verbs,
    local: Option<SocketAddr>,
    peer: SocketAddr,
    attempt_timeout: Duration,
) -> Result<CmId, Error> {
    // The kernel sends an event when its own timeout ends; wait a little longer to receive it.
    let deadline = Instant::now() + attempt_timeout + Duration::from_millis(100);
    let id = verbs.open_event_channel()?.create_id()?;
    id.resolve_address(local, peer, attempt_timeout)?;
    wait_for(id.channel(), CmEventKind::ADDRESS_RESOLVED, deadline, peer)?;
    id.resolve_route(attempt_timeout)?;
    wait_for(id.channel(), CmEventKind::ROUTE_RESOLVED, deadline, peer)?;
    Ok(id)
}

/// Connects `qp` through a resolved identifier and returns the peer's private data.
///
/// `params.qp_num` and `params.srq` are ignored, because `qp` provides these values. `access` says
/// what the peer may do with our memory.
///
/// # Errors
/// [`ErrorKind::Rejected`] with the reason, [`ErrorKind::Unreachable`], [`ErrorKind::Timeout`].
pub fn connect(
    id: &CmId,
    qp: &QueuePair,
    access: Access,
    params: &ConnectParams<'_>,
    timeout: Duration,
) -> Result<Vec<u8>, Error> {
    let deadline = Instant::now() + timeout;
    let peer = id.peer_addr().unwrap_or(UNKNOWN_PEER);
    // The caller may already have moved the queue pair to INIT, to post receives.
    if qp.state()? == State::RESET {
        qp.modify(&id.queue_pair_attributes(State::INIT)?.access(access))?;
    }
    id.connect(&ConnectParams { qp_num: qp.number(), srq: qp.uses_srq(), ..params.clone() })?;
    let event = wait_for(id.channel(), CmEventKind::CONNECT_RESPONSE, deadline, peer)?;
    bring_up(id, qp, access, params.reads_in, params.reads_out)?;
    id.establish()?;
    Ok(event.private_data)
}

/// Accepts a request with `qp`, and waits until the connection is up.
///
/// As in [`connect`], `params.qp_num` and `params.srq` are ignored. The numbers of reads in
/// `params` are lowered to those of the request.
///
/// # Errors
/// [`ErrorKind::Timeout`] if the peer does not finish the handshake.
pub fn accept(
    request: &ConnectionRequest,
    qp: &QueuePair,
    access: Access,
    params: &ConnectParams<'_>,
    timeout: Duration,
) -> Result<(), Error> {
    let id = &request.id;
    let reads_out = params.reads_out.min(request.reads_out_max);
    let reads_in = params.reads_in.min(request.reads_in_wanted);
    if qp.state()? == State::RESET {
        qp.modify(&id.queue_pair_attributes(State::INIT)?.access(access))?;
    }
    bring_up(id, qp, access, reads_in, reads_out)?;
    id.accept(&ConnectParams {
        qp_num: qp.number(),
        srq: qp.uses_srq(),
        reads_in,
        reads_out,
        ..params.clone()
    })?;
    let peer = id.peer_addr().unwrap_or(UNKNOWN_PEER);
    let deadline = Instant::now() + timeout;
    loop {
        // The listener shares the channel, so this loop also gets events of other peers, and
        // ignores them. Dropping a connection request rejects the request.
        let event = next_event(id.channel(), deadline, peer)?;
        if event.id == id.key() {
            return check_kind(event, CmEventKind::ESTABLISHED, peer).map(drop);
        }
    }
}

/// Moves a queue pair from INIT to RTR and RTS, with the attributes that the CM negotiated.
fn bring_up(
    id: &CmId,
    qp: &QueuePair,
    access: Access,
    reads_in: u8,
    reads_out: u8,
) -> Result<(), Error> {
    // 12 means 640 µs. With the CM's default, a peer that finds no receive posted waits for 655 ms.
    const RNR_TIMER: u8 = 12;
    let ready_to_receive = id.queue_pair_attributes(State::READY_TO_RECEIVE)?;
    qp.modify(&ready_to_receive.access(access).reads_in(reads_in).rnr_timer(RNR_TIMER))?;
    qp.modify(&id.queue_pair_attributes(State::READY_TO_SEND)?.reads_out(reads_out))
}

/// A listening identifier with its own channel.
#[derive(Debug)]
pub struct Listener(CmId);

impl Listener {
    /// Listens on `local`; port 0 chooses a free port.
    ///
    /// # Errors
    /// [`ErrorKind::AddressInUse`]; [`ErrorKind::NoRoute`] if no RDMA device has the address.
    pub fn bind(verbs: &Verbs, local: SocketAddr, backlog: u32) -> Result<Self, Error> {
        let id = verbs.open_event_channel()?.create_id()?;
        id.bind(local)?;
        id.listen(backlog)?;
        Ok(Self(id))
    }

    /// Returns the identifier.
    #[must_use]
    pub fn id(&self) -> &CmId {
        &self.0
    }

    /// Returns the next connection request; `None` if `timeout` passed. Drops all other events of
    /// the channel, including those of accepted connections.
    ///
    /// # Errors
    /// If the connection manager is no longer available, or the device was removed.
    pub fn next_request(&self, timeout: Duration) -> Result<Option<ConnectionRequest>, Error> {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Some(event) = self.0.channel().wait_event(left)? else { return Ok(None) };
            if event.id == self.0.key() && event.kind == CmEventKind::DEVICE_REMOVAL {
                return Err(Error::new(
                    ErrorKind::DeviceGone,
                    "rdma_listen",
                    "the device is being removed",
                ));
            }
            if let Some(request) = event.request {
                return Ok(Some(request));
            }
        }
    }
}

const UNKNOWN_PEER: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED), 0);

fn next_event(
    channel: &EventChannel,
    deadline: Instant,
    peer: SocketAddr,
) -> Result<CmEvent, Error> {
    channel.wait_event(deadline.saturating_duration_since(Instant::now()))?.ok_or_else(|| {
        Error::new(ErrorKind::Timeout, "rdma_get_cm_event", peer.to_string()).because(
            "the peer's connection manager did not answer in time: the host is down, or UDP port 4791 \
             is filtered",
        )
    })
}

fn wait_for(
    channel: &EventChannel,
    wanted: CmEventKind,
    deadline: Instant,
    peer: SocketAddr,
) -> Result<CmEvent, Error> {
    check_kind(next_event(channel, deadline, peer)?, wanted, peer)
}

fn check_kind(event: CmEvent, wanted: CmEventKind, peer: SocketAddr) -> Result<CmEvent, Error> {
    if event.kind == wanted { Ok(event) } else { Err(event.into_error(peer)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rejected(status: i32) -> Error {
        let event = CmEvent {
            id: crate::cm::CmKey(1),
            kind: CmEventKind::REJECTED,
            status,
            private_data: b"full".to_vec(),
            request: None,
        };
        check_kind(event, CmEventKind::CONNECT_RESPONSE, UNKNOWN_PEER).expect_err("a rejection")
    }

    #[test]
    fn rejection_has_a_reason_or_an_error_number() {
        let error = rejected(28);
        assert_eq!(error.kind(), ErrorKind::Rejected);
        assert_eq!(
            error.rejection().map(|rejection| rejection.private_data.as_slice()),
            Some(&b"full"[..])
        );
        let error = rejected(-111);
        assert_eq!((error.kind(), error.rejection()), (ErrorKind::Rejected, None), "{error}");
        assert!(error.to_string().contains("refused"), "{error}");
    }
}
