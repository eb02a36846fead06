//! Work requests in flight, and the memory they own.
//!
//! The fabric puts the addresses of local memory into work requests only here and in `receives.rs`.
//! This is sound because:
//!
//! - A request is recorded in its slot, with the buffer by value, *before* it is posted. Nobody can
//!   drop or reuse a buffer that the device may access. A future that waits for the request holds
//!   only a number.
//! - A buffer that the device may access leaves its slot in one of two cases: the completion of its
//!   request or of a later one was polled, or the queue was destroyed and the device confirmed it.
//!   Without the confirmation, the buffers stay for ever. If the device takes receives in order, a
//!   receive buffer is also taken back when no queue pair is left that could hold it
//!   (`ReceiveStock`).
//! - While a buffer that the device writes is in a slot, nobody has a reference into it: `BufMut`
//!   is the only handle of its block. A buffer that the device reads may have other readers,
//!   because a `Buf` is never written.
#![expect(
    unsafe_code,
    reason = "passes addresses of buffers to the device; each block states its obligations"
)]

mod receives;
mod table;

use std::sync::{Arc, Weak};

use ferrite_verbs::{Error, Operation, PostError, QueuePair, SendRequest, Sge, WorkCompletion};

use crate::mem::{Binding, Buf, BufMut, Window};
pub(crate) use receives::{ReceiveStock, Taken, Taker};
pub(crate) use table::{Key, Table};

/// Maximum number of requests that are posted in one call.
pub(crate) const BATCH: usize = 8;

/// The memory that a request owns.
#[derive(Debug)]
pub(crate) enum Held {
    /// No memory: there is no payload, or the device has already copied it.
    Nothing,
    /// A few bytes that the device copies during the post. Only for inline requests.
    Copied([u8; 16]),
    /// A buffer that the device copies during the post, and that is then released. Only for inline
    /// requests that are never repeated.
    Passing(Buf),
    /// A buffer that the device reads.
    Shared(Buf),
    /// A buffer that the device writes.
    Unique(BufMut),
    /// A window that is being bound.
    Binding(#[expect(dead_code, reason = "dropped when it is bound")] Binding),
}

/// A work request to be posted. The caller gets `request` back when the work request completes.
pub(crate) struct Work<T> {
    pub(crate) operation: Operation,
    pub(crate) held: Held,
    pub(crate) signaled: bool,
    pub(crate) inline: bool,
    pub(crate) request: T,
}

/// A request that has a slot but was not posted yet.
#[derive(Clone, Copy)]
struct Added {
    key: Key,
    operation: Operation,
    signaled: bool,
    inline: bool,
    /// Whether the request's memory is released after the post.
    is_passing: bool,
}

/// The content of a slot: a request in flight.
pub(crate) struct InFlight<T> {
    pub(crate) held: Held,
    pub(crate) request: T,
}

/// A request's number as the device returns it. It consists of the owner and the key of the slot.
///
/// ```text
///   63      62 … 40     39 … 16      15 … 0
///   0       owner       generation   slot        a request in a link's send queue
///
///   63      62 … 32                  31 … 0
///   1       generation               slot        a receive
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WorkId(pub(crate) u64);

const RECEIVE: u64 = 1 << 63;
/// The largest owner number. It allows more links than any device has queue pairs.
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
    /// `None` after the queue pair was destroyed, and while a command owns it.
    qp: Option<QueuePair>,
    number: u32,
    /// Whether a command owns the queue pair.
    is_away: bool,
    table: Table<InFlight<T>>,
    /// The newest requests in the table, which are to be posted together.
    added: Vec<Added>,
    owner: u32,
    /// The pool's index of the queue pair's protection domain.
    domain: usize,
    /// Present as long as the queue pair exists.
    taker: Option<Taker>,
    /// Whether the queue pair has taken its last receive: the device has reported that, or had
    /// enough time to report it. After the report, all completions of the queue pair are in the
    /// completion queue.
    took_last: bool,
    /// Windows that are bound to the queue pair, or about to be. They must be closed before it is
    /// destroyed.
    windows: Vec<Weak<Window>>,
}

impl<T> SendQueue<T> {
    /// Creates the queue. `taker` must come from the stock that the queue pair receives from.
    pub(crate) fn new(
        qp: QueuePair,
        taker: Taker,
        owner: u32,
        domain: usize,
        first_generation: u32,
    ) -> Self {
        let capacity = u16::try_from(qp.capacity().max_send_wr).unwrap_or(u16::MAX);
        let table = Table::new(capacity, first_generation);
        let number = qp.number();
        Self {
            qp: Some(qp),
            number,
            is_away: false,
            table,
            added: Vec::new(),
            owner,
            domain,
            taker: Some(taker),
            took_last: false,
            windows: Vec::new(),
        }
    }

    /// Returns a queue without a queue pair, for a link that does not use RDMA.
    pub(crate) fn none() -> Self {
        Self {
            qp: None,
            number: 0,
            is_away: false,
            table: Table::new(0, 0),
            added: Vec::new(),
            owner: 0,
            domain: 0,
            taker: None,
            took_last: true,
            windows: Vec::new(),
        }
    }

    pub(crate) fn qp(&self) -> Option<&QueuePair> {
        self.qp.as_ref()
    }

    /// Returns whether `qp` is the number of this queue's queue pair.
    pub(crate) fn is_of(&self, qp: u32) -> bool {
        (self.qp.is_some() || self.is_away) && self.number == qp
    }

    /// Lends the queue pair to a command. Nothing can be posted until the command returns it.
    pub(crate) fn lend(&mut self) -> Option<QueuePair> {
        let qp = self.qp.take();
        self.is_away |= qp.is_some();
        qp
    }

    /// Returns the number of the queue pair, even while a command owns the queue pair.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    pub(crate) fn is_away(&self) -> bool {
        self.is_away
    }

    /// Takes the queue pair back from the command.
    pub(crate) fn take_back(&mut self, qp: QueuePair) {
        debug_assert_eq!(qp.number(), self.number, "the queue pair belongs to another queue");
        (self.qp, self.is_away) = (Some(qp), false);
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

    /// Returns how many requests were added and not posted yet.
    pub(crate) fn added(&self) -> usize {
        self.added.len()
    }

    /// Adds a request to those that [`SendQueue::post`] posts. The queue must have
    /// [`SendQueue::room`], and fewer than [`BATCH`] requests may have been added.
    #[inline]
    pub(crate) fn add(&mut self, work: Work<T>) {
        let Work { operation, held, signaled, inline, request } = work;
        let is_passing = matches!(held, Held::Passing(_));
        debug_assert!(
            inline || !is_passing && !matches!(held, Held::Copied(_)),
            "only an inline request may own bytes that the device copies during the post"
        );
        debug_assert!(self.added.len() < BATCH, "more requests than a batch holds");
        let claimed = self.table.claim(InFlight { held, request });
        debug_assert!(claimed.is_ok(), "more requests than there is room for");
        if let Ok(key) = claimed {
            self.added.push(Added { key, operation, signaled, inline, is_passing });
        }
    }

    /// Posts the added requests.
    ///
    /// # Errors
    /// Returns the device's error, and the requests that were not posted.
    pub(crate) fn post(&mut self) -> Result<(), (Error, Vec<InFlight<T>>)> {
        // One request is the common case, and needs no arrays for a whole batch.
        let posted = match self.added.len() {
            1 => self.post_up_to::<1>(),
            _ => self.post_up_to::<BATCH>(),
        };
        let Err(refused) = posted else {
            for Added { key, .. } in self.added.drain(..).filter(|added| added.is_passing) {
                if let Some(in_flight) = self.table.get_mut(key) {
                    in_flight.held = Held::Nothing;
                }
            }
            return Ok(());
        };
        let mut unposted: Vec<_> =
            self.added.drain(refused.posted..).filter_map(|_| self.table.undo()).collect();
        unposted.reverse(); // the newest came first
        self.added.clear();
        Err((refused.error, unposted))
    }

    fn post_up_to<const N: usize>(&mut self) -> Result<(), PostError> {
        let Self { qp: Some(qp), table, added, domain, owner, .. } = self else { return Ok(()) };
        // SAFETY: an empty piece refers to no memory.
        let nothing = unsafe { Sge::from_raw(0, 0, 0) };
        let mut pieces = [nothing; N];
        for (piece, Added { key, .. }) in pieces.iter_mut().zip(&*added) {
            let Some(InFlight { held, .. }) = table.get_mut(*key) else { continue };
            let (addr, len, lkey) = match held {
                Held::Nothing | Held::Binding(_) => continue,
                Held::Copied(bytes) => {
                    (bytes.as_ptr().expose_provenance() as u64, bytes.len() as u32, 0)
                }
                Held::Shared(buf) | Held::Passing(buf) => buf.raw_parts(*domain).into(),
                Held::Unique(buf) => buf.raw_parts(*domain).into(),
            };
            // SAFETY: the slot owns the buffer until its completion was polled or the queue pair is
            // destroyed, and nobody else has a conflicting reference (see the top of this file).
            // Copied bytes lie in the slot, which does not move before the post below has copied
            // them.
            *piece = unsafe { Sge::from_raw(addr, len, lkey) };
        }
        let mut requests = [SendRequest::send(0, &[]); N];
        for ((request, piece), added) in requests.iter_mut().zip(&pieces).zip(&*added) {
            let local = if piece.is_empty() { &[] } else { std::slice::from_ref(piece) };
            let number = WorkId::of_send(*owner, added.key).0;
            *request = SendRequest::new(number, added.operation, local);
            if added.signaled {
                *request = request.signaled();
            }
            if added.inline {
                *request = request.inline();
            }
        }
        qp.post_send(&requests[..added.len().min(N)])
    }

    /// Posts one request whose payload the device copies before this returns. The payload therefore
    /// needs no registered memory. Does nothing if there is no queue pair or no room.
    ///
    /// # Errors
    /// Returns the device's error, which also says whether the request is in flight nevertheless.
    pub(crate) fn post_inline(
        &mut self,
        operation: Operation,
        bytes: &[u8],
        signaled: bool,
        request: T,
    ) -> Result<(), PostError> {
        let Some(qp) = self.qp.as_ref() else { return Ok(()) };
        let Ok(key) = self.table.claim(InFlight { held: Held::Nothing, request }) else {
            return Ok(());
        };
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        // SAFETY: the device copies the bytes of an inline request during the post, and `bytes` is
        // borrowed until then. The device refuses more than its inline limit, so `len` is the
        // length of the slice.
        let piece = [unsafe { Sge::from_raw(bytes.as_ptr().expose_provenance() as u64, len, 0) }];
        let local = if bytes.is_empty() { &[] } else { &piece[..] };
        let mut request =
            SendRequest::new(WorkId::of_send(self.owner, key).0, operation, local).inline();
        if signaled {
            request = request.signaled();
        }
        qp.post_send(&[request]).inspect_err(|refused| {
            if refused.posted == 0 {
                drop(self.table.undo());
            }
        })
    }

    /// Posts the request that binds a window to the queue pair. The device executes later requests
    /// after the binding.
    ///
    /// Returns `Ok(false)` if nothing was posted, because the window is already closed, or because
    /// there is no queue pair or no room.
    ///
    /// # Errors
    /// Returns the device's error, which also says whether the request is in flight nevertheless.
    pub(crate) fn post_bind(
        &mut self,
        window: &Arc<Window>,
        signaled: bool,
        request: T,
    ) -> Result<bool, PostError> {
        let Some(qp) = self.qp.as_ref() else { return Ok(false) };
        let Ok(key) = self.table.claim(InFlight { held: Held::Nothing, request }) else {
            return Ok(false);
        };
        let number = WorkId::of_send(self.owner, key).0;
        let mut refused = None;
        let binding = window.bind(|window| {
            let request = SendRequest::bind(number, window);
            let request = if signaled { request.signaled() } else { request };
            refused = qp.post_send(&[request]).err();
            refused.as_ref().is_none_or(|refused| refused.posted > 0)
        });
        let Some(binding) = binding else {
            drop(self.table.undo());
            return refused.map_or(Ok(false), Err);
        };
        if let Some(in_flight) = self.table.get_mut(key) {
            in_flight.held = Held::Binding(binding);
        }
        self.windows.retain(|window| window.strong_count() > 0);
        self.windows.push(Arc::downgrade(window));
        refused.map_or(Ok(true), Err)
    }

    /// Closes the windows of the queue pair. Otherwise destroying the queue pair may block or fail.
    fn close_windows(&mut self) -> Result<(), Error> {
        while let Some(window) = self.windows.last() {
            if let Some(window) = window.upgrade() {
                window.close()?;
            }
            self.windows.pop();
        }
        Ok(())
    }

    /// Records that the queue pair completed the receive with this number.
    pub(crate) fn on_taken(&self, number: u64) {
        if let Some(taker) = &self.taker {
            taker.passes(number);
        }
    }

    /// Records that the queue pair has taken its last receive: the device reported it, or had
    /// enough time to report it.
    pub(crate) fn on_last_receive(&mut self) {
        self.took_last = true;
    }

    /// Returns whether the queue pair has taken its last receive.
    ///
    /// The queue pair must be destroyed only after that, and after its completions were polled.
    /// mlx5 and other drivers remove completions that were not polled, and the stock would count
    /// their receives as posted for ever.
    pub(crate) fn took_last(&self) -> bool {
        self.took_last || self.qp.is_none()
    }

    /// Returns the request that a completion names, if it is in flight.
    pub(crate) fn get(&mut self, wc: &WorkCompletion) -> Option<&InFlight<T>> {
        self.table.get_mut(WorkId(wc.wr_id()).key()).map(|it| &*it)
    }

    /// Handles a completion: passes each request that it completes to `each`. The request that the
    /// completion names comes last, with `true`. Returns `false` if the completion names no request
    /// in flight.
    pub(crate) fn complete(
        &mut self,
        wc: &WorkCompletion,
        each: impl FnMut(InFlight<T>, bool),
    ) -> bool {
        self.table.complete(WorkId(wc.wr_id()).key(), each)
    }

    /// Destroys the queue pair and passes all requests in flight to `each`. Afterwards no
    /// completion of this queue pair is valid.
    ///
    /// The caller must have polled its completions (see [`SendQueue::took_last`]).
    ///
    /// # Errors
    /// Returns the device's error if the device did not destroy the queue pair. The queue pair and
    /// the requests are unchanged then, but windows may be closed.
    pub(crate) fn destroy(&mut self, mut each: impl FnMut(InFlight<T>)) -> Result<(), Error> {
        self.close_windows()?;
        let Some(qp) = self.qp.take() else { return Ok(()) };
        match qp.destroy() {
            Ok(()) => {
                self.table.drain(&mut each);
                self.taker = None;
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
        if self.destroy(drop).is_err() || self.is_away && self.table.in_flight() > 0 {
            // The device may still access the buffers, so they are never used again. The queue
            // pair's own drop tries once more and counts the leak.
            std::mem::forget(std::mem::replace(&mut self.table, Table::new(0, 0)));
            std::mem::forget(self.taker.take());
        }
    }
}
