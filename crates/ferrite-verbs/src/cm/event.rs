//! Events of the connection manager: fetched from the channel, copied and acknowledged.

use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::channel::IdInfo;
use super::{CmId, CmKey, EventChannel};
use crate::code::codes;
use crate::context::wait_readable;
use crate::error::{Error, ErrorKind, RejectReason, Rejection, last_errno};
use crate::sys;
use crate::sys::rdma_cm_event_type as Event;

/// An event of an identifier.
#[derive(Debug)]
#[non_exhaustive]
pub struct CmEvent {
    /// The identifier that the event is about; for a connection request, the listener.
    pub id: CmKey,
    /// What happened.
    pub kind: CmEventKind,
    /// 0, a negative error number, or the code of the [`RejectReason`] if the peer rejected.
    pub status: i32,
    /// The private data that the peer sent. The CM pads it with zeros to the size of its message.
    /// Empty for a connection request: see [`ConnectionRequest::private_data`].
    pub private_data: Vec<u8>,
    /// The connection request, if the event is one. Dropping it rejects the connection.
    pub request: Option<ConnectionRequest>,
}

/// A peer's request for a connection.
#[derive(Debug)]
pub struct ConnectionRequest {
    /// The new identifier, for accepting or rejecting the request.
    pub id: CmId,
    /// Maximum number of reads that we may have outstanding at the peer.
    pub reads_out_max: u8,
    /// Number of reads that the peer wants to have outstanding here.
    pub reads_in_wanted: u8,
    /// The peer's queue pair number.
    pub qp_num: u32,
    /// The private data that the peer sent, padded with zeros.
    pub private_data: Vec<u8>,
}

impl EventChannel {
    /// Returns the next event, without waiting. Calls of other threads on identifiers of this
    /// channel do not block this call.
    ///
    /// # Errors
    /// If the connection manager is no longer available.
    pub fn next_event(&self) -> Result<Option<CmEvent>, Error> {
        let _fetching = self.start_fetching();
        let mut raw = std::ptr::null_mut();
        // SAFETY: the channel is alive and `raw` is valid for the write.
        let rc = unsafe { (self.functions().rdma_get_cm_event)(self.raw(), &raw mut raw) };
        if rc != 0 {
            return match last_errno() {
                Errno::AGAIN | Errno::INTR => Ok(None),
                errno => Err(Error::os("rdma_get_cm_event", errno, "")),
            };
        }
        // SAFETY: the event was fetched above and is not acknowledged yet, and no other thread
        // fetches.
        let event = unsafe { CmEvent::take(raw, self) };
        // `take` has copied the event. It is acknowledged at once, because destroying an identifier
        // waits for the acknowledgement of its events.
        // SAFETY: the event is acknowledged once, and not used afterwards.
        unsafe { (self.functions().rdma_ack_cm_event)(raw) };
        Ok(Some(event))
    }

    /// Returns the next event, waiting up to `timeout`; `None` if `timeout` passed.
    ///
    /// # Errors
    /// If the connection manager is no longer available.
    pub fn wait_event(&self, timeout: Duration) -> Result<Option<CmEvent>, Error> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(event) = self.next_event()? {
                return Ok(Some(event));
            }
            // librdmacm consumes some events internally. So there may be no event for us although
            // the descriptor is readable.
            if !wait_readable(self.as_fd(), deadline.saturating_duration_since(Instant::now()))? {
                return Ok(None);
            }
        }
    }
}

impl CmEvent {
    /// Returns why the peer rejected the connection, if it did.
    #[must_use]
    pub fn reject_reason(&self) -> Option<RejectReason> {
        let reason = u32::try_from(self.status).ok().map(RejectReason);
        reason.filter(|_| self.kind == CmEventKind::REJECTED)
    }

    /// Copies an event, and gives the identifier of a connection request a key of its own.
    ///
    /// # Safety
    /// `raw` was fetched from `channel` and is not acknowledged yet, and no other thread fetches.
    unsafe fn take(raw: *mut sys::rdma_cm_event, channel: &EventChannel) -> Self {
        // SAFETY: the event and the identifiers that it names live until it is acknowledged.
        let event = unsafe { &*raw };
        let kind = CmEventKind(event.event.0);
        // SAFETY: `conn` is the valid member of the union, because we create no UD identifiers. In
        // an event without parameters, all its fields are zero.
        let param = unsafe { &event.param.conn };
        let mut private_data = if param.private_data.is_null() {
            Vec::new()
        } else {
            // SAFETY: librdmacm keeps `private_data_len` bytes there until the acknowledgement.
            unsafe {
                std::slice::from_raw_parts(
                    param.private_data.cast::<u8>(),
                    param.private_data_len.into(),
                )
            }
            .to_vec()
        };
        let request = (kind == CmEventKind::CONNECT_REQUEST)
            .then(|| NonNull::new(event.id))
            .flatten()
            .map(|raw| {
                let key = CmKey::next();
                let mut info = IdInfo::default();
                // SAFETY: the identifier is new, and nothing else uses it. From now on we own it.
                unsafe {
                    (*raw.as_ptr()).context = key.as_context();
                    info.copy_local(raw.as_ptr());
                    info.copy_peer(raw.as_ptr());
                    channel.opened_devices().note(raw.as_ptr());
                }
                ConnectionRequest {
                    id: CmId::new(raw, key, channel.clone(), info),
                    // The kernel has swapped the two numbers: they are from our point of view.
                    reads_out_max: param.initiator_depth,
                    reads_in_wanted: param.responder_resources,
                    qp_num: param.qp_num,
                    private_data: std::mem::take(&mut private_data),
                }
            });
        let subject = if request.is_some() { event.listen_id } else { event.id };
        // SAFETY: the identifiers that the event names live until it is acknowledged.
        let id = CmKey(if subject.is_null() { 0 } else { unsafe { (*subject).context.addr() } });
        if kind == CmEventKind::ADDRESS_RESOLVED
            && let Some(info) = channel.id_infos().get_mut(&id)
        {
            // SAFETY: the identifier lives until the acknowledgement. librdmacm filled in these
            // fields while it fetched the event. The call that requested the resolution may not
            // have returned yet, but it writes only the peer's address.
            unsafe { info.copy_local(event.id) };
        }
        if kind == CmEventKind::ADDRESS_RESOLVED {
            // SAFETY: as above.
            unsafe { channel.opened_devices().note(event.id) };
        }
        if kind == CmEventKind::DEVICE_REMOVAL {
            // Does not read the identifier's struct: another thread may be in the call that binds
            // the identifier, and librdmacm then writes the device without a lock.
            if let Some(info) = channel.id_infos().get_mut(&id) {
                info.device_removed = true;
                channel.opened_devices().forget(info.context);
            }
        }
        Self { id, kind, status: event.status, private_data, request }
    }

    /// Converts the event to an error, for a caller that waited for a different event in a
    /// handshake with `peer`.
    #[must_use]
    pub fn into_error(self, peer: SocketAddr) -> Error {
        let error = Error::new(ErrorKind::System, "rdma_get_cm_event", peer.to_string());
        if let Some(reason) = self.reject_reason() {
            return error
                .because_of_rejection(Rejection { reason, private_data: self.private_data });
        }
        let errno = || std::io::Error::from_raw_os_error(self.status.abs()).to_string();
        let with_errno = || format!("the {}: {}", self.kind, errno());
        let (kind, why) = match self.kind {
            // iWARP reports an error number instead of a reason.
            CmEventKind::REJECTED => (ErrorKind::Rejected, with_errno()),
            CmEventKind::ADDRESS_ERROR | CmEventKind::ROUTE_ERROR => {
                (ErrorKind::NoRoute, with_errno())
            }
            CmEventKind::UNREACHABLE | CmEventKind::CONNECT_ERROR => {
                (ErrorKind::Unreachable, with_errno())
            }
            CmEventKind::DEVICE_REMOVAL => {
                (ErrorKind::DeviceGone, "the device is being removed".to_owned())
            }
            CmEventKind::DISCONNECTED => {
                (ErrorKind::Disconnected, "the peer disconnected".to_owned())
            }
            _ => {
                let (event, status) = (self.kind, self.status);
                let why = format!("unexpected event \"{event}\" (status {status})");
                (ErrorKind::System, why)
            }
        };
        error.with_kind(kind).because(why)
    }
}

codes! {
    /// What happened.
    pub struct CmEventKind, unknown: "unknown event" {
        /// The next step is [`CmId::resolve_route`].
        ADDRESS_RESOLVED = Event::RDMA_CM_EVENT_ADDR_RESOLVED.0, "address is resolved";
        /// The status is a negative error number.
        ADDRESS_ERROR = Event::RDMA_CM_EVENT_ADDR_ERROR.0, "address cannot be resolved";
        /// The next step is [`CmId::connect`].
        ROUTE_RESOLVED = Event::RDMA_CM_EVENT_ROUTE_RESOLVED.0, "route is resolved";
        /// The status is a negative error number.
        ROUTE_ERROR = Event::RDMA_CM_EVENT_ROUTE_ERROR.0, "route cannot be resolved";
        /// See [`CmEvent::request`].
        CONNECT_REQUEST = Event::RDMA_CM_EVENT_CONNECT_REQUEST.0, "peer wants a connection";
        /// Move the queue pair to ready to send, then call [`CmId::establish`].
        CONNECT_RESPONSE = Event::RDMA_CM_EVENT_CONNECT_RESPONSE.0, "peer accepted";
        /// The status is a negative error number.
        CONNECT_ERROR = Event::RDMA_CM_EVENT_CONNECT_ERROR.0, "connection failed";
        /// The kernel gave up on the peer.
        UNREACHABLE = Event::RDMA_CM_EVENT_UNREACHABLE.0, "peer does not answer";
        /// See [`CmEvent::reject_reason`].
        REJECTED = Event::RDMA_CM_EVENT_REJECTED.0, "peer refused";
        /// Both sides are ready.
        ESTABLISHED = Event::RDMA_CM_EVENT_ESTABLISHED.0, "connection is up";
        /// Confirm with [`CmId::disconnect`].
        DISCONNECTED = Event::RDMA_CM_EVENT_DISCONNECTED.0, "connection ended";
        /// Destroy everything on the device.
        DEVICE_REMOVAL = Event::RDMA_CM_EVENT_DEVICE_REMOVAL.0, "device is being removed";
        /// Connect again if the connection must use the new device.
        ADDRESS_CHANGE = Event::RDMA_CM_EVENT_ADDR_CHANGE.0,
            "local address moved to another device";
        /// No packet of the old connection can arrive any more.
        TIMEWAIT_EXIT = Event::RDMA_CM_EVENT_TIMEWAIT_EXIT.0, "queue pair number is free again";
    }
}
