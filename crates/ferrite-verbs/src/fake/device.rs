//! Devices and contexts: the device list, port changes, and removal.

mod queries;

use std::ffi::{c_char, c_int};

use rustix::io::Errno;

use super::enter::enter;
use super::object::{self, Events, Id, Object, Ptr, code, extended, pointer};
use super::records::{Context, Device, Subject};
use super::state::State;
use super::{DeviceSpec, World, completion, execution, receive, window};
use crate::sys;
use queries::query_port_ex;
pub(super) use queries::{
    ack_async_event, get_async_event, query_device, query_gid, query_gid_table, query_port,
};

/// The length of the GID table; the entries in use come first.
const GID_TABLE_LEN: u16 = 16;
const COMPLETION_VECTORS: c_int = 2;
const ROCE_V2: u32 = 2;

impl State {
    pub(super) fn add_device(&mut self, spec: DeviceSpec) {
        let id = self.new_id();
        let guid = 0x0200_00ff_fe00_0000 | id;
        let (node_type, transport_type) = match spec.is_iwarp {
            true => {
                (sys::ibv_node_type::IBV_NODE_RNIC, sys::ibv_transport_type::IBV_TRANSPORT_IWARP)
            }
            false => (sys::ibv_node_type::IBV_NODE_CA, sys::ibv_transport_type::IBV_TRANSPORT_IB),
        };
        let mut raw = sys::ibv_device { node_type, transport_type, ..empty_device() };
        put_text(&mut raw.name, &spec.name);
        put_text(&mut raw.dev_name, &spec.name);
        let raw = Object::for_world(raw, id, self.weak());
        let cm_context = Object::for_world(new_context(raw, -1), 0, self.weak());
        self.devices
            .insert(id, Device { id, spec, guid, up: true, removed: false, raw, cm_context });
    }

    pub(super) fn set_port_up(&mut self, device: Id, up: bool) {
        use sys::ibv_event_type as Event;
        let Some(found) = self.devices.get_mut(&device) else { return };
        if std::mem::replace(&mut found.up, up) != up {
            let kind = if up { Event::IBV_EVENT_PORT_ACTIVE } else { Event::IBV_EVENT_PORT_ERR };
            self.notify_all(device, kind, Subject::Port(1));
            self.settle();
        }
    }

    pub(super) fn remove(&mut self, device: Id) {
        let Some(found) = self.devices.get_mut(&device) else { return };
        (found.removed, found.up) = (true, false);
        self.notify_all(device, sys::ibv_event_type::IBV_EVENT_DEVICE_FATAL, Subject::Device);
        let doomed: Vec<Id> = self
            .queue_pairs
            .iter()
            .filter(|(_, qp)| qp.device == device)
            .map(|(id, _)| *id)
            .collect();
        for id in doomed {
            self.fail(id);
        }
        self.settle();
        self.notify_device_removal(device);
    }

    /// See [`World::disassociate_device`].
    pub(super) fn disassociate(&mut self, device: Id) {
        self.remove(device);
        self.disassociated = true;
        let contexts: Vec<Id> = self
            .contexts
            .iter()
            .filter(|(_, context)| context.device == device)
            .map(|(id, _)| *id)
            .collect();
        let of = |context: Id| contexts.contains(&context);
        let domains: Vec<Id> = self
            .domains
            .iter()
            .filter(|(_, domain)| of(domain.context))
            .map(|(id, _)| *id)
            .collect();
        let kept = |domain: Id| !domains.contains(&domain);
        // The C structs that callers hold stay allocated, as with a real provider.
        self.queue_pairs.retain(|_, qp| kept(qp.domain));
        self.by_qp_num.retain(|_, id| self.queue_pairs.contains_key(id));
        self.windows.retain(|_, window| kept(window.domain));
        self.srqs.retain(|_, srq| kept(srq.domain));
        self.queues.retain(|_, queue| !of(queue.context));
        self.regions.retain(|_, region| kept(region.domain));
        self.keys.retain(|_, id| self.regions.contains_key(id));
        self.domains.retain(|id, _| kept(*id));
        for context in self.contexts.values_mut().filter(|context| context.device == device) {
            // Events about the destroyed objects are dropped, as in `ib_uverbs_release_uevent`.
            context
                .events
                .remove(|event| !matches!(event.subject, Subject::Device | Subject::Port(_)));
            context.events.close();
        }
        for channel in self.channels.values_mut().filter(|channel| of(channel.context)) {
            channel.events.close();
        }
    }

    /// Returns the error for a destroy of an object that does not exist.
    pub(super) fn no_object(&self) -> Errno {
        if self.disassociated { Errno::IO } else { Errno::INVAL }
    }

    /// Drops the pending events about an object that is being destroyed.
    pub(super) fn drop_async_events(&mut self, context: Id, subject: Subject) {
        if let Some(context) = self.contexts.get_mut(&context) {
            context.events.remove(|event| event.subject == subject);
        }
    }

    fn has_children(&self, context: Id) -> bool {
        self.domains.values().any(|domain| domain.context == context)
            || self.channels.values().any(|channel| channel.context == context)
            || self.queues.values().any(|queue| queue.context == context)
    }
}

fn empty_device() -> sys::ibv_device {
    sys::ibv_device {
        _ops: sys::_ibv_device_ops::default(),
        node_type: sys::ibv_node_type::IBV_NODE_UNKNOWN,
        transport_type: sys::ibv_transport_type::IBV_TRANSPORT_UNKNOWN,
        name: [0; 64],
        dev_name: [0; 64],
        dev_path: [0; 256],
        ibdev_path: [0; 256],
    }
}

fn put_text(place: &mut [c_char], text: &str) {
    // The last byte stays zero.
    let room = place.len() - 1;
    for (to, from) in place[..room].iter_mut().zip(text.bytes()) {
        *to = std::ffi::c_char::from_ne_bytes([from]);
    }
}

fn new_context(device: Ptr<sys::ibv_device>, async_fd: c_int) -> sys::verbs_context {
    let mut raw = sys::verbs_context {
        query_port: Some(query_port_ex),
        sz: size_of::<sys::verbs_context>(),
        ..Default::default()
    };
    raw.context.device = device.0;
    raw.context.cmd_fd = -1;
    raw.context.async_fd = async_fd;
    raw.context.num_comp_vectors = COMPLETION_VECTORS;
    // All ones marks a context that has the extended part.
    raw.context.abi_compat = std::ptr::without_provenance_mut(usize::MAX);
    raw.context.ops.poll_cq = Some(completion::poll_cq);
    raw.context.ops.req_notify_cq = Some(completion::req_notify_cq);
    raw.context.ops.post_send = Some(execution::post_send);
    raw.context.ops.post_recv = Some(receive::post_recv);
    raw.context.ops.post_srq_recv = Some(receive::post_srq_recv);
    raw.context.ops.alloc_mw = Some(window::alloc_mw);
    raw.context.ops.dealloc_mw = Some(window::dealloc_mw);
    raw
}

pub(super) unsafe extern "C" fn get_device_list(
    num_devices: *mut c_int,
) -> *mut *mut sys::ibv_device {
    let list = World::current().ok_or(Errno::NOSYS).and_then(|world| {
        let mut state = world.lock();
        if let Some(errno) = state.take_fault("ibv_get_device_list") {
            return Err(errno);
        }
        let mut list: Vec<_> =
            state.devices.values().filter(|d| !d.removed).map(|d| d.raw.0).collect();
        if !num_devices.is_null() {
            // SAFETY: the caller guarantees that `num_devices` is null or valid for the write.
            unsafe { *num_devices = c_int::try_from(list.len()).unwrap_or(c_int::MAX) };
        }
        if !list.is_empty() {
            state.device_lists += 1;
        }
        list.push(std::ptr::null_mut());
        Ok(Box::into_raw(list.into_boxed_slice()).cast())
    });
    pointer(list)
}

pub(super) unsafe extern "C" fn free_device_list(list: *mut *mut sys::ibv_device) {
    if list.is_null() {
        return;
    }
    // SAFETY: the list came from `get_device_list`: a boxed slice that ends with a null pointer.
    // Its devices live as long as the world, which the caller holds.
    unsafe {
        let mut len = 0;
        while !(*list.add(len)).is_null() {
            len += 1;
        }
        if len > 0 {
            // The name is empty, so that no fault can be injected: this call cannot fail.
            let _ = enter("", *list, |state, _| {
                state.device_lists = state.device_lists.saturating_sub(1);
                Ok(())
            });
        }
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, len + 1)));
    }
}

pub(super) unsafe extern "C" fn fork_init() -> c_int {
    use sys::ibv_fork_status as Status;
    object::code(World::current().ok_or(Errno::NOSYS).and_then(|world| {
        let mut state = world.lock();
        if let Some(errno) = state.take_fault("ibv_fork_init") {
            return Err(errno);
        }
        if state.forks == Status::IBV_FORK_DISABLED {
            if !state.domains.is_empty() {
                // The real `ibv_fork_init` fails after the first registration. The fake fails
                // already if a protection domain exists.
                return Err(Errno::INVAL);
            }
            state.forks = Status::IBV_FORK_ENABLED;
        }
        Ok(())
    }))
}

pub(super) unsafe extern "C" fn is_fork_initialized() -> sys::ibv_fork_status {
    World::current().map_or(sys::ibv_fork_status::IBV_FORK_DISABLED, |world| world.lock().forks)
}

pub(super) unsafe extern "C" fn get_device_name(device: *mut sys::ibv_device) -> *const c_char {
    // SAFETY: the caller's device belongs to a world that is alive.
    unsafe { (&raw const (*device).name).cast() }
}

pub(super) unsafe extern "C" fn get_device_guid(device: *mut sys::ibv_device) -> sys::__be64 {
    // SAFETY: as above.
    let guid =
        unsafe { enter("ibv_get_device_guid", device, |state, id| Ok(state.devices[&id].guid)) };
    guid.unwrap_or(0).to_be()
}

pub(super) unsafe extern "C" fn open_device(device: *mut sys::ibv_device) -> *mut sys::ibv_context {
    // SAFETY: as above.
    let opened = unsafe {
        enter("ibv_open_device", device, |state, id| {
            let found = state.devices.get(&id).filter(|device| !device.removed).ok_or(Errno::IO)?;
            let raw_device = found.raw;
            let events = Events::new()?;
            let name = state.new_id();
            let raw =
                Object::for_caller(new_context(raw_device, events.fd()), name, state.world()?);
            state.contexts.insert(name, Context { device: id, events, raw });
            Ok(raw.context())
        })
    };
    pointer(opened)
}

pub(super) unsafe extern "C" fn close_device(context: *mut sys::ibv_context) -> c_int {
    // SAFETY: the caller's context is open until here, and not used after.
    code(unsafe {
        enter("ibv_close_device", extended(context), |state, id| {
            if state.has_children(id) {
                return Err(Errno::BUSY);
            }
            let closed = state.contexts.remove(&id).ok_or(Errno::INVAL)?;
            object::free(closed.raw);
            Ok(())
        })
    })
}
