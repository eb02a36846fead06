//! Reads posted work requests from the caller's memory.

use std::ffi::c_int;

use rustix::io::Errno;

use super::{Kind, MAX_MESSAGE_BYTES, Payload, Send};
use crate::fake::memory;
use crate::fake::records::{Binding, Piece};
use crate::sys;

impl Send {
    /// Reads a work request.
    ///
    /// # Safety
    /// - `wr` and its scatter/gather list are valid for the call.
    /// - For an inline request, the memory that the list names is valid for reads.
    /// - For a bind request, the window is alive, and the region is null or alive.
    pub(super) unsafe fn from_raw(wr: &sys::ibv_send_wr) -> Result<Self, Errno> {
        use sys::ibv_send_flags as Flag;
        use sys::ibv_wr_opcode as Op;
        let (kind, with_imm) = match wr.opcode {
            Op::IBV_WR_SEND => (Kind::Send, false),
            Op::IBV_WR_SEND_WITH_IMM => (Kind::Send, true),
            Op::IBV_WR_RDMA_WRITE => (Kind::Write, false),
            Op::IBV_WR_RDMA_WRITE_WITH_IMM => (Kind::Write, true),
            Op::IBV_WR_RDMA_READ => (Kind::Read, false),
            Op::IBV_WR_BIND_MW => (Kind::Bind, false),
            Op::IBV_WR_LOCAL_INV => (Kind::Invalidate, false),
            _ => return Err(Errno::INVAL),
        };
        let has = |flag: sys::ibv_send_flags| wr.send_flags & flag.0 != 0;
        // SAFETY: the caller guarantees that the list is valid. The members of the unions are plain
        // numbers.
        let (pieces, remote, imm) =
            unsafe { (pieces(wr.sg_list, wr.num_sge), wr.wr.rdma, wr.__bindgen_anon_1.imm_data) };
        let len = pieces.iter().map(|piece| u64::from(piece.len)).sum();
        let inline = has(Flag::IBV_SEND_INLINE);
        if inline && (kind == Kind::Read || len > u64::from(MAX_MESSAGE_BYTES)) {
            return Err(Errno::INVAL);
        }
        Ok(Self {
            wr_id: wr.wr_id,
            kind,
            signaled: has(Flag::IBV_SEND_SIGNALED),
            solicited: has(Flag::IBV_SEND_SOLICITED),
            payload: if inline {
                // SAFETY: the caller guarantees that the memory of an inline request is valid.
                Payload::Inline(unsafe { memory::read_inline(&pieces) })
            } else {
                Payload::Pieces(pieces)
            },
            len,
            imm: with_imm.then_some(imm),
            remote_addr: remote.remote_addr,
            // `invalidate_rkey` and `imm_data` are at the same place in the union.
            rkey: if kind == Kind::Invalidate { imm } else { remote.rkey },
            // SAFETY: the opcode says that this member was written. The caller guarantees that its
            // window and region are alive.
            binding: (kind == Kind::Bind)
                .then(|| unsafe { Binding::from_raw(&wr.__bindgen_anon_2.bind_mw) }),
        })
    }
}

/// Copies a scatter/gather list.
///
/// # Safety
/// `list` has `len` entries.
pub(in crate::fake) unsafe fn pieces(list: *const sys::ibv_sge, len: c_int) -> Vec<Piece> {
    let len = usize::try_from(len).unwrap_or(0);
    // SAFETY: the caller guarantees that `list` has `len` entries.
    let read = |at| unsafe { list.add(at).read() };
    (0..len)
        .map(read)
        .map(|sge| Piece { addr: sge.addr, len: sge.length, lkey: sge.lkey })
        .collect()
}
