//! One pass of the engine: take completions, deliver them, look at events and the clock.
//!
//! Whoever drives the engine holds the poller while a pass runs; nobody waits inside. A pass costs the same however many
//! links are idle. Looking at descriptors is a system call, so it is done every millisecond while there are completions,
//! and before and after sleeping.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::{Duration, Instant};

use ferrite_verbs::{AsyncEvent, AsyncEventKind, CmKey, EventChannel, Status, Subject, WorkCompletion};

use super::Shared;
use super::gear::Gear;
use super::lane::Lane;
use super::leaving::Leaving;
use super::links::Links;
use super::queue_pairs::QueuePairs;
use super::revive::Search;
use super::shrinking::Shrinking;
use super::slots::{SendQueue, Taken, WorkId};
use super::strikes::Strikes;
use super::timers::{LinkName, Timer, Timers};
use super::waits::Ready;
use crate::connect::{Meeting, Meetings, Opening, Sockets};
use crate::diagnose::Failure;
use crate::error::{Error, ErrorKind};
use crate::link::shared::LinkShared;
use crate::link::state::{LinkState, Tag, Wakes};
use crate::listener::rdma::LostListeners;

/// Between looks at the descriptors while completions keep coming.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// Between looks for memory while there is too little for receives.
const STARVED: Duration = Duration::from_millis(5);

/// Handshakes and deadlines cost system calls. So many of each at a time, so that thousands at once do not
/// keep the completions of others waiting; the rest has its turn in the next pass.
const CM_EVENTS: usize = 16;
const TIMERS: usize = 32;

pub(crate) struct Poller {
    /// By lane; `None` while the device is gone.
    pub(crate) gears: Vec<Option<Gear>>,
    /// What is left of queues whose queue pair a command has, by lane and number: it may take receives until it is back.
    pub(crate) orphans: HashMap<(usize, u32), SendQueue<Tag>>,
    /// Queue pairs that no link has any more.
    pub(super) leaving: Vec<Leaving>,
    /// By lane: devices that are gone and looked for.
    pub(super) searches: HashMap<usize, Search>,
    pub(crate) lost_listeners: LostListeners,
    completions: Vec<WorkCompletion>,
    pub(super) by_qp: QueuePairs,
    pub(crate) cm: Option<EventChannel>,
    pub(crate) meetings: Meetings,
    pub(crate) sockets: Sockets,
    /// Who asked for what devices refused.
    pub(crate) strikes: Strikes,
    /// Links that can move, by what this side calls them.
    pub(crate) sessions: HashMap<u64, LinkName>,
    /// Links that are there on TCP, and that somebody waits for on RDMA.
    pub(crate) openings: HashMap<LinkName, Opening>,
    /// Who waits for a moment, by number.
    pub(crate) sleepers: BTreeMap<u64, Waker>,
    pub(crate) timers: Timers,
    clock_set: Option<Instant>,
    /// Links that called and have not been attended to.
    pub(super) calls: VecDeque<u32>,
    ready: Vec<(Ready, bool)>,
    /// The descriptor was prepared for waiting, and not looked at since.
    armed: bool,
    /// The last look left something, of which nobody tells again.
    unfinished: bool,
    /// The clock was told to look for memory for receives.
    starved: bool,
    pub(super) shrinking: Shrinking,
    /// To be woken when the poller is free again.
    pub(crate) wakes: Wakes,
    /// The time of the last look.
    pub(crate) now: Instant,
    /// All that had come by then was handled.
    pub(crate) heard_all: Instant,
    looked: quanta::Instant,
}

impl Poller {
    pub(crate) fn new(batch: usize, gears: Vec<Option<Gear>>, back_off: Duration) -> Self {
        Self {
            gears,
            orphans: HashMap::new(),
            leaving: Vec::new(),
            searches: HashMap::new(),
            lost_listeners: LostListeners::default(),
            completions: vec![WorkCompletion::default(); batch],
            by_qp: QueuePairs::default(),
            cm: None,
            meetings: Meetings::default(),
            sockets: Sockets::default(),
            strikes: Strikes::new(back_off),
            sessions: HashMap::new(),
            openings: HashMap::new(),
            sleepers: BTreeMap::new(),
            timers: Timers::default(),
            clock_set: None,
            calls: VecDeque::new(),
            ready: Vec::new(),
            armed: true, // nobody has looked yet
            unfinished: false,
            starved: false,
            shrinking: Shrinking::default(),
            wakes: Wakes::new(),
            now: Instant::now(),
            heard_all: Instant::now(),
            looked: quanta::Instant::recent(),
        }
    }

    /// Takes what completions there are, and looks at the rest if it is time; how much there was.
    pub(crate) fn pass(&mut self, shared: &Shared) -> usize {
        let mut done = 0;
        // First, because what follows goes by the time of the last look.
        let now = shared.clock.now();
        if self.armed || self.sockets.are_in_use() || now.saturating_duration_since(self.looked) >= LOOK_EVERY
        {
            self.looked = now;
            done += shared.mailbox.awake(|| self.look(shared));
        }
        done += self.reap(shared);
        if self.sockets.has_ready() {
            done += self.serve_sockets(shared);
        }
        let calls = shared.mailbox.take();
        done += self.finish_commands(shared);
        if !calls.is_empty() || !self.calls.is_empty() {
            self.calls.extend(calls);
            done += self.attend_some(shared);
        }
        shared.counters.passes.fetch_add(1, Ordering::Relaxed);
        done
    }

    /// Takes completions from every lane, at most a few batches each, so that none waits for another.
    fn reap(&mut self, shared: &Shared) -> usize {
        const BATCHES: usize = 4;
        let mut total = 0;
        let mut gears = std::mem::take(&mut self.gears); // nothing below asks for them
        for (lane, gear) in shared.lanes.iter().zip(&mut gears) {
            let Some(gear) = gear else { continue };
            for _ in 0..BATCHES {
                let taken = gear.cq.poll(&mut self.completions).unwrap_or(0);
                if taken == 0 {
                    break;
                }
                let completions = std::mem::take(&mut self.completions);
                {
                    let links = shared.links.read().unwrap_or_else(std::sync::PoisonError::into_inner);
                    for wc in &completions[..taken] {
                        self.dispatch(shared, &links, lane, gear, wc);
                    }
                }
                self.completions = completions;
                total += taken;
                shared.counters.batches.fetch_add(1, Ordering::Relaxed);
                if taken < self.completions.len() {
                    break;
                }
            }
            for link in lane.take_waiting() {
                if let Some(link) = self.link(shared, link) {
                    link.with_wakes(&mut self.wakes, LinkState::pump);
                }
            }
            // Some at a time while busy, all when idle.
            let (missing, posted) = (gear.stock.missing(), gear.stock.posted());
            if missing > 0 && (total == 0 || missing >= 8 || posted < 8) && !lane.is_gone() {
                // What fails here fails again, and is seen by peers as back-pressure.
                let _ = gear.refill(&shared.pool);
                if gear.stock.missing() > 0 {
                    self.look_for_memory();
                }
            }
        }
        self.gears = gears;
        if total > 0 {
            shared.counters.completions.fetch_add(total as u64, Ordering::Relaxed);
        }
        total
    }

    /// There was too little memory for what comes in. Nobody tells when there is some again.
    pub(crate) fn look_for_memory(&mut self) {
        if !std::mem::replace(&mut self.starved, true) {
            self.timers.add(self.now + STARVED, Timer::Refill);
        }
    }

    /// Takes all completions that are there now; those that keep coming wait for the next pass.
    pub(crate) fn reap_all(&mut self, shared: &Shared) {
        let mut left: usize = self.gears.iter().flatten().map(|gear| gear.cq.depth() as usize).sum();
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
        lane: &Lane,
        gear: &mut Gear,
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
                link.with_wakes(&mut self.wakes, |state, around, wakes| {
                    state.on_sent(around, wc, wakes, |status| shared.completion_error(link, status));
                });
            }
            return;
        }
        let taken = gear.stock.take(wc.wr_id());
        let link = self.by_qp.get(lane.index, wc.qp_num()).and_then(|index| links.get(index));
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
        link.with_wakes(&mut self.wakes, |state, around, wakes| match wc.status() {
            // What a queue pair left behind that is gone was not counted when the peer was told, and is sent again.
            _ if !state.on_taken(wc.qp_num(), number) => {}
            Status::SUCCESS => match state.on_received(around.pool, wc, buf, now, wakes) {
                Ok(()) => state.pump(around, wakes),
                Err(error) => state.fail(error, wakes),
            },
            Status::FLUSHED => {}
            status if state.failure().is_none() && state.is_carried_by(wc.qp_num()) => {
                state.fail(shared.completion_error(link, status), wakes);
            }
            _ => {}
        });
    }

    pub(crate) fn link(&self, shared: &Shared, index: u32) -> Option<Arc<LinkShared>> {
        shared.links.read().unwrap_or_else(std::sync::PoisonError::into_inner).get(index).cloned()
    }

    /// The link, unless its number is another's by now.
    pub(crate) fn link_named(&self, shared: &Shared, name: LinkName) -> Option<Arc<LinkShared>> {
        self.link(shared, name.index).filter(|link| link.name == name)
    }

    /// Looks at the descriptors and the clock; how much there was to do. Apart, so that counts of instructions can leave it
    /// out: it comes with the clock.
    #[inline(never)]
    fn look(&mut self, shared: &Shared) -> usize {
        self.now = Instant::now();
        self.armed = false;
        let mut ready = std::mem::take(&mut self.ready);
        self.unfinished = shared.waits.ready(&mut ready);
        let mut done = 0;
        for (ready, failed) in ready.drain(..) {
            match ready {
                Ready::Completions(lane) => {
                    let Some(gear) = &mut self.gears[lane] else { continue };
                    // One: it was armed once. A second would be told of again.
                    match gear.channel.next_event() {
                        Ok(Some(_)) => gear.armed = false,
                        // Nothing comes there any more, and it would be ready for ever.
                        _ if failed => shared.waits.remove(gear.channel.as_fd()),
                        _ => {}
                    }
                }
                Ready::Device(lane) => {
                    done += self.device_events(shared, lane);
                    if failed {
                        self.device_left(shared, lane);
                    }
                }
                Ready::Cm => done += self.cm_events(shared),
                Ready::Mailbox => shared.mailbox.silence(),
                Ready::Socket(id) => self.sockets.on_ready(id),
                Ready::Clock => {
                    shared.waits.silence_clock();
                    self.clock_set = None;
                }
            }
        }
        self.ready = ready;
        if !self.unfinished {
            self.heard_all = self.now;
        }
        self.watch_memory(shared);
        for _ in 0..TIMERS {
            let Some(timer) = self.timers.due(self.now) else { break };
            done += 1;
            self.on_timer(shared, timer);
        }
        done
    }

    fn device_events(&mut self, shared: &Shared, lane: usize) -> usize {
        let mut count = 0;
        let lane = &shared.lanes[lane];
        while let Some(event) = self.next_device_event(lane.index) {
            count += 1;
            match (event.kind, event.subject) {
                (
                    AsyncEventKind::QP_FATAL
                    | AsyncEventKind::QP_REQUEST_ERROR
                    | AsyncEventKind::QP_ACCESS_ERROR,
                    Subject::QueuePair(number),
                ) => {
                    // Completions that came before say more.
                    self.reap_all(shared);
                    let index = self.by_qp.get(lane.index, number);
                    if let Some(link) = index.and_then(|index| self.link(shared, index)) {
                        if event.kind != AsyncEventKind::QP_FATAL {
                            self.peer_was_refused(shared, &link, true);
                        }
                        let what = format!("link to {}: the {}", link.peer_name(), event.kind);
                        let error = Error::new(ErrorKind::LinkDown, what);
                        link.with_wakes(&mut self.wakes, |state, _, wakes| state.fail(error, wakes));
                    }
                }
                (AsyncEventKind::LAST_RECEIVE, Subject::QueuePair(number)) => {
                    self.on_last_receive(shared, lane.index, number);
                }
                (AsyncEventKind::DEVICE_FATAL | AsyncEventKind::CQ_ERROR | AsyncEventKind::SRQ_ERROR, _) => {
                    self.device_gone(shared, lane.index, &event.kind.to_string());
                }
                _ => {}
            }
        }
        count
    }

    /// The kernel has taken a device away: its descriptors report an error, for ever.
    fn device_left(&mut self, shared: &Shared, lane: usize) {
        if let Some(gear) = &self.gears[lane] {
            shared.waits.remove(gear.context.as_fd());
            shared.waits.remove(gear.channel.as_fd());
            self.device_gone(shared, lane, "the device was removed or reset");
        }
    }

    /// Nothing works on a device any more: its links end.
    pub(crate) fn device_gone(&mut self, shared: &Shared, lane: usize, why: &str) {
        self.reap_all(shared);
        let lane = &shared.lanes[lane];
        if lane.set_gone() {
            shared.counters.devices_lost.fetch_add(1, Ordering::Relaxed);
        }
        self.end_climbs_on(shared, lane);
        let links: Vec<_> = {
            let links = shared.links.read().unwrap_or_else(std::sync::PoisonError::into_inner);
            links.iter().filter(|link| link.is_on(lane)).cloned().collect()
        };
        for link in links {
            let what = format!("link to {}: {}: {why}", link.peer_name(), lane.name);
            let error = Error::new(ErrorKind::DeviceGone, what);
            link.with_wakes(&mut self.wakes, |state, _, wakes| state.fail(error, wakes));
        }
        self.retire_if_unused(shared, lane.index);
    }

    /// Lets go of a device that is gone, when no link is left on it: the kernel cannot finish removing a Soft-RoCE device
    /// that somebody holds.
    pub(crate) fn retire_if_unused(&mut self, shared: &Shared, lane: usize) {
        let lane = &shared.lanes[lane];
        if !lane.is_gone() {
            return;
        }
        let in_use = {
            let links = shared.links.read().unwrap_or_else(std::sync::PoisonError::into_inner);
            links.iter().any(|link| link.is_on(lane))
        };
        if in_use {
            return;
        }
        self.destroy_leaving_on(shared, lane.index);
        if self.gears[lane.index].as_ref().is_none_or(|gear| gear.under_way > 0) {
            return; // it went with the last command, or waits for it
        }
        shared.regions.on_device_gone(
            lane,
            shared.config.rdma == crate::policy::Rdma::Prefer,
            &mut self.wakes,
        );
        self.retire(shared, lane);
    }

    fn next_device_event(&self, lane: usize) -> Option<AsyncEvent> {
        self.gears[lane].as_ref()?.context.next_async_event().ok().flatten()
    }

    /// Receives that are posted, and those that failed links took along.
    pub(crate) fn receives(&self) -> (u64, u64) {
        let stocks = self.gears.iter().flatten().map(|gear| &gear.stock);
        stocks.fold((0, 0), |(posted, overdue), stock| {
            (posted + stock.posted() as u64, overdue + stock.overdue() as u64)
        })
    }

    pub(crate) fn drop_gears(&mut self) {
        self.leaving.clear();
        self.orphans.clear();
        self.gears.clear();
    }

    fn on_timer(&mut self, shared: &Shared, timer: Timer) {
        match timer {
            Timer::Keepalive(name) => {
                let Some(link) = self.link_named(shared, name) else { return };
                if link.with(|state, _, _| state.is_overdue(self.now)) {
                    // It may be us who had no time to look: its answer can be here.
                    self.reap_all(shared);
                }
                match link.on_timer(self.now) {
                    Ok(Some((next, well))) => {
                        self.timers.add(next, timer);
                        if well {
                            shared.is_well(&link);
                        }
                    }
                    Ok(None) => {}
                    Err((error, failure)) => link.fail(shared.diagnose(&link, error, failure)),
                }
            }
            Timer::Close(name) => {
                let Some(link) = self.link_named(shared, name) else { return };
                let what = format!(
                    "the peer did not take what was sent within {} ms of closing",
                    shared.config.close_timeout.as_millis()
                );
                link.fail(Error::new(ErrorKind::Timeout, what));
                self.attend(shared, name.index);
            }
            Timer::Drain(name) => {
                if let Some(link) = self.link_named(shared, name) {
                    self.tear_down(shared, &link, true);
                }
            }
            Timer::LastReceive(name) => {
                let Some(link) = self.link_named(shared, name) else { return };
                link.with_wakes(&mut self.wakes, |state, _, _| state.stop_waiting_for_last_receive());
            }
            Timer::Leaving(lane, number) => self.leaving_timed_out(shared, lane, number),
            Timer::Flushed(name) => {
                let Some(link) = self.link_named(shared, name) else { return };
                if !link.with(|state, _, _| state.has_flushed()) {
                    return; // it has another path by now
                }
                // None of our own requests failed before them: one of the peer's did, it seems. Not every
                // device tells. On a host that has too little CPU, Soft-RoCE also does this to peers that
                // did nothing wrong, so that it is counted, and nobody is kept out for it.
                self.peer_was_refused(shared, &link, false);
                let what = format!(
                    "link to {} ({}): the queue pair failed, and nobody says why",
                    link.peer_name(),
                    link.carrier()
                );
                let error = Error::new(ErrorKind::LinkDown, what);
                link.fail(shared.diagnose(&link, error, Failure::Completion(Status::FLUSHED)));
                self.attend(shared, name.index);
            }
            Timer::Refill => {
                self.starved = false; // the pass goes on to do it
                self.sockets.unstarve();
            }
            Timer::Shrink => self.shrink(shared),
            Timer::Wake(id) => self.wakes.extend(self.sleepers.remove(&id)),
            Timer::Move(name) => self.move_timed_out(shared, name),
            Timer::Climb(name) => self.climb_due(shared, name),
            Timer::Redial(name) => self.redial(shared, name),
            Timer::Greeting(id) => self.greeting_timed_out(shared, id),
            Timer::Door => self.look_at_the_door(shared),
            Timer::Accept(id) => self.sockets.on_ready(id),
            Timer::Listen(number) => self.listen_again(shared, number),
            Timer::Meeting(key) => self.meeting_timed_out(shared, key),
            Timer::Retry(ticket) => self.retry_meeting(shared, ticket),
            Timer::Expiry(region) => shared.regions.expire(self, shared, region),
            Timer::Revocation(region) => shared.regions.revocation_due(region, &mut self.wakes),
            Timer::Look(lane) => self.look_for(shared, lane),
        }
    }

    /// Prepares for sleep: after this the descriptor becomes readable when there is something to do. `false` if there
    /// is something already.
    pub(crate) fn arm(&mut self, shared: &Shared) -> bool {
        for gear in self.gears.iter_mut().flatten() {
            // Once armed it stays so until its event was taken: arming again would be a system call for nothing.
            if !std::mem::replace(&mut gear.armed, true) {
                let _ = gear.cq.request_notify(false); // on a device that is gone nothing comes any more
            }
        }
        let found = self.reap(shared);
        let soonest = self.timers.soonest();
        if soonest != self.clock_set {
            shared.waits.set_clock(soonest);
            self.clock_set = soonest;
        }
        self.armed = true;
        let asleep = shared.mailbox.fall_asleep();
        if !asleep || found > 0 || self.unfinished || !self.calls.is_empty() || self.sockets.has_ready() {
            return false;
        }
        shared.counters.sleeps.fetch_add(1, Ordering::Relaxed);
        true
    }

    fn cm_events(&mut self, shared: &Shared) -> usize {
        let Some(channel) = self.cm.clone() else { return 0 };
        let mut count = 0;
        while count < CM_EVENTS
            && let Ok(Some(event)) = channel.next_event()
        {
            count += 1;
            self.on_cm_event(shared, event);
        }
        self.unfinished |= count == CM_EVENTS;
        count
    }

    /// Ends all handshakes and connections: the engine ends.
    pub(crate) fn hang_up(&mut self) {
        self.meetings = Meetings::default();
        self.sockets = Sockets::default();
    }

    pub(crate) fn meeting(&mut self, key: CmKey) -> Option<Meeting> {
        self.meetings.take(key)
    }
}
