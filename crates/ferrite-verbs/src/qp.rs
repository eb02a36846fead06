//! Queue pairs: reliable connections.
//!
//! A queue pair is made here and brought up by [`QueuePairAttributes`], which come either from RDMA
//! CM ([`crate::CmId::queue_pair_attributes`]) or from an address that the peers exchanged by other
//! means ([`QueuePairAttributes::connect_to`]). One kind of queue pair, two ways to meet.

use std::fmt;
use std::ptr::NonNull;

use crate::code::codes;
use crate::context::exceeded;
use crate::cq::CompletionQueue;
use crate::error::{ENTRY_BYTES, Error, ErrorKind, SEND_ENTRY_BYTES, check, set_errno};
use crate::gid::Gid;
use crate::mr::Access;
use crate::pd::ProtectionDomain;
use crate::port::Mtu;
use crate::srq::{Held, SharedReceiveQueue};
use crate::sys;
use crate::wr::{PostError, RecvRequest, SendRequest, post_chained};

/// What a queue pair needs to be made.
#[derive(Debug, Clone)]
pub struct QueuePairConfig {
    /// Where completions of sends, writes and reads go.
    pub send_cq: CompletionQueue,
    /// Where completions of receives go; may be the same.
    pub recv_cq: CompletionQueue,
    /// Take receives from here instead of a queue of its own.
    pub srq: Option<SharedReceiveQueue>,
    /// Entries of the send queue.
    pub max_send_wr: u32,
    /// Entries of the receive queue (unused with a shared one).
    pub max_recv_wr: u32,
    /// Pieces per send.
    pub max_send_sge: u32,
    /// Pieces per receive (unused with a shared queue).
    pub max_recv_sge: u32,
    /// Bytes that a send may carry inline.
    pub max_inline: u32,
}

impl QueuePairConfig {
    /// Both directions complete on `cq`: 128 entries each way, one piece per request, no inline
    /// data.
    #[must_use]
    pub fn new(cq: &CompletionQueue) -> Self {
        Self {
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            srq: None,
            max_send_wr: 128,
            max_recv_wr: 128,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
        }
    }
}

/// A reliable-connected queue pair.
///
/// Destroyed when dropped; the device then touches none of the memory that was posted to it.
pub struct QueuePair {
    raw: NonNull<sys::ibv_qp>,
    /// By [`QueuePair::destroy`]; nothing but `Drop` comes after that.
    destroyed: bool,
    capacity: Capacity,
    // Dropped after `raw` was destroyed (in `Drop`): first the memory, then the parents.
    held: Held,
    domain: ProtectionDomain,
    srq: Option<SharedReceiveQueue>,
    _queues: [CompletionQueue; 2],
}

/// What the device granted, at least what was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "as in QueuePairConfig")]
pub struct Capacity {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline: u32,
}

// SAFETY: providers lock both queues of a queue pair inside.
unsafe impl Send for QueuePair {}
// SAFETY: as above.
unsafe impl Sync for QueuePair {}

impl Drop for QueuePair {
    fn drop(&mut self) {
        if !self.destroyed && !crate::leak::unless_released(self.release()) {
            self.held.leak();
        }
    }
}

impl ProtectionDomain {
    /// Makes a queue pair, in state RESET.
    ///
    /// # Errors
    /// [`ErrorKind::DeviceLimit`] if the device cannot; lack of memory or a cgroup's limit
    /// otherwise.
    pub fn create_queue_pair(&self, config: &QueuePairConfig) -> Result<QueuePair, Error> {
        let mut attr = sys::ibv_qp_init_attr {
            send_cq: config.send_cq.raw(),
            recv_cq: config.recv_cq.raw(),
            srq: config.srq.as_ref().map_or(std::ptr::null_mut(), SharedReceiveQueue::raw),
            cap: sys::ibv_qp_cap {
                max_send_wr: config.max_send_wr,
                max_recv_wr: config.max_recv_wr,
                max_send_sge: config.max_send_sge,
                max_recv_sge: config.max_recv_sge,
                max_inline_data: config.max_inline,
            },
            qp_type: sys::ibv_qp_type::IBV_QPT_RC,
            ..Default::default()
        };
        set_errno(0);
        // SAFETY: domain, queues and `attr` are alive for the call; the queue pair keeps them after
        // it.
        let raw = unsafe { (self.context().verbs().ibv.ibv_create_qp)(self.raw(), &raw mut attr) };
        let raw = NonNull::new(raw).ok_or_else(|| self.create_error(config))?;
        Ok(QueuePair {
            raw,
            destroyed: false,
            capacity: Capacity {
                max_send_wr: attr.cap.max_send_wr,
                max_recv_wr: attr.cap.max_recv_wr,
                max_send_sge: attr.cap.max_send_sge,
                max_recv_sge: attr.cap.max_recv_sge,
                max_inline: attr.cap.max_inline_data,
            },
            held: Held::default(),
            domain: self.clone(),
            srq: config.srq.clone(),
            _queues: [config.send_cq.clone(), config.recv_cq.clone()],
        })
    }

    #[cold]
    fn create_error(&self, config: &QueuePairConfig) -> Error {
        let asked = format!(
            "send {}×{}, receive {}×{}, inline {}",
            config.max_send_wr,
            config.max_send_sge,
            config.max_recv_wr,
            config.max_recv_sge,
            config.max_inline
        );
        let error = Error::last("ibv_create_qp", asked);
        let limit = self.context().limits().ok().and_then(|l| {
            exceeded(&[
                ("max_send_wr", config.max_send_wr, l.max_qp_wr),
                ("max_recv_wr", config.max_recv_wr, l.max_qp_wr),
                ("max_send_sge", config.max_send_sge, l.max_sge),
                ("max_recv_sge", config.max_recv_sge, l.max_sge),
            ])
        });
        match limit {
            Some(limit) => error.with_kind(ErrorKind::DeviceLimit).because(limit),
            // Devices do not report their inline maximum: it is found by asking.
            None if error.kind() == ErrorKind::Misuse && config.max_inline > 0 => error
                .with_kind(ErrorKind::DeviceLimit)
                .because("perhaps more inline bytes than the device has"),
            None => {
                let (sends, receives) = (config.max_send_wr.into(), u64::from(config.max_recv_wr));
                error.or_memlock(
                    u64::saturating_mul(sends, SEND_ENTRY_BYTES) + receives * ENTRY_BYTES,
                )
            }
        }
    }
}

impl QueuePair {
    fn raw(&self) -> *mut sys::ibv_qp {
        self.raw.as_ptr()
    }

    fn release(&mut self) -> i32 {
        // SAFETY: created by us and destroyed once (`destroyed`); the parents are still alive:
        // fields drop later.
        let rc = unsafe { (self.domain.context().verbs().ibv.ibv_destroy_qp)(self.raw()) };
        crate::leak::outcome(rc, self.domain.context())
    }

    /// Destroys it, for callers that must know: after `Ok` the device touches none of the memory
    /// that was posted to it.
    ///
    /// # Errors
    /// What the device said if it refused; the queue pair is as it was.
    pub fn destroy(mut self) -> Result<(), (Self, Error)> {
        match check("ibv_destroy_qp", self.release(), || format!("queue pair {:#x}", self.number()))
        {
            Ok(()) => {
                self.destroyed = true;
                Ok(())
            }
            Err(error) => Err((self, error)),
        }
    }

    /// Its number: what the peer needs, and what completions and logs name.
    #[must_use]
    pub fn number(&self) -> u32 {
        // SAFETY: the queue pair is alive; the field is constant.
        unsafe { (*self.raw()).qp_num }
    }

    /// What the device granted.
    #[must_use]
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// Whether its receives come from a shared queue.
    #[must_use]
    pub fn uses_srq(&self) -> bool {
        self.srq.is_some()
    }

    /// The protection domain it is in.
    #[must_use]
    pub fn domain(&self) -> &ProtectionDomain {
        &self.domain
    }

    /// Its state, as the device has it now.
    ///
    /// # Errors
    /// When the device has gone.
    pub fn state(&self) -> Result<State, Error> {
        Ok(State(self.query()?.qp_state.0))
    }

    /// Retry and timeout settings in use, as the device has them.
    ///
    /// # Errors
    /// When the device has gone.
    pub fn path(&self) -> Result<Path, Error> {
        let attr = self.query()?;
        Ok(Path {
            mtu: Mtu(attr.path_mtu.0),
            ack_timeout: attr.timeout,
            retries: attr.retry_cnt,
            rnr_retries: attr.rnr_retry,
            rnr_timer: attr.min_rnr_timer,
        })
    }

    fn query(&self) -> Result<sys::ibv_qp_attr, Error> {
        use sys::ibv_qp_attr_mask as mask;
        let (mut attr, mut init) = (sys::ibv_qp_attr::default(), sys::ibv_qp_init_attr::default());
        let wanted = mask::IBV_QP_STATE.0
            | mask::IBV_QP_PATH_MTU.0
            | mask::IBV_QP_TIMEOUT.0
            | mask::IBV_QP_RETRY_CNT.0
            | mask::IBV_QP_RNR_RETRY.0
            | mask::IBV_QP_MIN_RNR_TIMER.0;
        let ibv = self.domain.context().verbs().ibv;
        // SAFETY: the queue pair is alive, both structs are valid for the write.
        let rc = unsafe {
            (ibv.ibv_query_qp)(self.raw(), &raw mut attr, wanted.cast_signed(), &raw mut init)
        };
        check("ibv_query_qp", rc, || format!("queue pair {:#x}", self.number()))?;
        Ok(attr)
    }

    /// Applies attributes: moves the queue pair to the next state.
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`] if its state does not allow it; [`ErrorKind::NoRoute`] or
    /// [`ErrorKind::Timeout`] if the peer's hardware address is not found.
    pub fn modify(&self, attributes: &QueuePairAttributes) -> Result<(), Error> {
        let mut attr = attributes.attr;
        let ibv = self.domain.context().verbs().ibv;
        // SAFETY: the queue pair is alive and `attr` is valid for the call.
        let rc = unsafe { (ibv.ibv_modify_qp)(self.raw(), &raw mut attr, attributes.mask) };
        check("ibv_modify_qp", rc, || {
            format!("queue pair {:#x} to {}", self.number(), State(attr.qp_state.0))
        })
    }

    /// Stops it: everything posted completes as flushed. The only way to cancel.
    ///
    /// # Errors
    /// When the device has gone.
    pub fn stop(&self) -> Result<(), Error> {
        self.modify(&QueuePairAttributes::new(sys::ibv_qp_state::IBV_QPS_ERR))
    }

    /// Posts to the send queue, in order.
    ///
    /// # Errors
    /// [`ErrorKind::QueueFull`] when there is no room; how many were posted before comes along.
    pub fn post_send(&self, requests: &[SendRequest<'_>]) -> Result<(), PostError> {
        self.held.hold(requests);
        let raw = self.raw();
        // SAFETY: the queue pair is alive; the provider filled the operations when it was opened.
        let post = unsafe { (*(*raw).context).ops.post_send };
        post_chained("ibv_post_send", requests, |head, refused| match post {
            // SAFETY: the chain is valid for the call, and the memory it names outlives its use:
            // held above, or promised by whoever called `Sge::from_raw`.
            Some(post) => unsafe { post(raw, head, refused) },
            None => rustix::io::Errno::NOSYS.raw_os_error(),
        })
    }

    /// Posts receives, in order. With a shared receive queue, post there instead.
    ///
    /// # Errors
    /// [`ErrorKind::QueueFull`] when there is no room; how many were posted before comes along.
    pub fn post_recv(&self, requests: &[RecvRequest<'_>]) -> Result<(), PostError> {
        if self.srq.is_some() {
            let error = Error::new(
                ErrorKind::Misuse,
                "ibv_post_recv",
                "the queue pair uses a shared receive queue",
            );
            return Err(PostError { posted: 0, error });
        }
        self.held.hold(requests);
        let raw = self.raw();
        // SAFETY: as in `post_send`.
        let post = unsafe { (*(*raw).context).ops.post_recv };
        post_chained("ibv_post_recv", requests, |head, refused| match post {
            // SAFETY: as in `post_send`.
            Some(post) => unsafe { post(raw, head, refused) },
            None => rustix::io::Errno::NOSYS.raw_os_error(),
        })
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QueuePair({:#x})", self.number())
    }
}

codes! {
    /// The state of a queue pair.
    pub struct State, unknown: "state" {
        /// Fresh: nothing can be posted.
        RESET = sys::ibv_qp_state::IBV_QPS_RESET.0, "RESET";
        /// Receives can be posted.
        INIT = sys::ibv_qp_state::IBV_QPS_INIT.0, "INIT";
        /// Ready to receive.
        READY_TO_RECEIVE = sys::ibv_qp_state::IBV_QPS_RTR.0, "RTR";
        /// Ready to send and receive.
        READY_TO_SEND = sys::ibv_qp_state::IBV_QPS_RTS.0, "RTS";
        /// Broken or stopped.
        ERROR = sys::ibv_qp_state::IBV_QPS_ERR.0, "ERROR";
    }
}

/// How a queue pair talks to its peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// Packet payload.
    pub mtu: Mtu,
    /// Wait for an acknowledgement: 4.096 µs × 2^this; 0 is for ever.
    pub ack_timeout: u8,
    /// Resends before [`crate::Status::RETRY_EXCEEDED`], 0 to 7; Soft-RoCE never gives up with 7.
    pub retries: u8,
    /// Resends to a peer without receives, 0 to 6; 7 is for ever.
    pub rnr_retries: u8,
    /// What a peer is told to wait when we have no receive posted (encoded: 0 is 655 ms, 1 is 10
    /// µs, 12 is 640 µs; table 45 of the InfiniBand specification).
    pub rnr_timer: u8,
}

impl Default for Path {
    /// A dead peer is noticed after about half a second: 67 ms × 7 tries. (Soft-RoCE takes 7
    /// resends for "for ever".)
    fn default() -> Self {
        Self { mtu: Mtu::B1024, ack_timeout: 14, retries: 6, rnr_retries: 7, rnr_timer: 12 }
    }
}

/// Who the peer is, for a connection that is not made by RDMA CM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerAddress {
    /// Its queue pair.
    pub qp_num: u32,
    /// The first packet number it sends.
    pub psn: u32,
    /// Its address.
    pub gid: Gid,
    /// Its local identifier (InfiniBand; 0 on Ethernet).
    pub lid: u16,
}

/// A change of a queue pair: its next state and what belongs to it.
#[derive(Clone, Copy)]
pub struct QueuePairAttributes {
    pub(crate) attr: sys::ibv_qp_attr,
    pub(crate) mask: i32,
}

impl QueuePairAttributes {
    pub(crate) fn new(state: sys::ibv_qp_state) -> Self {
        let attr = sys::ibv_qp_attr { qp_state: state, ..Default::default() };
        Self { attr, mask: sys::ibv_qp_attr_mask::IBV_QP_STATE.0.cast_signed() }
    }

    fn also(mut self, masks: &[sys::ibv_qp_attr_mask]) -> Self {
        self.mask = masks.iter().fold(self.mask, |mask, bit| mask | bit.0.cast_signed());
        self
    }

    /// RESET → INIT on `port`; `access` is what the peer may do to our memory.
    #[must_use]
    pub fn init(port: u8, access: Access) -> Self {
        use sys::ibv_qp_attr_mask as mask;
        let mut new = Self::new(sys::ibv_qp_state::IBV_QPS_INIT);
        new.attr.port_num = port;
        new.attr.qp_access_flags = access.of_queue_pair();
        new.also(&[mask::IBV_QP_PKEY_INDEX, mask::IBV_QP_PORT, mask::IBV_QP_ACCESS_FLAGS])
    }

    /// INIT → ready to receive from `peer`, reached from our GID at `gid_index` of `port`.
    #[must_use]
    pub fn connect_to(
        peer: &PeerAddress,
        port: u8,
        gid_index: u8,
        path: &Path,
        reads_in: u8,
    ) -> Self {
        use sys::ibv_qp_attr_mask as mask;
        let mut new = Self::new(sys::ibv_qp_state::IBV_QPS_RTR);
        new.attr.path_mtu = sys::ibv_mtu(path.mtu.0);
        new.attr.dest_qp_num = peer.qp_num;
        new.attr.rq_psn = peer.psn;
        new.attr.max_dest_rd_atomic = reads_in;
        new.attr.min_rnr_timer = path.rnr_timer;
        new.attr.ah_attr.dlid = peer.lid;
        new.attr.ah_attr.port_num = port;
        new.attr.ah_attr.is_global = 1;
        new.attr.ah_attr.grh.dgid.raw = peer.gid.0;
        new.attr.ah_attr.grh.sgid_index = gid_index;
        new.attr.ah_attr.grh.hop_limit = 64;
        new.also(&[
            mask::IBV_QP_AV,
            mask::IBV_QP_PATH_MTU,
            mask::IBV_QP_DEST_QPN,
            mask::IBV_QP_RQ_PSN,
            mask::IBV_QP_MAX_DEST_RD_ATOMIC,
            mask::IBV_QP_MIN_RNR_TIMER,
        ])
    }

    /// Ready to receive → ready to send, starting with packet number `psn`.
    #[must_use]
    pub fn ready_to_send(psn: u32, path: &Path, reads_out: u8) -> Self {
        use sys::ibv_qp_attr_mask as mask;
        let mut new = Self::new(sys::ibv_qp_state::IBV_QPS_RTS);
        new.attr.sq_psn = psn;
        new.attr.timeout = path.ack_timeout;
        new.attr.retry_cnt = path.retries;
        new.attr.rnr_retry = path.rnr_retries;
        new.attr.max_rd_atomic = reads_out;
        new.also(&[
            mask::IBV_QP_SQ_PSN,
            mask::IBV_QP_TIMEOUT,
            mask::IBV_QP_RETRY_CNT,
            mask::IBV_QP_RNR_RETRY,
            mask::IBV_QP_MAX_QP_RD_ATOMIC,
        ])
    }

    /// Sets the wait that peers without a receive are told (see [`Path::rnr_timer`]): RDMA CM
    /// leaves it at 0, which is 655 ms.
    #[must_use]
    pub fn rnr_timer(mut self, encoded: u8) -> Self {
        self.attr.min_rnr_timer = encoded;
        self.also(&[sys::ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER])
    }

    /// Sets how often a request is repeated to a peer without a receive, 7 for ever (ready to
    /// send).
    #[must_use]
    pub fn rnr_retries(mut self, retries: u8) -> Self {
        self.attr.rnr_retry = retries;
        self.also(&[sys::ibv_qp_attr_mask::IBV_QP_RNR_RETRY])
    }

    /// Sets what the peer may do to our memory.
    #[must_use]
    pub fn access(mut self, access: Access) -> Self {
        self.attr.qp_access_flags = access.of_queue_pair();
        self.also(&[sys::ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS])
    }

    /// Changes what the peer of a queue pair that is ready to send may do to our memory.
    #[must_use]
    pub fn change_access(access: Access) -> Self {
        Self::new(sys::ibv_qp_state::IBV_QPS_RTS).access(access)
    }

    /// Sets how many reads of the peer this side serves at a time (ready to receive).
    #[must_use]
    pub fn reads_in(mut self, reads: u8) -> Self {
        self.attr.max_dest_rd_atomic = reads;
        self
    }

    /// Sets how many reads this side may have outstanding (ready to send).
    #[must_use]
    pub fn reads_out(mut self, reads: u8) -> Self {
        self.attr.max_rd_atomic = reads;
        self
    }
}

impl fmt::Debug for QueuePairAttributes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QueuePairAttributes({}, mask {:#x})", State(self.attr.qp_state.0), self.mask)
    }
}
