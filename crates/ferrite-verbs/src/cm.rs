//! RDMA CM: finding a peer by IP address and shaking hands.
//!
//! Identifiers and events, as librdmacm has them, made safe; [`connect`] and [`accept`] put the
//! steps together for callers that may block. Queue pairs are ours and not librdmacm's: the CM
//! carries their numbers and computes their attributes. So one device context serves all
//! connections, and a queue pair is the same object whichever way the peers met.

use std::net::SocketAddr;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::{Error, ErrorKind};
use crate::qp::QueuePairAttributes;
use crate::sys;

pub(crate) mod address;
mod blocking;
mod channel;
mod event;

pub use blocking::{Listener, accept, connect, resolve};
pub use channel::EventChannel;
pub use event::{CmEvent, CmEventKind, ConnectionRequest};

use address::RawAddress;
use channel::Known;

/// Private data that fits into a connection request (port space TCP).
pub const REQUEST_PRIVATE_DATA_MAX: usize = 56;
/// Private data that fits into an acceptance.
pub const ACCEPT_PRIVATE_DATA_MAX: usize = 196;
/// Private data that fits into a rejection.
pub const REJECT_PRIVATE_DATA_MAX: usize = 148;

/// Tells identifiers apart in events; never used twice in a process.
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

/// What the two sides tell each other about a connection.
#[derive(Debug, Clone)]
pub struct ConnectParams<'a> {
    /// The queue pair of this side.
    pub qp_num: u32,
    /// Whether it takes its receives from a shared queue.
    pub srq: bool,
    /// Bytes for the peer's application.
    pub private_data: &'a [u8],
    /// Reads of the peer that this side serves at a time.
    pub reads_in: u8,
    /// Reads that this side may have outstanding.
    pub reads_out: u8,
    /// Resends before the peer counts as dead, 0 to 7.
    pub retries: u8,
    /// Resends to a peer without receives, 0 to 6; 7 is for ever.
    pub rnr_retries: u8,
}

/// One end of a connection, or a listener.
pub struct CmId {
    raw: NonNull<sys::rdma_cm_id>,
    key: CmKey,
    channel: EventChannel,
    /// Held during each call: librdmacm changes the struct without a lock of its own.
    calling: Mutex<()>,
}

// SAFETY: librdmacm's calls on an identifier may come from any thread, beside calls on other
// identifiers and beside the fetching of events.
unsafe impl Send for CmId {}
// SAFETY: two calls on one identifier, which would change its struct at a time, are kept apart by
// its lock.
unsafe impl Sync for CmId {}

impl Drop for CmId {
    fn drop(&mut self) {
        self.channel.known().remove(&self.key);
        // SAFETY: created for us and destroyed once; no queue pair was attached to it; every event
        // of it is acknowledged where it is fetched, so that this does not wait for long.
        let rc = unsafe { (self.cm().rdma_destroy_id)(self.raw.as_ptr()) };
        if !crate::leak::unless_released(rc) {
            // It still points at the channel: keep that too.
            std::mem::forget(self.channel.clone());
        }
        if self.channel.device_was_removed() {
            close_removed_devices(self.cm());
        }
    }
}

/// librdmacm opens each device once and looks only here whether it still exists. The kernel cannot
/// finish removing a Soft-RoCE device that somebody holds open.
#[cold]
fn close_removed_devices(cm: &sys::CmFunctions) {
    if let (Some(devices), Some(free)) = (cm.rdma_get_devices, cm.rdma_free_devices) {
        // SAFETY: no preconditions; the list is given back at once, unless there is none.
        unsafe {
            let list = devices(std::ptr::null_mut());
            if !list.is_null() {
                free(list);
            }
        }
    }
}

impl CmId {
    fn new(raw: NonNull<sys::rdma_cm_id>, key: CmKey, channel: EventChannel, known: Known) -> Self {
        channel.known().insert(key, known);
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

    /// What events of this identifier carry.
    #[must_use]
    pub fn key(&self) -> CmKey {
        self.key
    }

    /// The channel its events arrive on.
    #[must_use]
    pub fn channel(&self) -> &EventChannel {
        &self.channel
    }

    /// The device and port it is bound to; `None` before an address was resolved or bound, and for
    /// a listener on all addresses.
    #[must_use]
    pub fn device(&self) -> Option<(String, u8)> {
        self.known().device
    }

    /// Our address, once there is one.
    #[must_use]
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.known().local
    }

    /// The peer's address, once there is one.
    #[must_use]
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.known().peer
    }

    fn known(&self) -> Known {
        self.channel.known().get(&self.key).cloned().unwrap_or_default()
    }

    /// Copies what a call that has bound the identifier wrote to its struct.
    fn is_bound(&self) {
        let mut known = Known::default();
        // SAFETY: the identifier is alive. Events change these fields only after an address was to
        // be resolved, and then the kernel refuses to bind or to listen.
        unsafe { known.copy_local(self.raw()) };
        if let Some(entry) = self.channel.known().get_mut(&self.key) {
            (entry.local, entry.device) = (known.local, known.device);
        }
    }

    /// Binds to a local address. Port 0 picks one: see [`CmId::local_addr`].
    ///
    /// # Errors
    /// [`ErrorKind::AddressInUse`]; [`ErrorKind::NoRoute`] if no RDMA device has the address.
    pub fn bind(&self, local: SocketAddr) -> Result<(), Error> {
        let _calling = self.lock();
        let mut addr = RawAddress::from(local);
        // SAFETY: the identifier is alive and the address is valid for the call.
        let rc = unsafe { (self.cm().rdma_bind_addr)(self.raw(), addr.as_mut_ptr()) };
        done("rdma_bind_addr", rc, || local.to_string())
            .map_err(|error| no_rdma_at(error, local))?;
        self.is_bound();
        Ok(())
    }

    /// Waits for connections, at most `backlog` of them unanswered.
    ///
    /// # Errors
    /// [`ErrorKind::AddressInUse`] if another listens there.
    pub fn listen(&self, backlog: u32) -> Result<(), Error> {
        let _calling = self.lock();
        // SAFETY: the identifier is alive.
        let rc = unsafe {
            (self.cm().rdma_listen)(self.raw(), i32::try_from(backlog).unwrap_or(i32::MAX))
        };
        done("rdma_listen", rc, || format!("backlog {backlog}"))?;
        self.is_bound();
        Ok(())
    }

    /// Starts to find the device and hardware addresses for `peer`;
    /// [`CmEventKind::ADDRESS_RESOLVED`] or an error event follows. Give a `local` address on hosts
    /// with several: it picks the device.
    ///
    /// # Errors
    /// [`ErrorKind::NoRoute`] if there is no way from here.
    pub fn resolve_address(
        &self,
        local: Option<SocketAddr>,
        peer: SocketAddr,
        timeout: Duration,
    ) -> Result<(), Error> {
        let _calling = self.lock();
        let mut source = local.map(RawAddress::from);
        let mut target = RawAddress::from(peer);
        if let Some(known) = self.channel.known().get_mut(&self.key) {
            // before the event, which may be fetched before the call returns
            known.peer = Some(peer);
        }
        // SAFETY: the identifier is alive; both addresses are valid for the call.
        let rc = unsafe {
            let source = source.as_mut().map_or(std::ptr::null_mut(), RawAddress::as_mut_ptr);
            (self.cm().rdma_resolve_addr)(self.raw(), source, target.as_mut_ptr(), millis(timeout))
        };
        let context = || local.map_or(peer.to_string(), |local| format!("{peer} from {local}"));
        done("rdma_resolve_addr", rc, context)
            .map_err(|error| no_rdma_at(error, local.unwrap_or(peer)))
    }

    /// Starts to find the path; [`CmEventKind::ROUTE_RESOLVED`] or an error event follows.
    ///
    /// # Errors
    /// When the state does not allow it; [`ErrorKind::NoRoute`] if the address is not an RDMA
    /// device's (as 127.0.0.1, which the kernel resolves and then finds no way to).
    pub fn resolve_route(&self, timeout: Duration) -> Result<(), Error> {
        let _calling = self.lock();
        let peer = self.peer_addr();
        // SAFETY: the identifier is alive.
        let rc = unsafe { (self.cm().rdma_resolve_route)(self.raw(), millis(timeout)) };
        let context = || peer.map(|peer| peer.to_string()).unwrap_or_default();
        done("rdma_resolve_route", rc, context).map_err(|error| match peer {
            Some(peer) => no_rdma_at(error, peer),
            None => error,
        })
    }

    /// Asks the peer for a connection; [`CmEventKind::CONNECT_RESPONSE`] (then bring the queue pair
    /// up and call [`CmId::establish`]), a rejection or an error event follows. The kernel gives up
    /// on a peer that does not answer after more than a minute: set a deadline of your own.
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`] if the private data does not fit.
    pub fn connect(&self, params: &ConnectParams<'_>) -> Result<(), Error> {
        let _calling = self.lock();
        let mut raw = params.to_raw("rdma_connect", REQUEST_PRIVATE_DATA_MAX)?;
        // SAFETY: the identifier is alive; `raw` and the private data it points to are valid for
        // the call.
        let rc = unsafe { (self.cm().rdma_connect)(self.raw(), &raw mut raw) };
        done("rdma_connect", rc, || format!("queue pair {:#x}", params.qp_num))
    }

    /// Tells the peer that our queue pair is ready, after [`CmEventKind::CONNECT_RESPONSE`].
    ///
    /// # Errors
    /// When the state does not allow it.
    pub fn establish(&self) -> Result<(), Error> {
        let _calling = self.lock();
        // SAFETY: the identifier is alive.
        done("rdma_establish", unsafe { (self.cm().rdma_establish)(self.raw()) }, String::new)
    }

    /// Accepts a request, once our queue pair is up.
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`] if the private data does not fit.
    pub fn accept(&self, params: &ConnectParams<'_>) -> Result<(), Error> {
        let _calling = self.lock();
        let mut raw = params.to_raw("rdma_accept", ACCEPT_PRIVATE_DATA_MAX)?;
        // SAFETY: as in `connect`.
        let rc = unsafe { (self.cm().rdma_accept)(self.raw(), &raw mut raw) };
        done("rdma_accept", rc, || format!("queue pair {:#x}", params.qp_num))
    }

    /// Refuses a request; the peer sees the private data.
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`] if the private data does not fit.
    pub fn reject(&self, private_data: &[u8]) -> Result<(), Error> {
        let _calling = self.lock();
        let len = private_data_len("rdma_reject", private_data, REJECT_PRIVATE_DATA_MAX)?;
        // SAFETY: the identifier is alive and the data is valid for the call.
        let rc = unsafe { (self.cm().rdma_reject)(self.raw(), private_data.as_ptr().cast(), len) };
        done("rdma_reject", rc, String::new)
    }

    /// Ends the connection, or answers a peer that did. The peer gets [`CmEventKind::DISCONNECTED`]
    /// at once, this side when the peer has answered (by this call, or by dropping its identifier).
    /// The queue pair is not touched: stop it as well.
    ///
    /// # Errors
    /// When there is no connection.
    pub fn disconnect(&self) -> Result<(), Error> {
        let _calling = self.lock();
        // SAFETY: the identifier is alive.
        done("rdma_disconnect", unsafe { (self.cm().rdma_disconnect)(self.raw()) }, String::new)
    }

    /// Sets the IP type of service (DSCP and ECN bits) of the connection; before the route is
    /// resolved.
    ///
    /// # Errors
    /// When the kernel does not know the option.
    pub fn set_tos(&self, tos: u8) -> Result<(), Error> {
        self.set_option(sys::RDMA_OPTION_ID_TOS.0, tos)
    }

    /// Sets how long to wait for an acknowledgement, 4.096 µs × 2^`encoded` (at most 31); before
    /// connecting. The default of the kernel is some 2 s.
    ///
    /// # Errors
    /// When the kernel does not know the option (before 5.1).
    pub fn set_ack_timeout(&self, encoded: u8) -> Result<(), Error> {
        self.set_option(sys::RDMA_OPTION_ID_ACK_TIMEOUT.0, encoded)
    }

    /// Lets a listener take an address that a connection of an earlier one still uses.
    ///
    /// # Errors
    /// After the address was bound.
    pub fn set_reuse_address(&self) -> Result<(), Error> {
        self.set_option(sys::RDMA_OPTION_ID_REUSEADDR.0, 1_i32)
    }

    /// Lets a listener on `[::]` take IPv6 alone. Otherwise it takes IPv4 as well, and its port
    /// from listeners there.
    ///
    /// # Errors
    /// After the address was bound.
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
        done("rdma_set_option", rc, || format!("option {option}"))
    }

    /// What a queue pair of this connection needs to move to `state`.
    ///
    /// # Errors
    /// When the connection is not that far.
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
        done("rdma_init_qp_attr", rc, || state.to_string())?;
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
            format!("{} bytes of private data, {max} fit", data.len()),
        )),
    }
}

/// librdmacm's convention: 0, or −1 and errno.
fn done(call: &'static str, rc: i32, context: impl FnOnce() -> String) -> Result<(), Error> {
    if rc == 0 { Ok(()) } else { Err(Error::last(call, context())) }
}

/// ENODEV for an address means that no RDMA device has it, not that a device went.
fn no_rdma_at(error: Error, addr: SocketAddr) -> Error {
    if error.kind() != ErrorKind::DeviceGone {
        return error;
    }
    error.with_kind(ErrorKind::NoRoute).because(format!(
        "no RDMA device serves {}: `ferrite devices` lists the addresses that do",
        addr.ip()
    ))
}

fn millis(timeout: Duration) -> i32 {
    i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX)
}
