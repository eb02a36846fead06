//! The state of a world: every object by its id, as plain Rust data.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Weak;
use std::thread::ThreadId;

use rustix::io::Errno;

use super::object::Id;
use super::records::{
    AsyncEvent, Channel, CmChannel, Context, Device, Domain, Identifier, Late, Queue, QueuePair,
    Region, SharedQueue, Subject, Window,
};
use super::{Inner, Objects, World};
use crate::sys;

pub(super) struct State {
    me: Weak<Inner>,
    next_id: Id,
    pub(super) next_qp_num: u32,
    pub(super) next_port: u16,
    pub(super) device_lists: usize,
    pub(super) forks: sys::ibv_fork_status,
    /// Whether a device was disassociated. Then callers may still hold objects that are no longer
    /// in the maps below.
    pub(super) disassociated: bool,
    pub(super) late: Late,
    faults: HashMap<&'static str, VecDeque<Errno>>,
    /// Functions whose calls wait until they are released: see [`World::hold`].
    pub(super) held: BTreeSet<&'static str>,
    /// The number of waiting calls of each held function.
    pub(super) waiting: BTreeMap<&'static str, usize>,
    /// The names of the C functions that each thread has called: see [`World::calls_of`].
    pub(super) calls: HashMap<ThreadId, BTreeSet<&'static str>>,
    pub(super) sizes: super::Sizes,
    /// Pairs of devices that lose each other's packets, with the smaller id first.
    pub(super) black_holes: BTreeSet<(Id, Id)>,
    pub(super) devices: BTreeMap<Id, Device>,
    pub(super) contexts: BTreeMap<Id, Context>,
    pub(super) domains: BTreeMap<Id, Domain>,
    pub(super) regions: BTreeMap<Id, Region>,
    /// Regions by the upper 24 bits of their keys.
    pub(super) keys: HashMap<u32, Id>,
    pub(super) windows: BTreeMap<Id, Window>,
    pub(super) channels: BTreeMap<Id, Channel>,
    pub(super) queues: BTreeMap<Id, Queue>,
    pub(super) srqs: BTreeMap<Id, SharedQueue>,
    pub(super) queue_pairs: BTreeMap<Id, QueuePair>,
    pub(super) by_qp_num: HashMap<u32, Id>,
    /// Queue pairs that may have requests to execute: see `settle`.
    pub(super) pending: BTreeSet<Id>,
    pub(super) cm_channels: BTreeMap<Id, CmChannel>,
    pub(super) identifiers: BTreeMap<Id, Identifier>,
}

impl State {
    pub(super) fn new(me: Weak<Inner>) -> Self {
        Self {
            me,
            next_id: 1,
            next_qp_num: 0x11,
            next_port: 49_152,
            device_lists: 0,
            forks: sys::ibv_fork_status::IBV_FORK_UNNEEDED,
            disassociated: false,
            late: Late::default(),
            faults: HashMap::new(),
            held: BTreeSet::new(),
            waiting: BTreeMap::new(),
            calls: HashMap::new(),
            sizes: super::Sizes::default(),
            black_holes: BTreeSet::new(),
            devices: BTreeMap::new(),
            contexts: BTreeMap::new(),
            domains: BTreeMap::new(),
            regions: BTreeMap::new(),
            keys: HashMap::new(),
            windows: BTreeMap::new(),
            channels: BTreeMap::new(),
            queues: BTreeMap::new(),
            srqs: BTreeMap::new(),
            queue_pairs: BTreeMap::new(),
            by_qp_num: HashMap::new(),
            pending: BTreeSet::new(),
            cm_channels: BTreeMap::new(),
            identifiers: BTreeMap::new(),
        }
    }

    /// Returns an id for a new object.
    pub(super) fn new_id(&mut self) -> Id {
        self.next_id += 1;
        self.next_id
    }

    pub(super) fn weak(&self) -> Weak<Inner> {
        self.me.clone()
    }

    /// Returns the world, for an object that keeps the world alive.
    pub(super) fn world(&self) -> Result<World, Errno> {
        self.me.upgrade().map(World).ok_or(Errno::NODEV)
    }

    pub(super) fn inject(&mut self, call: &'static str, errno: Errno) {
        self.faults.entry(call).or_default().push_back(errno);
    }

    pub(super) fn take_fault(&mut self, call: &'static str) -> Option<Errno> {
        if self.faults.is_empty() {
            return None;
        }
        let errno = self.faults.get_mut(call)?.pop_front();
        self.faults.retain(|_, queue| !queue.is_empty());
        errno
    }

    pub(super) fn device_named(&self, name: &str) -> Option<Id> {
        self.devices
            .values()
            .find(|device| device.spec.name == name && !device.removed)
            .map(|d| d.id)
    }

    /// Returns the context; EIO if its device was removed.
    pub(super) fn usable(&self, context: Id) -> Result<&Context, Errno> {
        let context = self.contexts.get(&context).ok_or(Errno::INVAL)?;
        match self.devices.get(&context.device) {
            Some(device) if !device.removed => Ok(context),
            _ => Err(Errno::IO),
        }
    }

    /// Returns the device behind a context; EIO if it was removed.
    pub(super) fn device_of(&self, context: Id) -> Result<&Device, Errno> {
        let device = self.usable(context)?.device;
        self.devices.get(&device).ok_or(Errno::IO)
    }

    pub(super) fn notify(&mut self, context: Id, kind: sys::ibv_event_type, subject: Subject) {
        if let Some(context) = self.contexts.get_mut(&context) {
            context.events.push(AsyncEvent { kind, subject });
        }
    }

    /// Adds an async event to every context of a device.
    pub(super) fn notify_all(&mut self, device: Id, kind: sys::ibv_event_type, subject: Subject) {
        for context in self.contexts.values_mut().filter(|context| context.device == device) {
            context.events.push(AsyncEvent { kind, subject });
        }
    }

    pub(super) fn objects(&self) -> Objects {
        let unacked = self.queues.values().map(|queue| queue.unacked).sum::<usize>()
            + self.queue_pairs.values().map(|qp| qp.unacked).sum::<usize>()
            + self.srqs.values().map(|srq| srq.unacked).sum::<usize>()
            + self.identifiers.values().map(|id| id.unacked).sum::<usize>();
        Objects {
            device_lists: self.device_lists,
            contexts: self.contexts.len(),
            protection_domains: self.domains.len(),
            memory_regions: self.regions.len(),
            memory_windows: self.windows.len(),
            completion_channels: self.channels.len(),
            completion_queues: self.queues.len(),
            shared_receive_queues: self.srqs.len(),
            queue_pairs: self.queue_pairs.len(),
            event_channels: self.cm_channels.len(),
            cm_ids: self.identifiers.len(),
            unacked_events: unacked,
        }
    }
}
