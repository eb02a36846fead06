//! Work completions: how a work request ended.

use std::fmt;

use crate::code::codes;
use crate::sys;

/// One completion. The status and the operation decide which fields are meaningful.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub struct WorkCompletion(pub(crate) sys::ibv_wc);

impl WorkCompletion {
    /// Returns the number that the request was posted with.
    #[must_use]
    pub fn wr_id(&self) -> u64 {
        self.0.wr_id
    }

    /// Returns how the request ended.
    #[must_use]
    pub fn status(&self) -> Status {
        Status(self.0.status.0)
    }

    /// Returns the number of the queue pair that the request belongs to.
    #[must_use]
    pub fn qp_num(&self) -> u32 {
        self.0.qp_num
    }

    /// Returns what completed. Only meaningful on success.
    #[must_use]
    pub fn opcode(&self) -> Opcode {
        Opcode(self.0.opcode.0)
    }

    /// Returns the number of bytes received or read. Only meaningful for a successful receive or
    /// read.
    #[must_use]
    pub fn byte_len(&self) -> u32 {
        self.0.byte_len
    }

    /// Returns the immediate data of the message, if it has any.
    #[must_use]
    pub fn imm(&self) -> Option<u32> {
        let has = self.0.wc_flags & sys::ibv_wc_flags::IBV_WC_WITH_IMM.0 != 0;
        // SAFETY: both members of the union are 32 plain bits.
        has.then(|| u32::from_be(unsafe { self.0.__bindgen_anon_1.imm_data }))
    }

    /// Returns `Ok` on success, otherwise the failure as an error.
    ///
    /// # Errors
    /// [`CompletionError`], unless the status is [`Status::SUCCESS`].
    pub fn ok(&self) -> Result<(), CompletionError> {
        if self.status() == Status::SUCCESS {
            return Ok(());
        }
        Err(CompletionError {
            status: self.status(),
            wr_id: self.wr_id(),
            qp_num: self.qp_num(),
            vendor_error: self.0.vendor_err,
        })
    }
}

impl fmt::Debug for WorkCompletion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkCompletion")
            .field("wr_id", &self.wr_id())
            .field("status", &self.status())
            .field("opcode", &self.opcode())
            .field("byte_len", &self.byte_len())
            .field("imm", &self.imm())
            .field("qp_num", &format_args!("{:#x}", self.qp_num()))
            .finish()
    }
}

codes! {
    /// What kind of request completed.
    pub struct Opcode, unknown: "opcode" {
        /// A send, with immediate data or without.
        SEND = sys::ibv_wc_opcode::IBV_WC_SEND.0, "SEND";
        /// A write, with immediate data or without.
        WRITE = sys::ibv_wc_opcode::IBV_WC_RDMA_WRITE.0, "WRITE";
        /// A read.
        READ = sys::ibv_wc_opcode::IBV_WC_RDMA_READ.0, "READ";
        /// A memory window was bound.
        BIND = sys::ibv_wc_opcode::IBV_WC_BIND_MW.0, "BIND";
        /// A memory window was invalidated.
        INVALIDATE = sys::ibv_wc_opcode::IBV_WC_LOCAL_INV.0, "INVALIDATE";
        /// A receive that a send filled.
        RECV = sys::ibv_wc_opcode::IBV_WC_RECV.0, "RECV";
        /// A receive that a write with immediate data consumed.
        RECV_WRITE_IMM = sys::ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM.0, "RECV_WRITE_IMM";
    }
}

codes! {
    /// The outcome of a request.
    pub struct Status, unknown: "unknown status" {
        /// The request succeeded.
        SUCCESS = sys::ibv_wc_status::IBV_WC_SUCCESS.0, "success";
        /// The message is longer than the posted receive, or than the device can send.
        LOCAL_LENGTH = sys::ibv_wc_status::IBV_WC_LOC_LEN_ERR.0, "local length error";
        /// Our port went down, or the request is malformed.
        LOCAL_QP_OPERATION = sys::ibv_wc_status::IBV_WC_LOC_QP_OP_ERR.0, "local queue pair error";
        /// The local memory is not registered, or does not allow this operation.
        LOCAL_PROTECTION = sys::ibv_wc_status::IBV_WC_LOC_PROT_ERR.0, "local protection error";
        /// The queue pair failed or was stopped before the request was executed.
        FLUSHED = sys::ibv_wc_status::IBV_WC_WR_FLUSH_ERR.0, "flushed";
        /// The memory window cannot be bound in this way.
        BIND = sys::ibv_wc_status::IBV_WC_MW_BIND_ERR.0, "memory window bind error";
        /// The peer's device sent an unexpected response.
        BAD_RESPONSE = sys::ibv_wc_status::IBV_WC_BAD_RESP_ERR.0, "bad response";
        /// A write from the peer caused a protection fault here.
        LOCAL_ACCESS = sys::ibv_wc_status::IBV_WC_LOC_ACCESS_ERR.0, "local access error";
        /// The peer's queue pair does not accept the request.
        REMOTE_INVALID_REQUEST = sys::ibv_wc_status::IBV_WC_REM_INV_REQ_ERR.0,
            "remote invalid request";
        /// The peer's memory does not allow the access.
        REMOTE_ACCESS = sys::ibv_wc_status::IBV_WC_REM_ACCESS_ERR.0, "remote access error";
        /// The peer's device failed.
        REMOTE_OPERATION = sys::ibv_wc_status::IBV_WC_REM_OP_ERR.0, "remote operation error";
        /// The peer does not answer.
        RETRY_EXCEEDED = sys::ibv_wc_status::IBV_WC_RETRY_EXC_ERR.0, "transport retry exceeded";
        /// The peer posts no receives.
        RNR_RETRY_EXCEEDED = sys::ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR.0, "receiver not ready";
        /// The peer aborted the operation.
        REMOTE_ABORTED = sys::ibv_wc_status::IBV_WC_REM_ABORT_ERR.0, "remote aborted";
        /// The device failed.
        FATAL = sys::ibv_wc_status::IBV_WC_FATAL_ERR.0, "fatal error";
        /// The peer does not answer.
        RESPONSE_TIMEOUT = sys::ibv_wc_status::IBV_WC_RESP_TIMEOUT_ERR.0, "response timeout";
        /// The transport failed for another reason.
        GENERAL = sys::ibv_wc_status::IBV_WC_GENERAL_ERR.0, "general error";
    }
}

impl Status {
    /// Returns the usual cause.
    #[must_use]
    pub fn likely_cause(self) -> &'static str {
        match self {
            Self::SUCCESS => "no error",
            Self::LOCAL_LENGTH => {
                "the message is longer than the posted receive, or than the device can send"
            }
            Self::LOCAL_QP_OPERATION => "the local port went down, or the request is malformed",
            Self::LOCAL_PROTECTION => {
                "the local memory is not registered, or not for this operation"
            }
            Self::FLUSHED => "the queue pair had failed before: see its first error",
            Self::BIND => "the window is bound already, or its region does not allow binding",
            Self::BAD_RESPONSE => "the peer's device sent an unexpected response",
            Self::LOCAL_ACCESS => "a write from the peer caused a protection fault here",
            Self::REMOTE_INVALID_REQUEST => {
                "the message does not fit the peer's receive, or the peer does not allow the \
                 operation"
            }
            Self::REMOTE_ACCESS => {
                "the key is wrong, or the peer's memory does not contain the range or does not \
                 allow the operation"
            }
            Self::REMOTE_OPERATION => "the peer's device failed, or could not place the message",
            Self::RETRY_EXCEEDED | Self::RESPONSE_TIMEOUT => {
                "the peer does not answer: host or port down, path broken, or its queue pair gone"
            }
            Self::RNR_RETRY_EXCEEDED => {
                "the peer has no receives posted: its process is stuck, or posts them too slowly"
            }
            Self::REMOTE_ABORTED => "the peer aborted the operation",
            Self::FATAL => "the device failed",
            Self::GENERAL => "the transport failed for another reason",
            _ => "a status that this version does not know",
        }
    }
}

/// A work request that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("queue pair {qp_num:#x}: {status} (status {}): {}", .status.code(), .status.likely_cause())]
#[non_exhaustive]
pub struct CompletionError {
    /// How the request ended.
    pub status: Status,
    /// The number that the request was posted with.
    pub wr_id: u64,
    /// The number of the queue pair that the request belongs to.
    pub qp_num: u32,
    /// The vendor's own code, for its support staff.
    pub vendor_error: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_codes_are_kept_and_named_by_number() {
        let mut raw = sys::ibv_wc { status: sys::ibv_wc_status(4711), ..Default::default() };
        raw.opcode = sys::ibv_wc_opcode(9999);
        let wc = WorkCompletion(raw);
        assert_eq!(wc.status().to_string(), "unknown status 4711");
        assert_eq!(format!("{:?}", wc.opcode()), "opcode 9999");
        assert_eq!(wc.ok().map_err(|error| error.status), Err(Status(4711)));
    }

    #[test]
    fn failure_names_status_and_cause() {
        let raw = sys::ibv_wc {
            status: sys::ibv_wc_status::IBV_WC_RETRY_EXC_ERR,
            qp_num: 0x11,
            ..Default::default()
        };
        let text = WorkCompletion(raw).ok().expect_err("a failure").to_string();
        assert!(
            text.starts_with(
                "queue pair 0x11: transport retry exceeded (status 12): the peer does not answer"
            ),
            "{text}"
        );
    }

    #[test]
    fn immediate_data_is_in_host_order() {
        let mut raw =
            sys::ibv_wc { wc_flags: sys::ibv_wc_flags::IBV_WC_WITH_IMM.0, ..Default::default() };
        raw.__bindgen_anon_1.imm_data = 0x0102_0304_u32.to_be();
        assert_eq!(WorkCompletion(raw).imm(), Some(0x0102_0304));
        assert_eq!(WorkCompletion::default().imm(), None);
    }
}
