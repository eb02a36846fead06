//! Connects that wait until their link, already on TCP, is upgraded to RDMA.

use std::sync::Arc;

use super::dialing::Reply;
use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::fabric::poller::Poller;
use crate::link::shared::LinkShared;
use crate::policy::{Fallback, Rdma};

/// A connect that waits until its link, already on TCP, is upgraded to RDMA.
pub(crate) struct UpgradeWaiter {
    reply: Reply,
    policy: Rdma,
}

impl Poller {
    /// Upgrades a link to RDMA before it is returned to its caller.
    pub(crate) fn open_on_rdma(
        &mut self,
        shared: &Shared,
        link: &Arc<LinkShared>,
        reply: Reply,
        policy: Rdma,
    ) {
        self.upgrade_waiters.insert(link.name, UpgradeWaiter { reply, policy });
        let moves = link.with_wakes(&mut self.wakes, |state, _, _| state.core.can_migrate());
        if moves {
            // Schedule the next attempt first. If the offer fails, the failure changes the time of
            // the next attempt.
            self.upgrade_in(link, shared.config.connection_timeout);
            self.offer(shared, link);
        } else {
            let error = Error::new(
                ErrorKind::Refused,
                format!("{} does not accept RDMA", link.peer_name()),
            );
            self.first_upgrade_failed(shared, link, error);
        }
    }

    /// Handles the failed upgrade of a link whose connect still waits.
    pub(crate) fn first_upgrade_failed(
        &mut self,
        shared: &Shared,
        link: &Arc<LinkShared>,
        error: Error,
    ) {
        let Some(UpgradeWaiter { reply, policy }) = self.upgrade_waiters.remove(&link.name) else {
            return;
        };
        if policy == Rdma::Require || link.failure_known() {
            link.with_wakes(&mut self.wakes, |state, _, wakes| {
                state.core.end(error.clone(), wakes);
            });
            let _ = reply.send(Err(error));
            return;
        }
        shared.fell_back(link, Fallback::new(error));
        if link.with_wakes(&mut self.wakes, |state, _, _| state.core.can_migrate()) {
            self.upgrade_in(link, shared.config.upgrade_after);
        }
        if let Err(Ok(link)) = reply.send(Ok(Arc::clone(link))) {
            link.close();
        }
    }

    /// Returns a link that was upgraded to the caller whose connect waits for it.
    pub(super) fn first_upgrade_done(&mut self, link: &Arc<LinkShared>) {
        let Some(UpgradeWaiter { reply, policy }) = self.upgrade_waiters.remove(&link.name) else {
            return;
        };
        if policy == Rdma::Require {
            link.with_wakes(&mut self.wakes, |state, _, _| state.core.stay_on_path());
        }
        if let Err(Ok(link)) = reply.send(Ok(Arc::clone(link))) {
            link.close(); // the caller is gone
        }
    }
}
