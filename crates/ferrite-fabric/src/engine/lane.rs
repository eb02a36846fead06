//! A lane: what an engine has on one device, shared by all links there.
//!
//! One completion queue and one stock of receives, however many links: an idle link costs neither. The completion queue
//! must never overrun, so each request in flight holds one of its entries from post to completion, also if it is not
//! signaled (when a queue pair fails, every request completes). Links that find none left wait here in line.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use ferrite_verbs::{
    CompletionChannel, CompletionQueue, Context, ErrorKind, Limits, ProtectionDomain, QueuePair,
    QueuePairConfig, SharedReceiveQueue,
};

use super::config::Config;
use super::slots::ReceiveStock;
use crate::error::Error;
use crate::mem::{Pool, lock};

pub(crate) struct Lane {
    pub(crate) context: Context,
    pub(crate) name: String,
    pub(crate) limits: Limits,
    /// Its index, which is also that of its protection domain in the pool.
    pub(crate) index: usize,
    pub(crate) domain: ProtectionDomain,
    pub(crate) cq: CompletionQueue,
    pub(crate) channel: CompletionChannel,
    /// `stock` must be dropped when no queue pair is left: links hold their lane.
    pub(crate) stock: Mutex<ReceiveStock>,
    srq: Mutex<Option<SharedReceiveQueue>>,
    in_flight: AtomicU32,
    in_flight_max: u32,
    /// Links that found no entry left.
    waiting: Mutex<VecDeque<u32>>,
    has_waiting: AtomicBool,
    /// What queue pairs of this device take inline: found when the first is made.
    inline: AtomicU32,
    /// The completion queue will tell of its next completion.
    pub(crate) armed: AtomicBool,
    pub(crate) gone: AtomicBool,
}

impl Lane {
    pub(crate) fn new(
        index: usize,
        domain: &ProtectionDomain,
        config: &Config,
    ) -> Result<Self, ferrite_verbs::Error> {
        let context = domain.context().clone();
        let limits = context.limits()?;
        let receives = config.recv_queue_depth.clamp(BATCH_MIN, limits.max_srq_wr);
        let entries = config.cq_size.max(receives + BATCH_MIN).min(limits.max_cqe);
        let receives = receives.min(entries / 2);
        let channel = context.create_completion_channel()?;
        let cq = context.create_completion_queue(entries, Some(&channel), index as u32)?;
        let srq = domain.create_shared_receive_queue(receives, 1)?;
        let block_bytes = config.recv_buffer_size as usize;
        let stock = ReceiveStock::new(srq.clone(), receives as usize, block_bytes, index);
        Ok(Self {
            name: context.device().name(),
            limits,
            index,
            domain: domain.clone(),
            context,
            cq,
            channel,
            stock: Mutex::new(stock),
            srq: Mutex::new(Some(srq)),
            in_flight: AtomicU32::new(0),
            in_flight_max: entries - receives,
            waiting: Mutex::new(VecDeque::new()),
            has_waiting: AtomicBool::new(false),
            inline: AtomicU32::new(config.inline_threshold),
            armed: AtomicBool::new(false),
            gone: AtomicBool::new(false),
        })
    }

    /// Posts what receives are missing. A pool without memory is no error: peers wait until there is some.
    pub(crate) fn refill(&self, pool: &Pool) -> Result<(), Error> {
        match lock(&self.stock).refill(pool) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == crate::mem::ErrorKind::Exhausted => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// A queue pair for a link.
    pub(crate) fn create_queue_pair(&self, config: &Config) -> Result<QueuePair, Error> {
        let max_send_wr =
            config.send_queue_depth.clamp(BATCH_MIN, self.limits.max_qp_wr.min(u16::MAX.into()));
        loop {
            let inline = self.inline.load(Ordering::Relaxed);
            let made = self.domain.create_queue_pair(&QueuePairConfig {
                srq: lock(&self.srq).clone(),
                max_send_wr,
                max_recv_wr: 0,
                max_inline: inline,
                ..QueuePairConfig::new(&self.cq)
            });
            match made {
                // A device does not say how much it takes inline: it refuses too much.
                Err(error) if inline > 0 && error.kind() == ErrorKind::DeviceLimit => {
                    self.inline.store(if inline > 64 { 64 } else { 0 }, Ordering::Relaxed);
                }
                made => return made.map_err(Error::from),
            }
        }
    }

    /// What links may put into a request instead of memory.
    pub(crate) fn inline(&self, qp: &QueuePair) -> usize {
        qp.capacity().max_inline.min(self.inline.load(Ordering::Relaxed)) as usize
    }

    /// Takes up to `wanted` entries of the completion queue.
    pub(crate) fn reserve(&self, wanted: usize) -> usize {
        let wanted = wanted as u32; // a batch
        let before = self.in_flight.fetch_add(wanted, Ordering::Relaxed);
        let granted = self.in_flight_max.saturating_sub(before).min(wanted);
        if granted < wanted {
            self.in_flight.fetch_sub(wanted - granted, Ordering::Relaxed);
        }
        granted as usize
    }

    pub(crate) fn release(&self, entries: usize) {
        self.in_flight.fetch_sub(entries as u32, Ordering::Relaxed);
    }

    /// Whether requests should be signaled so that their entries come back soon.
    pub(crate) fn is_pressed(&self) -> bool {
        self.in_flight.load(Ordering::Relaxed) > self.in_flight_max / 4
    }

    pub(crate) fn in_flight(&self) -> u32 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Puts a link in line for entries.
    pub(crate) fn wait(&self, link: u32) {
        lock(&self.waiting).push_back(link);
        self.has_waiting.store(true, Ordering::Release);
    }

    /// The links in line, if there are entries for some.
    pub(crate) fn take_waiting(&self) -> VecDeque<u32> {
        if !self.has_waiting.load(Ordering::Acquire)
            || self.in_flight.load(Ordering::Relaxed) >= self.in_flight_max
        {
            return VecDeque::new();
        }
        self.has_waiting.store(false, Ordering::Release);
        std::mem::take(&mut lock(&self.waiting))
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // The stock destroys the queue and must see that: it is to have the last handle.
        lock(&self.srq).take();
    }
}

const BATCH_MIN: u32 = 16;
