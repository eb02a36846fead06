//! When links on TCP try to upgrade to RDMA.
//!
//! - A link tries after `upgrade_after`, and then after delays that double up to [`UPGRADE_MAX`].
//! - While attempts to a peer's address fail, its links take turns. Otherwise thousands of links
//!   would try a broken path at the same time.
//! - As soon as one link has succeeded, the others follow. They also try when a device or its port
//!   is back.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::fabric::poller::Poller;
use crate::fabric::timers::Timer;
use crate::link::core::ActiveTransport;
use crate::link::name::LinkName;
use crate::link::shared::LinkShared;

/// The longest delay between attempts to upgrade to RDMA.
const UPGRADE_MAX: Duration = Duration::from_secs(5);
/// When RDMA is back, this many links try at a time, with this delay between them.
const TOGETHER: usize = 4;
const APART: Duration = Duration::from_millis(20);

/// The peers' addresses to which the last attempt failed, and when it failed.
#[derive(Debug, Default)]
pub(crate) struct UpgradeSchedule(HashMap<IpAddr, Instant>);

impl UpgradeSchedule {
    pub(super) fn on_failed(&mut self, link: &LinkShared, now: Instant) {
        if let Some(peer) = link.route().peer {
            self.0.insert(peer.ip(), now);
        }
    }

    /// Notes that a link was upgraded. Returns whether attempts to its peer had failed before.
    pub(super) fn on_done(&mut self, link: &LinkShared) -> bool {
        link.route().peer.is_some_and(|peer| self.0.remove(&peer.ip()).is_some())
    }

    /// Returns how long a link must wait because an attempt to its peer has just failed.
    fn wait(&self, link: &LinkShared, now: Instant, spacing: Duration) -> Option<Duration> {
        let failed = *self.0.get(&link.route().peer?.ip())?;
        (failed + spacing).checked_duration_since(now).filter(|wait| !wait.is_zero())
    }

    /// Notes an attempt, so that other links wait for its result. Has no effect unless attempts to
    /// the peer fail.
    fn on_attempt(&mut self, link: &LinkShared, now: Instant) {
        if let Some(at) = link.route().peer.and_then(|peer| self.0.get_mut(&peer.ip())) {
            *at = now;
        }
    }
}

impl Poller {
    /// Schedules the next attempt to upgrade after `wait`, and cancels an earlier schedule.
    pub(crate) fn upgrade_in(&mut self, link: &Arc<LinkShared>, wait: Duration) {
        let at = self.now + wait;
        link.with_wakes(&mut self.wakes, |state, _, _| state.core.set_upgrade_due(at));
        self.timers.add(at, Timer::Upgrade(link.name));
    }

    /// Tries to upgrade a link that is on TCP, when the timer has expired.
    pub(crate) fn upgrade_due(&mut self, shared: &Shared, name: LinkName) {
        let Some(link) = self.link_named(shared, name) else { return };
        let now = self.now;
        let is_due = link.with_wakes(&mut self.wakes, |state, _, _| state.core.is_upgrade_due(now));
        if !is_due {
            return;
        }
        let (transport, upgrading, switched) = link.with_wakes(&mut self.wakes, |state, _, _| {
            (state.core.transport(), state.core.is_upgrading(), state.core.has_switched())
        });
        if transport == ActiveTransport::Rdma || link.failure_known() {
            return;
        }
        let spacing = shared.config.upgrade_after;
        if let Some(wait) = self.upgrade_schedule.wait(&link, now, spacing)
            && !upgrading
        {
            self.upgrade_in(&link, wait);
            return;
        }
        let wait = link.with_wakes(&mut self.wakes, |state, _, _| {
            state.core.next_backoff(shared.config.upgrade_after, UPGRADE_MAX)
        });
        if switched {
            self.upgrade_in(&link, wait); // the peer may still withdraw
            return;
        }
        if upgrading {
            self.withdraw(&link);
            self.upgrade_schedule.on_failed(&link, now);
            if self.upgrade_waiters.contains_key(&name) {
                let what = format!("{} did not upgrade to RDMA in time", link.peer_name());
                self.first_upgrade_failed(shared, &link, Error::new(ErrorKind::Timeout, what));
                return; // this call has scheduled the next attempt
            }
        }
        self.upgrade_in(&link, wait);
        if transport == ActiveTransport::Tcp {
            self.upgrade_schedule.on_attempt(&link, now);
            self.offer(shared, &link);
        }
    }

    /// Lets links on TCP try to upgrade soon, because RDMA may work again: those to one address, or
    /// all. Their delays stay as they are, because an attempt may take as long as its delay.
    pub(crate) fn retry_upgrades(&mut self, shared: &Shared, peer: Option<IpAddr>) {
        let links: Vec<_> = {
            let links = shared.links.read().unwrap_or_else(std::sync::PoisonError::into_inner);
            let is_peer = |link: &LinkShared| {
                peer.is_none() || link.route().peer.map(|peer| peer.ip()) == peer
            };
            let waits = |link: &LinkShared| link.peek(|state| state.core.awaits_upgrade());
            links.iter().filter(|link| is_peer(link) && waits(link)).cloned().collect()
        };
        for (number, link) in links.iter().enumerate() {
            self.upgrade_in(link, APART * u32::try_from(number / TOGETHER).unwrap_or(u32::MAX));
        }
    }
}
