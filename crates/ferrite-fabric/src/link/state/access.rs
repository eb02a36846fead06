//! Access of the peer to our memory: the rights of the queue pair, and the windows that are bound
//! to it. A queue pair has no remote rights until something is granted. The exception is a raw
//! connection, which allows writes from the start.

use std::sync::Arc;

use ferrite_verbs::{Access, QueuePairAttributes, RemoteSlice};

use super::{LinkEnv, LinkState};
use crate::device::shared_device::SharedDevice;
use crate::link::core::{ActiveTransport, RequestContext, Wakes};
use crate::link::kind::Kind;
use crate::mem::Window;

impl LinkState {
    /// Returns the peer's rights on the current and the next queue pair of the link.
    pub(crate) fn rights(&self) -> Access {
        self.rdma.rights
    }

    /// Gives the peer more rights on the queue pair. The remote keys of the grants limit them
    /// further.
    pub(crate) fn allow(&mut self, more: Access) {
        let rights = self.rdma.rights | more;
        if rights == self.rdma.rights {
            return;
        }
        self.rdma.rights = rights;
        // A queue pair that is not ready to send yet gets the rights when it becomes ready.
        if let Some(qp) = self.rdma.queue.qp() {
            let _ = qp.modify(&QueuePairAttributes::change_access(rights));
        }
        self.allow_ahead();
    }

    /// Gives the peer the same rights on the queue pair of the upgrade, if it is ready.
    pub(crate) fn allow_ahead(&mut self) {
        if let Some(qp) = self.next.as_ref().and_then(|next| next.queue.qp()) {
            let _ = qp.modify(&QueuePairAttributes::change_access(self.rdma.rights));
        }
    }

    /// Returns the device of an upgrade under way; otherwise the link's device.
    pub(crate) fn next_device(&self) -> Option<Arc<SharedDevice>> {
        let next = self.next.as_ref().map(|next| &next.device);
        next.or(self.rdma.device.as_ref()).map(Arc::clone)
    }

    /// Binds a window of `device` to the link's queue pair on that device, or to the queue pair of
    /// an upgrade under way. Sends that are queued later are posted after the bind. If the link is
    /// down or does not use `device`, nothing is bound. The peer then learns of a new window when
    /// the link migrates to the next path.
    pub(crate) fn bind(
        &mut self,
        device: &SharedDevice,
        window: &Arc<Window>,
        env: &LinkEnv<'_>,
        wakes: &mut Wakes,
    ) {
        if self.next.is_some() {
            self.bind_ahead(device, window);
        } else if self.failure().is_none()
            && self.core.transport() == ActiveTransport::Rdma
            && self.rdma.device.as_ref().is_some_and(|on| on.index == device.index)
        {
            self.rdma.binds.push_back(Arc::clone(window));
            self.pump(env, wakes);
        } else {
            self.core.stats.binds_dropped += 1;
        }
    }

    /// Posts a request that binds a window to the queue pair of the upgrade. Returns the window's
    /// address and key if the device has accepted the request.
    pub(crate) fn bind_ahead(
        &mut self,
        device: &SharedDevice,
        window: &Arc<Window>,
    ) -> Option<RemoteSlice> {
        let next = self.next.as_mut().filter(|next| next.device.index == device.index)?;
        if next.queue.room() == 0 || next.device.reserve(1) == 0 {
            return None;
        }
        let request = RequestContext { kind: Kind::Bind, ..RequestContext::default() };
        let posted = match next.queue.post_bind(window, true, request) {
            Ok(posted) => usize::from(posted),
            Err(refused) => {
                self.core.on_probed(false);
                refused.posted
            }
        };
        next.device.release(1 - posted);
        (posted == 1).then(|| window.remote())
    }
}
