//! The state of a link: credits, what goes out, what came in, and how it ends. Everything here
//! happens under its lock.
//!
//! ```text
//!   Opening ──► Up ──► closing ──► Down(closed)        closing: nothing new is taken, what was sent is delivered
//!      │         │        │                            (Fin, FinAck), then both sides hang up
//!      └─────────┴────────┴──────► Down(first failure) ──► in flight: flushed ──► queue pair destroyed
//! ```
//!
//! Credits: a peer may send `window` frames that are not consumed. A frame is consumed when it
//! became part of a message that is still being put together, or when the application has taken its
//! message. The count travels in every frame; if there is none to send, in a control frame of its
//! own. Control frames need no credit: they are consumed at once, and if ever no receive is posted,
//! the device repeats them until one is.

mod ending;
mod exposing;
mod migration;
mod over_tcp;
mod raw_connection;
mod receiving;
mod sending;
mod upgrading;

pub(crate) use ending::{Destroying, Silence};
pub(crate) use migration::ActiveTransport;
pub(crate) use over_tcp::{Reading, Request};
pub use raw_connection::{Arrival, Done};
pub(crate) use upgrading::Step;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use ferrite_verbs::{Access, WorkCompletion};

use super::inbox::{Arrived, Inbox, Limits};
use super::keepalive::Keepalive;
use super::message::Message;
use super::outbox::{OneSided, Outbox, QueuedMessage, frames};
use super::stats::LinkStats;
use super::tcp::TcpPath;
use super::tickets::{Outcome, Ticket, Tickets};
use crate::error::{Error, ErrorKind};
use crate::fabric::shared_device::SharedDevice;
use crate::fabric::slots::{Held, SendQueue, Work};
use crate::latency::Latencies;
use crate::mem::{Buf, Pool, Window};
use crate::wire::{Control, Features, Hello};
use migration::{Again, Kept, Lost};
use upgrading::Upgrade;

/// Who is to be woken when the lock is gone.
pub(crate) type Wakes = Vec<Waker>;

/// What comes back with a completion.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RequestContext {
    ticket: Option<Ticket>,
    kind: Kind,
    bytes: u32,
    /// Frames sent when it was, itself included if it is one.
    frame: u64,
    /// Of one-sided operations: the grant and where in it, and what the peer is told.
    grant: u64,
    offset: u64,
    imm: u32,
    /// When it began, if somebody waits for it; else 0.
    begun: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Kind {
    /// The last request of a link that is down: its completion says that all before it are done.
    Last,
    #[default]
    Control,
    Send,
    Write,
    /// A write that the peer is told of.
    Notice,
    Read,
    /// A frame that the peer's device had once: it was counted then.
    Again,
    /// A memory window is bound.
    Bind,
}

impl Kind {
    pub(crate) fn is_one_sided(self) -> bool {
        matches!(self, Self::Write | Self::Notice | Self::Read)
    }
}

pub(crate) enum Phase {
    Opening,
    Up,
    Down(Error),
}

/// What the lock's holder needs from outside.
pub(crate) struct LinkEnv<'a> {
    pub(crate) index: u32,
    /// The device that carries the link when the lock is taken; `None` on TCP.
    pub(crate) device: Option<Arc<SharedDevice>>,
    pub(crate) pool: &'a Pool,
}

impl LinkEnv<'_> {
    /// Takes up to `wanted` entries of the completion queue.
    fn reserve(&self, wanted: usize) -> usize {
        self.device.as_ref().map_or(0, |device| device.reserve(wanted))
    }

    fn release(&self, entries: usize) {
        if let Some(device) = &self.device {
            device.release(entries);
        }
    }

    fn is_pressed(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.is_pressed())
    }

    /// Stands in line for entries.
    fn wait(&self) {
        if let Some(device) = &self.device {
            device.wait(self.index);
        }
    }
}

pub(crate) struct LinkState {
    pub(crate) phase: Phase,
    pub(crate) queue: SendQueue<RequestContext>,
    /// A command destroys the queue pair.
    is_destroying: bool,
    /// Whose queues the queue pair uses; `None` on TCP.
    pub(crate) device: Option<Arc<SharedDevice>>,
    /// The connection: on TCP, or as the way back.
    pub(crate) tcp: Option<TcpPath>,
    pub(crate) transport: ActiveTransport,
    /// This side opened it.
    pub(crate) is_caller: bool,
    /// What is particular to a peer of another protocol, if it is one.
    raw: Option<Box<raw_connection::RawConnection>>,
    /// A path that is lost can be replaced by another.
    pub(crate) moves: bool,
    kept: VecDeque<Kept>,
    kept_bytes: usize,
    again: VecDeque<Again>,
    pub(crate) lost: Option<Lost>,
    pub(crate) upgrade: Option<Upgrade>,
    /// The peer has made an offer that neither side has withdrawn: the next would break the rules.
    peer_offers: bool,
    /// The command for the way up that is under way or was the last, by number; `None` if there is
    /// no way up.
    attempt: Option<u64>,
    attempts: u64,
    /// The peer may be on RDMA already, and say that it has lost that, while TCP carries the link
    /// for this side.
    may_resume: bool,
    /// For the fabric.
    pub(crate) steps: Vec<Step>,
    /// Where grants of the peer's are on the device that carries the link, if not where their
    /// tokens say.
    rekeyed: BTreeMap<u64, (u64, u32)>,
    /// Where the generations of the next queue pair's slots begin.
    pub(crate) generation: u32,
    upgrade_wait: Option<Duration>,
    /// When to try to go up to RDMA next.
    pub(crate) upgrade_at: Option<Instant>,
    pub(crate) stats: LinkStats,
    outbox: Outbox,
    tickets: Tickets,
    inbox: Inbox<Buf>,
    controls: VecDeque<Control>,
    /// Windows that are to be bound to the queue pair.
    binds: VecDeque<Arc<Window>>,
    /// What the peer may do to our memory, as far as the queue pair decides it.
    rights: Access,
    /// Reused for each post.
    batch: Vec<Work<RequestContext>>,
    inline: usize,
    unsignaled: usize,
    limits: OwnLimits,
    /// What the peer takes.
    peer: Hello,
    /// Frames sent that need a credit, and how many of them the peer has consumed.
    sent: u64,
    acknowledged: u64,
    /// Frames of the peer's: received, consumed, and what it was told of that.
    received: u64,
    consumed: u64,
    told: u64,
    closing: bool,
    close_called: bool,
    fin_sent: bool,
    peer_fin: bool,
    fin_ack_sent: bool,
    /// Grants that the peer took back, and those whose last use is still in flight.
    revoked: BTreeSet<u64>,
    revoking: Vec<u64>,
    /// Grants of ours that the peer was told are over and has not answered for, and those that it
    /// is still to be told of.
    told_revoked: Vec<u64>,
    to_be_revoked: VecDeque<u64>,
    /// Grants of ours that the peer has let go of: for the fabric.
    pub(crate) released: Vec<u64>,
    receivers: Wakes,
    wait_for_room: Wakes,
    wait_for_end: Wakes,
    last_heard: Instant,
    asked: Option<Instant>,
    /// The peer's device has acknowledged something since it was asked.
    acknowledged_since: bool,
    /// The fabric has been told that the link is down.
    pub(crate) announced: bool,
    /// The device refused a request of the peer's.
    pub(crate) peer_was_refused: bool,
    /// The last request was posted.
    last_posted: bool,
    /// Completions of requests that were flushed before it was known why, and whether the fabric
    /// was told of them.
    flushed: Vec<WorkCompletion>,
    flush_called: bool,
}

/// What the configuration allows on this side.
#[derive(Clone)]
pub(crate) struct OwnLimits {
    pub(crate) hello: Hello,
    pub(crate) queue_messages: usize,
    pub(crate) queue_bytes: u64,
    pub(crate) patience: Keepalive,
    pub(crate) peer_timeout: Duration,
    pub(crate) latencies: Arc<Latencies>,
    pub(crate) clock: quanta::Clock,
}

/// Grants that are known to be revoked. Beyond that the oldest are forgotten: who uses one of them
/// is told by the device.
const REVOKED_MAX: usize = 1 << 16;
/// Revocations that a peer is told of before it has answered.
const REVOKING_MAX: usize = 64;
/// Answers to a peer's control frames that may wait to be sent.
const CONTROLS_MAX: usize = 1024;

impl LinkState {
    /// Over a queue pair.
    pub(crate) fn new(
        queue: SendQueue<RequestContext>,
        device: Arc<SharedDevice>,
        inline: usize,
        limits: OwnLimits,
    ) -> Self {
        Self::with(queue, Some(device), None, inline, limits)
    }

    /// Over a TCP connection.
    pub(crate) fn over_tcp(tcp: TcpPath, limits: OwnLimits) -> Self {
        Self::with(SendQueue::none(), None, Some(tcp), 0, limits)
    }

    fn with(
        queue: SendQueue<RequestContext>,
        device: Option<Arc<SharedDevice>>,
        tcp: Option<TcpPath>,
        inline: usize,
        limits: OwnLimits,
    ) -> Self {
        let Hello { channels, max_message_bytes, .. } = limits.hello;
        Self {
            phase: Phase::Opening,
            queue,
            is_destroying: false,
            transport: if tcp.is_some() { ActiveTransport::Tcp } else { ActiveTransport::Rdma },
            device,
            tcp,
            is_caller: false,
            raw: None,
            moves: false,
            kept: VecDeque::new(),
            kept_bytes: 0,
            again: VecDeque::new(),
            lost: None,
            upgrade: None,
            peer_offers: false,
            attempt: None,
            attempts: 0,
            may_resume: false,
            steps: Vec::new(),
            rekeyed: BTreeMap::new(),
            generation: 0,
            upgrade_wait: None,
            upgrade_at: None,
            stats: LinkStats::default(),
            outbox: Outbox::default(),
            tickets: Tickets::default(),
            inbox: Inbox::new(Limits {
                channels,
                max_message_bytes,
                max_frames: limits.hello.max_frames(),
            }),
            controls: VecDeque::new(),
            binds: VecDeque::new(),
            rights: Access::LOCAL,
            batch: Vec::new(),
            inline,
            unsignaled: 0,
            peer: limits.hello,
            limits,
            sent: 0,
            acknowledged: 0,
            received: 0,
            consumed: 0,
            told: 0,
            closing: false,
            close_called: false,
            fin_sent: false,
            peer_fin: false,
            fin_ack_sent: false,
            revoked: BTreeSet::new(),
            revoking: Vec::new(),
            told_revoked: Vec::new(),
            to_be_revoked: VecDeque::new(),
            released: Vec::new(),
            receivers: Vec::new(),
            wait_for_room: Vec::new(),
            wait_for_end: Vec::new(),
            last_heard: Instant::now(),
            asked: None,
            acknowledged_since: false,
            announced: false,
            peer_was_refused: false,
            last_posted: false,
            flushed: Vec::new(),
            flush_called: false,
        }
    }

    /// The handshake is done, and this is what the peer said.
    pub(crate) fn open(&mut self, peer: Hello, now: Instant) {
        self.peer = peer;
        let common = peer.features & self.limits.hello.features;
        self.moves =
            common.contains(Features::MOVE) && peer.session != 0 && self.limits.hello.session != 0;
        self.last_heard = now;
        if matches!(self.phase, Phase::Opening) {
            self.phase = Phase::Up;
        }
    }

    /// What the peer said of itself.
    pub(crate) fn set_peer(&mut self, peer: Hello) {
        self.peer = peer;
    }

    /// What this side said of itself.
    pub(crate) fn hello(&self) -> &Hello {
        &self.limits.hello
    }

    pub(crate) fn peer(&self) -> &Hello {
        &self.peer
    }

    pub(crate) fn failure(&self) -> Option<&Error> {
        match &self.phase {
            Phase::Down(error) => Some(error),
            Phase::Opening | Phase::Up => None,
        }
    }

    /// Whether new work is taken.
    pub(crate) fn check_open(&self) -> Result<(), Error> {
        match &self.phase {
            Phase::Down(error) => Err(error.clone()),
            _ if self.closing => Err(Error::new(ErrorKind::Closed, "the link is closing")),
            _ if self.peer_fin => {
                Err(Error::new(ErrorKind::Closed, "the peer has closed the link"))
            }
            _ => Ok(()),
        }
    }

    /// Whether another message of `bytes` may wait.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        let waiting = self.outbox.waiting();
        waiting == 0
            || waiting < self.limits.queue_messages
                && self.outbox.waiting_bytes() + bytes <= self.limits.queue_bytes
    }

    /// Whether messages wait, or something that is in flight has a buffer: a completion of it
    /// brings progress.
    #[cfg(feature = "tokio")]
    pub(crate) fn holds_memory(&self) -> bool {
        let has_buffer = |held: &Held| matches!(held, Held::Shared(_) | Held::Unique(_));
        !self.outbox.is_empty() || self.queue.iter().any(|in_flight| has_buffer(&in_flight.held))
    }

    #[cfg(feature = "tokio")]
    pub(crate) fn peer_has_closed(&self) -> bool {
        self.peer_fin
    }

    pub(crate) fn check_message(&self, channel: u16, bytes: u64) -> Result<(), Error> {
        if channel >= self.peer.channels {
            let what = format!("channel {channel}: the peer has {}", self.peer.channels);
            return Err(Error::new(ErrorKind::Misuse, what));
        }
        if bytes > self.peer.max_message_bytes {
            let what = format!(
                "a message of {bytes} bytes: the peer takes {} (max_message_bytes)",
                self.peer.max_message_bytes
            );
            return Err(Error::new(ErrorKind::TooLarge, what));
        }
        Ok(())
    }

    /// As [`LinkState::check_message`], of what a message of several parts may be.
    pub(crate) fn check_parts(&self, parts: &[Buf]) -> Result<(), Error> {
        let (frames, max) =
            (frames(parts, self.peer.segment_bytes as usize), self.peer.max_frames());
        if frames > max {
            let what = format!(
                "a message of {frames} frames: the peer takes {max}; send fewer, larger parts"
            );
            return Err(Error::new(ErrorKind::TooLarge, what));
        }
        Ok(())
    }

    /// Queues a message; the caller has checked.
    pub(crate) fn push(
        &mut self,
        channel: u16,
        parts: impl IntoIterator<Item = Buf>,
        wait: bool,
    ) -> Option<Ticket> {
        let ticket = wait.then(|| self.tickets.issue());
        self.outbox.push(channel, QueuedMessage::new(parts, ticket));
        ticket
    }

    pub(crate) fn push_one_sided(&mut self, mut operation: OneSided, wait: bool) -> Option<Ticket> {
        let ticket = wait.then(|| self.tickets.issue());
        operation.ticket = ticket;
        self.outbox.push_one_sided(operation);
        ticket
    }

    /// Tells the peer that a grant of ours is over: as soon as it has answered for enough of the
    /// others.
    pub(crate) fn revoke(&mut self, grant: u64) {
        self.to_be_revoked.push_back(grant);
        self.tell_revoked();
    }

    fn tell_revoked(&mut self) {
        while self.told_revoked.len() < REVOKING_MAX
            && let Some(grant) = self.to_be_revoked.pop_front()
        {
            self.told_revoked.push(grant);
            self.controls.push_back(Control::Revoke(grant));
        }
    }

    /// The next message, or `None` if there is none yet.
    ///
    /// # Errors
    /// The link is down, and everything that came before that was taken. Kind `Closed`: in good
    /// order.
    pub(crate) fn pop(&mut self) -> Result<Option<Message>, Error> {
        if let Some(arrived) = self.inbox.pop() {
            self.count_consumed();
            return Ok(Some(match arrived {
                Arrived::Message { channel, parts } => Message::new(channel, parts),
                Arrived::Notice(imm) => Message::notice_of(imm),
            }));
        }
        match self.failure() {
            Some(error) => Err(error.clone()),
            None if self.peer_fin => {
                Err(Error::new(ErrorKind::Closed, "the peer has closed the link"))
            }
            None => Ok(None),
        }
    }

    /// Whether the peer should be told of credits before it waits.
    pub(crate) fn owes_credit(&self) -> bool {
        self.consumed - self.told >= (u64::from(self.limits.hello.window) / 2).max(1)
    }

    pub(crate) fn poll_ticket(
        &mut self,
        ticket: Ticket,
        waker: &Waker,
    ) -> std::task::Poll<Outcome> {
        self.tickets.poll(ticket, waker)
    }

    pub(crate) fn abandon(&mut self, ticket: Ticket) {
        self.tickets.abandon(ticket);
    }

    pub(crate) fn wake_on_message(&mut self, waker: &Waker) {
        keep(&mut self.receivers, waker);
    }

    pub(crate) fn wake_on_room(&mut self, waker: &Waker) {
        keep(&mut self.wait_for_room, waker);
    }

    pub(crate) fn wake_on_end(&mut self, waker: &Waker) {
        keep(&mut self.wait_for_end, waker);
    }

    /// The time, if somebody waits.
    fn began(&self, ticket: Option<Ticket>) -> u64 {
        if ticket.is_some() { self.limits.clock.raw() } else { 0 }
    }
}

/// Counts how long an operation took, if somebody waited for it.
fn took(limits: &OwnLimits, request: &RequestContext) {
    if request.begun != 0 {
        let histogram = match request.kind {
            Kind::Read => &limits.latencies.read,
            Kind::Write | Kind::Notice => &limits.latencies.write,
            _ => &limits.latencies.send,
        };
        histogram.record(limits.clock.delta_as_nanos(request.begun, limits.clock.raw()));
    }
}

fn outcome(result: Result<(), Error>, held: Held) -> Outcome {
    let buf = match held {
        Held::Unique(buf) => Some(buf),
        Held::Nothing | Held::Copied(_) | Held::Passing(_) | Held::Shared(_) | Held::Binding(_) => {
            None
        }
    };
    Outcome { result, buf }
}

/// Keeps a waker, once.
pub(crate) fn keep(wakers: &mut Wakes, waker: &Waker) {
    if !wakers.iter().any(|kept| kept.will_wake(waker)) {
        wakers.push(waker.clone());
    }
}
