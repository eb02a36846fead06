//! The protocol of a link, without I/O.
//!
//! ```text
//!   application ──► push, pop ──► ┌──────────┐ ──► next_output, next_tcp_output ──► driver ──► device, socket
//!   peer's frames, completions ─► │ LinkCore │ ──► steps, wakes
//!   the clock ──────────────────► └──────────┘
//! ```
//!
//! The core takes events, bytes and the time, and decides what to send. The *driver* of a core is
//! the code that does the core's I/O: `link/state.rs` posts work requests, handles completions, and
//! reads and writes the socket. The fabric's poller polls the completion queues, and takes the
//! steps of an upgrade. Because the core does no I/O, two cores can run against each other in
//! virtual time (`link/simulation.rs`).
//!
//! The *caller* of a link is the side that opened the link, also after a migration.
//!
//! | file | what it decides |
//! |---|---|
//! | `credits.rs` | how many frames may be under way |
//! | `closing.rs` | how a link closes in good order |
//! | `ending.rs` | how a link or its path ends, and which tasks learn of it |
//! | `grants.rs` | which grants are revoked, and which revocations are confirmed |
//! | `liveness.rs` | when a silent peer gets a keepalive, and when it is given up |
//! | `migration.rs` | how a link continues on another path |
//! | `probing.rs` | when a caller that hears nothing probes its path |
//! | `redial.rs` | from which address a caller reconnects |
//! | `upgrade.rs` | how a link goes from TCP to RDMA |
//! | `sending.rs` `receiving.rs` | what is sent next, what a frame means |
//! | `tcp.rs` | the same for a TCP connection |
//!
//! ```text
//!   Opening ──► Up ──► closing ──► Down(closed)     closing: no new messages, queued ones are
//!      │         │        │                         delivered, then Fin, which the peer answers
//!      │         │        │                         with FinAck
//!      └─────────┴────────┴──────► Down(first failure)
//! ```

mod body;
mod closing;
mod credits;
mod ending;
mod grants;
mod liveness;
mod migration;
mod probing;
mod receiving;
mod redial;
mod request;
mod sending;
mod tcp;
mod upgrade;

pub(crate) use body::Body;
pub(crate) use liveness::{Look, PeerTimeouts, Silence};
pub(crate) use migration::ActiveTransport;
pub(crate) use receiving::protocol;
pub(crate) use redial::Redial;
use request::Sampler;
pub(crate) use request::{RequestContext, outcome};
pub(crate) use sending::Output;
pub(crate) use tcp::{SEGMENT_BYTES, TcpOutput, data_frame};
pub(crate) use upgrade::Step;

use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Instant;

use super::inbox::{Arrived, Inbox, Limits};
use super::keepalive::Keepalive;
use super::message::Message;
use super::outbox::{OneSided, Outbox, QueuedMessage, frames};
use super::stats::LinkStats;
use super::tickets::{Outcome, Ticket, Tickets};
use crate::device::slots::Held;
use crate::error::{Error, ErrorKind};
use crate::latency::Latencies;
use crate::mem::Buf;
use crate::wire::{Control, Features, Hello};
use closing::Closing;
use credits::Credits;
use grants::Grants;
use liveness::Liveness;
use migration::Migration;
use probing::{Probe, Progress};
use upgrade::Upgrade;

/// Tasks to be woken when the link's lock is free again.
pub(crate) type Wakes = Vec<Waker>;

/// The phase of a link's life.
pub(crate) enum Phase {
    Opening,
    Up,
    Down(Error),
}

/// The limits of this side, from its configuration, and what it needs to measure latencies.
#[derive(Clone)]
pub(crate) struct OwnLimits {
    pub(crate) hello: Hello,
    pub(crate) queue_messages: usize,
    pub(crate) queue_bytes: u64,
    pub(crate) keepalive: Keepalive,
    pub(crate) timeouts: PeerTimeouts,
    pub(crate) latencies: Arc<Latencies>,
    pub(crate) clock: quanta::Clock,
}

/// Tasks that wait for the link.
#[derive(Default)]
pub(crate) struct Waiters {
    pub(crate) message: Wakes,
    pub(crate) room: Wakes,
    pub(crate) end: Wakes,
}

pub(crate) struct LinkCore {
    phase: Phase,
    limits: OwnLimits,
    /// Limits of the peer.
    peer: Hello,
    pub(crate) credits: Credits,
    closing: Closing,
    grants: Grants,
    liveness: Liveness,
    migration: Migration,
    upgrade: Upgrade,
    outbox: Outbox,
    inbox: Inbox<Buf>,
    tickets: Tickets,
    sampler: Sampler,
    pub(crate) waiters: Waiters,
    pub(crate) stats: LinkStats,
}

impl LinkCore {
    pub(crate) fn new(limits: OwnLimits, transport: ActiveTransport, now: Instant) -> Self {
        let hello = limits.hello;
        let Hello { channels, max_message_bytes, .. } = hello;
        Self {
            phase: Phase::Opening,
            peer: hello,
            credits: Credits::new(hello.window, hello.window),
            closing: Closing::default(),
            grants: Grants::default(),
            liveness: Liveness::new(limits.keepalive.clone(), limits.timeouts, now),
            migration: Migration::new(transport),
            upgrade: Upgrade::default(),
            outbox: Outbox::default(),
            inbox: Inbox::new(Limits {
                channels,
                max_message_bytes,
                max_frames: hello.max_frames(),
            }),
            tickets: Tickets::default(),
            sampler: Sampler::default(),
            waiters: Waiters::default(),
            stats: LinkStats::default(),
            limits,
        }
    }

    /// Completes the handshake: applies the peer's hello, and opens the link.
    pub(crate) fn open(&mut self, peer: Hello, now: Instant) {
        self.set_peer(peer);
        self.migration.is_possible =
            self.uses(Features::MOVE) && peer.session != 0 && self.limits.hello.session != 0;
        self.liveness.on_heard(now);
        if matches!(self.phase, Phase::Opening) {
            self.phase = Phase::Up;
        }
    }

    /// Applies the peer's hello before the handshake ends.
    pub(crate) fn set_peer(&mut self, peer: Hello) {
        self.peer = peer;
        self.credits.set_peer_window(peer.window);
    }

    /// Returns whether both sides have these features. A link uses no others.
    pub(crate) fn uses(&self, features: Features) -> bool {
        (self.peer.features & self.limits.hello.features).contains(features)
    }

    /// Returns the hello of this side.
    pub(crate) fn hello(&self) -> &Hello {
        &self.limits.hello
    }

    pub(crate) fn peer(&self) -> &Hello {
        &self.peer
    }

    pub(crate) fn is_up(&self) -> bool {
        matches!(self.phase, Phase::Up)
    }

    pub(crate) fn failure(&self) -> Option<&Error> {
        match &self.phase {
            Phase::Down(error) => Some(error),
            Phase::Opening | Phase::Up => None,
        }
    }

    /// Returns the failure, or a general error if the link has none.
    pub(crate) fn failure_or_gone(&self) -> Error {
        let gone = || Error::new(ErrorKind::Closed, "the link is gone");
        self.failure().cloned().unwrap_or_else(gone)
    }

    /// Checks whether new work is accepted.
    pub(crate) fn check_open(&self) -> Result<(), Error> {
        match &self.phase {
            Phase::Down(error) => Err(error.clone()),
            _ if self.closing.is_requested() => {
                Err(Error::new(ErrorKind::Closed, "the link is closing"))
            }
            _ if self.closing.peer_has_closed() => {
                Err(Error::new(ErrorKind::Closed, "the peer has closed the link"))
            }
            _ => Ok(()),
        }
    }

    /// Returns whether another message or one-sided operation of `bytes` bytes may be queued. An
    /// empty queue accepts any size.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        let waiting = self.outbox.waiting();
        waiting == 0
            || waiting < self.limits.queue_messages
                && self.outbox.waiting_bytes() + bytes <= self.limits.queue_bytes
    }

    /// Returns whether messages or one-sided operations wait to be sent.
    #[cfg(feature = "tokio")]
    pub(crate) fn has_queued(&self) -> bool {
        !self.outbox.is_empty()
    }

    #[cfg(feature = "tokio")]
    pub(crate) fn peer_has_closed(&self) -> bool {
        self.closing.peer_has_closed()
    }

    pub(crate) fn check_message(&self, channel: u16, bytes: u64) -> Result<(), Error> {
        if channel >= self.peer.channels {
            let what = format!(
                "channel {channel} does not exist: the peer has {} channels",
                self.peer.channels
            );
            return Err(Error::new(ErrorKind::Misuse, what));
        }
        if bytes > self.peer.max_message_bytes {
            let what = format!(
                "a message of {bytes} bytes is too long: the peer accepts {} (max_message_bytes)",
                self.peer.max_message_bytes
            );
            return Err(Error::new(ErrorKind::TooLarge, what));
        }
        Ok(())
    }

    /// Checks the number of frames of a message of several parts.
    pub(crate) fn check_parts(&self, parts: &[Buf]) -> Result<(), Error> {
        let max = self.peer.max_frames();
        let frames = frames(parts, self.peer.segment_bytes as usize);
        if frames > max {
            let what = format!(
                "a message of {frames} frames is too long: the peer accepts {max}; send fewer, \
                 larger parts"
            );
            return Err(Error::new(ErrorKind::TooLarge, what));
        }
        Ok(())
    }

    /// Queues a message that was checked.
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

    /// Queues a one-sided operation.
    pub(crate) fn push_one_sided(&mut self, mut operation: OneSided, wait: bool) -> Option<Ticket> {
        let ticket = wait.then(|| self.tickets.issue());
        operation.ticket = ticket;
        self.outbox.push_one_sided(operation);
        ticket
    }

    /// Returns the next message or notice; `None` if there is none yet.
    ///
    /// # Errors
    /// Fails if the link is down or the peer has closed it, and every message that arrived before
    /// was taken. The kind is `Closed` after an orderly close.
    pub(crate) fn pop(&mut self) -> Result<Option<Message>, Error> {
        if let Some(arrived) = self.inbox.pop() {
            self.count_consumed();
            return Ok(Some(match arrived {
                Arrived::Message { channel, parts, bytes } => Message::new(channel, parts, bytes),
                Arrived::Notice(imm) => Message::notice_of(imm),
            }));
        }
        match self.failure() {
            Some(error) => Err(error.clone()),
            None if self.closing.peer_has_closed() => {
                Err(Error::new(ErrorKind::Closed, "the peer has closed the link"))
            }
            None => Ok(None),
        }
    }

    /// Drops all unfinished messages. The caller knows that their remaining frames cannot arrive.
    pub(crate) fn drop_partial(&mut self) {
        self.inbox.drop_partial();
    }

    /// Returns whether the application has taken everything that has arrived.
    #[cfg(feature = "tokio")]
    pub(crate) fn is_all_read(&self) -> bool {
        self.inbox.is_empty()
    }

    pub(crate) fn poll_ticket(&mut self, ticket: Ticket, waker: &Waker) -> Poll<Outcome> {
        self.tickets.poll(ticket, waker)
    }

    pub(crate) fn abandon(&mut self, ticket: Ticket) {
        self.tickets.abandon(ticket);
    }

    pub(crate) fn wake_on_message(&mut self, waker: &Waker) {
        keep(&mut self.waiters.message, waker);
    }

    pub(crate) fn wake_on_room(&mut self, waker: &Waker) {
        keep(&mut self.waiters.room, waker);
    }

    pub(crate) fn wake_on_end(&mut self, waker: &Waker) {
        keep(&mut self.waiters.end, waker);
    }

    /// Returns whether the driver must call [`LinkCore::begin_probing`]. Returns true only once.
    #[inline]
    pub(crate) fn take_probe_request(&mut self) -> bool {
        self.may_probe() && self.liveness.probing.take_request(self.progress())
    }

    /// Starts the wait for the peer, if [`LinkCore::take_probe_request`] has asked for it. Returns
    /// when the driver must call [`LinkCore::on_probe_timer`].
    pub(crate) fn begin_probing(&mut self, now: Instant) -> Option<Instant> {
        self.liveness.probing.begin(self.progress(), now)
    }

    /// Probes the path if the peer was silent for too long. The probe returns credits and needs no
    /// answer: the device tells whether it has arrived. Returns when to call this again.
    pub(crate) fn on_probe_timer(&mut self, now: Instant) -> Option<Instant> {
        if !self.may_probe() {
            self.liveness.probing.forget();
            return None;
        }
        match self.liveness.probing.on_timer(self.progress(), now) {
            Probe::None => None,
            Probe::Wait(next) => Some(next),
            Probe::Send(next) => {
                if self.outbox.controls.is_empty() {
                    self.outbox.controls.push_back(Control::Credit);
                }
                Some(next)
            }
        }
    }

    /// Returns whether the link uses RDMA and this side would replace a lost path. Only the caller
    /// reconnects, and only while neither side has closed the link.
    fn may_probe(&self) -> bool {
        self.migration.is_possible
            && self.migration.is_caller
            && self.migration.transport == ActiveTransport::Rdma
            && self.is_up()
            && !self.closing.is_requested()
            && !self.closing.peer_has_closed()
    }

    fn progress(&self) -> Progress {
        let heard = self.credits.received() + self.credits.acknowledged();
        Progress { sent: self.credits.sent(), heard }
    }

    /// Notes a sign of life, even if only a part of a frame has arrived.
    pub(crate) fn on_heard(&mut self, now: Instant) {
        self.liveness.on_heard(now);
    }

    /// Notes that the peer's device has acknowledged a request.
    pub(crate) fn on_acknowledged_by_device(&mut self) {
        self.liveness.on_acknowledged();
    }

    /// Revokes a grant of ours. If too many revocations are unanswered, the peer is told later.
    pub(crate) fn revoke(&mut self, grant: u64) {
        self.outbox.controls.extend(self.grants.revoke(grant));
    }

    pub(crate) fn is_revoked(&self, grant: u64) -> bool {
        self.grants.is_revoked(grant)
    }

    /// Returns our revoked grants that the peer has released.
    pub(crate) fn take_released(&mut self) -> Vec<u64> {
        self.grants.take_released()
    }

    pub(crate) fn has_released(&self) -> bool {
        self.grants.has_released()
    }

    /// Confirms revocations of the peer's grants that nothing uses any more. `is_used` returns
    /// whether a request in flight uses a grant.
    pub(crate) fn answer_revocations(&mut self, is_used: impl Fn(u64) -> bool) {
        let has_no_path =
            self.migration.transport != ActiveTransport::Rdma && !self.migration.has_connection;
        if self.grants.waiting() == 0 || has_no_path || self.migration.lost.is_some() {
            return; // nothing to confirm, or no path to confirm it on yet
        }
        let Self { grants, outbox, migration, .. } = self;
        grants.answer(&mut outbox.controls, |grant| is_used(grant) || migration.repeats(grant));
    }

    /// Finishes an operation that is done or has failed, and counts it.
    pub(crate) fn complete(
        &mut self,
        request: RequestContext,
        held: Held,
        result: Result<(), Error>,
        wakes: &mut Wakes,
    ) {
        self.stats.completed(request.kind, request.bytes, result.is_err());
        self.finish(request, held, result, wakes);
    }

    /// Reports the result of an operation to its future, and records the latency of a success.
    pub(crate) fn finish(
        &mut self,
        request: RequestContext,
        held: Held,
        result: Result<(), Error>,
        wakes: &mut Wakes,
    ) {
        if result.is_ok() {
            request.record_latency(&self.limits);
        }
        if let Some(ticket) = request.ticket {
            wakes.extend(self.tickets.finish(ticket, outcome(result, held)));
        }
    }

    /// Returns the current time if someone waits for the operation; otherwise 0.
    fn began(&self, ticket: Option<Ticket>) -> u64 {
        if ticket.is_some() { self.limits.clock.raw() } else { 0 }
    }
}

/// Keeps a waker, unless an equal one is kept already.
pub(crate) fn keep(wakers: &mut Wakes, waker: &Waker) {
    if !wakers.iter().any(|kept| kept.will_wake(waker)) {
        wakers.push(waker.clone());
    }
}
