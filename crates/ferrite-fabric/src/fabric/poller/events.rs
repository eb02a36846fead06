//! Events of devices and of the connection manager.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use ferrite_verbs::{AsyncEvent, AsyncEventKind, Subject};

use super::Poller;
use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::policy::Rdma;

/// Maximum number of events of a device and of the connection manager that one pass handles. Each
/// event needs system calls, and thousands of events must not delay the completions of other links.
/// The next pass handles the rest.
const DEVICE_EVENTS_PER_PASS: usize = 64;
const CM_EVENTS_PER_PASS: usize = 16;

impl Poller {
    pub(super) fn device_events(&mut self, shared: &Shared, device: usize) -> usize {
        let mut count = 0;
        let device = &shared.devices[device];
        while count < DEVICE_EVENTS_PER_PASS
            && let Some(event) = self.next_device_event(device.index)
        {
            count += 1;
            match (event.kind, event.subject) {
                (
                    AsyncEventKind::QP_FATAL
                    | AsyncEventKind::QP_REQUEST_ERROR
                    | AsyncEventKind::QP_ACCESS_ERROR,
                    Subject::QueuePair(number),
                ) => {
                    // Completions that arrived before this event give more details.
                    self.reap_all(shared);
                    let index = self.by_qp.get(device.index, number);
                    if let Some(link) = index.and_then(|index| self.link(shared, index)) {
                        if event.kind != AsyncEventKind::QP_FATAL {
                            self.peer_was_refused(shared, &link, true);
                        }
                        let what = format!("link to {}: the {}", link.peer_name(), event.kind);
                        let error = Error::new(ErrorKind::LinkDown, what);
                        link.with_wakes(&mut self.wakes, |state, _, wakes| {
                            state.core.fail(error, wakes);
                        });
                    }
                }
                (AsyncEventKind::LAST_RECEIVE, Subject::QueuePair(number)) => {
                    self.on_last_receive(shared, device.index, number);
                }
                (
                    AsyncEventKind::DEVICE_FATAL
                    | AsyncEventKind::CQ_ERROR
                    | AsyncEventKind::SRQ_ERROR,
                    _,
                ) => {
                    self.device_gone(shared, device.index, &event.kind.to_string());
                }
                (AsyncEventKind::GID_CHANGE, _) => device.forget_gids(),
                (AsyncEventKind::PORT_ERROR, Subject::Port(port)) => device.port_went_down(port),
                (AsyncEventKind::PORT_ACTIVE, Subject::Port(port)) => {
                    device.port_came_up(port);
                    self.retry_upgrades(shared);
                }
                _ => {}
            }
        }
        self.unfinished |= count == DEVICE_EVENTS_PER_PASS;
        count
    }

    /// Handles a device that the kernel has removed. Its descriptors report an error from now on.
    pub(super) fn device_removed(&mut self, shared: &Shared, device: usize) {
        if let Some(objects) = &self.device_objects[device] {
            shared.waits.remove(objects.context.as_fd());
            shared.waits.remove(objects.channel.as_fd());
            self.device_gone(shared, device, "the device was removed or reset");
        }
    }

    /// Handles a device that no longer works: its links lose their RDMA path, and upgrades to it
    /// end. Links that can migrate continue over TCP, and the others fail.
    pub(crate) fn device_gone(&mut self, shared: &Shared, device: usize, why: &str) {
        self.reap_all(shared);
        let device = &shared.devices[device];
        if device.set_gone() {
            shared.counters.devices_lost.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                "RDMA device {}: {why}; its links end or continue over TCP; the device is used \
                 again when it is back",
                device.name
            );
        }
        self.end_upgrades_on(shared, device);
        let links: Vec<_> = {
            let links = shared.links.read().unwrap_or_else(std::sync::PoisonError::into_inner);
            links.iter().filter(|link| link.is_on(device)).cloned().collect()
        };
        for link in links {
            let what = format!("link to {}: {}: {why}", link.peer_name(), device.name);
            let error = Error::new(ErrorKind::DeviceGone, what);
            link.with_wakes(&mut self.wakes, |state, _, wakes| state.core.fail(error, wakes));
        }
        self.retire_if_unused(shared, device.index);
    }

    /// Releases a device that is gone, once no link uses it. The kernel cannot finish removing a
    /// Soft-RoCE device that is in use.
    pub(crate) fn retire_if_unused(&mut self, shared: &Shared, device: usize) {
        let device = &shared.devices[device];
        if !device.is_gone() {
            return;
        }
        let in_use = {
            let links = shared.links.read().unwrap_or_else(std::sync::PoisonError::into_inner);
            links.iter().any(|link| link.is_on(device))
        };
        if in_use {
            return;
        }
        self.destroy_leaving_on(shared, device.index);
        if self.device_objects[device.index].as_ref().is_none_or(|objects| objects.under_way > 0) {
            return; // already released, or a command is still running
        }
        shared.regions.on_device_gone(device, shared.config.rdma == Rdma::Prefer, &mut self.wakes);
        self.retire(shared, device);
    }

    fn next_device_event(&self, device: usize) -> Option<AsyncEvent> {
        self.device_objects[device].as_ref()?.context.next_async_event().ok().flatten()
    }

    pub(super) fn cm_events(&mut self, shared: &Shared) -> usize {
        let Some(channel) = self.cm.clone() else { return 0 };
        let mut count = 0;
        while count < CM_EVENTS_PER_PASS
            && let Ok(Some(event)) = channel.next_event()
        {
            count += 1;
            self.on_cm_event(shared, event);
        }
        self.unfinished |= count == CM_EVENTS_PER_PASS;
        count
    }
}
