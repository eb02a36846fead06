//! When links on TCP try to upgrade to RDMA.
//!
//! - A link tries after `upgrade_after`, and then after delays that double up to [`UPGRADE_MAX`].
//! - After a loss, and while attempts between two addresses fail, their links take turns
//!   (`upgrade_turns.rs`). Otherwise thousands of links would try a broken path at the same time.
//! - As soon as one link has succeeded, the others follow. They also try when a device or its port
//!   is back.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use super::upgrade_turns::{APART, Turn, UPGRADE_MAX, UpgradeTurns};
use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::fabric::poller::Poller;
use crate::fabric::timers::Timer;
use crate::link::core::ActiveTransport;
use crate::link::name::LinkName;
use crate::link::shared::LinkShared;

/// When RDMA is back, this many links try at a time, and the next ones [`APART`] later.
const TOGETHER: usize = 4;

/// The turns of links on TCP. A path is from a local address to the peer's address and port.
pub(crate) type UpgradeSchedule = UpgradeTurns<Path, LinkName>;
type Path = (Option<IpAddr>, SocketAddr);

/// Returns the path of a link that this side opened. The other side never makes attempts.
fn path(link: &LinkShared) -> Option<Path> {
    let route = link.route();
    let is_caller = link.peek(|state| state.core.is_caller());
    Some((route.first_local().map(|local| local.ip()), route.peer.filter(|_| is_caller)?))
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
        let may_offer = transport == ActiveTransport::Tcp && !upgrading && !switched;
        if let Some(path) = path(&link).filter(|_| may_offer) {
            let mut schedule = std::mem::take(&mut self.upgrade_schedule);
            let waits = |name| {
                let link = self.link_named(shared, name);
                link.is_some_and(|link| link.peek(|state| state.core.awaits_upgrade()))
            };
            let turn = schedule.ask(&path, name, now, spacing, waits);
            self.upgrade_schedule = schedule;
            if let Turn::After(wait, first) = turn {
                if let Some(first) = first.and_then(|first| self.link_named(shared, first)) {
                    self.upgrade_in(&first, Duration::ZERO);
                }
                self.upgrade_in(&link, wait);
                return;
            }
        }
        if upgrading && !switched {
            self.withdraw(&link);
            self.take_turns(shared, &link);
            if self.upgrade_waiters.contains_key(&name) {
                let what = format!("{} did not upgrade to RDMA in time", link.peer_name());
                self.first_upgrade_failed(shared, &link, Error::new(ErrorKind::Timeout, what));
            } else {
                self.upgrade_in(&link, Duration::ZERO); // it needs another turn
            }
            return;
        }
        let wait = link.with_wakes(&mut self.wakes, |state, _, _| {
            state.core.next_backoff(spacing, UPGRADE_MAX)
        });
        self.upgrade_in(&link, wait); // if the link has switched, the peer may still withdraw
        if may_offer {
            self.offer(shared, &link);
        }
    }

    /// Makes the links that this side opened to the same address take turns, because an attempt
    /// has failed.
    pub(super) fn take_turns(&mut self, shared: &Shared, link: &LinkShared) {
        if let Some(path) = path(link) {
            self.upgrade_schedule.on_failed(path, self.now, shared.config.upgrade_after);
        }
    }

    /// Makes the links to the same address take turns, and lets this link try later, because its
    /// path is lost.
    pub(super) fn upgrade_after_loss(&mut self, shared: &Shared, link: &Arc<LinkShared>) {
        if let Some(path) = path(link) {
            self.upgrade_schedule.on_lost(path, self.now, shared.config.upgrade_after);
            self.upgrade_in(link, shared.config.upgrade_after);
        }
    }

    /// Lets the next link try, because no device of this side fits this link.
    pub(super) fn pass_turn(&mut self, link: &LinkShared) {
        if let Some(path) = path(link) {
            self.upgrade_schedule.pass(&path, self.now);
        }
    }

    /// Ends the turns of the links to the same address, and lets them try soon, because a link was
    /// upgraded.
    pub(super) fn end_turns(&mut self, shared: &Shared, link: &LinkShared) {
        if let Some(found) = path(link).filter(|path| self.upgrade_schedule.end(path)) {
            self.retry_chosen(shared, |link| path(link).is_some_and(|path| path == found));
        }
    }

    /// Lets all links on TCP try to upgrade soon, because a device or its port is back.
    pub(crate) fn retry_upgrades(&mut self, shared: &Shared) {
        self.upgrade_schedule.clear();
        self.retry_chosen(shared, |_| true);
    }

    /// Lets links on TCP try to upgrade soon. Their delays are not reset, because the delay until
    /// the next attempt is also the time that an attempt may take.
    fn retry_chosen(&mut self, shared: &Shared, is_chosen: impl Fn(&LinkShared) -> bool) {
        let links: Vec<_> = {
            let links = shared.links.read().unwrap_or_else(std::sync::PoisonError::into_inner);
            let waits = |link: &LinkShared| link.peek(|state| state.core.awaits_upgrade());
            links.iter().filter(|link| waits(link) && is_chosen(link)).cloned().collect()
        };
        for (number, link) in links.iter().enumerate() {
            self.upgrade_in(link, APART * u32::try_from(number / TOGETHER).unwrap_or(u32::MAX));
        }
    }
}
