//! The handshake in one call, for callers that may block: resolve, connect, accept, with a
//! deadline.
//!
//! One event channel per connection keeps it simple: every event that arrives is ours. Drivers with
//! many connections use the events themselves.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::{CmEvent, CmEventKind, CmId, ConnectParams, ConnectionRequest, EventChannel};
use crate::error::{Error, ErrorKind};
use crate::mr::Access;
use crate::qp::{QueuePair, State};
use crate::table::Verbs;

/// Finds the device and the path for `peer`, from `local` if given; make the queue pair on that
/// device ([`CmId::device`]), then [`connect`].
///
/// # Errors
/// [`ErrorKind::NoRoute`], [`ErrorKind::Timeout`], or that RDMA is absent.
pub fn resolve(
    verbs: &Verbs,
    local: Option<SocketAddr>,
    peer: SocketAddr,
    timeout: Duration,
) -> Result<CmId, Error> {
    // The kernel can miss the moment when a neighbour's address becomes known, and then looks again
    // only when its time is over. So it is asked with a short time first, and again with a longer
    // one.
    const FIRST_TRY: Duration = Duration::from_millis(250);
    let deadline = Instant::now() + timeout;
    let mut patience = FIRST_TRY;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let last = patience >= left;
        match resolve_once(verbs, local, peer, patience.min(left)) {
            Err(error)
                if !last && matches!(error.kind(), ErrorKind::NoRoute | ErrorKind::Timeout) =>
            {
                patience *= 2;
            }
            settled => return settled,
        }
    }
}

fn resolve_once(
    verbs: &Verbs,
    local: Option<SocketAddr>,
    peer: SocketAddr,
    patience: Duration,
) -> Result<CmId, Error> {
    // The kernel says when its own time is over; a little more, so that we hear it.
    let deadline = Instant::now() + patience + Duration::from_millis(100);
    let id = verbs.open_event_channel()?.create_id()?;
    id.resolve_address(local, peer, patience)?;
    expect(id.channel(), CmEventKind::ADDRESS_RESOLVED, deadline, peer)?;
    id.resolve_route(patience)?;
    expect(id.channel(), CmEventKind::ROUTE_RESOLVED, deadline, peer)?;
    Ok(id)
}

/// Connects `qp` through a resolved identifier. `params.qp_num` and `params.srq` are taken from
/// `qp`; `access` is what the peer may do to our memory. Returns the peer's private data.
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
    // Receives may be posted before this, if the queue pair was initialised by the caller.
    if qp.state()? == State::RESET {
        qp.modify(&id.queue_pair_attributes(State::INIT)?.access(access))?;
    }
    id.connect(&ConnectParams { qp_num: qp.number(), srq: qp.uses_srq(), ..params.clone() })?;
    let event = expect(id.channel(), CmEventKind::CONNECT_RESPONSE, deadline, peer)?;
    bring_up(id, qp, access, params.reads_in, params.reads_out)?;
    id.establish()?;
    Ok(event.private_data)
}

/// Accepts a request with `qp`, and waits until the connection is up.
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
        // The listener shares the channel: other peers' events are not ours to judge, and a request
        // that arrives meanwhile is refused by being dropped.
        let event = next(id.channel(), deadline, peer)?;
        if event.id == id.key() {
            return judge(event, CmEventKind::ESTABLISHED, peer).map(drop);
        }
    }
}

/// INIT was done; RTR and RTS follow from what the CM agreed on.
fn bring_up(
    id: &CmId,
    qp: &QueuePair,
    access: Access,
    reads_in: u8,
    reads_out: u8,
) -> Result<(), Error> {
    // 640 µs: the CM's own choice stalls a peer that meets an empty receive queue for 655 ms.
    const RNR_TIMER: u8 = 12;
    let ready_to_receive = id.queue_pair_attributes(State::READY_TO_RECEIVE)?;
    qp.modify(&ready_to_receive.access(access).reads_in(reads_in).rnr_timer(RNR_TIMER))?;
    qp.modify(&id.queue_pair_attributes(State::READY_TO_SEND)?.reads_out(reads_out))
}

/// A listening identifier on a channel of its own.
#[derive(Debug)]
pub struct Listener(CmId);

impl Listener {
    /// Listens on `local`; port 0 picks one.
    ///
    /// # Errors
    /// [`ErrorKind::AddressInUse`]; [`ErrorKind::NoRoute`] if no RDMA device has the address.
    pub fn bind(verbs: &Verbs, local: SocketAddr, backlog: u32) -> Result<Self, Error> {
        let id = verbs.open_event_channel()?.create_id()?;
        id.bind(local)?;
        id.listen(backlog)?;
        Ok(Self(id))
    }

    /// The identifier.
    #[must_use]
    pub fn id(&self) -> &CmId {
        &self.0
    }

    /// The next peer that wants a connection; `None` when `timeout` passed.
    ///
    /// # Errors
    /// When the connection manager or the device has gone.
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

fn next(channel: &EventChannel, deadline: Instant, peer: SocketAddr) -> Result<CmEvent, Error> {
    channel.wait_event(deadline.saturating_duration_since(Instant::now()))?.ok_or_else(|| {
        Error::new(ErrorKind::Timeout, "rdma_get_cm_event", peer.to_string()).because(
            "the peer's connection manager did not answer in time: host down, or UDP 4791 filtered",
        )
    })
}

fn expect(
    channel: &EventChannel,
    wanted: CmEventKind,
    deadline: Instant,
    peer: SocketAddr,
) -> Result<CmEvent, Error> {
    judge(next(channel, deadline, peer)?, wanted, peer)
}

fn judge(event: CmEvent, wanted: CmEventKind, peer: SocketAddr) -> Result<CmEvent, Error> {
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
        judge(event, CmEventKind::CONNECT_RESPONSE, UNKNOWN_PEER).expect_err("a rejection")
    }

    #[test]
    fn a_rejection_is_one_with_a_reason_or_an_error_number() {
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
