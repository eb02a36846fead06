//! Starts the revocation of regions, and sets the time by which peers must have released their
//! grants.

use std::time::Instant;

use super::Poller;
use crate::fabric::Shared;
use crate::fabric::regions::RegionShared;
use crate::fabric::timers::Timer;

impl Poller {
    pub(crate) fn revoke_region(&mut self, shared: &Shared, region: &RegionShared) {
        if region.begin_revocation(&mut self.wakes) {
            let at = Instant::now() + shared.config.peer_timeout;
            self.timers.add(at, Timer::Revocation(region.id));
        }
    }

    /// Revokes a region whose lifetime is over.
    pub(super) fn region_expired(&mut self, shared: &Shared, id: u64) {
        if let Some(region) = shared.regions.get(id) {
            self.revoke_region(shared, &region);
        }
    }
}
