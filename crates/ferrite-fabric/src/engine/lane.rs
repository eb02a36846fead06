//! A lane: one device as links see it. Its objects are the poller's (`gear.rs`).
//!
//! One completion queue and one stock of receives, however many links: an idle link costs neither. The completion queue
//! must never overrun, so each request in flight holds one of its entries from post to completion, also if it is not
//! signaled (when a queue pair fails, every request completes). Links that find none left wait here in line.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use ferrite_verbs::{Context, Limits, ProtectionDomain};

use super::config::Config;
use super::gear::Gear;
use crate::mem::lock;

pub(crate) struct Lane {
    pub(crate) name: String,
    pub(crate) limits: Limits,
    /// Its index, which is also that of its protection domain in the pool.
    pub(crate) index: usize,
    /// To look at when a link fails; `None` once the device is gone.
    context: Mutex<Option<Context>>,
    in_flight: AtomicU32,
    in_flight_max: u32,
    /// Links that found no entry left.
    waiting: Mutex<VecDeque<u32>>,
    has_waiting: AtomicBool,
    /// What queue pairs of this device take inline: found when the first is made.
    inline: AtomicU32,
    gone: AtomicBool,
}

impl Lane {
    pub(crate) fn new(
        index: usize,
        domain: &ProtectionDomain,
        config: &Config,
    ) -> Result<(Self, Gear), ferrite_verbs::Error> {
        let context = domain.context().clone();
        let limits = context.limits()?;
        let receives = config.recv_queue_depth.clamp(BATCH_MIN, limits.max_srq_wr);
        let entries = config.cq_size.max(receives + BATCH_MIN).min(limits.max_cqe);
        let receives = receives.min(entries / 2);
        let gear = Gear::new(domain, index, receives, entries, config)?;
        let lane = Self {
            name: context.device().name(),
            limits,
            index,
            context: Mutex::new(Some(context)),
            in_flight: AtomicU32::new(0),
            in_flight_max: entries - receives,
            waiting: Mutex::new(VecDeque::new()),
            has_waiting: AtomicBool::new(false),
            inline: AtomicU32::new(config.inline_threshold),
            gone: AtomicBool::new(false),
        };
        Ok((lane, gear))
    }

    /// The device, unless it is gone.
    pub(crate) fn context(&self) -> Option<Context> {
        lock(&self.context).clone()
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// Nothing new begins on it.
    pub(crate) fn set_gone(&self) {
        self.gone.store(true, Ordering::Relaxed);
    }

    /// Lets go of the device.
    pub(crate) fn close(&self) {
        lock(&self.context).take();
    }

    pub(super) fn send_queue_depth(&self, config: &Config) -> u32 {
        config.send_queue_depth.clamp(BATCH_MIN, self.limits.max_qp_wr.min(u16::MAX.into()))
    }

    /// What links may put into a request instead of memory.
    pub(crate) fn inline(&self) -> u32 {
        self.inline.load(Ordering::Relaxed)
    }

    /// The device did not take so much.
    pub(super) fn less_inline(&self) {
        let less = if self.inline() > 64 { 64 } else { 0 };
        self.inline.store(less, Ordering::Relaxed);
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

const BATCH_MIN: u32 = 16;
