//! What the peer of a link may reach of our memory: the rights of the queue pair, and the windows
//! that are bound to it.
//!
//! A queue pair has no remote rights before there is something to reach.

use std::sync::Arc;

use ferrite_verbs::{Access, QueuePairAttributes, RemoteSlice};

use super::{Around, Carrier, Kind, LinkState, Step, Tag, Wakes};
use crate::engine::lane::Lane;
use crate::mem::Window;

impl LinkState {
    /// What the queue pair that carries the link, or that it climbs to, is to allow.
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

    /// The same for the queue pair that is climbed to, if it is ready.
    pub(crate) fn allow_ahead(&mut self) {
        if let Some(qp) = self.climb.as_ref().and_then(|climb| climb.queue.qp()) {
            let _ = qp.modify(&QueuePairAttributes::change_access(self.rights));
        }
    }

    /// Whether this side has begun to end the link.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing
    }

    /// The device that carries the link, or will.
    pub(crate) fn next_lane(&self) -> Option<Arc<Lane>> {
        self.climb.as_ref().map(|climb| &climb.lane).or(self.lane.as_ref()).map(Arc::clone)
    }

    /// Binds a window of `lane` to the queue pair there. What is sent later comes after it. Where the path is lost, or the
    /// link, there is none: it is told of a window on the next path when it goes there.
    pub(crate) fn bind(&mut self, lane: &Lane, window: &Arc<Window>, around: &Around<'_>, wakes: &mut Wakes) {
        if self.climb.is_some() {
            self.bind_ahead(lane, window);
        } else if self.failure().is_none()
            && self.carrier == Carrier::Rdma
            && self.lane.as_ref().is_some_and(|on| on.index == lane.index)
        {
            self.binds.push_back(Arc::clone(window));
            self.pump(around, wakes);
        } else {
            self.stats.binds_dropped += 1;
        }
    }

    /// Binds a window to the queue pair that is climbed to; where it is, if that went well.
    pub(crate) fn bind_ahead(&mut self, lane: &Lane, window: &Arc<Window>) -> Option<RemoteSlice> {
        let climb = self.climb.as_mut().filter(|climb| climb.lane.index == lane.index)?;
        if climb.queue.room() == 0 || climb.lane.reserve(1) == 0 {
            return None;
        }
        let tag = Tag { kind: Kind::Bind, ..Tag::default() };
        let posted = match climb.queue.post_bind(window, true, tag) {
            Ok(posted) => usize::from(posted),
            Err(refused) => {
                self.steps.push(Step::Failed);
                refused.posted
            }
        };
        climb.lane.release(1 - posted);
        (posted == 1).then(|| window.remote())
    }
}
