//! A link's state on a TCP connection: the same credits, tickets and messages, and one-sided
//! operations that the fabric serves.

use std::io::{self, IoSlice};
use std::time::Instant;

#[cfg(feature = "tokio")]
use tokio::io::ReadBuf;

use super::receiving::protocol;
use super::{
    ActiveTransport, Kind, LinkEnv, LinkState, Phase, REVOKED_MAX, RequestContext, Step, Wakes,
    outcome, took,
};
use crate::error::{Error, ErrorKind};
use crate::fabric::slots::Held;
use crate::link::outbox::{Next, OneSided};
use crate::link::tcp::{Arrival, Asked, Body, SEGMENT_BYTES, TcpPath, data_frame};
use crate::mem::BufMut;
#[cfg(feature = "tokio")]
use crate::mem::Pool;
use crate::wire::{Address, CONTROL_BYTES, Frame, TcpFrame, TcpFrameKind};

/// Read before other links have their turn, and who waits for it takes it while it is in the CPU's
/// cache.
const TURN_BYTES: usize = 256 << 10;

/// What a peer asks of our memory: see `one_sided.rs`.
pub(crate) enum Request<'a> {
    Write { grant: u64, offset: u64, bytes: &'a [u8] },
    Read { grant: u64, offset: u64, into: &'a mut [u8] },
}

/// How reading ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reading {
    /// All there was.
    Done,
    /// There may be more, after others.
    More,
    /// There is no memory for more.
    NoMemory,
    /// There is none for this peer, until some that it has comes back.
    OverBudget,
}

impl LinkState {
    /// The largest frame that the peer takes over TCP.
    fn tcp_segment(&self) -> usize {
        (self.peer.segment_bytes as usize).max(SEGMENT_BYTES)
    }

    /// As [`LinkState::send_now`]: up to a whole frame goes from the caller's memory to the kernel.
    pub(super) fn send_now_over_tcp(&mut self, channel: u16, bytes: &[u8]) -> Result<bool, Error> {
        if bytes.len() > self.tcp_segment() {
            return Ok(false);
        }
        self.send_slices_over_tcp(channel, &[IoSlice::new(bytes)], bytes.len())
            .map(|sent| sent.is_some())
    }

    /// The same with the first `len` bytes of the slices, or as many as go, in messages of a frame
    /// each; how many.
    pub(crate) fn send_slices_over_tcp(
        &mut self,
        channel: u16,
        slices: &[IoSlice<'_>],
        len: usize,
    ) -> Result<Option<usize>, Error> {
        let ready = matches!(self.phase, Phase::Up)
            && self.outbox.is_empty()
            && self.controls.is_empty()
            && self.credits() > 0
            && self.transport == ActiveTransport::Tcp
            && self.again.is_empty()
            && self.upgrade.as_ref().is_none_or(|upgrade| !upgrade.switching);
        let Some(mut tcp) = self.tcp.take_if(|tcp| ready && tcp.is_written()) else {
            return Ok(None);
        };
        let most = usize::try_from(self.peer.max_message_bytes).unwrap_or(usize::MAX);
        let most = self.tcp_segment().min(most).max(1);
        let len = len.min(self.credits().saturating_mul(most));
        let imm =
            Frame { control: false, more: false, channel, consumed: self.consumed as u16 }.to_imm();
        let mut written = tcp.write_now(imm, slices, len, most);
        if let Err(error) = tcp.flush(|_| {}) {
            written = Err(error);
        }
        self.tcp = Some(tcp);
        let (frames, bytes) = written.map_err(|error| self.broken(&error))?;
        if frames == 0 {
            return Ok(None);
        }
        self.sent += frames as u64;
        self.told = self.consumed;
        for frame in 0..frames {
            self.stats.completed(Kind::Send, most.min(bytes - frame * most) as u32, false);
        }
        self.stats.tcp_bytes += bytes as u64;
        Ok(Some(bytes))
    }

    /// Whether large writes go to the kernel from where they are. Not with TLS, which copies
    /// anyway.
    #[cfg(feature = "tokio")]
    pub(crate) fn writes_through(&self) -> bool {
        self.transport == ActiveTransport::Tcp && self.tcp.as_ref().is_some_and(TcpPath::is_plain)
    }

    /// Whether nothing can go until the kernel or the peer says so. The fabric hears of it and
    /// pumps.
    #[cfg(feature = "tokio")]
    pub(crate) fn is_held_up(&self) -> bool {
        self.credits() == 0 || self.tcp.as_ref().is_some_and(TcpPath::is_blocked)
    }

    /// Reads into `out` what has come of large frames on `channel`, if nothing stands before it;
    /// `false` if nothing has.
    ///
    /// The fabric reads as well and needs no call: what is left has an event of its own that it
    /// sees, or has seen and will attend to.
    #[cfg(feature = "tokio")]
    pub(crate) fn read_through(
        &mut self,
        pool: &Pool,
        channel: u16,
        out: &mut ReadBuf<'_>,
    ) -> Result<bool, Error> {
        let largest = self.largest_over_tcp();
        let takes = |imm| {
            let frame = Frame::from_imm(imm);
            !frame.control && !frame.more && frame.channel == channel
        };
        let mut any = false;
        while matches!(self.phase, Phase::Up)
            && self.writes_through()
            && self.lost.is_none()
            && self.inbox.is_empty()
            && out.remaining() > 0
            && let Some(tcp) = &mut self.tcp
            && let Some((bytes, over)) =
                tcp.read_through(out, pool, largest, takes).map_err(|error| self.broken(&error))?
        {
            any = true;
            self.stats.recv_bytes += bytes as u64;
            if let Some(imm) = over {
                self.begin_frame(Frame::from_imm(imm), true)?;
                self.stats.recv_ops += 1;
                self.count_consumed();
            }
        }
        if any {
            self.last_heard = Instant::now();
            self.asked = None;
        }
        Ok(any)
    }

    /// The largest frame that this side takes over TCP.
    fn largest_over_tcp(&self) -> usize {
        (self.limits.hello.segment_bytes as usize).max(SEGMENT_BYTES)
    }

    /// Writes whatever may go.
    pub(super) fn post_over_tcp(&mut self, wakes: &mut Wakes) -> Result<(), Error> {
        let Some(mut tcp) = self.tcp.take() else { return Ok(()) };
        let mut result;
        loop {
            while tcp.has_room() && self.add_tcp_frame(&mut tcp) {}
            let before = tcp.is_written();
            let (tickets, stats, limits) = (&mut self.tickets, &mut self.stats, &self.limits);
            result = tcp.flush(|request| {
                stats.completed(request.kind, request.bytes, false);
                stats.tcp_bytes += u64::from(request.bytes);
                if let Some(ticket) = request.ticket {
                    took(limits, &request);
                    wakes.extend(tickets.finish(ticket, outcome(Ok(()), Held::Nothing)));
                }
            });
            if result.is_err() || before || !tcp.is_written() {
                break;
            }
        }
        self.tcp = Some(tcp);
        result.map_err(|error| self.broken(&error))
    }

    /// The next TCP frame that may go; `false` if there is none.
    fn add_tcp_frame(&mut self, tcp: &mut TcpPath) -> bool {
        if self.add_again(tcp) {
            return true;
        }
        if self.is_switching(tcp) {
            return false;
        }
        if let Some(control) = self.controls.pop_front() {
            self.told = self.consumed;
            let imm =
                Frame { control: true, more: false, channel: 0, consumed: self.consumed as u16 }
                    .to_imm();
            self.stats.controls_sent += 1;
            tcp.push(&data_frame(imm, CONTROL_BYTES), Body::Few(control.encode()), None);
            return true;
        }
        let may_ask = self.outbox.next_one_sided_reads().is_none_or(|bytes| tcp.may_ask(bytes));
        let mut allowed = self.allowed(self.tcp_segment());
        allowed.one_sided = may_ask;
        let Some(next) = self.outbox.next(allowed) else { return false };
        match next {
            Next::Frame { channel, more, piece, ticket } => {
                let bytes = piece.as_ref().map_or(0, |piece| piece.len());
                let tcp_frame = data_frame(self.data_frame(channel, more), bytes);
                let begun = self.began(ticket);
                let request = RequestContext {
                    ticket,
                    kind: Kind::Send,
                    bytes: bytes as u32,
                    begun,
                    ..RequestContext::default()
                };
                tcp.push(&tcp_frame, piece.map_or(Body::Nothing, Body::Buf), Some(request));
            }
            Next::OneSided(OneSided { kind, held, ticket, grant, offset, bytes, imm, .. }) => {
                let tcp_frame_kind = match kind {
                    Kind::Read => TcpFrameKind::Read,
                    Kind::Notice => {
                        self.sent += 1;
                        TcpFrameKind::WriteImm
                    }
                    _ => TcpFrameKind::Write,
                };
                let tcp_frame =
                    TcpFrame { kind: tcp_frame_kind, imm, len: bytes, op: 0, grant, offset };
                let begun = self.began(ticket);
                tcp.ask(
                    tcp_frame,
                    held,
                    RequestContext {
                        ticket,
                        kind,
                        bytes,
                        frame: self.sent,
                        grant,
                        offset,
                        imm,
                        begun,
                    },
                );
            }
        }
        true
    }

    /// Something came, or the connection takes more. Reads and delivers a turn's worth; `serve`
    /// carries out what the peer asks of our memory, `false` if it may not.
    pub(crate) fn on_socket(
        &mut self,
        env: &LinkEnv<'_>,
        scratch: &mut [u8],
        now: Instant,
        wakes: &mut Wakes,
        serve: &mut dyn FnMut(Request<'_>) -> bool,
    ) -> Reading {
        if !self.receivers.is_empty() && self.tcp.as_mut().is_some_and(TcpPath::defers) {
            wakes.append(&mut self.receivers);
            self.pump(env, wakes);
            return Reading::More;
        }
        let Some(mut tcp) = self.tcp.take() else { return Reading::Done };
        tcp.begin_reading(scratch);
        let largest = self.largest_over_tcp();
        let mut left = TURN_BYTES;
        let read = loop {
            if self.is_to_be_detached() {
                break Ok(Reading::More); // first the queue pair has to go
            }
            if left == 0 {
                break Ok(Reading::More);
            }
            match tcp.next(scratch, env.pool, largest) {
                Ok(Arrival::TcpFrame(tcp_frame, body)) => {
                    left = left.saturating_sub(tcp_frame.follows() + size_of::<TcpFrame>());
                    if let Err(error) =
                        self.on_tcp_frame(&mut tcp, &tcp_frame, body, now, wakes, serve)
                    {
                        break Err(error);
                    }
                    if self.failure().is_some() {
                        break Ok(Reading::Done);
                    }
                }
                Ok(Arrival::Nothing) => {
                    // A part of something is a sign of life too.
                    if tcp.has_begun() {
                        (self.last_heard, self.asked) = (now, None);
                    }
                    break Ok(Reading::Done);
                }
                Ok(Arrival::NoMemory) => break Ok(Reading::NoMemory),
                Ok(Arrival::OverBudget) => break Ok(Reading::OverBudget),
                Ok(Arrival::End) => {
                    tcp.end_reading(scratch);
                    self.tcp = Some(tcp);
                    let error = self.hung_up();
                    // also while RDMA carries the link: this is how a peer is heard to go
                    self.end(error, wakes);
                    return Reading::Done;
                }
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    break Err(protocol(&error.to_string()));
                }
                Err(error) => break Err(self.broken(&error)),
            }
        };
        tcp.end_reading(scratch);
        self.tcp = Some(tcp);
        match read {
            Ok(reading) => {
                if self.lost.is_some() {
                    self.resume(wakes);
                }
                if self.transport != ActiveTransport::Tcp
                    && let Some(tcp) = &mut self.tcp
                    && tcp.flush(|_| {}).is_err()
                {
                    let error = self.hung_up();
                    self.end(error, wakes);
                    return Reading::Done;
                }
                if !self.revoking.is_empty() {
                    self.answer_revocations();
                }
                self.pump(env, wakes);
                reading
            }
            Err(error) => {
                self.fail(error, wakes);
                Reading::Done
            }
        }
    }

    fn on_tcp_frame(
        &mut self,
        tcp: &mut TcpPath,
        tcp_frame: &TcpFrame,
        body: Option<BufMut>,
        now: Instant,
        wakes: &mut Wakes,
        serve: &mut dyn FnMut(Request<'_>) -> bool,
    ) -> Result<(), Error> {
        self.last_heard = now;
        self.asked = None;
        if tcp.is_flooded() {
            return Err(protocol("more questions than it takes answers to"));
        }
        let &TcpFrame { kind, imm, len, op, grant, offset } = tcp_frame;
        if kind.is_of_moving() && !self.moves {
            return Err(protocol("a move of a link that stays where it is"));
        }
        match (kind, body) {
            (TcpFrameKind::Frame, Some(body)) => return self.on_frame(imm, Some(body), now, wakes),
            (TcpFrameKind::Write | TcpFrameKind::WriteImm, Some(body)) => {
                let done = serve(Request::Write { grant, offset, bytes: &body });
                drop(body);
                if kind == TcpFrameKind::WriteImm {
                    if done {
                        self.on_frame(imm, None, now, wakes)?;
                    } else {
                        // It has taken its credit all the same.
                        self.received += 1;
                        self.count_consumed();
                    }
                }
                tcp.answer(op, done, Body::Nothing);
            }
            (TcpFrameKind::Read, None) => {
                if tcp.is_overasked(len as usize) {
                    return Err(protocol("more reads at a time than are answered"));
                }
                let mut bytes = vec![0; len as usize].into_boxed_slice();
                let done = serve(Request::Read { grant, offset, into: &mut bytes });
                tcp.answer(op, done, Body::Loose(bytes));
            }
            (TcpFrameKind::Offer | TcpFrameKind::Answer, Some(body)) => {
                let Some(address) = Address::decode(&body) else {
                    return Err(protocol("a wrong address"));
                };
                let offered = kind == TcpFrameKind::Offer;
                if self.steps.len() > 8 || offered && self.is_caller {
                    return Err(protocol("an offer at the wrong time"));
                }
                if offered && self.transport != ActiveTransport::Tcp {
                    // It crossed with a move of ours: it is made again.
                    tracing::debug!("an offer while {:?} carries the link", self.transport);
                    tcp.push(
                        &super::migration::plain(TcpFrameKind::Withdraw, 0),
                        Body::Nothing,
                        None,
                    );
                    return Ok(());
                }
                if offered && std::mem::replace(&mut self.peer_offers, true) {
                    return Err(protocol("an offer before the one before it was withdrawn"));
                }
                self.steps.push(if offered {
                    Step::Offered(address)
                } else {
                    Step::Answered(address)
                });
            }
            (TcpFrameKind::Withdraw, None) => {
                if self.steps.len() > 8 {
                    return Err(protocol("more withdrawals than offers"));
                }
                self.peer_offers = false;
                self.steps.push(Step::Withdrawn);
            }
            (TcpFrameKind::Switch, None) => self.on_switch()?,
            (TcpFrameKind::Resume, None) => self.on_resume(offset, wakes)?,
            (TcpFrameKind::Rekey, None) => {
                if self.rekeyed.len() >= REVOKED_MAX && !self.rekeyed.contains_key(&grant) {
                    return Err(protocol("more grants than anyone has"));
                }
                self.rekeyed.insert(grant, (offset, imm));
            }
            (TcpFrameKind::Done, None) => self.on_answer(tcp, op, None, Ok(()), wakes)?,
            (TcpFrameKind::Data, Some(body)) => {
                self.on_answer(tcp, op, Some(body), Ok(()), wakes)?
            }
            (TcpFrameKind::Denied, None) => {
                let what = "the peer refused: the grant is over, or does not cover this";
                self.on_answer(tcp, op, None, Err(Error::new(ErrorKind::Denied, what)), wakes)?;
            }
            _ => return Err(protocol("a tcp_frame without its payload")),
        }
        Ok(())
    }

    fn on_answer(
        &mut self,
        tcp: &mut TcpPath,
        op: u32,
        data: Option<BufMut>,
        result: Result<(), Error>,
        wakes: &mut Wakes,
    ) -> Result<(), Error> {
        let Some(Asked { held, request, .. }) = tcp.answered(op) else {
            return Err(protocol("an answer to no question"));
        };
        let held = match (request.kind, data, held) {
            // What came went into the buffer that waited for it, if it had the right length.
            (Kind::Read, Some(buf), Held::Nothing) => Held::Unique(buf),
            (Kind::Read, None, held) if result.is_err() => held,
            (Kind::Write | Kind::Notice, None, held) => held,
            (_, _, held) => {
                let error = protocol("an answer to another question");
                if let Some(ticket) = request.ticket {
                    wakes.extend(self.tickets.finish(ticket, outcome(Err(error.clone()), held)));
                }
                return Err(error);
            }
        };
        self.stats.completed(request.kind, request.bytes, result.is_err());
        self.stats.tcp_bytes += u64::from(request.bytes);
        took(&self.limits, &request);
        if let Some(ticket) = request.ticket {
            wakes.extend(self.tickets.finish(ticket, outcome(result, held)));
        }
        Ok(())
    }

    /// Tells all who wait on the connection, when the link is down; its last words are written
    /// first. `true` if there was one.
    pub(super) fn close_tcp(&mut self, wakes: &mut Wakes) -> bool {
        let Some(mut tcp) = self.tcp.take() else { return false };
        let error = self
            .failure()
            .cloned()
            .unwrap_or_else(|| Error::new(ErrorKind::Closed, "the link is gone"));
        let _ = tcp.flush(|_| {});
        tcp.shut_down();
        for request in tcp.take_leaving() {
            self.stats.completed(request.kind, request.bytes, true);
            if let Some(ticket) = request.ticket {
                wakes.extend(
                    self.tickets.finish(ticket, outcome(Err(error.clone()), Held::Nothing)),
                );
            }
        }
        for Asked { held, request, .. } in tcp.take_asked() {
            self.stats.completed(request.kind, request.bytes, true);
            if let Some(ticket) = request.ticket {
                wakes.extend(self.tickets.finish(ticket, outcome(Err(error.clone()), held)));
            }
        }
        true
    }

    /// The connection broke.
    fn broken(&self, error: &io::Error) -> Error {
        Error::new(ErrorKind::LinkDown, format!("the TCP connection broke: {error}"))
    }

    fn hung_up(&self) -> Error {
        if self.fin_ack_sent {
            return Error::new(ErrorKind::Closed, "the peer has closed the link");
        }
        let what = "the peer hung up without closing (its process ended, or aborted the link)";
        Error::new(ErrorKind::LinkDown, what)
    }
}
