//! Work requests: the operations that a queue pair executes.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, ErrorKind, check};
use crate::mr::{MemoryRegion, Registration, RemoteSlice};
use crate::mw::MemoryWindow;
use crate::sys;

/// A piece of local memory in a work request.
#[derive(Clone, Copy)]
pub struct Sge<'a> {
    raw: sys::ibv_sge,
    /// The registration that the queue must keep alive. `None` if the caller keeps the memory
    /// registered.
    owner: Option<&'a Arc<Registration>>,
}

impl MemoryRegion {
    /// Returns a part of the region as the local side of a work request.
    ///
    /// # Panics
    /// If the range is not within the region, or is 4 GiB or larger.
    #[must_use]
    pub fn sge(&self, range: Range<usize>) -> Sge<'_> {
        let len = u32::try_from(self.checked_len(&range))
            .expect("a scatter/gather entry is shorter than 4 GiB");
        let addr = self.address(range.start);
        let raw = sys::ibv_sge { addr, length: len, lkey: self.lkey() };
        Sge { raw, owner: Some(self.registration()) }
    }
}

impl<'a> Sge<'a> {
    /// Creates an entry from an address and a key, for callers that own the memory until the
    /// completion.
    ///
    /// # Safety
    /// Until the work request has completed, or its queue is destroyed:
    /// - the memory must stay mapped, and registered under `lkey`,
    /// - no Rust reference may conflict with the device's access to the memory.
    #[must_use]
    pub unsafe fn from_raw(addr: u64, len: u32, lkey: u32) -> Self {
        Self { raw: sys::ibv_sge { addr, length: len, lkey }, owner: None }
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.raw.length
    }

    /// Returns whether the piece has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.raw.length == 0
    }

    pub(crate) fn owner(&self) -> Option<&'a Arc<Registration>> {
        self.owner
    }
}

impl std::fmt::Debug for Sge<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sge({} bytes, lkey {:#x})", self.raw.length, self.raw.lkey)
    }
}

/// The operation of a send request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Sends into the peer's next posted receive.
    Send,
    /// Like `Send`, with 32 bits of immediate data.
    SendImm(u32),
    /// Writes to the peer's memory; the peer is not notified.
    Write(RemoteSlice),
    /// Writes to the peer's memory, and completes one of its receives with these 32 bits.
    WriteImm(RemoteSlice, u32),
    /// Reads from the peer's memory into ours.
    Read(RemoteSlice),
    /// Ends the binding of the window with this key, which must be bound to this queue pair.
    Invalidate(u32),
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum RequestKind<'a> {
    Operation(Operation),
    Bind(&'a MemoryWindow),
}

/// An entry for the send queue.
///
/// ```
/// # use ferrite_verbs::{MemoryRegion, SendRequest};
/// # fn show(region: &MemoryRegion) {
/// let piece = [region.sge(0..64)];
/// let request = SendRequest::send(7, &piece).signaled().inline();
/// # let _ = request; }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct SendRequest<'a> {
    pub(crate) wr_id: u64,
    pub(crate) kind: RequestKind<'a>,
    pub(crate) local: &'a [Sge<'a>],
    pub(crate) flags: u32,
}

impl<'a> SendRequest<'a> {
    /// Creates a request for `operation` on `local`; `wr_id` comes back in the completion.
    #[must_use]
    pub fn new(wr_id: u64, operation: Operation, local: &'a [Sge<'a>]) -> Self {
        Self { wr_id, kind: RequestKind::Operation(operation), local, flags: 0 }
    }

    /// Creates a request that binds `window` to the queue pair that it is posted to. Once the
    /// request is executed, the peer has the window's rights. Requests that are posted later start
    /// after the binding. If the window is released before the request is executed, the request
    /// fails.
    #[must_use]
    pub fn bind(wr_id: u64, window: &'a MemoryWindow) -> Self {
        Self { wr_id, kind: RequestKind::Bind(window), local: &[], flags: 0 }
    }

    /// Creates a request for [`Operation::Send`].
    #[must_use]
    pub fn send(wr_id: u64, local: &'a [Sge<'a>]) -> Self {
        Self::new(wr_id, Operation::Send, local)
    }

    /// Creates a request for [`Operation::Write`].
    #[must_use]
    pub fn write(wr_id: u64, local: &'a [Sge<'a>], remote: RemoteSlice) -> Self {
        Self::new(wr_id, Operation::Write(remote), local)
    }

    /// Creates a request for [`Operation::Read`].
    #[must_use]
    pub fn read(wr_id: u64, local: &'a [Sge<'a>], remote: RemoteSlice) -> Self {
        Self::new(wr_id, Operation::Read(remote), local)
    }

    /// Requests a completion on success too; failures always complete.
    #[must_use]
    pub fn signaled(self) -> Self {
        self.with(sys::ibv_send_flags::IBV_SEND_SIGNALED)
    }

    /// Copies the bytes into the queue during the post, so the memory may be reused afterwards.
    #[must_use]
    pub fn inline(self) -> Self {
        self.with(sys::ibv_send_flags::IBV_SEND_INLINE)
    }

    /// Wakes a peer that waits for solicited completions only.
    #[must_use]
    pub fn solicited(self) -> Self {
        self.with(sys::ibv_send_flags::IBV_SEND_SOLICITED)
    }

    /// Delays the start of the request until earlier reads of the same queue pair have finished.
    #[must_use]
    pub fn fenced(self) -> Self {
        self.with(sys::ibv_send_flags::IBV_SEND_FENCE)
    }

    fn with(mut self, flag: sys::ibv_send_flags) -> Self {
        self.flags |= flag.0;
        self
    }
}

impl Request for SendRequest<'_> {
    type Raw = sys::ibv_send_wr;

    fn local(&self) -> &[Sge<'_>] {
        self.local
    }

    fn link(raw: &mut Self::Raw, next: *mut Self::Raw) {
        raw.next = next;
    }

    fn to_raw(self, sges: *mut sys::ibv_sge) -> Self::Raw {
        use sys::ibv_wr_opcode as op;
        let mut wr = sys::ibv_send_wr {
            wr_id: self.wr_id,
            sg_list: sges,
            num_sge: i32::try_from(self.local.len()).unwrap_or(i32::MAX),
            send_flags: self.flags,
            ..Default::default()
        };
        let operation = match self.kind {
            RequestKind::Operation(operation) => operation,
            RequestKind::Bind(window) => {
                wr.opcode = op::IBV_WR_BIND_MW;
                wr.__bindgen_anon_2.bind_mw = window.binding();
                return wr;
            }
        };
        let (opcode, remote, imm) = match operation {
            Operation::Send => (op::IBV_WR_SEND, None, None),
            Operation::SendImm(imm) => (op::IBV_WR_SEND_WITH_IMM, None, Some(imm)),
            Operation::Write(remote) => (op::IBV_WR_RDMA_WRITE, Some(remote), None),
            Operation::WriteImm(remote, imm) => {
                (op::IBV_WR_RDMA_WRITE_WITH_IMM, Some(remote), Some(imm))
            }
            Operation::Read(remote) => (op::IBV_WR_RDMA_READ, Some(remote), None),
            Operation::Invalidate(rkey) => {
                wr.__bindgen_anon_1.invalidate_rkey = rkey;
                (op::IBV_WR_LOCAL_INV, None, None)
            }
        };
        wr.opcode = opcode;
        if let Some(RemoteSlice { addr, rkey, .. }) = remote {
            wr.wr.rdma = sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: addr, rkey };
        }
        if let Some(imm) = imm {
            wr.__bindgen_anon_1.imm_data = imm.to_be();
        }
        wr
    }
}

/// An entry for a receive queue: the memory for the next message.
#[derive(Debug, Clone, Copy)]
pub struct RecvRequest<'a> {
    pub(crate) wr_id: u64,
    pub(crate) local: &'a [Sge<'a>],
}

impl<'a> RecvRequest<'a> {
    /// Creates a receive into `local`; `wr_id` comes back in the completion. An empty list accepts
    /// messages without payload, such as a WRITE with immediate data.
    #[must_use]
    pub fn new(wr_id: u64, local: &'a [Sge<'a>]) -> Self {
        Self { wr_id, local }
    }
}

impl Request for RecvRequest<'_> {
    type Raw = sys::ibv_recv_wr;

    fn local(&self) -> &[Sge<'_>] {
        self.local
    }

    fn link(raw: &mut Self::Raw, next: *mut Self::Raw) {
        raw.next = next;
    }

    fn to_raw(self, sges: *mut sys::ibv_sge) -> Self::Raw {
        sys::ibv_recv_wr {
            wr_id: self.wr_id,
            next: std::ptr::null_mut(),
            sg_list: sges,
            num_sge: i32::try_from(self.local.len()).unwrap_or(i32::MAX),
        }
    }
}

/// A post that failed: the first `posted` requests are in the queue, the rest are not.
///
/// Requests go to the provider in chains of at most 8. If the provider does not say which request
/// of a chain it refused, it may have queued all of them. In this case the whole chain counts as
/// posted, the device may access its memory, and the queue pair is unusable.
#[derive(Debug)]
pub struct PostError {
    /// How many requests count as posted.
    pub posted: usize,
    /// Why the provider refused the next request. If the provider named no request, why its call
    /// failed.
    pub error: Error,
}

impl std::fmt::Display for PostError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({} requests posted before)", self.error, self.posted)
    }
}

impl std::error::Error for PostError {}

impl From<PostError> for Error {
    fn from(error: PostError) -> Self {
        error.error
    }
}

/// The common interface of send and receive requests, for [`post_chained`].
pub(crate) trait Request: Copy {
    type Raw;
    fn local(&self) -> &[Sge<'_>];
    /// Returns the C struct. The caller has copied the scatter/gather list to `sges`.
    fn to_raw(self, sges: *mut sys::ibv_sge) -> Self::Raw;
    fn link(raw: &mut Self::Raw, next: *mut Self::Raw);
}

/// Maximum number of requests that go to the device in one call.
const CHAIN: usize = 8;
/// Maximum number of scatter/gather entries that go to the device in one call. A single request
/// with more entries is rejected, even if the device allows more.
const CHAIN_SGES: usize = 32;

/// Posts `requests` in chains that are built on the stack, without allocating.
///
/// `post` is the provider's function. It takes the head of a chain and a place for the first
/// request that it refuses, and returns an error number.
pub(crate) fn post_chained<R: Request>(
    call: &'static str,
    requests: &[R],
    mut post: impl FnMut(*mut R::Raw, *mut *mut R::Raw) -> i32,
) -> Result<(), PostError> {
    let mut posted = 0;
    while posted < requests.len() {
        let mut wrs = [const { MaybeUninit::<R::Raw>::uninit() }; CHAIN];
        let mut sges = [const { MaybeUninit::<sys::ibv_sge>::uninit() }; CHAIN_SGES];
        // The code below uses only these two pointers, because another borrow of the arrays would
        // invalidate them.
        let (head, pieces) =
            (wrs.as_mut_ptr().cast::<R::Raw>(), sges.as_mut_ptr().cast::<sys::ibv_sge>());
        let (mut len, mut sges_used) = (0, 0);
        for request in requests[posted..].iter().take(CHAIN) {
            let local = request.local();
            if sges_used + local.len() > CHAIN_SGES {
                break;
            }
            // SAFETY: the check above keeps the entries within `sges`, and `take(CHAIN)` keeps
            // `len` within `wrs`.
            unsafe {
                let list = pieces.add(sges_used);
                for (at, sge) in local.iter().enumerate() {
                    list.add(at).write(sge.raw);
                }
                head.add(len).write(request.to_raw(list));
            }
            sges_used += local.len();
            len += 1;
        }
        if len == 0 {
            let asked = format!(
                "a request has {} scatter/gather entries, at most {CHAIN_SGES} are allowed",
                requests[posted].local().len()
            );
            return Err(PostError {
                posted,
                error: Error::new(ErrorKind::DeviceLimit, call, asked),
            });
        }
        for at in 1..len {
            // SAFETY: the first `len` entries were written above.
            unsafe { R::link(&mut *head.add(at - 1), head.add(at)) };
        }
        let mut refused = std::ptr::null_mut();
        let rc = post(head, &raw mut refused);
        if rc != 0 {
            let offset = refused.addr().checked_sub(head.addr());
            let refused = offset.filter(|bytes| bytes % size_of::<R::Raw>() == 0);
            let refused = refused.map(|bytes| bytes / size_of::<R::Raw>()).filter(|at| *at < len);
            let error = post_error(call, rc);
            // Soft-RoCE can queue all requests and then fail without naming a refused request. This
            // happens if the doorbell (`post_send_db`) fails in `rxe_post_send` (rdma-core's
            // providers/rxe/rxe.c).
            let error = match refused {
                Some(_) => error,
                None => error.because(
                    "the provider did not say which request it refused; all count as posted",
                ),
            };
            return Err(PostError { posted: posted + refused.unwrap_or(len), error });
        }
        posted += len;
    }
    Ok(())
}

#[cold]
fn post_error(call: &'static str, rc: i32) -> Error {
    match check(call, rc, String::new) {
        Err(error) if error.kind() == ErrorKind::OutOfMemory => {
            let full = error.with_kind(ErrorKind::QueueFull);
            full.because("the queue is full; reap completions first")
        }
        Err(error) if error.kind() == ErrorKind::Misuse => error.because(
            "the queue pair's state does not allow posting, or the request has too many entries \
             or inline bytes",
        ),
        Err(error) => error,
        Ok(()) => Error::new(ErrorKind::System, call, "failed without an error number"),
    }
}
