//! One pass of the fabric: poll completions, deliver them, handle events and deadlines.
//!
//! A driver holds the poller while it makes a pass. The driver does not block during the pass if
//! calls that may block run on command threads (`commands.rs`). The cost of a pass does not depend
//! on the number of idle links. Checking the descriptors is a system call. So a pass checks them
//! only if the last check was at least a millisecond ago, if the driver has prepared to sleep since
//! then, or if a TCP connection carries a link.

pub(crate) mod connect;
mod due;
mod events;
mod leaving;
mod link_lifecycle;
mod listening;
mod prepared;
mod revive;
mod revoking;
mod shrinking;

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ferrite_verbs::{CmKey, EventChannel, Status, WorkCompletion};

use super::Shared;
use super::links::Links;
use super::poller::connect::{Handshake, Handshakes, Sockets, UpgradeSchedule, UpgradeWaiter};
use super::poller::leaving::{Leaving, Unreported};
use super::poller::listening::LostListeners;
use super::poller::revive::Search;
use super::poller::shrinking::Shrinking;
use super::strikes::Strikes;
use super::timers::{Timer, Timers};
use crate::device::device_objects::DeviceObjects;
use crate::device::queue_pairs::QueuePairs;
use crate::device::shared_device::SharedDevice;
use crate::device::slots::{SendQueue, Taken, WorkId};
use crate::link::core::{RequestContext, Wakes};
use crate::link::name::LinkName;
use crate::link::shared::LinkShared;
use crate::link::state::LinkState;
use crate::wake::wait_set::Ready;

/// The interval between checks of the descriptors while the driver polls and no TCP connection
/// carries a link.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// The interval between attempts to get memory for receives.
const REFILL_EVERY: Duration = Duration::from_millis(5);

/// Maximum number of expired timers that one pass handles, so that many timers do not delay the
/// completions of other links.
const TIMERS_PER_PASS: usize = 32;

pub(crate) struct Poller {
    /// By device index; `None` while the device is gone.
    pub(crate) device_objects: Vec<Option<DeviceObjects>>,
    /// Send queues of withdrawn upgrades whose queue pair a command still owns, by device and queue
    /// pair number. They are kept because the queue pair may take receives until the command
    /// returns it.
    pub(crate) orphans: HashMap<(usize, u32), SendQueue<RequestContext>>,
    /// Queue pairs that no longer belong to a link.
    leaving: Vec<Leaving>,
    /// Queue pairs whose last receive the device has not reported in time.
    unreported: Vec<Unreported>,
    /// The searches for missing devices, by device index.
    searches: HashMap<usize, Search>,
    pub(crate) lost_listeners: LostListeners,
    completions: Vec<WorkCompletion>,
    pub(super) by_qp: QueuePairs,
    pub(crate) cm: Option<EventChannel>,
    pub(crate) handshakes: Handshakes,
    pub(crate) sockets: Sockets,
    /// Sources whose requests the devices refused.
    pub(crate) strikes: Strikes,
    /// Links that can migrate, by the session number that this side gave them.
    pub(crate) sessions: HashMap<u64, LinkName>,
    /// Links on TCP whose connect waits until they are upgraded to RDMA.
    pub(crate) upgrade_waiters: HashMap<LinkName, UpgradeWaiter>,
    pub(crate) upgrade_schedule: UpgradeSchedule,
    pub(crate) timers: Timers,
    clock_set: Option<Instant>,
    /// The numbers of links that asked for attention.
    pub(super) pending_links: VecDeque<u32>,
    ready: Vec<(Ready, bool)>,
    /// Whether the driver has prepared to sleep since the last check of the descriptors.
    armed: bool,
    /// Whether the last check may have left events. The driver must not sleep then.
    unfinished: bool,
    /// Whether the timer for another attempt to get memory is running.
    starved: bool,
    /// Links that wait for memory.
    starved_links: HashSet<LinkName>,
    shrinking: Shrinking,
    /// Futures to wake when the poller is unlocked.
    pub(crate) wakes: Wakes,
    /// The time of the last check of the descriptors, or of a later call by the program.
    pub(crate) now: Instant,
    /// The time of the last check that left no events. All events that had arrived by then are
    /// handled.
    pub(crate) heard_all: Instant,
    /// The time of the last check of the descriptors, as the raw value of the fabric's clock.
    looked: u64,
}

impl Poller {
    pub(crate) fn new(
        batch: usize,
        device_objects: Vec<Option<DeviceObjects>>,
        back_off: Duration,
    ) -> Self {
        Self {
            device_objects,
            orphans: HashMap::new(),
            leaving: Vec::new(),
            unreported: Vec::new(),
            searches: HashMap::new(),
            lost_listeners: LostListeners::default(),
            completions: vec![WorkCompletion::default(); batch],
            by_qp: QueuePairs::default(),
            cm: None,
            handshakes: Handshakes::default(),
            sockets: Sockets::default(),
            strikes: Strikes::new(back_off),
            sessions: HashMap::new(),
            upgrade_waiters: HashMap::new(),
            upgrade_schedule: UpgradeSchedule::default(),
            timers: Timers::default(),
            clock_set: None,
            pending_links: VecDeque::new(),
            ready: Vec::new(),
            armed: true, // the descriptors were not checked yet
            unfinished: false,
            starved: false,
            starved_links: HashSet::new(),
            shrinking: Shrinking::default(),
            wakes: Wakes::new(),
            now: Instant::now(),
            heard_all: Instant::now(),
            looked: 0,
        }
    }

    /// Makes a pass: polls completions, and handles events and deadlines when it is time. Returns
    /// how much work the pass did. `at` is the time, as the raw value of the fabric's clock.
    pub(crate) fn pass(&mut self, shared: &Shared, at: u64) -> usize {
        let mut done = 0;
        // Check the descriptors first, because the rest of the pass uses `self.now`.
        if self.armed
            || self.sockets.are_in_use()
            || shared.clock.delta(self.looked, at) >= LOOK_EVERY
        {
            self.looked = at;
            done += shared.mailbox.awake(|| self.look(shared));
        }
        done += self.reap(shared);
        if self.sockets.has_ready() {
            done += self.serve_sockets(shared);
        }
        let links = shared.mailbox.take();
        done += self.finish_commands(shared);
        if !links.is_empty() || !self.pending_links.is_empty() {
            self.pending_links.extend(links);
            done += self.service_some(shared);
        }
        shared.counters.passes.fetch_add(1, Ordering::Relaxed);
        done
    }

    /// Takes completions from every device, at most a few batches each, so that no device delays
    /// another.
    fn reap(&mut self, shared: &Shared) -> usize {
        const BATCHES: usize = 4;
        let mut total = 0;
        // The functions called below do not use `self.device_objects`.
        let mut device_objects = std::mem::take(&mut self.device_objects);
        for (device, objects) in shared.devices.iter().zip(&mut device_objects) {
            let Some(objects) = objects else { continue };
            for _ in 0..BATCHES {
                let taken = objects.cq.poll(&mut self.completions).unwrap_or(0);
                if taken == 0 {
                    break;
                }
                let completions = std::mem::take(&mut self.completions);
                {
                    let links =
                        shared.links.read().unwrap_or_else(std::sync::PoisonError::into_inner);
                    for wc in &completions[..taken] {
                        self.dispatch(shared, &links, device, objects, wc);
                    }
                }
                self.completions = completions;
                total += taken;
                shared.counters.batches.fetch_add(1, Ordering::Relaxed);
                if taken < self.completions.len() {
                    break;
                }
            }
            for link in device.take_waiting() {
                if let Some(link) = self.link(shared, link) {
                    link.with_wakes(&mut self.wakes, LinkState::pump);
                }
            }
            // Post missing receives in batches while busy, and all of them when idle.
            let (missing, posted) = (objects.stock.missing(), objects.stock.posted());
            if missing > 0 && (total == 0 || missing >= 8 || posted < 8) && !device.is_gone() {
                // If this fails, the next pass tries again. Peers notice only back-pressure.
                let _ = objects.refill(&shared.pool);
                device.release_receives(objects.stock.take_found());
                if objects.stock.missing() > 0 {
                    self.refill_later();
                }
            }
        }
        self.device_objects = device_objects;
        if total > 0 {
            shared.counters.completions.fetch_add(total as u64, Ordering::Relaxed);
        }
        total
    }

    /// Starts the timer for another attempt to get memory, because nobody reports when memory
    /// becomes free.
    pub(crate) fn refill_later(&mut self) {
        if !std::mem::replace(&mut self.starved, true) {
            self.timers.add(self.now + REFILL_EVERY, Timer::Refill);
        }
    }

    /// Continues with links that waited for memory.
    fn retry_starved_links(&mut self, shared: &Shared) {
        for name in std::mem::take(&mut self.starved_links) {
            let Some(link) = self.link_named(shared, name) else { continue };
            link.with_wakes(&mut self.wakes, |state, env, wakes| {
                state.pump(env, wakes);
                wakes.append(&mut state.core.waiters.room);
            });
        }
    }

    /// Takes all completions that have arrived so far. Terminates even if more keep arriving.
    pub(crate) fn reap_all(&mut self, shared: &Shared) {
        let mut left: usize =
            self.device_objects.iter().flatten().map(|objects| objects.cq.depth() as usize).sum();
        while left > 0 {
            match self.reap(shared) {
                0 => return,
                taken => left = left.saturating_sub(taken),
            }
        }
    }

    fn dispatch(
        &mut self,
        shared: &Shared,
        links: &Links,
        device: &SharedDevice,
        objects: &mut DeviceObjects,
        wc: &WorkCompletion,
    ) {
        let id = WorkId(wc.wr_id());
        if wc.status() != Status::SUCCESS
            && let Some(count) = shared.counters.errors.get(wc.status().code() as usize)
        {
            count.fetch_add(1, Ordering::Relaxed);
        }
        if !id.is_receive() {
            if let Some(link) = links.get(id.owner()) {
                link.with_wakes(&mut self.wakes, |state, env, wakes| {
                    state.on_sent(env, wc, wakes, |status| shared.completion_error(link, status));
                });
            }
            return;
        }
        let taken = objects.stock.take(wc.wr_id());
        let link = self.by_qp.get(device.index, wc.qp_num()).and_then(|index| links.get(index));
        let (Some(Taken { buf, number }), Some(link)) = (taken, link) else {
            shared.counters.unknown_receives.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let now = self.now;
        if matches!(
            wc.status(),
            Status::REMOTE_ACCESS | Status::REMOTE_INVALID_REQUEST | Status::LOCAL_ACCESS
        ) {
            self.peer_was_refused(shared, link, true);
        }
        link.with_wakes(&mut self.wakes, |state, env, wakes| match wc.status() {
            // The link no longer uses this receive's queue pair. When this side told the peer how
            // many frames it had received, it did not count this one, so the peer sends it again.
            _ if !state.on_taken(wc.qp_num(), number) => {}
            Status::SUCCESS => match state.on_received(env.pool, wc, buf, now, wakes) {
                Ok(()) => state.pump(env, wakes),
                Err(error) => state.core.fail(error, wakes),
            },
            Status::FLUSHED => {}
            status if state.failure().is_none() && state.is_carried_by(wc.qp_num()) => {
                state.core.fail(shared.completion_error(link, status), wakes);
            }
            _ => {}
        });
    }

    pub(crate) fn link(&self, shared: &Shared, index: u32) -> Option<Arc<LinkShared>> {
        shared.links.read().unwrap_or_else(std::sync::PoisonError::into_inner).get(index).cloned()
    }

    /// Returns the link, unless its number was reused.
    pub(crate) fn link_named(&self, shared: &Shared, name: LinkName) -> Option<Arc<LinkShared>> {
        self.link(shared, name.index).filter(|link| link.name == name)
    }

    /// Checks the descriptors and the deadlines. Returns how much work there was. Not inlined, so
    /// that instruction counts can exclude it: how often it runs depends on the clock.
    #[inline(never)]
    fn look(&mut self, shared: &Shared) -> usize {
        self.now = Instant::now();
        self.armed = false;
        let mut ready = std::mem::take(&mut self.ready);
        self.unfinished = shared.waits.ready(&mut ready);
        let mut done = 0;
        for (ready, failed) in ready.drain(..) {
            match ready {
                Ready::Completions(device) => {
                    let Some(objects) = &mut self.device_objects[device] else { continue };
                    // One event is enough, because the queue was armed once. If there is another
                    // event, the descriptor stays ready, and the next call takes it.
                    match objects.channel.next_event() {
                        Ok(Some(_)) => objects.armed = false,
                        // No more events will come, and the descriptor would stay ready for ever.
                        _ if failed => shared.waits.remove(objects.channel.as_fd()),
                        _ => {}
                    }
                }
                Ready::Device(device) => {
                    done += self.device_events(shared, device);
                    if failed {
                        self.device_removed(shared, device);
                    }
                }
                Ready::Cm => done += self.cm_events(shared),
                Ready::Mailbox => shared.mailbox.clear(),
                Ready::Socket(id) => self.sockets.on_ready(id),
                Ready::Clock => {
                    shared.waits.clear_clock();
                    self.clock_set = None;
                }
            }
        }
        self.ready = ready;
        if !self.unfinished {
            self.heard_all = self.now;
        }
        self.watch_memory(shared);
        for _ in 0..TIMERS_PER_PASS {
            let Some(timer) = self.timers.due(self.now) else { break };
            done += 1;
            self.on_timer(shared, timer);
        }
        done
    }

    /// Returns how many receives are posted, how many are overdue, and how many may be missing: see
    /// [`FabricStats`](crate::FabricStats).
    pub(crate) fn receives(&self) -> [u64; 3] {
        let stocks = self.device_objects.iter().flatten().map(|objects| &objects.stock);
        stocks.fold([0; 3], |[posted, overdue, missing], stock| {
            [
                posted + stock.posted() as u64,
                overdue + stock.overdue() as u64,
                missing + stock.expected_missing() as u64,
            ]
        })
    }

    pub(crate) fn drop_device_objects(&mut self) {
        self.leaving.clear();
        self.orphans.clear();
        self.device_objects.clear();
    }

    /// Prepares for sleep. Afterwards the descriptor becomes readable when there is something to
    /// do. Returns `false` if there already is something to do.
    pub(crate) fn arm(&mut self, shared: &Shared) -> bool {
        let mut unarmed = false;
        for (device, objects) in shared.devices.iter().zip(&mut self.device_objects) {
            let Some(objects) = objects else { continue };
            // A completion queue stays armed until its event was taken. Arming it again would be
            // needless, and is a system call on some devices. A device that is gone has no more
            // completions.
            if !objects.armed {
                objects.armed = objects.cq.request_notify(false).is_ok();
                unarmed |= !objects.armed && !device.is_gone();
            }
        }
        if unarmed {
            self.refill_later(); // the refill timer wakes the driver, which then arms the queue
        }
        let found = self.reap(shared);
        let soonest = self.timers.soonest();
        if soonest != self.clock_set {
            shared.waits.set_clock(soonest);
            self.clock_set = soonest;
        }
        self.armed = true;
        let asleep = shared.mailbox.fall_asleep();
        if !asleep
            || found > 0
            || self.unfinished
            || !self.pending_links.is_empty()
            || self.sockets.has_ready()
        {
            return false;
        }
        shared.counters.sleeps.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Ends all handshakes and connections, because the fabric ends.
    pub(crate) fn hang_up(&mut self) {
        self.handshakes = Handshakes::default();
        self.sockets = Sockets::default();
    }

    pub(crate) fn handshake(&mut self, key: CmKey) -> Option<Handshake> {
        self.handshakes.take(key)
    }
}
