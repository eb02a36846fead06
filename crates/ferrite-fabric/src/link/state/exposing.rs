//! What the peer of a link may reach of our memory: the rights of the queue pair, and the windows
//! that are bound to it.
//!
//! A queue pair has no remote rights before there is something to reach.

use std::sync::Arc;

use ferrite_verbs::{Access, QueuePairAttributes, RemoteSlice};

use super::{ActiveTransport, Kind, LinkEnv, LinkState, RequestContext, Step, Wakes};
use crate::fabric::shared_device::SharedDevice;
use crate::mem::Window;

impl LinkState {
    /// What the queue pair that carries the link, or that it upgrades to, is to allow.
    pub(crate) fn rights(&self) -> Access {
        self.rights
    }

    /// Lets the peer do more, by what its keys allow.
    pub(crate) fn allow(&mut self, more: Access) {
        let rights = self.rights | more;
        if rights == self.rights {
            return;
        }
        self.rights = rights;
        // One that is not ready to send yet takes them when it becomes so.
        if let Some(qp) = self.queue.qp() {
            let _ = qp.modify(&QueuePairAttributes::change_access(rights));
        }
        self.allow_ahead();
    }

    /// The same for the queue pair that is upgraded to, if it is ready.
    pub(crate) fn allow_ahead(&mut self) {
        if let Some(qp) = self.upgrade.as_ref().and_then(|upgrade| upgrade.queue.qp()) {
            let _ = qp.modify(&QueuePairAttributes::change_access(self.rights));
        }
    }

    /// Whether this side has begun to end the link.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing
    }

    /// The device that carries the link, or will.
    pub(crate) fn next_device(&self) -> Option<Arc<SharedDevice>> {
        self.upgrade
            .as_ref()
            .map(|upgrade| &upgrade.device)
            .or(self.device.as_ref())
            .map(Arc::clone)
    }

    /// Binds a window of `device` to the queue pair there. What is sent later comes after it. Where
    /// the path is lost, or the link, there is none: it is told of a window on the next path when
    /// it goes there.
    pub(crate) fn bind(
        &mut self,
        device: &SharedDevice,
        window: &Arc<Window>,
        env: &LinkEnv<'_>,
        wakes: &mut Wakes,
    ) {
        if self.upgrade.is_some() {
            self.bind_ahead(device, window);
        } else if self.failure().is_none()
            && self.transport == ActiveTransport::Rdma
            && self.device.as_ref().is_some_and(|on| on.index == device.index)
        {
            self.binds.push_back(Arc::clone(window));
            self.pump(env, wakes);
        } else {
            self.stats.binds_dropped += 1;
        }
    }

    /// Binds a window to the queue pair that is upgraded to; where it is, if that went well.
    pub(crate) fn bind_ahead(
        &mut self,
        device: &SharedDevice,
        window: &Arc<Window>,
    ) -> Option<RemoteSlice> {
        let upgrade =
            self.upgrade.as_mut().filter(|upgrade| upgrade.device.index == device.index)?;
        if upgrade.queue.room() == 0 || upgrade.device.reserve(1) == 0 {
            return None;
        }
        let request = RequestContext { kind: Kind::Bind, ..RequestContext::default() };
        let posted = match upgrade.queue.post_bind(window, true, request) {
            Ok(posted) => usize::from(posted),
            Err(refused) => {
                self.steps.push(Step::Failed);
                refused.posted
            }
        };
        upgrade.device.release(1 - posted);
        (posted == 1).then(|| window.remote())
    }
}
