//! The queue pair that a link is upgraded to, until RDMA carries the link.

use std::sync::Arc;

use ferrite_verbs::{Operation, WorkCompletion};

use super::LinkState;
use crate::device::shared_device::SharedDevice;
use crate::device::slots::SendQueue;
use crate::error::{Error, ErrorKind};
use crate::link::core::RequestContext;
use crate::link::kind::Kind;
use crate::wire::CONTROL_BYTES;

pub(crate) struct NextPath {
    pub(crate) queue: SendQueue<RequestContext>,
    pub(crate) device: Arc<SharedDevice>,
    pub(super) inline: usize,
    /// The sequence number of our first packet.
    psn: u32,
}

impl LinkState {
    /// Sets the queue pair to upgrade to.
    pub(crate) fn begin_upgrade(
        &mut self,
        queue: SendQueue<RequestContext>,
        device: Arc<SharedDevice>,
        inline: usize,
        psn: u32,
    ) {
        self.core.begin_upgrade();
        self.next = Some(NextPath { queue, device, inline, psn });
    }

    /// Probes the new queue pair. An acknowledgement proves that the path works.
    pub(crate) fn probe(&mut self) -> Result<(), Error> {
        let Some(next) = &mut self.next else { return Ok(()) };
        if next.device.reserve(1) == 0 {
            return Err(Error::new(ErrorKind::Full, "the device's completion queue has no room"));
        }
        let (imm, bytes) = self.core.probe();
        let request = RequestContext {
            kind: Kind::Control,
            bytes: CONTROL_BYTES as u32,
            ..RequestContext::default()
        };
        let posted = next.queue.post_inline(Operation::SendImm(imm), &bytes, true, request);
        posted
            .inspect_err(|refused| next.device.release(1 - refused.posted))
            .map_err(|refused| refused.error.into())
    }

    /// Handles a completion of the new queue pair. Returns false if it belongs to another queue
    /// pair.
    pub(super) fn on_next_sent(&mut self, wc: &WorkCompletion) -> bool {
        let Some(next) = &mut self.next else { return false };
        let (mut entries, mut is_bind) = (0, false);
        let is_known = next.queue.complete(wc, |it, last| {
            entries += 1;
            is_bind |= last && it.request.kind == Kind::Bind;
        });
        next.device.release(entries);
        let works = wc.ok().is_ok();
        if is_known && !(is_bind && works) {
            self.core.on_probed(works);
        }
        is_known
    }

    /// Gives up the upgrade. The caller must destroy the queue pair.
    pub(crate) fn end_upgrade(&mut self) -> Option<(Arc<SharedDevice>, SendQueue<RequestContext>)> {
        self.core.end_upgrade();
        let NextPath { queue, device, .. } = self.next.take()?;
        if let Some(qp) = queue.qp() {
            let _ = qp.stop(); // fails only if the device was removed, and then nothing runs
        }
        self.rdma.generation = queue.next_generation();
        Some((device, queue))
    }

    /// Returns whether the upgrade uses this device.
    pub(crate) fn upgrades_on(&self, device: &SharedDevice) -> bool {
        self.next.as_ref().is_some_and(|next| next.device.index == device.index)
    }

    /// Returns the send queue of the next path, if its queue pair has the number `qp`.
    pub(super) fn next_queue(&self, qp: u32) -> Option<&SendQueue<RequestContext>> {
        self.next.as_ref().map(|next| &next.queue).filter(|queue| queue.is_of(qp))
    }

    /// Returns the sequence number of our first packet on the queue pair of the upgrade.
    pub(crate) fn next_psn(&self) -> u32 {
        self.next.as_ref().map_or(0, |next| next.psn)
    }
}
