//! How a link goes from one path to another without losing, repeating or reordering anything.
//!
//! ```text
//!              Offer, Answer, probe, Switch both ways
//!     Tcp ─────────────────────────────────────────────► Rdma (the connection stays, as the way back)
//!      ▲                                                   │ the path is lost: queue pair destroyed
//!      └────────────── Resume both ways ◄── Moving ◄───────┘ without a connection: the side that called calls again
//! ```
//!
//! Frames that went over RDMA are kept until the peer has consumed them. When the path is lost,
//! each side first destroys its queue pair, so that nothing can come or land any more, and then
//! says how many frames it has: the other sends the rest again, on TCP. A write that was under way
//! is carried out again, unless a frame after it has come: then it was carried out, since a queue
//! pair keeps their order. The way up is in [`upgrading`](super::upgrading).

use std::collections::VecDeque;
use std::time::Instant;

use super::{Kind, LinkEnv, LinkState, Phase, RequestContext, Wakes, outcome};
use crate::error::{Error, ErrorKind};
use crate::fabric::slots::{Held, InFlight, SendQueue};
use crate::link::tcp::{Body, TcpPath};
use crate::mem::Buf;
use crate::wire::{Control, Frame, TcpFrame, TcpFrameKind};

/// What carries the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ActiveTransport {
    Rdma,
    Tcp,
    /// Nothing, at the moment.
    Moving,
}

/// A frame that went over RDMA and that the peer has not consumed.
pub(super) struct Kept {
    number: u64,
    what: KeptFrame,
}

enum KeptFrame {
    Piece {
        channel: u16,
        more: bool,
        body: KeptBody,
    },
    /// Of a write: its bytes are in its slot, until the peer's device has them.
    Notice,
}

enum KeptBody {
    Nothing,
    Buf(Buf),
    Copied(Box<[u8]>),
}

/// What is to be sent again, on TCP.
pub(super) enum Again {
    Frame { channel: u16, more: bool, body: Body, request: RequestContext },
    OneSided { held: Held, request: RequestContext },
}

/// A path was lost.
pub(crate) struct Lost {
    pub(crate) error: Error,
    /// When it has been without a path for too long.
    pub(crate) deadline: Option<Instant>,
    /// The fabric waits for the queue pair's last receive.
    pub(crate) draining: bool,
    /// The queue pair is gone.
    pub(crate) detached: bool,
    told: bool,
    /// Calls to the peer so far.
    dials: u32,
    /// Frames of ours that the peer has, when it has said so.
    peer_received: Option<u64>,
    /// What was under way on the queue pair, oldest first, and what could not be posted after it.
    under_way: VecDeque<InFlight<RequestContext>>,
    not_posted: VecDeque<InFlight<RequestContext>>,
}

impl Lost {
    fn new(error: &Error) -> Self {
        Self {
            error: error.clone(),
            deadline: None,
            draining: false,
            detached: false,
            told: false,
            dials: 0,
            peer_received: None,
            under_way: VecDeque::new(),
            not_posted: VecDeque::new(),
        }
    }

    /// Counts a call to the peer; how many there were before it.
    pub(crate) fn next_dial(&mut self) -> u32 {
        let before = self.dials;
        self.dials = before.wrapping_add(1);
        before
    }
}

impl LinkState {
    /// Whether this failure is of the path and not of the link.
    fn can_move(&self, error: &Error) -> bool {
        let of_the_path = matches!(
            error.kind(),
            ErrorKind::LinkDown
                | ErrorKind::DeviceGone
                | ErrorKind::Unreachable
                | ErrorKind::PeerStalled
        );
        self.moves
            && of_the_path
            && matches!(self.phase, Phase::Up)
            && self.transport != ActiveTransport::Tcp
    }

    /// Ends the path if the link can go on elsewhere; `false` if it cannot.
    pub(super) fn lose(&mut self, error: &Error) -> bool {
        if !self.can_move(error) {
            return false;
        }
        if self.transport == ActiveTransport::Rdma {
            if let Some(qp) = self.queue.qp() {
                let _ = qp.stop(); // a device that is gone has stopped it
            }
            self.transport = ActiveTransport::Moving;
            self.stats.binds_dropped += self.binds.len() as u64;
            self.binds.clear(); // on the next device there are others
            self.stats.moves += 1;
            self.lost = Some(Lost::new(error));
        }
        true
    }

    /// A request that the device did not take goes elsewhere.
    pub(super) fn not_posted(&mut self, held: Held, request: RequestContext) {
        if let Some(lost) = &mut self.lost {
            lost.not_posted.push_back(InFlight { held, request });
        }
    }

    /// Whether a queue pair is that of the path.
    pub(crate) fn is_carried_by(&self, number: u32) -> bool {
        self.queue.is_of(number)
    }

    /// A queue pair took a receive; whether it is the link's, or is about to be.
    pub(crate) fn on_taken(&self, qp: u32, receive: u64) -> bool {
        let queue = if self.is_carried_by(qp) { Some(&self.queue) } else { self.upgrade_queue(qp) };
        queue.map(|queue| queue.on_taken(receive)).is_some()
    }

    /// Whether the fabric has to take the queue pair away.
    pub(crate) fn is_to_be_detached(&self) -> bool {
        self.lost.as_ref().is_some_and(|lost| !lost.detached)
    }

    /// Whether the fabric waits for the last receive of the path that was lost.
    pub(crate) fn is_draining(&self) -> bool {
        self.lost.as_ref().is_some_and(|lost| lost.draining)
    }

    /// First step of the way down: gives away the queue pair of a path that was lost, to be
    /// destroyed. The caller has reaped the completion queue. `None` if there is none to give, or a
    /// command has it.
    pub(crate) fn begin_detach(&mut self) -> Option<SendQueue<RequestContext>> {
        if self.is_away() || !self.is_to_be_detached() {
            return None;
        }
        self.is_destroying = true;
        Some(std::mem::replace(&mut self.queue, SendQueue::none()))
    }

    /// Second step: the queue pair is gone, with what was in flight. Nothing of it comes, or lands,
    /// any more.
    ///
    /// # Errors
    /// The device did not let go, and the link cannot go on with that memory; or the link has ended
    /// meanwhile.
    pub(crate) fn end_detach(
        &mut self,
        env: &LinkEnv<'_>,
        queue: SendQueue<RequestContext>,
        in_flight: Vec<InFlight<RequestContext>>,
        gone: Result<(), Error>,
        wakes: &mut Wakes,
    ) -> Result<(), Error> {
        self.is_destroying = false;
        if let Err(error) = gone {
            self.queue = queue;
            return Err(error);
        }
        let Some(lost) = self.lost.as_mut().filter(|lost| !lost.detached) else {
            self.end_destroy(env, queue, in_flight, wakes);
            return Err(Error::new(ErrorKind::Closed, "the link is gone"));
        };
        env.release(in_flight.len());
        lost.under_way = in_flight.into();
        lost.under_way.append(&mut lost.not_posted);
        lost.detached = true;
        self.peer_offers = false;
        if self.device.is_some() {
            self.generation = queue.next_generation();
        }
        self.device = None;
        self.flushed.clear();
        (self.flush_called, self.asked, self.unsignaled) = (false, None, 0);
        Ok(())
    }

    /// Says on the connection what has come, once nothing more can; and goes on there if the peer
    /// has said it too.
    pub(crate) fn resume(&mut self, wakes: &mut Wakes) {
        let Some(lost) = &mut self.lost else { return };
        let Some(tcp) = &mut self.tcp else { return };
        if !lost.detached {
            return;
        }
        if !std::mem::replace(&mut lost.told, true) {
            tcp.push(&plain(TcpFrameKind::Resume, self.received), Body::Nothing, None);
        }
        if let Some(received) = lost.peer_received {
            self.go_on(received, wakes);
        }
    }

    /// Another connection: both have said what they have in its greeting.
    ///
    /// `false` if it has a path, or a connection, already.
    pub(crate) fn resume_over(
        &mut self,
        tcp: TcpPath,
        peer_received: u64,
        wakes: &mut Wakes,
    ) -> bool {
        if self.tcp.is_some() {
            return false;
        }
        let Some(lost) = self.lost.as_mut().filter(|lost| lost.detached) else { return false };
        lost.told = true;
        self.tcp = Some(tcp);
        self.go_on(peer_received, wakes);
        true
    }

    /// Frames of the peer that have come.
    pub(crate) fn received(&self) -> u64 {
        self.received
    }

    /// TCP carries the link from here on, beginning with what the peer does not have.
    fn go_on(&mut self, peer_received: u64, wakes: &mut Wakes) {
        let Some(Lost { under_way, .. }) = self.lost.take() else { return };
        self.transport = ActiveTransport::Tcp;
        if peer_received > self.sent || peer_received < self.acknowledged {
            let what =
                "the peer broke the protocol: it has frames that were never sent, or lost some";
            self.end(Error::new(ErrorKind::Protocol, what), wakes);
            return;
        }
        let mut kept = std::mem::take(&mut self.kept);
        self.kept_bytes = 0;
        kept.retain(|kept| kept.number > peer_received);
        for InFlight { held, request } in under_way {
            let came = request.frame <= peer_received;
            match request.kind {
                Kind::Send | Kind::Notice if came => self.done(request, Held::Nothing, wakes),
                Kind::Send | Kind::Notice => {
                    // Those that the peer's device had, and the peer has not.
                    self.again_until(&mut kept, request.frame, wakes);
                    match kept.pop_front() {
                        Some(Kept { what: KeptFrame::Piece { channel, more, body }, .. }) => {
                            self.again.push_back(Again::Frame {
                                channel,
                                more,
                                body: body.into(),
                                request,
                            });
                        }
                        _ => self.again.push_back(Again::OneSided { held, request }),
                    }
                }
                // A frame after it has come.
                Kind::Write if request.frame < peer_received => self.done(request, held, wakes),
                Kind::Write | Kind::Read => {
                    self.again_until(&mut kept, request.frame + 1, wakes);
                    self.again.push_back(Again::OneSided { held, request });
                }
                Kind::Again | Kind::Control | Kind::Last | Kind::Bind => {}
            }
        }
        self.again_until(&mut kept, u64::MAX, wakes);
        if self.failure().is_some() {
            return;
        }
        // What may have been lost of what is said past the application is said again; the farewells
        // when all has gone.
        (self.fin_sent, self.fin_ack_sent) = (false, false);
        self.controls.clear();
        self.controls.push_back(Control::Credit);
        for grant in &self.told_revoked {
            self.controls.push_back(Control::Revoke(*grant));
        }
        self.answer_revocations();
    }

    /// Frames before this one that the peer's device had are sent again.
    fn again_until(&mut self, kept: &mut VecDeque<Kept>, frame: u64, wakes: &mut Wakes) {
        while let Some(Kept { number, what }) = kept.pop_front_if(|kept| kept.number < frame) {
            let KeptFrame::Piece { channel, more, body } = what else {
                let what = "the path was lost together with the notice of a write";
                self.end(Error::new(ErrorKind::LinkDown, what), wakes);
                return;
            };
            let request =
                RequestContext { kind: Kind::Again, frame: number, ..RequestContext::default() };
            self.again.push_back(Again::Frame { channel, more, body: body.into(), request });
        }
    }

    /// An operation that went over RDMA is known to be done.
    fn done(&mut self, request: RequestContext, held: Held, wakes: &mut Wakes) {
        self.stats.completed(request.kind, request.bytes, false);
        if let Some(ticket) = request.ticket {
            wakes.extend(self.tickets.finish(ticket, outcome(Ok(()), held)));
        }
    }

    /// Puts what is to be sent again on the connection; `false` if there is nothing.
    pub(super) fn add_again(&mut self, tcp: &mut TcpPath) -> bool {
        match self.again.pop_front() {
            None => return false,
            Some(Again::Frame { channel, more, body, request }) => {
                let frame = Frame { control: false, more, channel, consumed: self.consumed as u16 };
                self.told = self.consumed;
                let tcp_frame = TcpFrame {
                    kind: TcpFrameKind::Frame,
                    imm: frame.to_imm(),
                    len: body.bytes().len() as u32,
                    op: 0,
                    grant: 0,
                    offset: 0,
                };
                tcp.push(&tcp_frame, body, Some(request));
            }
            Some(Again::OneSided { held, request }) => {
                let kind = match request.kind {
                    Kind::Read => TcpFrameKind::Read,
                    Kind::Notice => TcpFrameKind::WriteImm,
                    _ => TcpFrameKind::Write,
                };
                let RequestContext { grant, offset, imm, bytes: len, .. } = request;
                tcp.ask(TcpFrame { kind, imm, len, op: 0, grant, offset }, held, request);
            }
        }
        true
    }

    /// The link is down: who waits for what was to be sent again is told, and what was kept is let
    /// go.
    pub(super) fn end_again(&mut self, error: &Error, wakes: &mut Wakes) {
        let lost = self.lost.take().map(|lost| lost.under_way.into_iter().chain(lost.not_posted));
        let lost = lost.into_iter().flatten();
        let lost = lost.map(|InFlight { held, request }| (held, request));
        let again = std::mem::take(&mut self.again).into_iter().map(|again| match again {
            Again::Frame { request, .. } => (Held::Nothing, request),
            Again::OneSided { held, request } => (held, request),
        });
        for (held, request) in lost.chain(again) {
            self.stats.completed(request.kind, request.bytes, true);
            if let Some(ticket) = request.ticket {
                wakes.extend(self.tickets.finish(ticket, outcome(Err(error.clone()), held)));
            }
        }
        self.kept.clear();
        self.kept_bytes = 0;
    }

    /// Keeps a frame that goes over RDMA; `sent` counts it already.
    pub(super) fn keep_piece(&mut self, channel: u16, more: bool, piece: Option<&Buf>) {
        if self.moves {
            let body = piece.map_or(KeptBody::Nothing, |piece| KeptBody::Buf(piece.clone()));
            self.kept_bytes += body.len();
            self.kept.push_back(Kept {
                number: self.sent,
                what: KeptFrame::Piece { channel, more, body },
            });
        }
    }

    /// The same for one whose bytes are not ours.
    pub(super) fn keep_bytes(&mut self, channel: u16, bytes: &[u8]) {
        if self.moves {
            let body = KeptBody::Copied(Box::from(bytes));
            self.kept_bytes += body.len();
            let what = KeptFrame::Piece { channel, more: false, body };
            self.kept.push_back(Kept { number: self.sent, what });
        }
    }

    pub(super) fn keep_notice(&mut self) {
        if self.moves {
            self.kept.push_back(Kept { number: self.sent, what: KeptFrame::Notice });
        }
    }

    /// The peer has consumed frames: they are not needed any more.
    pub(super) fn let_go(&mut self) {
        while let Some(kept) = self.kept.pop_front_if(|kept| kept.number <= self.acknowledged) {
            if let KeptFrame::Piece { body, .. } = kept.what {
                self.kept_bytes -= body.len();
            }
        }
    }

    /// The peer says on the connection that its path is lost, and what it has.
    pub(super) fn on_resume(&mut self, received: u64, wakes: &mut Wakes) -> Result<(), Error> {
        let error = Error::new(ErrorKind::LinkDown, "the peer has lost the path");
        if self.transport == ActiveTransport::Tcp {
            // It was on its way up, and this side had not heard of it yet, or has withdrawn since.
            if !std::mem::take(&mut self.may_resume) {
                return Err(super::receiving::protocol("a path that was not there is lost"));
            }
            self.transport = ActiveTransport::Moving;
            self.lost = Some(Lost::new(&error));
        }
        self.lose(&error);
        if let Some(lost) = &mut self.lost {
            if lost.peer_received.replace(received).is_some() {
                return Err(super::receiving::protocol("one path is lost twice"));
            }
            if lost.detached && lost.told {
                self.go_on(received, wakes);
            }
        }
        Ok(())
    }

    /// The peer has lost its path, and so has this side; `false` if the link is over.
    pub(crate) fn lose_for_peer(&mut self) -> bool {
        let error = Error::new(ErrorKind::LinkDown, "the peer has lost the path");
        self.lose(&error)
    }

    /// Somebody wants the link to be elsewhere.
    pub(crate) fn leave(&mut self) -> bool {
        self.transport == ActiveTransport::Rdma
            && self.lose(&Error::new(ErrorKind::LinkDown, "told to leave RDMA"))
    }

    /// Writes what waits on the connection, whatever carries the link.
    pub(crate) fn flush_connection(&mut self, wakes: &mut Wakes) {
        if let Some(tcp) = &mut self.tcp
            && tcp.flush(|_| {}).is_err()
        {
            self.end(Error::new(ErrorKind::LinkDown, "the TCP connection broke"), wakes);
        }
    }

    /// What this side calls the link, if it can move.
    pub(crate) fn session(&self) -> u64 {
        self.limits.hello.session
    }
}

impl KeptBody {
    fn len(&self) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Buf(buf) => buf.len(),
            Self::Copied(bytes) => bytes.len(),
        }
    }
}

impl From<KeptBody> for Body {
    fn from(body: KeptBody) -> Self {
        match body {
            KeptBody::Nothing => Self::Nothing,
            KeptBody::Buf(buf) => Self::Buf(buf),
            KeptBody::Copied(bytes) => Self::Loose(bytes),
        }
    }
}

pub(super) fn plain(kind: TcpFrameKind, offset: u64) -> TcpFrame {
    TcpFrame { kind, imm: 0, len: 0, op: 0, grant: 0, offset }
}
