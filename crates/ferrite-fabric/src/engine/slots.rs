//! Work requests in flight, and the memory they own.
//!
//! The only place of the engine where memory reaches a device by its address. What makes that sound:
//!
//! - A request is recorded in its slot, with the buffer by value, *before* it is posted. Nobody can drop or reuse a
//!   buffer that the device may touch; a future that waits for it has nothing but a number.
//! - A buffer leaves its slot in two ways: the request's completion was reaped, or the queue was destroyed and the
//!   device said so. If it does not say so, the buffers stay for ever.
//! - While it is in a slot nobody has a reference into a buffer that the device writes: `BufMut` is the only handle of
//!   its block. Of one that the device reads there may be other readers: `Buf` is never written.
#![expect(
    unsafe_code,
    reason = "gives the addresses of buffers to the device: each block states its obligations"
)]

mod table;

use ferrite_verbs::{
    Error, Operation, QueuePair, RecvRequest, SendRequest, Sge, SharedReceiveQueue, WorkCompletion,
};

use crate::mem::{Buf, BufMut, Pool, PoolError, Purpose};
pub(crate) use table::{Key, Table};

/// Requests that are posted in one call.
pub(crate) const BATCH: usize = 8;

/// Memory that belongs to a request.
#[derive(Debug)]
pub(crate) enum Held {
    /// None: there is no payload, or the device has copied it.
    Nothing,
    /// A few bytes that the device copies while they are posted: only for inline requests.
    Copied([u8; 16]),
    /// The device copies it while it is posted, and it is let go of then: only for inline requests that are never repeated.
    Passing(Buf),
    /// The device reads it.
    Shared(Buf),
    /// The device writes it.
    Unique(BufMut),
}

/// A request to be posted; `tag` comes back with it.
pub(crate) struct Work<T> {
    pub(crate) operation: Operation,
    pub(crate) held: Held,
    pub(crate) signaled: bool,
    pub(crate) inline: bool,
    pub(crate) tag: T,
}

/// What is in a slot.
pub(crate) struct InFlight<T> {
    pub(crate) held: Held,
    pub(crate) tag: T,
}

/// The number of a request as the device carries it: whose it is, and the key of its slot.
///
/// ```text
///   63      62 … 40     39 … 16      15 … 0
///   0       owner       generation   slot        a send, write or read of a link
///   1       0           generation   slot        a receive of a device (generation 31 bits, slot 32)
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WorkId(pub(crate) u64);

const RECEIVE: u64 = 1 << 63;
/// More links than any device has queue pairs.
pub(crate) const OWNER_MAX: u32 = (1 << 23) - 1;

impl WorkId {
    fn of_send(owner: u32, key: Key) -> Self {
        Self(u64::from(owner) << 40 | u64::from(key.generation) << 16 | u64::from(key.slot))
    }

    fn of_receive(slot: usize, generation: u32) -> Self {
        Self(RECEIVE | u64::from(generation & 0x7fff_ffff) << 32 | slot as u64)
    }

    pub(crate) fn is_receive(self) -> bool {
        self.0 & RECEIVE != 0
    }

    pub(crate) fn owner(self) -> u32 {
        (self.0 >> 40) as u32 & OWNER_MAX
    }

    fn key(self) -> Key {
        Key { slot: self.0 as u16, generation: (self.0 >> 16) as u32 & table::GENERATION_MASK }
    }
}

/// A queue pair and everything that was posted to its send queue.
pub(crate) struct SendQueue<T> {
    /// `None` once it was destroyed.
    qp: Option<QueuePair>,
    table: Table<InFlight<T>>,
    owner: u32,
    /// The pool's index of the queue pair's protection domain.
    domain: usize,
}

impl<T> SendQueue<T> {
    pub(crate) fn new(qp: QueuePair, owner: u32, domain: usize, first_generation: u32) -> Self {
        let capacity = u16::try_from(qp.capacity().max_send_wr).unwrap_or(u16::MAX);
        Self { qp: Some(qp), table: Table::new(capacity, first_generation), owner, domain }
    }

    /// Without a queue pair: of a link that something else carries.
    pub(crate) fn none() -> Self {
        Self { qp: None, table: Table::new(0, 0), owner: 0, domain: 0 }
    }

    pub(crate) fn qp(&self) -> Option<&QueuePair> {
        self.qp.as_ref()
    }

    pub(crate) fn room(&self) -> usize {
        self.table.room()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.table.in_flight()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &InFlight<T>> {
        self.table.iter()
    }

    pub(crate) fn next_generation(&self) -> u32 {
        self.table.next_generation()
    }

    /// Posts the whole batch, at most [`BATCH`] and at most [`SendQueue::room`], and empties it.
    ///
    /// # Errors
    /// What the device said; then the batch has the requests that were not posted.
    pub(crate) fn post(&mut self, batch: &mut Vec<Work<T>>) -> Result<(), Error> {
        let count = batch.len().min(BATCH);
        let Some(qp) = self.qp.as_ref() else { return Ok(()) };
        // SAFETY: without bytes nothing is touched.
        let nothing = unsafe { Sge::from_raw(0, 0, 0) };
        let mut pieces = [nothing; BATCH];
        let mut headers = [(Key::default(), Operation::Send, false, false); BATCH];
        let mut claimed = 0;
        for Work { operation, held, signaled, inline, tag } in batch.drain(..count) {
            debug_assert!(
                inline || !matches!(held, Held::Copied(_) | Held::Passing(_)),
                "copied bytes go inline"
            );
            let Ok(key) = self.table.claim(InFlight { held, tag }) else { break };
            headers[claimed] = (key, operation, signaled, inline);
            claimed += 1;
        }
        for (piece, (key, ..)) in pieces.iter_mut().zip(&headers[..claimed]) {
            let Some(InFlight { held, .. }) = self.table.get_mut(*key) else { continue };
            let (addr, len, lkey) = match held {
                Held::Nothing => continue,
                Held::Copied(bytes) => (bytes.as_ptr().expose_provenance() as u64, bytes.len() as u32, 0),
                Held::Shared(buf) | Held::Passing(buf) => buf.raw_parts(self.domain).into(),
                Held::Unique(buf) => buf.raw_parts(self.domain).into(),
            };
            // SAFETY: the slot owns the buffer until the completion was reaped or the queue pair is destroyed, and nobody
            // else has a reference that conflicts (see the top of this file). Copied bytes lie in the slot, which does
            // not move before the post below has copied them.
            *piece = unsafe { Sge::from_raw(addr, len, lkey) };
        }
        let mut requests = [SendRequest::send(0, &[]); BATCH];
        for (at, request) in requests.iter_mut().enumerate().take(claimed) {
            let (key, operation, signaled, inline) = headers[at];
            let local = if pieces[at].is_empty() { &[] } else { &pieces[at..=at] };
            *request = SendRequest::new(WorkId::of_send(self.owner, key).0, operation, local);
            if signaled {
                *request = request.signaled();
            }
            if inline {
                *request = request.inline();
            }
        }
        let Err(refused) = qp.post_send(&requests[..claimed]) else {
            for (key, ..) in &headers[..claimed] {
                if let Some(InFlight { held: held @ Held::Passing(_), .. }) = self.table.get_mut(*key) {
                    *held = Held::Nothing;
                }
            }
            return Ok(());
        };
        for (_, operation, signaled, inline) in headers[refused.posted..claimed].iter().rev() {
            if let Some(InFlight { held, tag }) = self.table.undo() {
                let (operation, signaled, inline) = (*operation, *signaled, *inline);
                batch.insert(0, Work { operation, held, signaled, inline, tag });
            }
        }
        Err(refused.error)
    }

    /// Posts one request whose payload the device copies before this returns: it needs no registered memory.
    ///
    /// # Errors
    /// What the device said; nothing is in flight then. A full queue answers with the tag.
    pub(crate) fn post_inline(
        &mut self,
        operation: Operation,
        bytes: &[u8],
        signaled: bool,
        tag: T,
    ) -> Result<(), Error> {
        let Some(qp) = self.qp.as_ref() else { return Ok(()) };
        let Ok(key) = self.table.claim(InFlight { held: Held::Nothing, tag }) else { return Ok(()) };
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        // SAFETY: an inline request copies its bytes while it is posted, and `bytes` is borrowed until then. The device
        // refuses more than it takes inline, so `len` is that of the slice.
        let piece = [unsafe { Sge::from_raw(bytes.as_ptr().expose_provenance() as u64, len, 0) }];
        let local = if bytes.is_empty() { &[] } else { &piece[..] };
        let mut request = SendRequest::new(WorkId::of_send(self.owner, key).0, operation, local).inline();
        if signaled {
            request = request.signaled();
        }
        qp.post_send(&[request]).map_err(|refused| {
            drop(self.table.undo());
            refused.error
        })
    }

    /// What a completion names, while it is in flight.
    pub(crate) fn get(&mut self, wc: &WorkCompletion) -> Option<&InFlight<T>> {
        self.table.get_mut(WorkId(wc.wr_id()).key()).map(|it| &*it)
    }

    /// A completion came: everything that is done by it goes to `each`, the request that it names last and marked.
    /// `false` if it names nothing that is in flight.
    pub(crate) fn complete(&mut self, wc: &WorkCompletion, each: impl FnMut(InFlight<T>, bool)) -> bool {
        self.table.complete(WorkId(wc.wr_id()).key(), each)
    }

    /// Destroys the queue pair; what was in flight goes to `each`. Then no completion of it means anything any more.
    ///
    /// # Errors
    /// What the device said if it did not let go: everything stays as it was.
    pub(crate) fn destroy(&mut self, mut each: impl FnMut(InFlight<T>)) -> Result<(), Error> {
        let Some(qp) = self.qp.take() else { return Ok(()) };
        match qp.destroy() {
            Ok(()) => {
                self.table.drain(&mut each);
                Ok(())
            }
            Err((qp, error)) => {
                self.qp = Some(qp);
                Err(error)
            }
        }
    }
}

impl<T> Drop for SendQueue<T> {
    fn drop(&mut self) {
        if self.destroy(drop).is_err() {
            // The device may still touch the buffers: they are never used again. The queue pair's own drop tries once
            // more and counts the leak.
            std::mem::forget(std::mem::replace(&mut self.table, Table::new(0, 0)));
        }
    }
}

/// A shared receive queue and the buffers in it.
///
/// A queue pair that fails in the middle of a message may keep the receive it had begun, without a completion
/// (Soft-RoCE does; the specification knows only that the queue pair took its last one). The device may write that buffer as
/// long as its queue pair lives, and nobody can tell which buffer it is. So a receive that was overtaken by two rounds of
/// the whole queue counts as overdue: its buffer stays where it is until it completes or the queue ends, and another
/// receive takes its place, so that the stock does not dwindle.
pub(crate) struct ReceiveStock {
    /// `None` only while it is dropped.
    srq: Option<SharedReceiveQueue>,
    slots: Vec<ReceiveSlot>,
    free: Vec<usize>,
    /// Slots that were added for overdue ones, which have come after all.
    spare: Vec<usize>,
    overdue: usize,
    depth: usize,
    /// Receives posted, the youngest that completed, and when overdue ones were looked for.
    posted: u64,
    youngest: u64,
    checked: u64,
    domain: usize,
    /// Bytes of each buffer.
    block_bytes: usize,
}

struct ReceiveSlot {
    generation: u32,
    buf: Option<BufMut>,
    /// How many had been posted when this was.
    posted_at: u64,
    overdue: bool,
}

impl ReceiveSlot {
    fn new() -> Self {
        Self { generation: 0, buf: None, posted_at: 0, overdue: false }
    }
}

impl ReceiveStock {
    /// Up to `depth` receives of `block_bytes` each; none is posted yet.
    pub(crate) fn new(srq: SharedReceiveQueue, depth: usize, block_bytes: usize, domain: usize) -> Self {
        Self {
            srq: Some(srq),
            slots: (0..depth).map(|_| ReceiveSlot::new()).collect(),
            free: (0..depth).rev().collect(),
            spare: Vec::new(),
            overdue: 0,
            depth,
            posted: 0,
            youngest: 0,
            checked: 0,
            domain,
            block_bytes,
        }
    }

    /// How many receives could be posted.
    pub(crate) fn missing(&self) -> usize {
        self.free.len()
    }

    /// How many wait for messages.
    pub(crate) fn posted(&self) -> usize {
        self.depth - self.free.len()
    }

    /// How many were taken by queue pairs that never completed them.
    pub(crate) fn overdue(&self) -> usize {
        self.overdue
    }

    /// Looks for receives that were overtaken by two rounds, and makes room for others in their place.
    fn replace_overdue(&mut self) {
        let rounds = 2 * self.depth as u64;
        self.checked = self.youngest;
        let late = self.youngest.saturating_sub(rounds);
        for slot in 0..self.slots.len() {
            let place = &mut self.slots[slot];
            if place.buf.is_none() || place.overdue || place.posted_at >= late {
                continue;
            }
            place.overdue = true;
            self.overdue += 1;
            let another = self.spare.pop().unwrap_or_else(|| {
                self.slots.push(ReceiveSlot::new());
                self.slots.len() - 1
            });
            self.free.push(another);
        }
    }

    /// Posts receives until none is missing, or memory or the device says no.
    ///
    /// # Errors
    /// What the pool or the device said; what was posted before stays.
    pub(crate) fn refill(&mut self, pool: &Pool) -> Result<(), PoolError> {
        if self.youngest - self.checked > self.depth as u64 {
            self.replace_overdue();
        }
        while !self.free.is_empty() {
            // SAFETY: without bytes nothing is touched.
            let mut pieces = [unsafe { Sge::from_raw(0, 0, 0) }; BATCH];
            let mut ids = [WorkId(0); BATCH];
            let mut count = 0;
            let mut short = None;
            while count < BATCH {
                let Some(slot) = self.free.pop() else { break };
                let mut buf = match pool.take_uncharged(self.block_bytes, Purpose::Receive) {
                    Ok(buf) => buf,
                    Err(error) => {
                        self.free.push(slot);
                        short = Some(error);
                        break;
                    }
                };
                let parts = buf.raw_parts(self.domain);
                // SAFETY: the slot owns the buffer, its only handle, until the completion or the end of the queue.
                pieces[count] = unsafe { Sge::from_raw(parts.addr, parts.len, parts.lkey) };
                let place = &mut self.slots[slot];
                place.generation = place.generation.wrapping_add(1);
                place.buf = Some(buf);
                self.posted += 1;
                place.posted_at = self.posted;
                ids[count] = WorkId::of_receive(slot, place.generation);
                count += 1;
            }
            let mut requests = [RecvRequest::new(0, &[]); BATCH];
            for at in 0..count {
                requests[at] = RecvRequest::new(ids[at].0, &pieces[at..=at]);
            }
            let posted = match &self.srq {
                Some(srq) => srq.post_recv(&requests[..count]),
                None => Ok(()),
            };
            if let Err(refused) = posted {
                for id in &ids[refused.posted..count] {
                    self.take(id.0);
                }
                return Err(refused.error.into());
            }
            if let Some(error) = short {
                return Err(error);
            }
        }
        Ok(())
    }

    /// A receive completed: its buffer, unless the number names none that is posted.
    pub(crate) fn take(&mut self, wr_id: u64) -> Option<BufMut> {
        let (slot, generation) = (wr_id as u32 as usize, (wr_id >> 32) as u32 & 0x7fff_ffff);
        let place = self.slots.get_mut(slot)?;
        if place.generation & 0x7fff_ffff != generation {
            return None;
        }
        let buf = place.buf.take()?;
        self.youngest = self.youngest.max(place.posted_at);
        if std::mem::take(&mut place.overdue) {
            self.overdue -= 1;
            self.spare.push(slot);
        } else {
            self.free.push(slot);
        }
        Some(buf)
    }
}

impl Drop for ReceiveStock {
    fn drop(&mut self) {
        let Some(srq) = self.srq.take() else { return };
        if srq.destroy().is_err() {
            // As for sends. (The queue's own drop tries once more, and counts.)
            std::mem::forget(std::mem::take(&mut self.slots));
        }
    }
}

#[cfg(test)]
mod tests {
    use ferrite_verbs::fake::{DeviceSpec, World};

    use super::*;

    #[test]
    fn receives_that_never_complete_are_replaced() {
        let world = World::new();
        world.add_device(DeviceSpec::new("fake1", "10.0.0.1".parse().expect("an address")));
        let context = world.verbs().device("fake1").and_then(|device| device.open()).expect("device");
        let domain = context.allocate_protection_domain().expect("domain");
        // Deeper than the stock: what the test takes out by hand the device still has.
        let srq = domain.create_shared_receive_queue(64, 1).expect("queue");
        let pool = Pool::builder(&[domain]).build().expect("pool");
        let mut stock = ReceiveStock::new(srq, 4, 256, 0);
        stock.refill(&pool).expect("posted");
        let lost = WorkId::of_receive(0, 1).0;
        for _ in 0..4 {
            for slot in 1..4 {
                let generation = stock.slots[slot].generation;
                stock.take(WorkId::of_receive(slot, generation).0).expect("posted");
            }
            stock.refill(&pool).expect("posted");
        }
        assert_eq!((stock.posted(), stock.overdue(), stock.slots.len()), (4, 1, 5));
        stock.take(lost).expect("late, but known");
        assert_eq!((stock.posted(), stock.overdue(), stock.missing()), (4, 0, 0), "no place is free for it");
        assert!(stock.take(lost).is_none(), "twice");
    }
}
