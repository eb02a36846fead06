//! What waits to be sent: control frames, messages by channel, one-sided operations, and the order
//! between them. The outbox does no I/O.
//!
//! The channels and the one-sided operations are served round-robin: a channel sends one frame, the
//! one-sided operations send one operation. So a large message delays a small one on another
//! channel by only one frame.

use std::collections::VecDeque;

use super::kind::Kind;
use super::tickets::Ticket;
use crate::device::slots::Held;
use crate::mem::Buf;
use crate::wire::{Control, Hello};

/// A message that is being cut into frames.
pub(crate) struct QueuedMessage {
    /// The part that is being sent, unless the message is empty.
    part: Option<Buf>,
    rest: VecDeque<Buf>,
    /// The number of bytes of `part` that were sent.
    sent: usize,
    /// The total number of bytes.
    total: u64,
    /// The number of frames of a message that needs several; 0 until its first frame is due.
    frames: u64,
    begun: bool,
    ticket: Option<Ticket>,
}

impl QueuedMessage {
    pub(crate) fn new(parts: impl IntoIterator<Item = Buf>, ticket: Option<Ticket>) -> Self {
        let mut parts = parts.into_iter().filter(|part| !part.is_empty());
        let part = parts.next();
        let rest: VecDeque<Buf> = parts.collect(); // does not allocate if there is only one part
        let total = part.iter().chain(&rest).map(|part| part.len() as u64).sum();
        Self { part, rest, sent: 0, total, frames: 0, begun: false, ticket }
    }
}

/// A one-sided operation that waits to be posted.
pub(crate) struct OneSided {
    /// Read, write, or write with a notice.
    pub(crate) kind: Kind,
    pub(crate) held: Held,
    pub(crate) ticket: Option<Ticket>,
    pub(crate) grant: u64,
    /// The start and the key of the granted memory, on the device for which it was granted.
    pub(crate) base: u64,
    pub(crate) rkey: u32,
    /// The offset in the granted memory.
    pub(crate) offset: u64,
    pub(crate) bytes: u32,
    /// The immediate data for the peer.
    pub(crate) imm: u32,
}

/// The next thing to send.
pub(crate) enum Next {
    Frame { channel: u16, more: bool, piece: Option<Buf>, ticket: Option<Ticket> },
    OneSided(OneSided),
}

/// Limits on what may be sent now.
pub(crate) struct Allowed<'a> {
    /// Largest frame.
    pub(crate) segment_bytes: usize,
    /// The number of frames that may be sent now.
    pub(crate) credits: usize,
    /// The peer's limits on bytes and frames of all unfinished messages together.
    pub(crate) peer: &'a Hello,
    /// Whether a one-sided operation may be sent.
    pub(crate) one_sided: bool,
}

/// Returns the number of frames for a message with these parts. Each part that is not empty begins
/// a new frame. Returns 0 for an empty message, although it is sent as one frame.
pub(crate) fn frames<'a>(parts: impl IntoIterator<Item = &'a Buf>, segment_bytes: usize) -> u64 {
    parts.into_iter().map(|part| part.len().div_ceil(segment_bytes) as u64).sum()
}

struct Queue {
    channel: u16,
    queued: VecDeque<QueuedMessage>,
}

#[derive(Default)]
pub(crate) struct Outbox {
    /// Control frames. They are sent before everything else, and need no credit.
    pub(super) controls: VecDeque<Control>,
    /// The channels that were ever used.
    queues: Vec<Queue>,
    one_sided: VecDeque<OneSided>,
    /// What is served next: 0 stands for the one-sided operations, `n + 1` for `queues[n]`.
    turn: usize,
    waiting: usize,
    waiting_bytes: u64,
    /// Total bytes and frames of the messages of which some frames were sent and others were not.
    under_way_bytes: u64,
    under_way_frames: u64,
}

impl Outbox {
    pub(crate) fn push(&mut self, channel: u16, queued: QueuedMessage) {
        self.waiting += 1;
        self.waiting_bytes += queued.total;
        match self.queues.iter_mut().find(|queue| queue.channel == channel) {
            Some(queue) => queue.queued.push_back(queued),
            None => self.queues.push(Queue { channel, queued: VecDeque::from([queued]) }),
        }
    }

    pub(crate) fn push_one_sided(&mut self, operation: OneSided) {
        self.waiting += 1;
        self.waiting_bytes += u64::from(operation.bytes);
        self.one_sided.push_back(operation);
    }

    /// Returns the number of messages and operations that were not sent completely.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting
    }

    pub(crate) fn waiting_bytes(&self) -> u64 {
        self.waiting_bytes
    }

    /// Returns whether no message or operation waits. There may be control frames.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Returns the next frame or operation that may be sent.
    pub(crate) fn next(&mut self, allowed: &Allowed<'_>) -> Option<Next> {
        if self.waiting == 0 {
            return None;
        }
        for _ in 0..=self.queues.len() {
            let turn = self.turn;
            self.turn = if turn < self.queues.len() { turn + 1 } else { 0 };
            let next = match turn.checked_sub(1) {
                None => self.next_one_sided(allowed).map(Next::OneSided),
                Some(queue) => self.next_frame(queue, allowed),
            };
            if next.is_some() {
                return next;
            }
        }
        None
    }

    /// Returns how many bytes the next one-sided operation reads, which is 0 for a write; `None` if
    /// there is no operation.
    pub(crate) fn next_one_sided_reads(&self) -> Option<u64> {
        let next = self.one_sided.front()?;
        Some(if next.kind == Kind::Read { next.bytes.into() } else { 0 })
    }

    fn next_one_sided(&mut self, allowed: &Allowed<'_>) -> Option<OneSided> {
        if !allowed.one_sided {
            return None;
        }
        let needs_credit = self.one_sided.front()?.kind == Kind::Notice;
        if needs_credit && allowed.credits == 0 {
            return None;
        }
        let operation = self.one_sided.pop_front()?;
        self.waiting -= 1;
        self.waiting_bytes -= u64::from(operation.bytes);
        Some(operation)
    }

    fn next_frame(&mut self, queue: usize, allowed: &Allowed<'_>) -> Option<Next> {
        if allowed.credits == 0 {
            return None;
        }
        let queue = &mut self.queues[queue];
        let queued = queue.queued.front_mut()?;
        let channel = queue.channel;
        let Some(part) = &queued.part else {
            let ticket = queue.queued.pop_front().and_then(|queued| queued.ticket);
            self.waiting -= 1;
            return Some(Next::Frame { channel, more: false, piece: None, ticket });
        };
        let end = part.len().min(queued.sent + allowed.segment_bytes);
        let ends_part = end == part.len();
        let more = !(ends_part && queued.rest.is_empty());
        if more && !queued.begun {
            // A message begins only if the peer has room for it besides the other unfinished
            // messages, or if there are no others.
            let bytes = self.under_way_bytes + queued.total;
            queued.frames = frames(queued.part.iter().chain(&queued.rest), allowed.segment_bytes);
            let frames = self.under_way_frames + queued.frames;
            let too_much =
                bytes > allowed.peer.max_message_bytes || frames > allowed.peer.max_frames();
            if too_much && self.under_way_frames > 0 {
                return None;
            }
            (self.under_way_bytes, self.under_way_frames) = (bytes, frames);
            queued.begun = true;
        }
        let piece =
            if queued.sent == 0 && ends_part { part.clone() } else { part.slice(queued.sent..end) };
        if ends_part {
            queued.part = queued.rest.pop_front();
            queued.sent = 0;
        } else {
            queued.sent = end;
        }
        self.waiting_bytes -= piece.len() as u64;
        let mut ticket = None;
        if !more {
            if queued.begun {
                self.under_way_bytes -= queued.total;
                self.under_way_frames -= queued.frames;
            }
            ticket = queue.queued.pop_front().and_then(|queued| queued.ticket);
            self.waiting -= 1;
        }
        Some(Next::Frame { channel, more, piece: Some(piece), ticket })
    }

    /// Removes and returns the one-sided operations that use this grant.
    pub(crate) fn take_using(&mut self, grant: u64) -> VecDeque<OneSided> {
        let (taken, kept): (VecDeque<_>, _) = std::mem::take(&mut self.one_sided)
            .into_iter()
            .partition(|operation| operation.grant == grant);
        self.one_sided = kept;
        self.waiting -= taken.len();
        self.waiting_bytes -= taken.iter().map(|operation| u64::from(operation.bytes)).sum::<u64>();
        taken
    }

    /// Removes everything, because the link is down. Calls `each` for each message and operation
    /// that has a ticket. The second argument is the memory of a one-sided operation.
    pub(crate) fn drain(&mut self, mut each: impl FnMut(Ticket, Held)) {
        for queue in self.queues.drain(..) {
            queue
                .queued
                .into_iter()
                .filter_map(|queued| queued.ticket)
                .for_each(|t| each(t, Held::Nothing));
        }
        for OneSided { ticket, held, .. } in self.one_sided.drain(..) {
            if let Some(ticket) = ticket {
                each(ticket, held);
            }
        }
        *self = Self::default();
    }
}
