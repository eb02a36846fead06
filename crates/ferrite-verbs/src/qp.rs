//! Queue pairs: reliable connections.
//!
//! A queue pair is created here and connected with [`QueuePairAttributes`]. These come either from
//! RDMA CM ([`crate::CmId::queue_pair_attributes`]) or from an address that the peers exchanged by
//! other means ([`QueuePairAttributes::connect_to`]).

mod attributes;

use std::fmt;
use std::ptr::NonNull;

use crate::code::codes;
use crate::context::exceeded;
use crate::cq::CompletionQueue;
use crate::error::{ENTRY_BYTES, Error, ErrorKind, SEND_ENTRY_BYTES, check, set_errno};
use crate::pd::ProtectionDomain;
use crate::port::Mtu;
use crate::srq::{PostedRegistrations, SharedReceiveQueue};
use crate::sys;
use crate::wr::{PostError, RecvRequest, SendRequest, post_chained};
pub use attributes::{Path, PeerAddress, QueuePairAttributes};

/// The configuration of a new queue pair.
#[derive(Debug, Clone)]
pub struct QueuePairConfig {
    /// The queue for completions of all requests in the send queue: sends, writes, reads, and
    /// requests that bind or invalidate windows.
    pub send_cq: CompletionQueue,
    /// The queue for completions of receives; may be the same as `send_cq`.
    pub recv_cq: CompletionQueue,
    /// The shared receive queue, if the queue pair has no receive queue of its own.
    pub srq: Option<SharedReceiveQueue>,
    /// Number of entries of the send queue.
    pub max_send_wr: u32,
    /// Number of entries of the receive queue (unused with a shared one).
    pub max_recv_wr: u32,
    /// Maximum number of scatter/gather elements per send request.
    pub max_send_sge: u32,
    /// Maximum number of scatter/gather elements per receive (unused with a shared queue).
    pub max_recv_sge: u32,
    /// Maximum number of bytes that a send request may carry inline.
    pub max_inline: u32,
}

impl QueuePairConfig {
    /// Creates a configuration in which both directions complete on `cq`, with 128 entries each
    /// way, one scatter/gather element per request and no inline data.
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
/// Dropping it destroys it. After that, the device accesses none of the memory that was posted to
/// it.
pub struct QueuePair {
    raw: NonNull<sys::ibv_qp>,
    /// Set by [`QueuePair::destroy`], so that `Drop` does not destroy the queue pair again.
    destroyed: bool,
    capacity: Capacity,
    // Rust drops these fields after `Drop` has destroyed `raw`: first the memory, then the parents.
    held: PostedRegistrations,
    domain: ProtectionDomain,
    srq: Option<SharedReceiveQueue>,
    _queues: [CompletionQueue; 2],
}

/// The capacities that the device granted, each at least as large as requested. With a shared
/// receive queue, the two capacities for receives have no meaning and may be 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "as in QueuePairConfig")]
pub struct Capacity {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline: u32,
}

// SAFETY: providers lock both queues of a queue pair internally.
unsafe impl Send for QueuePair {}
// SAFETY: as above.
unsafe impl Sync for QueuePair {}

impl Drop for QueuePair {
    fn drop(&mut self) {
        if !self.destroyed && !crate::leak::count_unless_released(self.release()) {
            self.held.leak();
        }
    }
}

impl ProtectionDomain {
    /// Creates a queue pair, in state RESET.
    ///
    /// # Errors
    /// [`ErrorKind::DeviceLimit`] if a limit of the device is exceeded; otherwise lack of memory or
    /// a cgroup's limit.
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
        // SAFETY: domain, queues and `attr` are alive during the call. After it, the queue pair
        // keeps domain and queues alive.
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
            held: PostedRegistrations::default(),
            domain: self.clone(),
            srq: config.srq.clone(),
            _queues: [config.send_cq.clone(), config.recv_cq.clone()],
        })
    }

    #[cold]
    fn create_error(&self, config: &QueuePairConfig) -> Error {
        let asked = format!(
            "send {} WRs of {} SGEs, receive {} WRs of {} SGEs, inline {} bytes",
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
            // Devices do not report their maximum of inline bytes, so this cause is only likely.
            None if error.kind() == ErrorKind::Misuse && config.max_inline > 0 => error
                .with_kind(ErrorKind::DeviceLimit)
                .because("the device may not support that many inline bytes"),
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
        // SAFETY: we created the queue pair, and `destroyed` ensures that it is destroyed once. Its
        // parents are still alive, because the fields are dropped later.
        let rc = unsafe { (self.domain.context().verbs().ibv.ibv_destroy_qp)(self.raw()) };
        self.domain.context().destroy_result(rc)
    }

    /// Destroys the queue pair and reports failure. After `Ok`, the device accesses none of the
    /// memory that was posted to it.
    ///
    /// # Errors
    /// The error that the device reported; the queue pair is returned unchanged.
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

    /// Returns the queue pair number, which the peer needs and which appears in completions and
    /// logs.
    #[must_use]
    pub fn number(&self) -> u32 {
        // SAFETY: the queue pair is alive; the field is constant.
        unsafe { (*self.raw()).qp_num }
    }

    /// Returns the capacities that the device granted.
    #[must_use]
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// Returns whether receives come from a shared queue.
    #[must_use]
    pub fn uses_srq(&self) -> bool {
        self.srq.is_some()
    }

    /// Returns the protection domain of the queue pair.
    #[must_use]
    pub fn domain(&self) -> &ProtectionDomain {
        &self.domain
    }

    /// Returns the state, as the device reports it now.
    ///
    /// # Errors
    /// If the device was removed.
    pub fn state(&self) -> Result<State, Error> {
        Ok(State(self.query()?.qp_state.0))
    }

    /// Returns the MTU and the retry and timeout settings, as the device reports them now.
    ///
    /// # Errors
    /// If the device was removed.
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
        // SAFETY: the queue pair is alive, and both structs are valid for the write.
        let rc = unsafe {
            (ibv.ibv_query_qp)(self.raw(), &raw mut attr, wanted.cast_signed(), &raw mut init)
        };
        check("ibv_query_qp", rc, || format!("queue pair {:#x}", self.number()))?;
        Ok(attr)
    }

    /// Applies attributes: usually moves the queue pair to its next state.
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`] if the current state does not allow the change;
    /// [`ErrorKind::NoRoute`] or [`ErrorKind::Timeout`] if the peer's hardware address cannot be
    /// resolved.
    pub fn modify(&self, attributes: &QueuePairAttributes) -> Result<(), Error> {
        let mut attr = attributes.attr;
        let ibv = self.domain.context().verbs().ibv;
        // SAFETY: the queue pair is alive and `attr` is valid for the call.
        let rc = unsafe { (ibv.ibv_modify_qp)(self.raw(), &raw mut attr, attributes.mask) };
        check("ibv_modify_qp", rc, || {
            format!("queue pair {:#x} to {}", self.number(), State(attr.qp_state.0))
        })
    }

    /// Stops the queue pair: everything posted to its own queues completes as flushed. Receives in
    /// a shared receive queue stay there. Only this call and destroying the queue pair cancel
    /// posted requests.
    ///
    /// # Errors
    /// If the device was removed.
    pub fn stop(&self) -> Result<(), Error> {
        self.modify(&QueuePairAttributes::new(sys::ibv_qp_state::IBV_QPS_ERR))
    }

    /// Posts requests to the send queue, in order.
    ///
    /// # Errors
    /// [`ErrorKind::QueueFull`] if there is no room, [`ErrorKind::Misuse`] if the queue pair's
    /// state or capacities do not allow a request. The error tells how many requests were posted.
    pub fn post_send(&self, requests: &[SendRequest<'_>]) -> Result<(), PostError> {
        self.held.hold(requests);
        let raw = self.raw();
        // SAFETY: the queue pair is alive; the provider filled the operations when the context was
        // opened.
        let post = unsafe { (*(*raw).context).ops.post_send };
        post_chained("ibv_post_send", requests, |head, refused| match post {
            // SAFETY: the chain is valid for the call. The memory that it names outlives its use:
            // `hold` keeps it registered, or the caller of `Sge::from_raw` does.
            Some(post) => unsafe { post(raw, head, refused) },
            None => rustix::io::Errno::NOSYS.raw_os_error(),
        })
    }

    /// Posts receives, in order. If the queue pair uses a shared receive queue, post to that queue
    /// instead.
    ///
    /// # Errors
    /// [`ErrorKind::QueueFull`] if there is no room, [`ErrorKind::Misuse`] with a shared receive
    /// queue. The error tells how many requests were posted.
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
        /// New or reset: nothing can be posted.
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
