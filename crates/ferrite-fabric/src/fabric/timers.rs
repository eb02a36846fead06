//! Deadlines, soonest first. A deadline cannot be cancelled. If it no longer matters when it
//! expires, the handler ignores it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Instant;

use ferrite_verbs::CmKey;

use crate::link::name::LinkName;

/// The action when a deadline expires.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Timer {
    /// Check whether the peer of this link is alive.
    Keepalive(LinkName),
    /// Probe the path of this link if its peer has been silent.
    Probe(LinkName),
    /// Fail this link if it has not yet delivered the data that was sent before the close.
    Close(LinkName),
    /// Destroy the queue pair of this link, whether or not requests are in flight.
    Drain(LinkName),
    /// Stop waiting for the report that this link's queue pair has taken its last receive.
    LastReceive(LinkName),
    /// Like `LastReceive`, for a queue pair that no longer belongs to a link (device index, queue
    /// pair number).
    Leaving(usize, u32),
    /// Fail this link, whose requests were flushed, if no cause was reported.
    Flushed(LinkName),
    /// Fail this link if it has not found another path.
    Migration(LinkName),
    /// Try to upgrade this link if it is still on TCP.
    Upgrade(LinkName),
    /// Reconnect to the peer of this link, which has no path.
    Redial(LinkName),
    /// Release memory that nobody uses any more.
    Shrink,
    /// Try again to get memory for receives.
    Refill,
    /// End this RDMA handshake if it has not finished.
    Handshake(CmKey),
    /// End this TCP handshake if it has not finished.
    Greeting(u64),
    /// End this attempt to reconnect a link over TCP if the peer's host has not answered.
    Connect(u64),
    /// Check whether waiting connections may start their handshakes.
    Admission,
    /// Try again to accept connections of this listener, which ran out of descriptors or memory.
    Accept(u64),
    /// Listen again, if the device of this listener is back.
    Listen(u64),
    /// Retry this handshake. `u64::MAX` means to end the handshakes that have waited too long for
    /// their start.
    Retry(u64),
    /// Revoke this region, which has expired.
    Expiry(u64),
    /// End the revocation of this region, because its peers had enough time to release the grant.
    Revocation(u64),
    /// Search for this missing device.
    FindDevice(usize),
}

#[derive(Default)]
pub(crate) struct Timers(BinaryHeap<Reverse<(Instant, Timer)>>);

impl Timers {
    pub(crate) fn add(&mut self, at: Instant, timer: Timer) {
        self.0.push(Reverse((at, timer)));
    }

    pub(crate) fn soonest(&self) -> Option<Instant> {
        self.0.peek().map(|Reverse((at, _))| *at)
    }

    /// Removes and returns the next timer that has expired.
    pub(crate) fn due(&mut self, now: Instant) -> Option<Timer> {
        if self.soonest()? > now {
            return None;
        }
        self.0.pop().map(|Reverse((_, timer))| timer)
    }
}
