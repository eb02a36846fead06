//! Posted receives, shared by all links of a device. The top of `slots.rs` explains why this is
//! sound.
#![expect(
    unsafe_code,
    reason = "passes addresses of buffers to the device; each block states its obligations"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ferrite_verbs::{RecvRequest, Sge, SharedReceiveQueue};

use super::{BATCH, WorkId};
use crate::mem::{BufMut, Pool, PoolError, Purpose};

/// A shared receive queue and the buffers in it.
///
/// A queue pair that fails in the middle of a message may keep the receive that it had started,
/// without completing it. Soft-RoCE does this. The specification only defines the event that a
/// queue pair has taken its last receive. The device may write that buffer as long as the queue
/// pair exists, and nobody can tell which buffer it is. So a receive counts as overdue when a
/// receive that was posted more than two queue depths later has completed. The buffer of an overdue
/// receive stays in its slot. Another receive is posted in its place, so that the stock does not
/// shrink.
///
/// An overdue receive comes back when it completes after all. If the device takes receives in the
/// order in which they were posted, an overdue receive also comes back when no queue pair is left
/// that can hold it. A queue pair cannot hold a given receive in two cases (a younger receive is
/// one that was posted later):
///
/// - The queue pair was created after a younger receive had already been taken.
/// - The queue pair has completed a younger receive. A queue pair works on one message at a time.
pub(crate) struct ReceiveStock {
    /// `None` only during the drop.
    srq: Option<SharedReceiveQueue>,
    slots: Vec<ReceiveSlot>,
    free: Vec<usize>,
    /// Slots that are not in use: surplus slots, and slots of overdue receives that completed after
    /// all or were reclaimed. Other slots have already replaced the slots of overdue receives.
    spare: Vec<usize>,
    overdue: usize,
    /// Number of receives that are posted in addition to `depth`, because the same number of
    /// receives may be missing: see [`ReceiveStock::expect_missing`].
    extra: usize,
    /// How much `extra` has fallen since the last call of [`ReceiveStock::take_found`].
    found: usize,
    depth: usize,
    /// Sequence numbers of receives: the last posted one, the youngest completed one, and the value
    /// of `youngest` at the last search for overdue receives.
    posted: u64,
    youngest: u64,
    checked: u64,
    domain: usize,
    /// Size of each buffer.
    block_bytes: usize,
    /// Whether the device takes receives in the order in which they were posted.
    in_order: bool,
    /// The sequence number in the [`Taker`] of each queue pair that receives from here. When the
    /// queue pair is gone, this is the only reference.
    takers: Vec<Arc<AtomicU64>>,
}

/// Registers a queue pair that takes receives from a stock. It contains a sequence number. If the
/// device takes receives in order, the queue pair cannot hold any receive with a lower number.
///
/// Must be dropped only after the device has confirmed that the queue pair is destroyed. Without a
/// confirmation, it must never be dropped.
pub(crate) struct Taker(Arc<AtomicU64>);

impl Taker {
    /// Records that the queue pair has completed the receive with this number.
    pub(super) fn passes(&self, number: u64) {
        self.0.fetch_max(number, Ordering::Relaxed);
    }
}

/// A receive that completed.
pub(crate) struct Taken {
    pub(crate) buf: BufMut,
    /// Its number in the order in which receives were posted.
    pub(crate) number: u64,
}

struct ReceiveSlot {
    generation: u32,
    buf: Option<BufMut>,
    /// The receive's number in the order in which receives were posted.
    posted_at: u64,
    overdue: bool,
}

impl ReceiveSlot {
    fn new() -> Self {
        Self { generation: 0, buf: None, posted_at: 0, overdue: false }
    }
}

impl ReceiveStock {
    /// Creates a stock of up to `depth` receives of `block_bytes` each. None of them is posted yet.
    pub(crate) fn new(
        srq: SharedReceiveQueue,
        depth: usize,
        block_bytes: usize,
        domain: usize,
        in_order: bool,
    ) -> Self {
        Self {
            srq: Some(srq),
            slots: (0..depth).map(|_| ReceiveSlot::new()).collect(),
            free: (0..depth).rev().collect(),
            spare: Vec::new(),
            overdue: 0,
            extra: 0,
            found: 0,
            depth,
            posted: 0,
            youngest: 0,
            checked: 0,
            domain,
            block_bytes,
            in_order,
            takers: Vec::new(),
        }
    }

    /// Registers a queue pair that is about to be created.
    pub(crate) fn taker(&mut self) -> Taker {
        let passed = Arc::new(AtomicU64::new(self.youngest));
        self.takers.push(Arc::clone(&passed));
        Taker(passed)
    }

    /// Takes back the overdue receives that no remaining queue pair can hold. Takes back none if
    /// the device does not take receives in order.
    pub(crate) fn reclaim(&mut self) {
        self.takers.retain_mut(|taker| Arc::get_mut(taker).is_none());
        if self.overdue == 0 || !self.in_order {
            return;
        }
        let passed = self.takers.iter().map(|taker| taker.load(Ordering::Relaxed)).min();
        let passed = passed.unwrap_or(self.youngest);
        for slot in 0..self.slots.len() {
            let place = &mut self.slots[slot];
            if place.overdue && place.posted_at < passed {
                (place.buf, place.overdue) = (None, false);
                self.overdue -= 1;
                self.spare.push(slot);
            }
        }
    }

    /// Returns the number of receives that are to be posted.
    pub(crate) fn missing(&self) -> usize {
        self.free.len()
    }

    /// Returns the number of receives that wait for messages. Receives that may be missing do not
    /// count.
    pub(crate) fn posted(&self) -> usize {
        (self.depth + self.extra - self.free.len()).min(self.depth)
    }

    /// Makes the next refill post `most` more receives. They replace receives that a destroyed
    /// queue pair may have taken without completing them. This can happen if the device did not
    /// report the last receive of the queue pair, because providers such as mlx5 remove the
    /// completions of a destroyed queue pair. Each additional receive for which the shared receive
    /// queue has no room shows that one receive is not missing.
    pub(crate) fn expect_missing(&mut self, most: usize) {
        self.extra += most;
        for _ in 0..most {
            let slot = self.spare_slot();
            self.free.push(slot);
        }
    }

    /// Returns the number of receives that may be missing.
    pub(crate) fn expected_missing(&self) -> usize {
        self.extra
    }

    /// Returns how many receives, previously counted as possibly missing, were accounted for since
    /// the last call.
    pub(crate) fn take_found(&mut self) -> usize {
        std::mem::take(&mut self.found)
    }

    /// Records that up to `count` receives, counted as possibly missing, are accounted for. Returns
    /// their number.
    fn find(&mut self, count: usize) -> usize {
        let count = count.min(self.extra);
        self.extra -= count;
        self.found += count;
        count
    }

    fn spare_slot(&mut self) -> usize {
        self.spare.pop().unwrap_or_else(|| {
            self.slots.push(ReceiveSlot::new());
            self.slots.len() - 1
        })
    }

    /// Returns the number of overdue receives. A queue pair seems to have taken them without
    /// completing them.
    pub(crate) fn overdue(&self) -> usize {
        self.overdue
    }

    /// Finds receives that have become overdue, and makes room for others in their place.
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
            if self.find(1) == 0 {
                let another = self.spare_slot();
                self.free.push(another);
            } // else: an extra receive already replaces it
        }
    }

    /// Posts receives until none is missing, or until the pool or the device refuses.
    ///
    /// # Errors
    /// Returns the error of the pool or the device. Receives that were posted before the error stay
    /// posted.
    pub(crate) fn refill(&mut self, pool: &Pool) -> Result<(), PoolError> {
        if self.youngest - self.checked > self.depth as u64 {
            self.replace_overdue();
            self.reclaim();
        }
        while !self.free.is_empty() {
            // SAFETY: an empty piece refers to no memory.
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
                // SAFETY: the slot owns the buffer until the completion or the end of the queue,
                // and this is the buffer's only handle.
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
                // Do not use `take` for the receives that were not posted. It would count them as
                // completed, although older receives have not been taken yet.
                for id in &ids[refused.posted..count] {
                    let slot = id.0 as u32 as usize;
                    self.slots[slot].buf = None;
                    self.free.push(slot);
                }
                if refused.error.kind() == ferrite_verbs::ErrorKind::QueueFull {
                    let surplus = self.find(self.free.len());
                    let kept = self.free.len() - surplus;
                    self.spare.extend(self.free.drain(kept..));
                }
                return match self.free.is_empty() {
                    true => Ok(()),
                    false => Err(refused.error.into()),
                };
            }
            if let Some(error) = short {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Takes the buffer of a completed receive. Returns `None` if `wr_id` names no posted receive.
    pub(crate) fn take(&mut self, wr_id: u64) -> Option<Taken> {
        let (slot, generation) = (wr_id as u32 as usize, (wr_id >> 32) as u32 & 0x7fff_ffff);
        let place = self.slots.get_mut(slot)?;
        if place.generation & 0x7fff_ffff != generation {
            return None;
        }
        let buf = place.buf.take()?;
        let number = place.posted_at;
        self.youngest = self.youngest.max(number);
        if std::mem::take(&mut place.overdue) {
            self.overdue -= 1;
            self.spare.push(slot);
        } else {
            self.free.push(slot);
        }
        Some(Taken { buf, number })
    }
}

impl Drop for ReceiveStock {
    fn drop(&mut self) {
        let Some(srq) = self.srq.take() else { return };
        if srq.destroy().is_err() {
            // The device may still write the buffers, so they are never used again. The queue's own
            // drop tries once more and counts the leak.
            std::mem::forget(std::mem::take(&mut self.slots));
        }
    }
}

#[cfg(test)]
mod tests {
    use ferrite_verbs::fake::{DeviceSpec, World};

    use super::*;

    /// Returns a stock of four receives. The first receive was taken, but did not complete during
    /// four rounds.
    fn stock_with_lost_receive(in_order: bool) -> (ReceiveStock, Pool, Taker) {
        let world = World::new();
        world.add_device(DeviceSpec::new("fake1", "10.0.0.1".parse().expect("an address")));
        let context =
            world.verbs().device("fake1").and_then(|device| device.open()).expect("device");
        let domain = context.allocate_protection_domain().expect("domain");
        // This queue is deeper than the stock, because the device still holds the receives that the
        // test takes out by hand.
        let srq = domain.create_shared_receive_queue(64, 1).expect("queue");
        let pool = Pool::builder(&[domain]).build().expect("pool");
        let mut stock = ReceiveStock::new(srq, 4, 256, 0, in_order);
        let taker = stock.taker();
        stock.refill(&pool).expect("the receives are posted");
        for _ in 0..4 {
            for slot in 1..4 {
                take(&mut stock, slot);
            }
            stock.refill(&pool).expect("the receives are posted");
        }
        assert_eq!((stock.posted(), stock.overdue(), stock.slots.len()), (4, 1, 5));
        (stock, pool, taker)
    }

    fn take(stock: &mut ReceiveStock, slot: usize) -> u64 {
        let generation = stock.slots[slot].generation;
        stock.take(WorkId::of_receive(slot, generation).0).expect("a posted receive").number
    }

    const LOST: u64 = super::super::RECEIVE | 1 << 32;

    #[test]
    fn replaces_receives_that_never_complete() {
        let (mut stock, _pool, _taker) = stock_with_lost_receive(true);
        stock.take(LOST).expect("a late completion is known");
        assert_eq!(
            (stock.posted(), stock.overdue(), stock.missing()),
            (4, 0, 0),
            "its slot was replaced, so none is free"
        );
        assert!(stock.take(LOST).is_none(), "a repeated completion must have no effect");
    }

    #[test]
    fn reclaims_lost_receives_when_the_queue_pair_is_gone() {
        let (mut stock, pool, taker) = stock_with_lost_receive(true);
        let in_use = pool.stats().receive.in_use_bytes;
        let younger = stock.taker();
        stock.reclaim();
        assert_eq!(stock.overdue(), 1, "its queue pair may hold it");
        drop(taker);
        stock.reclaim();
        assert_eq!((stock.overdue(), stock.posted(), stock.missing()), (0, 4, 0));
        assert!(pool.stats().receive.in_use_bytes < in_use, "the memory is back");
        assert!(stock.take(LOST).is_none(), "it was reclaimed");
        drop(younger);
        take(&mut stock, 1);
        stock.refill(&pool).expect("the receives are posted");
        assert_eq!((stock.posted(), stock.slots.len()), (4, 5));
    }

    #[test]
    fn reclaims_a_lost_receive_after_a_younger_one_completed() {
        let (mut stock, _pool, taker) = stock_with_lost_receive(true);
        taker.passes(1);
        stock.reclaim();
        assert_eq!(stock.overdue(), 1, "the completed receive is the lost one itself");
        let number = take(&mut stock, 2);
        taker.passes(number);
        stock.reclaim();
        assert_eq!(stock.overdue(), 0);
    }

    #[test]
    fn keeps_lost_receives_on_a_device_without_order() {
        let (mut stock, _pool, taker) = stock_with_lost_receive(false);
        drop(taker);
        stock.reclaim();
        assert_eq!(stock.overdue(), 1);
    }
}
