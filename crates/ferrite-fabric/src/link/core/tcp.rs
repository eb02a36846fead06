//! The protocol on a TCP connection: the same frames, and one-sided operations that the peer's
//! software executes.

use super::body::Body;
use super::migration::{ActiveTransport, Again};
use super::{LinkCore, Output, RequestContext, Wakes, protocol};
use crate::device::slots::Held;
use crate::error::{Error, ErrorKind};
use crate::link::kind::Kind;
use crate::mem::BufMut;
use crate::wire::{Address, CONTROL_BYTES, Frame, TcpFrame, TcpFrameKind};

/// The largest frame on TCP, unless the receiver's `segment_bytes` is larger. TCP needs no posted
/// receives, so large frames need no extra memory there.
pub(crate) const SEGMENT_BYTES: usize = 64 << 10;

/// The next thing to write to the connection.
pub(crate) enum TcpOutput {
    /// A frame without an answer. Once it was written, the driver passes its request to
    /// [`LinkCore::on_tcp_sent`].
    Frame { frame: TcpFrame, body: Body, request: Option<RequestContext> },
    /// A one-sided operation, which the peer answers.
    Operation { frame: TcpFrame, held: Held, request: RequestContext },
}

/// Creates the frame of a message or of a control message.
pub(crate) fn data_frame(imm: u32, len: usize) -> TcpFrame {
    TcpFrame { kind: TcpFrameKind::Frame, imm, len: len as u32, op: 0, grant: 0, offset: 0 }
}

impl LinkCore {
    /// Returns the largest frame that the peer accepts over TCP.
    pub(crate) fn tcp_segment(&self) -> usize {
        (self.peer.segment_bytes as usize).max(SEGMENT_BYTES)
    }

    /// Returns the largest frame that this side accepts over TCP.
    pub(crate) fn own_tcp_segment(&self) -> usize {
        (self.limits.hello.segment_bytes as usize).max(SEGMENT_BYTES)
    }

    /// Returns the next migration frame. It is sent on TCP even while RDMA carries the link.
    pub(crate) fn next_said(&mut self) -> Option<(TcpFrame, Body)> {
        self.migration.next_said()
    }

    /// Returns the next thing to write to the connection. `may_ask` returns whether a one-sided
    /// operation that reads the given number of bytes may be sent.
    pub(crate) fn next_tcp_output(
        &mut self,
        may_ask: impl FnOnce(u64) -> bool,
    ) -> Option<TcpOutput> {
        if let Some((frame, body)) = self.migration.next_said() {
            return Some(TcpOutput::Frame { frame, body, request: None });
        }
        if self.migration.transport != ActiveTransport::Tcp {
            return None;
        }
        if let Some(again) = self.migration.next_again() {
            return Some(self.repeat(again));
        }
        if self.upgrade.is_switching() {
            let frame = self.next_switch()?;
            return Some(TcpOutput::Frame { frame, body: Body::Nothing, request: None });
        }
        let one_sided = self.outbox.next_one_sided_reads().is_none_or(may_ask);
        Some(match self.next_output(self.tcp_segment(), one_sided)? {
            Output::Data { imm, piece, request, .. } => TcpOutput::Frame {
                frame: data_frame(imm, request.bytes as usize),
                body: piece.map_or(Body::Nothing, Body::Buf),
                request: Some(request),
            },
            Output::Control { imm, control } => TcpOutput::Frame {
                frame: data_frame(imm, CONTROL_BYTES),
                body: Body::Few(control.encode()),
                request: None,
            },
            Output::OneSided { held, request, .. } => {
                TcpOutput::Operation { frame: operation_frame(&request), held, request }
            }
        })
    }

    fn repeat(&mut self, again: Again) -> TcpOutput {
        match again {
            Again::Frame { channel, more, body, request } => {
                let consumed = self.credits.announce();
                let imm = Frame { control: false, more, channel, consumed }.to_imm();
                let frame = data_frame(imm, body.bytes().len());
                TcpOutput::Frame { frame, body, request: Some(request) }
            }
            Again::OneSided { held, request } => {
                TcpOutput::Operation { frame: operation_frame(&request), held, request }
            }
        }
    }

    /// Notes that a frame was written completely.
    pub(crate) fn on_tcp_sent(&mut self, request: RequestContext, wakes: &mut Wakes) {
        self.stats.tcp_bytes += u64::from(request.bytes);
        self.complete(request, Held::Nothing, Ok(()), wakes);
    }

    /// Handles a migration frame. Returns whether the link uses RDMA from now on.
    ///
    /// # Errors
    /// The peer violated the protocol.
    pub(crate) fn on_path_frame(
        &mut self,
        frame: &TcpFrame,
        body: Option<&[u8]>,
        wakes: &mut Wakes,
    ) -> Result<bool, Error> {
        if !self.migration.is_possible {
            return Err(protocol("a migration frame on a link that cannot migrate"));
        }
        let &TcpFrame { kind, imm, op, grant, offset, .. } = frame;
        match (kind, body) {
            (TcpFrameKind::Offer | TcpFrameKind::Answer, Some(body)) => {
                let address =
                    Address::decode(body).ok_or_else(|| protocol("an invalid RDMA address"))?;
                self.on_negotiation(kind, op, Some(address))?;
            }
            (TcpFrameKind::Withdraw, None) => self.on_negotiation(kind, op, None)?,
            (TcpFrameKind::Switch, None) => return self.on_switch(op),
            (TcpFrameKind::Resume, None) => self.on_resume(offset, wakes)?,
            (TcpFrameKind::Rekey, None) => {
                if !self.grants.on_moved(grant, offset, imm) {
                    return Err(protocol("too many grants"));
                }
            }
            _ => return Err(protocol("the payload of a TCP frame is missing or unexpected")),
        }
        Ok(false)
    }

    /// Handles the peer's answer to a one-sided operation, with the data if it was a read.
    ///
    /// # Errors
    /// The peer violated the protocol.
    pub(crate) fn on_answer(
        &mut self,
        (held, request): (Held, RequestContext),
        data: Option<BufMut>,
        result: Result<(), Error>,
        wakes: &mut Wakes,
    ) -> Result<(), Error> {
        let held = match (request.kind, data, held) {
            // The answer was read into the buffer of the read, so `held` no longer has that buffer.
            (Kind::Read, Some(buf), Held::Nothing) => Held::Unique(buf),
            (Kind::Read, None, held) if result.is_err() => held,
            (Kind::Write | Kind::Notice, None, held) => held,
            (_, _, held) => {
                let error = protocol("an answer that does not fit its request");
                self.complete(request, held, Err(error.clone()), wakes);
                return Err(error);
            }
        };
        self.stats.tcp_bytes += u64::from(request.bytes);
        self.complete(request, held, result, wakes);
        Ok(())
    }

    /// Creates the error for a connection that the peer has closed.
    pub(crate) fn hung_up(&self) -> Error {
        if self.closing.fin_ack_sent() {
            return Error::new(ErrorKind::Closed, "the peer has closed the link");
        }
        let what = "the peer hung up without closing (its process ended, or aborted the link)";
        Error::new(ErrorKind::LinkDown, what)
    }
}

fn operation_frame(request: &RequestContext) -> TcpFrame {
    let kind = match request.kind {
        Kind::Read => TcpFrameKind::Read,
        Kind::Notice => TcpFrameKind::WriteImm,
        _ => TcpFrameKind::Write,
    };
    let &RequestContext { grant, offset, imm, bytes: len, .. } = request;
    TcpFrame { kind, imm, len, op: 0, grant, offset }
}
