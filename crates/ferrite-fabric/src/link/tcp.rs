//! A TCP connection that carries a link: it writes and reads TCP frames. It does not know credits,
//! tickets or messages.
//!
//! A sender writes at once, from the memory that holds its bytes. The fabric writes the rest when
//! the kernel accepts more. The fabric also reads. Without TLS, a stream's reader can read large
//! payloads from the kernel straight into its own buffer.

mod info;
mod reading;

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::task::Waker;
use std::time::Instant;

use super::core::{Body, RequestContext, data_frame};
use super::socket::send;
use super::tls::Tls;
use crate::device::slots::Held;
use crate::mem::{Account, BufMut};
use crate::wire::{TCP_FRAME_HEADER_BYTES, TcpFrame, TcpFrameKind};

/// The limits on unwritten data, in bytes and in TCP frames, above which the path takes nothing
/// more from the outbox. Answers to the peer and migration frames may exceed them.
const OUT_BYTES: usize = 512 << 10;
const OUT_FRAMES: usize = 128;
/// Maximum number of slices for the kernel in one call.
const SLICES: usize = 64;
/// Maximum number of slices that a caller writes at once.
pub(crate) const CALLERS_SLICES: usize = 15;
/// Maximum number of frames that a caller writes at once.
const CALLERS_FRAMES: usize = 16;
/// A frame of at least this many bytes is large: its payload is read from the kernel straight into
/// its buffer. At most the next frame's header is read along with the payload, because further
/// bytes would have to be copied.
const LARGE: usize = 16 << 10;
/// Maximum number of bytes to read at once after a large frame, to get the next header. Also the
/// smallest rest of a frame for which a reader reads from the kernel into its own buffer.
const PEEK: usize = 4 << 10;
/// Maximum number of one-sided operations without an answer.
const OPERATIONS: usize = 128;
/// Maximum number of bytes that all unanswered reads together may request; a single read may
/// request more. A peer that requests more than twice this limit violates the protocol.
const READ_BYTES: u64 = 4 << 20;
/// The largest one-sided operation, which is the size of the largest buffer.
const OPERATION_BYTES: usize = 2 << 20;

/// A TCP frame that waits to be written.
struct Leaving {
    head: [u8; TCP_FRAME_HEADER_BYTES],
    body: Body,
    /// The number of bytes of head and payload that were written.
    gone: usize,
    /// The request to report when the frame was written.
    request: Option<RequestContext>,
    /// Whether the frame answers a one-sided operation of the peer.
    is_answer: bool,
}

/// A one-sided operation without an answer.
pub(super) struct Asked {
    pub(super) op: u32,
    pub(super) held: Held,
    pub(super) request: RequestContext,
}

/// The result of reading.
pub(super) enum Arrival {
    /// A TCP frame, with its payload if it has one.
    TcpFrame(TcpFrame, Option<BufMut>),
    /// Nothing more for now.
    Nothing,
    /// There is no memory for the payload now.
    NoMemory,
    /// The account for this peer's data is at its limit, until some of the data is dropped.
    OverBudget,
    /// The peer has closed the connection.
    End,
}

pub(crate) struct TcpPath {
    socket: OwnedFd,
    tls: Option<Box<Tls>>,
    out: VecDeque<Leaving>,
    out_bytes: usize,
    /// Whether the kernel's buffer is full. An event tells when it has room.
    blocked: bool,
    head: [u8; TCP_FRAME_HEADER_BYTES],
    head_len: usize,
    /// The payload that is being read: its frame, its buffer, and the number of bytes read.
    body: Option<(TcpFrame, BufMut, usize)>,
    /// When a part of that payload was seen first.
    begun: Option<Instant>,
    /// Whether the last payload was a large one.
    large: bool,
    /// Whether a stream's reader found nothing in the kernel, and waits.
    awaited: bool,
    /// Whether the latest arrival was left to that reader.
    deferred: bool,
    /// Bytes that were read but not processed.
    stash: Vec<u8>,
    /// Whether `stash` has data that only the fabric can process, and that no event will report.
    left_over: bool,
    /// The unprocessed part of the scratch memory, between `begin_reading` and `end_reading`.
    chunk: Range<usize>,
    asked: VecDeque<Asked>,
    asked_reads: u64,
    next_op: u32,
    /// The account to charge for received data.
    account: Option<Account>,
}

impl TcpPath {
    /// Creates the path. `early` are bytes that were read after the peer's greeting.
    pub(crate) fn new(socket: OwnedFd, tls: Option<Box<Tls>>, early: Vec<u8>) -> Self {
        Self {
            socket,
            tls,
            out: VecDeque::new(),
            out_bytes: 0,
            blocked: false,
            head: [0; TCP_FRAME_HEADER_BYTES],
            head_len: 0,
            body: None,
            begun: None,
            large: false,
            awaited: false,
            deferred: false,
            stash: early,
            left_over: false,
            chunk: 0..0,
            asked: VecDeque::new(),
            asked_reads: 0,
            next_op: 0,
            account: None,
        }
    }

    /// Wakes `waker` when some of the memory of received data is returned.
    pub(crate) fn wake_on_credit(&self, waker: &Waker) {
        if let Some(account) = &self.account {
            account.wake_on_credit(waker);
        }
    }

    /// Sets the account to charge for received data.
    pub(crate) fn charged_to(mut self, account: Option<Account>) -> Self {
        self.account = account;
        self
    }

    /// Returns whether another TCP frame may be added.
    pub(super) fn has_room(&self) -> bool {
        self.out_bytes < OUT_BYTES && self.out.len() < OUT_FRAMES
    }

    /// Returns whether another one-sided operation that reads this many bytes may be requested.
    pub(super) fn may_ask(&self, read_bytes: u64) -> bool {
        self.asked.len() < OPERATIONS
            && (self.asked_reads == 0 || self.asked_reads + read_bytes <= READ_BYTES)
    }

    /// Returns whether everything was written.
    pub(super) fn is_written(&self) -> bool {
        self.out.is_empty() && self.tls.as_ref().is_none_or(|tls| !tls.wants_write())
    }

    /// Adds a TCP frame; [`TcpPath::flush`] writes it.
    pub(super) fn push(
        &mut self,
        tcp_frame: &TcpFrame,
        body: Body,
        request: Option<RequestContext>,
    ) {
        self.out_bytes += TCP_FRAME_HEADER_BYTES + body.bytes().len();
        self.out.push_back(Leaving {
            head: tcp_frame.encode(),
            body,
            gone: 0,
            request,
            is_answer: false,
        });
    }

    /// Answers a one-sided operation of the peer, with the data if it was a read.
    pub(super) fn answer(&mut self, op: u32, done: bool, body: Body) {
        let (kind, body) = match body {
            _ if !done => (TcpFrameKind::Denied, Body::Nothing),
            Body::Nothing => (TcpFrameKind::Done, Body::Nothing),
            body => (TcpFrameKind::Data, body),
        };
        let len = body.bytes().len();
        let head = TcpFrame { kind, imm: 0, len: len as u32, op, grant: 0, offset: 0 }.encode();
        self.out_bytes += TCP_FRAME_HEADER_BYTES + len;
        self.out.push_back(Leaving { head, body, gone: 0, request: None, is_answer: true });
    }

    /// Requests a one-sided operation from the peer.
    pub(super) fn ask(&mut self, mut tcp_frame: TcpFrame, held: Held, request: RequestContext) {
        tcp_frame.op = self.next_op;
        self.next_op = self.next_op.wrapping_add(1);
        let body = match &held {
            Held::Shared(buf) => Body::Buf(buf.clone()),
            _ => Body::Nothing,
        };
        if tcp_frame.kind == TcpFrameKind::Read {
            self.asked_reads += u64::from(tcp_frame.len);
        }
        self.push(&tcp_frame, body, None);
        self.asked.push_back(Asked { op: tcp_frame.op, held, request });
    }

    /// Returns the operation that an answer belongs to. Answers arrive in the order of the
    /// requests.
    pub(super) fn answered(&mut self, op: u32) -> Option<Asked> {
        if self.asked.front()?.op != op {
            return None;
        }
        let asked = self.asked.pop_front()?;
        if let Held::Unique(buf) = &asked.held {
            self.asked_reads -= buf.len() as u64;
        }
        Some(asked)
    }

    /// Returns the operations without an answer.
    pub(super) fn asked(&self) -> impl Iterator<Item = &Asked> {
        self.asked.iter()
    }

    pub(super) fn take_asked(&mut self) -> VecDeque<Asked> {
        if let Some((TcpFrame { kind: TcpFrameKind::Data, .. }, buf, _)) = self.body.take()
            && let Some(asked) = self.asked.front_mut()
        {
            asked.held = Held::Unique(buf); // a part of the payload was read into the buffer
        }
        std::mem::take(&mut self.asked)
    }

    /// Returns the requests of all frames that were not written completely.
    pub(super) fn take_leaving(&mut self) -> impl Iterator<Item = RequestContext> {
        self.out_bytes = 0;
        std::mem::take(&mut self.out).into_iter().filter_map(|leaving| leaving.request)
    }

    /// Returns whether a read of `more` bytes exceeds the limit. With its answer, more data would
    /// wait to be written than a correct peer requests.
    pub(super) fn exceeds_read_limit(&self, more: usize) -> bool {
        let answers = self.out.iter().filter(|leaving| leaving.is_answer);
        let waiting: usize = answers.map(|leaving| leaving.body.bytes().len()).sum();
        waiting > 0 && (waiting + more) as u64 > 2 * READ_BYTES
    }

    /// Returns whether the peer sends requests but does not read the answers, beyond what a correct
    /// peer may have under way.
    pub(super) fn is_flooded(&self) -> bool {
        self.out.len() > OUT_FRAMES + 4 * OPERATIONS
    }

    /// Writes frames straight from the caller's memory. Nothing else may wait to be written. The
    /// frames have the first `len` bytes of `slices`, at most `most` bytes each, and this `imm`.
    /// Returns how many frames have begun, and their bytes. If the kernel accepts only a part of a
    /// frame, the rest of that frame is copied.
    pub(super) fn write_now(
        &mut self,
        imm: u32,
        slices: &[IoSlice<'_>],
        len: usize,
        most: usize,
    ) -> io::Result<(usize, usize)> {
        debug_assert!(self.is_written(), "an earlier frame still waits to be written");
        debug_assert!(slices.len() <= CALLERS_SLICES, "the caller has passed too many slices");
        let count = len.div_ceil(most).clamp(1, CALLERS_FRAMES);
        let len = len.min(count * most);
        let size_of = |frame: usize| most.min(len - frame * most);
        let mut heads = [[0; TCP_FRAME_HEADER_BYTES]; CALLERS_FRAMES];
        for (frame, head) in heads[..count].iter_mut().enumerate() {
            *head = data_frame(imm, size_of(frame)).encode();
        }
        let mut all = [IoSlice::new(&[]); 2 * CALLERS_FRAMES + CALLERS_SLICES];
        let mut used = 0;
        let mut rest = slices.iter().map(|slice| &slice[..]);
        let mut here: &[u8] = &[];
        for (frame, head) in heads[..count].iter().enumerate() {
            all[used] = IoSlice::new(head);
            used += 1;
            let mut left = size_of(frame);
            while left > 0 {
                if here.is_empty() {
                    let Some(next) = rest.next() else {
                        return Err(invalid("the slices have fewer bytes than the frame".into()));
                    };
                    here = next;
                    continue;
                }
                let (part, after) = here.split_at(left.min(here.len()));
                all[used] = IoSlice::new(part);
                used += 1;
                left -= part.len();
                here = after;
            }
        }
        let sent = self.write(&all[..used])?.unwrap_or(0);
        if sent == TCP_FRAME_HEADER_BYTES * count + len {
            return Ok((count, len));
        }
        // With TLS, the buffer of TLS may be full although the kernel's is not.
        self.blocked = sent == 0 || self.is_plain();
        // All frames but the last have the same size, and the last was not written completely.
        let whole = sent / (TCP_FRAME_HEADER_BYTES + most);
        let of_next = sent % (TCP_FRAME_HEADER_BYTES + most);
        if of_next == 0 {
            return Ok((whole, whole * most));
        }
        // A part of the next frame was written. Queue the rest of its head, and a copy of the rest
        // of its payload.
        let gone = of_next.min(TCP_FRAME_HEADER_BYTES);
        let mut skip = whole * most + of_next - gone;
        let mut left = size_of(whole) - (of_next - gone);
        let mut copy = Vec::with_capacity(left);
        for slice in slices {
            let from = skip.min(slice.len());
            let part = &slice[from..slice.len().min(from + left)];
            copy.extend_from_slice(part);
            skip -= from;
            left -= part.len();
        }
        self.out_bytes += TCP_FRAME_HEADER_BYTES - gone + copy.len();
        let body = Body::Loose(copy.into_boxed_slice());
        self.out.push_back(Leaving {
            head: heads[whole],
            body,
            gone,
            request: None,
            is_answer: false,
        });
        self.flush(|_| {})?; // TLS may accept only a part at a time
        Ok((whole + 1, whole * most + size_of(whole)))
    }

    /// Returns whether writes go straight to the kernel.
    pub(super) fn is_plain(&self) -> bool {
        self.tls.is_none()
    }

    /// Returns whether the kernel's buffer is full.
    #[cfg(feature = "tokio")]
    pub(super) fn is_blocked(&self) -> bool {
        self.blocked
    }

    /// Notes that the kernel's buffer has room.
    pub(crate) fn unblock(&mut self) {
        self.blocked = false;
    }

    /// Writes as much as possible. Calls `each` with the request of each frame that was written
    /// completely.
    pub(super) fn flush(&mut self, mut each: impl FnMut(RequestContext)) -> io::Result<()> {
        while !self.blocked && !self.is_written() {
            let sent = {
                let mut slices = [IoSlice::new(&[]); SLICES];
                let mut count = 0;
                for leaving in &self.out {
                    if count + 2 > SLICES {
                        break;
                    }
                    let (head, body) = (&leaving.head[..], leaving.body.bytes());
                    let of_body = leaving.gone.saturating_sub(head.len());
                    for rest in [&head[leaving.gone.min(head.len())..], &body[of_body..]] {
                        if !rest.is_empty() {
                            slices[count] = IoSlice::new(rest);
                            count += 1;
                        }
                    }
                }
                write(&self.socket, self.tls.as_deref_mut(), &slices[..count])?
            };
            let Some(mut sent) = sent else {
                self.blocked = true;
                return Ok(());
            };
            self.out_bytes -= sent;
            while let Some(first) = self.out.front_mut() {
                let left = first.head.len() + first.body.bytes().len() - first.gone;
                if sent < left {
                    first.gone += sent;
                    break;
                }
                sent -= left;
                if let Some(request) = self.out.pop_front().and_then(|first| first.request) {
                    each(request);
                }
            }
        }
        Ok(())
    }

    fn write(&mut self, slices: &[IoSlice<'_>]) -> io::Result<Option<usize>> {
        write(&self.socket, self.tls.as_deref_mut(), slices)
    }

    /// Ends writing. The kernel still delivers what it has accepted.
    pub(super) fn shut_down(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.say_goodbye(&self.socket);
        }
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Write);
    }
}

fn write(
    socket: &OwnedFd,
    tls: Option<&mut Tls>,
    slices: &[IoSlice<'_>],
) -> io::Result<Option<usize>> {
    match tls {
        None => send(socket, slices),
        Some(tls) => tls.write(socket, slices),
    }
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
