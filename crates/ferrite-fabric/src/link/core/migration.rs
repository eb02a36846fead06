//! Migration of a link from one path to another, without losing, repeating or reordering anything.
//!
//! ```text
//!            Offer, Answer, probe, Switch both ways
//!   Tcp ───────────────────────────────────────────► Rdma (keeps the connection for a downgrade)
//!    ▲                                                 │ the path is lost: queue pair destroyed
//!    └─────────── Resume both ways ◄── Migrating ◄─────┘ without a connection: caller reconnects
//! ```
//!
//! Each side keeps the frames that it sent over RDMA until the peer has consumed them. When the
//! path is lost, each side first destroys its queue pair, so that no more data can arrive on that
//! path. Then it reports how many frames it has received, and the other side sends the remaining
//! frames again, on TCP.
//!
//! A read or write that was under way is repeated. The exception is a write if a later frame has
//! arrived: the write was executed, because a queue pair keeps the order. The upgrade is in
//! `upgrade.rs`.

use std::collections::VecDeque;
use std::time::Instant;

use super::body::Body;
use super::{LinkCore, Phase, Redial, RequestContext, Wakes};
use crate::device::slots::{Held, InFlight};
use crate::error::{Error, ErrorKind};
use crate::link::kind::Kind;
use crate::mem::Buf;
use crate::wire::{Control, TcpFrame, TcpFrameKind};

/// A link that keeps this many bytes for a migration sends no more frames, whatever the peer's
/// window.
const KEPT_BYTES_MAX: usize = 4 << 20;

/// The transport that carries the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ActiveTransport {
    Rdma,
    Tcp,
    /// No transport: the old path is lost, and there is no new one yet.
    Migrating,
}

/// The state for changing the path of a link.
pub(crate) struct Migration {
    pub(crate) transport: ActiveTransport,
    /// Whether this side opened the link.
    pub(crate) is_caller: bool,
    /// Whether a lost path can be replaced by another.
    pub(crate) is_possible: bool,
    /// Whether there is a TCP connection. The connection carries the link, or is kept for a
    /// downgrade.
    pub(crate) has_connection: bool,
    pub(crate) lost: Option<LostPath>,
    kept: VecDeque<KeptFrame>,
    kept_bytes: usize,
    again: VecDeque<Again>,
    /// Whether the peer may already use RDMA while this side uses TCP. In this state the peer may
    /// report that its RDMA path is lost.
    pub(super) may_resume: bool,
    /// Migration frames (`Offer`, `Resume` and so on), to be sent on the TCP connection.
    to_say: VecDeque<(TcpFrame, Body)>,
}

/// A frame that was sent over RDMA and that the peer has not consumed.
struct KeptFrame {
    number: u64,
    content: KeptContent,
}

enum KeptContent {
    Piece {
        channel: u16,
        more: bool,
        body: Body,
    },
    /// The notice (the immediate data) of a write. The request in flight holds the written bytes.
    Notice,
}

/// Work to send again, on TCP.
pub(super) enum Again {
    Frame { channel: u16, more: bool, body: Body, request: RequestContext },
    OneSided { held: Held, request: RequestContext },
}

/// A lost path.
pub(crate) struct LostPath {
    pub(crate) error: Error,
    /// The time at which the link ends if it still has no path.
    pub(crate) deadline: Option<Instant>,
    /// Whether the peer's connection manager has disconnected: the peer has lost the path, too, or
    /// is gone.
    pub(crate) has_peer_disconnected: bool,
    /// Whether the driver waits for the last receive of the queue pair.
    pub(crate) is_draining: bool,
    /// Whether the queue pair was destroyed.
    pub(crate) is_detached: bool,
    /// Whether the peer was told how many frames have arrived.
    is_told: bool,
    /// The attempts to reconnect.
    pub(crate) redial: Redial,
    /// The number of our frames that the peer has received, once it has reported that.
    peer_received: Option<u64>,
    /// Requests that were in flight on the queue pair, the oldest first.
    under_way: VecDeque<InFlight<RequestContext>>,
    /// Requests that could not be posted. They follow `under_way`.
    not_posted: VecDeque<InFlight<RequestContext>>,
}

impl LostPath {
    fn new(error: &Error) -> Self {
        Self {
            error: error.clone(),
            deadline: None,
            has_peer_disconnected: false,
            is_draining: false,
            is_detached: false,
            is_told: false,
            redial: Redial::default(),
            peer_received: None,
            under_way: VecDeque::new(),
            not_posted: VecDeque::new(),
        }
    }
}

impl Migration {
    pub(super) fn new(transport: ActiveTransport) -> Self {
        Self {
            transport,
            is_caller: false,
            is_possible: false,
            has_connection: transport == ActiveTransport::Tcp,
            lost: None,
            kept: VecDeque::new(),
            kept_bytes: 0,
            again: VecDeque::new(),
            may_resume: false,
            to_say: VecDeque::new(),
        }
    }

    pub(super) fn keeps_too_much(&self) -> bool {
        self.kept_bytes >= KEPT_BYTES_MAX
    }

    fn keeps(&self) -> bool {
        self.is_possible && self.transport == ActiveTransport::Rdma
    }

    fn keep(&mut self, number: u64, content: KeptContent) {
        if let KeptContent::Piece { body, .. } = &content {
            self.kept_bytes += body.bytes().len();
        }
        self.kept.push_back(KeptFrame { number, content });
    }

    /// Keeps a frame that is sent over RDMA.
    pub(super) fn keep_piece(
        &mut self,
        number: u64,
        channel: u16,
        more: bool,
        piece: Option<&Buf>,
    ) {
        if self.keeps() {
            let body = piece.map_or(Body::Nothing, |piece| Body::Buf(piece.clone()));
            self.keep(number, KeptContent::Piece { channel, more, body });
        }
    }

    /// Keeps a copy of a frame whose bytes belong to the application.
    pub(super) fn keep_bytes(&mut self, number: u64, channel: u16, bytes: &[u8]) {
        if self.keeps() {
            let body = Body::Loose(Box::from(bytes));
            self.keep(number, KeptContent::Piece { channel, more: false, body });
        }
    }

    /// Keeps the notice of a write.
    pub(super) fn keep_notice(&mut self, number: u64) {
        if self.keeps() {
            self.keep(number, KeptContent::Notice);
        }
    }

    /// Drops frames that the peer has consumed.
    pub(super) fn let_go(&mut self, acknowledged: u64) {
        while let Some(kept) = self.kept.pop_front_if(|kept| kept.number <= acknowledged) {
            if let KeptContent::Piece { body, .. } = kept.content {
                self.kept_bytes -= body.bytes().len();
            }
        }
    }

    /// Returns whether there is nothing to send again, and no migration frame to send.
    pub(super) fn is_all_said(&self) -> bool {
        self.again.is_empty() && self.to_say.is_empty()
    }

    pub(super) fn repeats_nothing(&self) -> bool {
        self.again.is_empty()
    }

    /// Returns whether an operation on this grant will be repeated.
    pub(super) fn repeats(&self, grant: u64) -> bool {
        let uses =
            |again: &Again| matches!(again, Again::OneSided { request, .. } if request.uses(grant));
        self.again.iter().any(uses)
    }

    pub(super) fn next_again(&mut self) -> Option<Again> {
        self.again.pop_front()
    }

    /// Queues a migration frame, if there is a connection.
    pub(super) fn say(&mut self, frame: TcpFrame, body: Body) {
        if self.has_connection {
            self.to_say.push_back((frame, body));
        }
    }

    /// Returns the next migration frame.
    pub(super) fn next_said(&mut self) -> Option<(TcpFrame, Body)> {
        self.to_say.pop_front()
    }

    /// Drops everything except the unsent migration frames, because the link is down. Returns the
    /// unfinished operations.
    pub(super) fn end(&mut self) -> Vec<(Held, RequestContext)> {
        self.kept.clear();
        self.kept_bytes = 0;
        let lost = self.lost.take().map(|lost| lost.under_way.into_iter().chain(lost.not_posted));
        let lost = lost.into_iter().flatten().map(|InFlight { held, request }| (held, request));
        let again = std::mem::take(&mut self.again).into_iter().map(|again| match again {
            Again::Frame { request, .. } => (Held::Nothing, request),
            Again::OneSided { held, request } => (held, request),
        });
        lost.chain(again).collect()
    }
}

/// Creates a migration frame without a payload.
pub(super) fn path_frame(kind: TcpFrameKind, offset: u64) -> TcpFrame {
    TcpFrame { kind, imm: 0, len: 0, op: 0, grant: 0, offset }
}

impl LinkCore {
    pub(crate) fn transport(&self) -> ActiveTransport {
        self.migration.transport
    }

    pub(crate) fn is_caller(&self) -> bool {
        self.migration.is_caller
    }

    pub(crate) fn set_caller(&mut self, is_caller: bool) {
        self.migration.is_caller = is_caller;
    }

    /// Returns whether a lost path can be replaced by another.
    pub(crate) fn can_migrate(&self) -> bool {
        self.migration.is_possible
    }

    /// Disables migration: from now on the link ends with its path.
    pub(crate) fn stay_on_path(&mut self) {
        self.migration.is_possible = false;
    }

    /// Notes that there is a connection, or that it has ended.
    pub(crate) fn set_connection(&mut self, has_connection: bool) {
        self.migration.has_connection = has_connection;
    }

    pub(crate) fn lost(&self) -> Option<&LostPath> {
        self.migration.lost.as_ref()
    }

    pub(crate) fn lost_mut(&mut self) -> Option<&mut LostPath> {
        self.migration.lost.as_mut()
    }

    /// Returns this side's identifier of the link; 0 if the link cannot migrate.
    pub(crate) fn session(&self) -> u64 {
        self.limits.hello.session
    }

    /// Ends the path if only the path failed and the link can use another. Otherwise returns false.
    pub(crate) fn lose(&mut self, error: &Error) -> bool {
        let is_of_path = matches!(
            error.kind(),
            ErrorKind::LinkDown
                | ErrorKind::DeviceGone
                | ErrorKind::Unreachable
                | ErrorKind::PeerStalled
        );
        if !self.migration.is_possible
            || !is_of_path
            || !matches!(self.phase, Phase::Up)
            || self.migration.transport == ActiveTransport::Tcp
        {
            return false;
        }
        if self.migration.transport == ActiveTransport::Rdma {
            self.migration.transport = ActiveTransport::Migrating;
            self.migration.lost = Some(LostPath::new(error));
            self.stats.moves += 1;
        }
        true
    }

    /// Ends the path because the peer has lost it. Returns false if the link cannot use another.
    pub(crate) fn lose_for_peer(&mut self) -> bool {
        self.lose(&Error::new(ErrorKind::LinkDown, "the peer has lost the path"))
    }

    /// Leaves RDMA at the application's request. Returns false if the link does not use RDMA, or
    /// cannot migrate.
    pub(crate) fn leave_rdma(&mut self) -> bool {
        self.migration.transport == ActiveTransport::Rdma
            && self.lose(&Error::new(
                ErrorKind::LinkDown,
                "the application moved the link from RDMA to TCP",
            ))
    }

    /// Keeps a request that the device did not accept, for the next path.
    pub(crate) fn not_posted(&mut self, held: Held, request: RequestContext) {
        if let Some(lost) = &mut self.migration.lost {
            lost.not_posted.push_back(InFlight { held, request });
        }
    }

    /// Returns whether the queue pair of a lost path must be destroyed.
    pub(crate) fn is_to_be_detached(&self) -> bool {
        self.migration.lost.as_ref().is_some_and(|lost| !lost.is_detached)
    }

    /// Returns whether the driver waits for the last receive of the lost path.
    pub(crate) fn is_draining(&self) -> bool {
        self.migration.lost.as_ref().is_some_and(|lost| lost.is_draining)
    }

    /// Notes that the queue pair was destroyed, with these requests in flight. No data can arrive
    /// over it any more.
    pub(crate) fn on_detached(&mut self, in_flight: Vec<InFlight<RequestContext>>) {
        if let Some(lost) = &mut self.migration.lost {
            lost.under_way = in_flight.into();
            lost.under_way.append(&mut lost.not_posted);
            lost.is_detached = true;
        }
        self.upgrade.on_path_lost();
        self.liveness.forget_path();
    }

    /// Reports on the connection how many frames have arrived, once the lost path can deliver no
    /// more. If the peer has already reported its own number, the link continues on the connection.
    pub(crate) fn resume(&mut self, wakes: &mut Wakes) {
        let received = self.credits.received();
        let Migration { lost: Some(lost), has_connection: true, to_say, .. } = &mut self.migration
        else {
            return;
        };
        if !lost.is_detached {
            return;
        }
        if !std::mem::replace(&mut lost.is_told, true) {
            to_say.push_back((path_frame(TcpFrameKind::Resume, received), Body::Nothing));
        }
        if let Some(received) = lost.peer_received {
            self.go_on(received, wakes);
        }
    }

    /// Continues over a new connection. Both sides reported in the connection's greeting how many
    /// frames they have received. Returns false if the link already has a path or a connection, or
    /// has not destroyed its queue pair yet.
    pub(crate) fn resume_over(&mut self, peer_received: u64, wakes: &mut Wakes) -> bool {
        let Migration { lost: Some(lost), has_connection, .. } = &mut self.migration else {
            return false;
        };
        if !lost.is_detached || *has_connection {
            return false;
        }
        lost.is_told = true;
        *has_connection = true;
        self.go_on(peer_received, wakes);
        true
    }

    /// Handles the peer's report that its path is lost, with the number of frames that it has
    /// received.
    pub(super) fn on_resume(&mut self, received: u64, wakes: &mut Wakes) -> Result<(), Error> {
        let error = Error::new(ErrorKind::LinkDown, "the peer has lost the path");
        if self.migration.transport == ActiveTransport::Tcp {
            // The peer has switched to RDMA. This side has not learned of the switch yet, or has
            // withdrawn from the upgrade since.
            if !std::mem::take(&mut self.migration.may_resume) {
                return Err(super::protocol("Resume, but the link did not use RDMA"));
            }
            self.migration.transport = ActiveTransport::Migrating;
            self.migration.lost = Some(LostPath::new(&error));
        }
        self.lose(&error);
        if let Some(lost) = &mut self.migration.lost {
            if lost.peer_received.replace(received).is_some() {
                return Err(super::protocol("a second Resume for the same path"));
            }
            if lost.is_detached && lost.is_told {
                self.go_on(received, wakes);
            }
        }
        Ok(())
    }

    /// Switches to TCP, beginning with the frames that the peer has not received.
    fn go_on(&mut self, peer_received: u64, wakes: &mut Wakes) {
        let Some(LostPath { under_way, .. }) = self.migration.lost.take() else { return };
        self.migration.transport = ActiveTransport::Tcp;
        if let Err(violation) = self.credits.check_resumed(peer_received) {
            self.end(violation.into(), wakes);
            return;
        }
        let mut kept = std::mem::take(&mut self.migration.kept);
        self.migration.kept_bytes = 0;
        kept.retain(|kept| kept.number > peer_received);
        for InFlight { held, request } in under_way {
            let has_come = request.frame <= peer_received;
            match request.kind {
                Kind::Send | Kind::Notice if has_come => {
                    self.complete(request, Held::Nothing, Ok(()), wakes);
                }
                Kind::Send | Kind::Notice => {
                    // Earlier frames may have reached the peer's device, but not its software. They
                    // are sent again first.
                    self.repeat_until(&mut kept, request.frame, wakes);
                    let again = match kept.pop_front().map(|kept| kept.content) {
                        Some(KeptContent::Piece { channel, more, body }) => {
                            Again::Frame { channel, more, body, request }
                        }
                        _ => Again::OneSided { held, request },
                    };
                    self.migration.again.push_back(again);
                }
                // A later frame has arrived, so this write was executed.
                Kind::Write if request.frame < peer_received => {
                    self.complete(request, held, Ok(()), wakes);
                }
                Kind::Write | Kind::Read => {
                    self.repeat_until(&mut kept, request.frame + 1, wakes);
                    self.migration.again.push_back(Again::OneSided { held, request });
                }
                Kind::Again | Kind::Control | Kind::Last | Kind::Bind => {}
            }
        }
        self.repeat_until(&mut kept, u64::MAX, wakes);
        if self.failure().is_some() {
            return;
        }
        // The path may have lost control frames, so credits and revocations are sent again. The
        // closing frames follow once everything else was sent.
        self.closing.say_again();
        self.outbox.controls.clear();
        self.outbox.controls.push_back(Control::Credit);
        self.outbox.controls.extend(self.grants.unanswered());
    }

    /// Queues the kept frames before `frame` to be sent again: the peer's device has received them,
    /// but its software has not. Ends the link if one of them is the notice of a write.
    fn repeat_until(&mut self, kept: &mut VecDeque<KeptFrame>, frame: u64, wakes: &mut Wakes) {
        while let Some(KeptFrame { number, content }) =
            kept.pop_front_if(|kept| kept.number < frame)
        {
            let KeptContent::Piece { channel, more, body } = content else {
                let what = "the path was lost, and with it the immediate data of a write";
                self.end(Error::new(ErrorKind::LinkDown, what), wakes);
                return;
            };
            let request =
                RequestContext { kind: Kind::Again, frame: number, ..RequestContext::default() };
            self.migration.again.push_back(Again::Frame { channel, more, body, request });
        }
    }
}
