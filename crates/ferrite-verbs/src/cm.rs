//! RDMA CM: finds a peer by IP address and performs the connection handshake.
//!
//! This module wraps librdmacm's identifiers and events in safe types. For callers that may block,
//! [`resolve`], [`connect`], [`Listener`] and [`accept`] combine the steps. This crate creates the
//! queue pairs, not librdmacm. The CM only transmits their numbers and computes their attributes.
//! So one device context serves all connections, and queue pairs are the same objects with and
//! without the CM.

use std::net::SocketAddr;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::cm_abi::RawAddress;
use crate::error::{Error, ErrorKind};
use crate::qp::QueuePairAttributes;
use crate::sys;

mod blocking;
mod channel;
mod event;
mod removal;

pub use crate::cm_abi::{
    ACCEPT_PRIVATE_DATA_MAX, REJECT_PRIVATE_DATA_MAX, REQUEST_PRIVATE_DATA_MAX,
};
pub use blocking::{Listener, accept, connect, resolve};
pub use channel::EventChannel;
pub use event::{CmEvent, CmEventKind, ConnectionRequest};

use channel::IdInfo;

/// Tells CM identifiers apart in events. A key is never reused within a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CmKey(usize);

impl CmKey {
    fn next() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    fn as_context(self) -> *mut std::ffi::c_void {
        std::ptr::without_provenance_mut(self.0)
    }
}

/// Parameters of a connection that the two sides exchange.
#[derive(Debug, Clone)]
pub struct ConnectParams<'a> {
    /// The queue pair number of this side.
    pub qp_num: u32,
    /// Whether the queue pair takes receives from a shared queue.
    pub srq: bool,
    /// Bytes for the peer's application.
    pub private_data: &'a [u8],
    /// Maximum number of reads of the peer that this side serves at a time.
    pub reads_in: u8,
    /// Maximum number of reads that this side may have outstanding.
    pub reads_out: u8,
    /// Number of resends before the connection fails, 0 to 7.
    pub retries: u8,
    /// Number of resends to a peer that has no receive posted, 0 to 6; 7 resends for ever.
    pub rnr_retries: u8,
}

/// One end of a connection, or a listener.
pub struct CmId {
    raw: NonNull<sys::rdma_cm_id>,
    key: CmKey,
    channel: EventChannel,
    /// Held during each call, because librdmacm changes the struct without a lock of its own.
    calling: Mutex<()>,
}

// SAFETY: any thread may call librdmacm on an identifier, concurrently with calls on other
// identifiers and with the fetching of events.
unsafe impl Send for CmId {}
// SAFETY: the lock serialises calls on one identifier. Without it, they would change the struct at
// the same time.
unsafe impl Sync for CmId {}

impl Drop for CmId {
    fn drop(&mut self) {
        let info = self.channel.id_infos().remove(&self.key);
        if info.is_some_and(|info| info.device_removed) {
            // SAFETY: the identifier is alive and keeps its context open. The kernel has reported
            // that its device is being removed.
            unsafe { removal::release_context((*self.raw.as_ptr()).verbs) };
        }
        // SAFETY: the identifier was created for us, is destroyed once, and has no queue pair. Its
        // events are acknowledged as soon as they are fetched, so this call does not wait for long.
        let rc = unsafe { (self.cm().rdma_destroy_id)(self.raw.as_ptr()) };
        if !crate::leak::count_unless_released(rc) {
            // The identifier still points to the channel, so leak the channel too.
            std::mem::forget(self.channel.clone());
        }
    }
}

impl CmId {
    fn new(raw: NonNull<sys::rdma_cm_id>, key: CmKey, channel: EventChannel, info: IdInfo) -> Self {
        channel.id_infos().insert(key, info);
        Self { raw, key, channel, calling: Mutex::new(()) }
    }

    fn cm(&self) -> &'static sys::CmFunctions {
        self.channel.functions()
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.calling.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn raw(&self) -> *mut sys::rdma_cm_id {
        self.raw.as_ptr()
    }

    /// Returns the key that events of this identifier carry.
    #[must_use]
    pub fn key(&self) -> CmKey {
        self.key
    }

    /// Returns the channel that delivers the events of this identifier.
    #[must_use]
    pub fn channel(&self) -> &EventChannel {
        &self.channel
    }

    /// Returns the device and port that the identifier is bound to. `None` before an address is
    /// bound or resolved, and for a listener on all addresses.
    #[must_use]
    pub fn device(&self) -> Option<(String, u8)> {
        self.info().device
    }

    /// Returns our address, once there is one.
    #[must_use]
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.info().local
    }

    /// Returns the peer's address, once there is one.
    #[must_use]
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.info().peer
    }

    fn info(&self) -> IdInfo {
        self.channel.id_infos().get(&self.key).cloned().unwrap_or_default()
    }

    /// Copies the address and device that a successful bind or listen wrote to the struct.
    fn copy_bound_address(&self) {
        let mut info = IdInfo::default();
        // SAFETY: the identifier is alive. Events change these fields only after address resolution
        // was requested, and then the kernel refuses to bind or to listen.
        unsafe {
            info.copy_local(self.raw());
            self.channel.opened_devices().note(self.raw());
        }
        if let Some(entry) = self.channel.id_infos().get_mut(&self.key) {
            (entry.local, entry.device, entry.context) = (info.local, info.device, info.context);
            // Another thread may have fetched the event during the call.
            if entry.device_removed {
                self.channel.opened_devices().forget(entry.context);
            }
        }
    }

    /// Binds to a local address. Port 0 chooses a free port: see [`CmId::local_addr`].
    ///
    /// # Errors
    /// [`ErrorKind::AddressInUse`]; [`ErrorKind::NoRoute`] if no RDMA device has the address.
    pub fn bind(&self, local: SocketAddr) -> Result<(), Error> {
        let _calling = self.lock();
        let mut addr = RawAddress::from(local);
        // SAFETY: the identifier is alive and the address is valid for the call.
        let rc = unsafe { (self.cm().rdma_bind_addr)(self.raw(), addr.as_mut_ptr()) };
        check_errno("rdma_bind_addr", rc, || local.to_string())
            .map_err(|error| no_route_if_no_device(error, local))?;
        self.copy_bound_address();
        Ok(())
    }

    /// Listens for connections, with at most `backlog` unanswered requests.
    ///
    /// # Errors
    /// [`ErrorKind::AddressInUse`] if there already is a listener.
    pub fn listen(&self, backlog: u32) -> Result<(), Error> {
        let _calling = self.lock();
        // SAFETY: the identifier is alive.
        let rc = unsafe {
            (self.cm().rdma_listen)(self.raw(), i32::try_from(backlog).unwrap_or(i32::MAX))
        };
        check_errno("rdma_listen", rc, || format!("backlog {backlog}"))?;
        self.copy_bound_address();
        Ok(())
    }

    /// Starts to resolve the device and the hardware addresses for `peer`;
    /// [`CmEventKind::ADDRESS_RESOLVED`] or an error event follows. On hosts with several devices,
    /// `local` selects the device.
    ///
    /// # Errors
    /// [`ErrorKind::NoRoute`] if there is no route to the peer.
    pub fn resolve_address(
        &self,
        local: Option<SocketAddr>,
        peer: SocketAddr,
        timeout: Duration,
    ) -> Result<(), Error> {
        let _calling = self.lock();
        let mut source = local.map(RawAddress::from);
        let mut target = RawAddress::from(peer);
        if let Some(info) = self.channel.id_infos().get_mut(&self.key) {
            // Set before the call, because the event may be fetched before the call returns.
            info.peer = Some(peer);
        }
        // SAFETY: the identifier is alive; both addresses are valid for the call.
        let rc = unsafe {
            let source = source.as_mut().map_or(std::ptr::null_mut(), RawAddress::as_mut_ptr);
            (self.cm().rdma_resolve_addr)(self.raw(), source, target.as_mut_ptr(), millis(timeout))
        };
        let context = || local.map_or(peer.to_string(), |local| format!("{peer} from {local}"));
        check_errno("rdma_resolve_addr", rc, context)
            .map_err(|error| no_route_if_no_device(error, local.unwrap_or(peer)))
    }

    /// Starts to resolve the path; [`CmEventKind::ROUTE_RESOLVED`] or an error event follows.
    ///
    /// # Errors
    /// [`ErrorKind::NoRoute`] if the address does not belong to an RDMA device. For example, the
    /// kernel resolves the address 127.0.0.1, but finds no path to it. Other errors if the address
    /// is not resolved yet.
    pub fn resolve_route(&self, timeout: Duration) -> Result<(), Error> {
        let _calling = self.lock();
        let peer = self.peer_addr();
        // SAFETY: the identifier is alive.
        let rc = unsafe { (self.cm().rdma_resolve_route)(self.raw(), millis(timeout)) };
        let context = || peer.map(|peer| peer.to_string()).unwrap_or_default();
        check_errno("rdma_resolve_route", rc, context).map_err(|error| match peer {
            Some(peer) => no_route_if_no_device(error, peer),
            None => error,
        })
    }

    /// Requests a connection from the peer.
    ///
    /// [`CmEventKind::CONNECT_RESPONSE`], a rejection or an error event follows. After
    /// `CONNECT_RESPONSE`, move the queue pair to ready to send and call [`CmId::establish`]. If
    /// the peer does not answer, the kernel gives up only after more than a minute. So callers need
    /// their own deadline.
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`] if the private data does not fit.
    pub fn connect(&self, params: &ConnectParams<'_>) -> Result<(), Error> {
        let _calling = self.lock();
        let mut raw = params.to_raw("rdma_connect", REQUEST_PRIVATE_DATA_MAX)?;
        // SAFETY: the identifier is alive; `raw` and the private data it points to are valid for
        // the call.
        let rc = unsafe { (self.cm().rdma_connect)(self.raw(), &raw mut raw) };
        check_errno("rdma_connect", rc, || format!("queue pair {:#x}", params.qp_num))
    }

    /// Tells the peer that our queue pair is ready, after [`CmEventKind::CONNECT_RESPONSE`].
    ///
    /// # Errors
    /// If the peer has not accepted the connection.
    pub fn establish(&self) -> Result<(), Error> {
        let _calling = self.lock();
        // SAFETY: the identifier is alive.
        let rc = unsafe { (self.cm().rdma_establish)(self.raw()) };
        check_errno("rdma_establish", rc, String::new)
    }

    /// Accepts a connection request, once our queue pair is ready to send.
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`] if the private data does not fit.
    pub fn accept(&self, params: &ConnectParams<'_>) -> Result<(), Error> {
        let _calling = self.lock();
        let mut raw = params.to_raw("rdma_accept", ACCEPT_PRIVATE_DATA_MAX)?;
        // SAFETY: as in `connect`.
        let rc = unsafe { (self.cm().rdma_accept)(self.raw(), &raw mut raw) };
        check_errno("rdma_accept", rc, || format!("queue pair {:#x}", params.qp_num))
    }

    /// Rejects a connection request; the peer receives the private data.
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`] if the private data does not fit.
    pub fn reject(&self, private_data: &[u8]) -> Result<(), Error> {
        let _calling = self.lock();
        let len = private_data_len("rdma_reject", private_data, REJECT_PRIVATE_DATA_MAX)?;
        // SAFETY: the identifier is alive and the data is valid for the call.
        let rc = unsafe { (self.cm().rdma_reject)(self.raw(), private_data.as_ptr().cast(), len) };
        check_errno("rdma_reject", rc, String::new)
    }

    /// Ends the connection, or confirms that the peer has ended it.
    ///
    /// The peer gets [`CmEventKind::DISCONNECTED`] at once. This side gets the event when the peer
    /// has confirmed, with this call or by dropping its identifier, or when the kernel gives up
    /// waiting for the confirmation. This call does not change the queue pair: the caller must stop
    /// it as well.
    ///
    /// # Errors
    /// If the identifier has never had a connection or a connection request.
    pub fn disconnect(&self) -> Result<(), Error> {
        let _calling = self.lock();
        // SAFETY: the identifier is alive.
        let rc = unsafe { (self.cm().rdma_disconnect)(self.raw()) };
        check_errno("rdma_disconnect", rc, String::new)
    }

    /// Sets the IP type of service (DSCP and ECN bits) of the connection. Call it before the route
    /// is resolved.
    ///
    /// # Errors
    /// If the kernel does not support the option.
    pub fn set_tos(&self, tos: u8) -> Result<(), Error> {
        self.set_option(sys::RDMA_OPTION_ID_TOS.0, tos)
    }

    /// Sets how long to wait for an acknowledgement: 4.096 µs × 2^`encoded` (at most 31). Call it
    /// before connecting. On RoCE, the kernel's default is about 0.5 s, and about 2 s in older
    /// versions (`CMA_IBOE_PACKET_LIFETIME` in its `drivers/infiniband/core/cma.c`).
    ///
    /// # Errors
    /// If the kernel does not support the option (before 5.1).
    pub fn set_ack_timeout(&self, encoded: u8) -> Result<(), Error> {
        self.set_option(sys::RDMA_OPTION_ID_ACK_TIMEOUT.0, encoded)
    }

    /// Allows a listener to use an address that a connection of an earlier listener still uses.
    /// Call it before [`CmId::bind`], which checks whether the address is in use.
    ///
    /// # Errors
    /// If the identifier already listens.
    pub fn set_reuse_address(&self) -> Result<(), Error> {
        self.set_option(sys::RDMA_OPTION_ID_REUSEADDR.0, 1_i32)
    }

    /// Restricts a listener on `[::]` to IPv6. Otherwise it listens on IPv4 as well, and occupies
    /// the port for both families.
    ///
    /// # Errors
    /// If the identifier already listens or connects.
    pub fn set_one_family(&self) -> Result<(), Error> {
        self.set_option(sys::RDMA_OPTION_ID_AFONLY.0, 1_i32)
    }

    fn set_option<T>(&self, option: u32, mut value: T) -> Result<(), Error> {
        let _calling = self.lock();
        // SAFETY: the identifier is alive; the value is valid for its size.
        let rc = unsafe {
            (self.cm().rdma_set_option)(
                self.raw(),
                sys::RDMA_OPTION_ID.0.cast_signed(),
                option.cast_signed(),
                (&raw mut value).cast(),
                size_of::<T>(),
            )
        };
        check_errno("rdma_set_option", rc, || format!("option {option}"))
    }

    /// Returns the attributes that move a queue pair of this connection to `state`.
    ///
    /// # Errors
    /// If the handshake has not reached the step that `state` needs.
    pub fn queue_pair_attributes(
        &self,
        state: crate::qp::State,
    ) -> Result<QueuePairAttributes, Error> {
        let _calling = self.lock();
        let mut new = QueuePairAttributes::new(sys::ibv_qp_state(state.code()));
        // SAFETY: the identifier is alive; both places are valid for the write.
        let rc = unsafe {
            (self.cm().rdma_init_qp_attr)(self.raw(), &raw mut new.attr, &raw mut new.mask)
        };
        check_errno("rdma_init_qp_attr", rc, || state.to_string())?;
        Ok(new)
    }
}

impl std::fmt::Debug for CmId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CmId")
            .field("key", &self.key.0)
            .field("local", &self.local_addr())
            .field("peer", &self.peer_addr())
            .finish()
    }
}

impl ConnectParams<'_> {
    fn to_raw(
        &self,
        call: &'static str,
        private_data_max: usize,
    ) -> Result<sys::rdma_conn_param, Error> {
        Ok(sys::rdma_conn_param {
            private_data: self.private_data.as_ptr().cast(),
            private_data_len: private_data_len(call, self.private_data, private_data_max)?,
            responder_resources: self.reads_in,
            initiator_depth: self.reads_out,
            flow_control: 1,
            retry_count: self.retries.min(7),
            rnr_retry_count: self.rnr_retries.min(7),
            srq: self.srq.into(),
            qp_num: self.qp_num,
        })
    }
}

fn private_data_len(call: &'static str, data: &[u8], max: usize) -> Result<u8, Error> {
    match u8::try_from(data.len()) {
        Ok(len) if data.len() <= max => Ok(len),
        _ => Err(Error::new(
            ErrorKind::Misuse,
            call,
            format!("{} bytes of private data, but only {max} fit", data.len()),
        )),
    }
}

/// Converts the return value of librdmacm, which is 0, or −1 with the error in errno.
fn check_errno(call: &'static str, rc: i32, context: impl FnOnce() -> String) -> Result<(), Error> {
    if rc == 0 { Ok(()) } else { Err(Error::last(call, context())) }
}

/// Corrects the kind of an error about an address. ENODEV means here that no RDMA device has the
/// address, not that a device was removed.
fn no_route_if_no_device(error: Error, addr: SocketAddr) -> Error {
    if error.kind() != ErrorKind::DeviceGone {
        return error;
    }
    error.with_kind(ErrorKind::NoRoute).because(format!(
        "no RDMA device has the address {}; `ferrite devices` lists the addresses of RDMA devices",
        addr.ip()
    ))
}

fn millis(timeout: Duration) -> i32 {
    i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX)
}

#[cfg(all(test, feature = "fake"))]
mod tests {
    use super::*;
    use crate::fake::{DeviceSpec, World};

    /// Another thread may fetch the event while the call that binds the identifier has not returned
    /// yet.
    #[test]
    fn forgets_a_device_whose_removal_was_reported_during_a_bind() {
        let world = World::new();
        world.add_device(DeviceSpec::new("fake1", "10.0.0.1".parse().expect("an address")));
        let channel = world.verbs().open_event_channel().expect("a channel");
        let any_port = "10.0.0.1:0".parse().expect("an address");
        let first = channel.create_id().expect("an identifier");
        first.bind(any_port).expect("bound");
        let second = channel.create_id().expect("an identifier");
        let set_removed = |info: Option<&mut IdInfo>| info.expect("known").device_removed = true;
        set_removed(channel.id_infos().get_mut(&second.key));
        assert!(!channel.opened_devices().is_empty());
        second.bind(any_port).expect("bound");
        assert!(channel.opened_devices().is_empty());
    }
}
