//! The data that connects a queue pair: the path, the peer's address, and the attributes for each
//! change of state.

use std::fmt;

use super::State;
use crate::gid::Gid;
use crate::mr::Access;
use crate::port::Mtu;
use crate::sys;

/// The packet size, timeouts and retries of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// The largest packet payload.
    pub mtu: Mtu,
    /// How long to wait for an acknowledgement: 4.096 µs × 2^value; 0 waits for ever.
    pub ack_timeout: u8,
    /// Number of resends before [`crate::Status::RETRY_EXCEEDED`], 0 to 7. Soft-RoCE resends for
    /// ever with 7.
    pub retries: u8,
    /// Number of resends to a peer that has no receive posted, 0 to 6; 7 resends for ever.
    pub rnr_retries: u8,
    /// How long the peer must wait before it resends when we have no receive posted. The value is
    /// encoded as in table 45 of the InfiniBand specification: 0 is 655 ms, 1 is 10 µs, 12 is 640
    /// µs.
    pub rnr_timer: u8,
}

impl Default for Path {
    /// Detects a dead peer after about half a second: 67 ms × 7 tries. (Soft-RoCE would treat 7
    /// resends as "for ever".)
    fn default() -> Self {
        Self { mtu: Mtu::B1024, ack_timeout: 14, retries: 6, rnr_retries: 7, rnr_timer: 12 }
    }
}

/// The address of a peer, for a connection that is not made by RDMA CM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerAddress {
    /// Its queue pair number.
    pub qp_num: u32,
    /// The first packet sequence number that it sends.
    pub psn: u32,
    /// Its GID.
    pub gid: Gid,
    /// Its local identifier (InfiniBand; 0 on Ethernet).
    pub lid: u16,
}

/// A change of a queue pair: its next state and the attributes for it.
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

    fn with_mask(mut self, masks: &[sys::ibv_qp_attr_mask]) -> Self {
        self.mask = masks.iter().fold(self.mask, |mask, bit| mask | bit.0.cast_signed());
        self
    }

    /// Returns the attributes for RESET → INIT on `port`; `access` says what the peer may do with
    /// our memory.
    #[must_use]
    pub fn init(port: u8, access: Access) -> Self {
        use sys::ibv_qp_attr_mask as mask;
        let mut new = Self::new(sys::ibv_qp_state::IBV_QPS_INIT);
        new.attr.port_num = port;
        new.attr.qp_access_flags = access.queue_pair_flags();
        new.with_mask(&[mask::IBV_QP_PKEY_INDEX, mask::IBV_QP_PORT, mask::IBV_QP_ACCESS_FLAGS])
    }

    /// Returns the attributes for INIT → RTR, ready to receive from `peer`. Our side uses the GID
    /// at `gid_index` of `port`.
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
        new.with_mask(&[
            mask::IBV_QP_AV,
            mask::IBV_QP_PATH_MTU,
            mask::IBV_QP_DEST_QPN,
            mask::IBV_QP_RQ_PSN,
            mask::IBV_QP_MAX_DEST_RD_ATOMIC,
            mask::IBV_QP_MIN_RNR_TIMER,
        ])
    }

    /// Returns the attributes for RTR → RTS, ready to send, starting with packet number `psn`.
    #[must_use]
    pub fn ready_to_send(psn: u32, path: &Path, reads_out: u8) -> Self {
        use sys::ibv_qp_attr_mask as mask;
        let mut new = Self::new(sys::ibv_qp_state::IBV_QPS_RTS);
        new.attr.sq_psn = psn;
        new.attr.timeout = path.ack_timeout;
        new.attr.retry_cnt = path.retries;
        new.attr.rnr_retry = path.rnr_retries;
        new.attr.max_rd_atomic = reads_out;
        new.with_mask(&[
            mask::IBV_QP_SQ_PSN,
            mask::IBV_QP_TIMEOUT,
            mask::IBV_QP_RETRY_CNT,
            mask::IBV_QP_RNR_RETRY,
            mask::IBV_QP_MAX_QP_RD_ATOMIC,
        ])
    }

    /// Sets how long a peer must wait when we have no receive posted (see [`Path::rnr_timer`]).
    /// RDMA CM leaves this timer at 0, which means 655 ms.
    #[must_use]
    pub fn rnr_timer(mut self, encoded: u8) -> Self {
        self.attr.min_rnr_timer = encoded;
        self.with_mask(&[sys::ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER])
    }

    /// Sets how often a request is resent to a peer that has no receive posted. 7 means for ever.
    /// Valid in the change to ready to send.
    #[must_use]
    pub fn rnr_retries(mut self, retries: u8) -> Self {
        self.attr.rnr_retry = retries;
        self.with_mask(&[sys::ibv_qp_attr_mask::IBV_QP_RNR_RETRY])
    }

    /// Returns the path MTU. Valid in the change to ready to receive.
    #[must_use]
    pub fn mtu(&self) -> Mtu {
        Mtu(self.attr.path_mtu.0)
    }

    /// Sets the path MTU. Valid in the change to ready to receive.
    #[must_use]
    pub fn path_mtu(mut self, mtu: Mtu) -> Self {
        self.attr.path_mtu = sys::ibv_mtu(mtu.0);
        self.with_mask(&[sys::ibv_qp_attr_mask::IBV_QP_PATH_MTU])
    }

    /// Sets how long to wait for an acknowledgement (see [`Path::ack_timeout`]). Valid in the
    /// change to ready to send.
    #[must_use]
    pub fn ack_timeout(mut self, encoded: u8) -> Self {
        self.attr.timeout = encoded;
        self.with_mask(&[sys::ibv_qp_attr_mask::IBV_QP_TIMEOUT])
    }

    /// Sets what the peer may do with our memory.
    #[must_use]
    pub fn access(mut self, access: Access) -> Self {
        self.attr.qp_access_flags = access.queue_pair_flags();
        self.with_mask(&[sys::ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS])
    }

    /// Returns attributes that change what the peer may do with our memory, for a queue pair that
    /// is ready to send.
    #[must_use]
    pub fn change_access(access: Access) -> Self {
        Self::new(sys::ibv_qp_state::IBV_QPS_RTS).access(access)
    }

    /// Sets how many reads of the peer this side serves at a time. Valid in the change to ready
    /// to receive.
    #[must_use]
    pub fn reads_in(mut self, reads: u8) -> Self {
        self.attr.max_dest_rd_atomic = reads;
        self
    }

    /// Sets how many reads this side may have outstanding. Valid in the change to ready to send.
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
