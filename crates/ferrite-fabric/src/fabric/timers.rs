//! Deadlines, soonest first. One that is no longer wanted comes all the same, and its owner ignores
//! it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Instant;

use ferrite_verbs::CmKey;

/// A link by its number, which others get after it, and by its serial, which none does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct LinkName {
    pub(crate) index: u32,
    pub(crate) serial: u64,
}

/// What to look at when the time has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Timer {
    /// Is the peer of this link alive?
    Keepalive(LinkName),
    /// Has this link delivered what was sent?
    Close(LinkName),
    /// Is everything of this link out of flight?
    Drain(LinkName),
    /// Has the device not said that the queue pair of this link has taken its last receive?
    LastReceive(LinkName),
    /// The same of a queue pair that no link has any more.
    Leaving(usize, u32),
    /// Has nobody said why requests of this link were flushed?
    Flushed(LinkName),
    /// Has this link found another path?
    Move(LinkName),
    /// Is this link still on TCP?
    Upgrade(LinkName),
    /// Call the peer of this link again: it has no path.
    Redial(LinkName),
    /// Is there memory that nobody uses any more?
    Shrink,
    /// Somebody wants to be woken.
    Wake(u64),
    /// Is there memory for receives again?
    Refill,
    /// Has this handshake got anywhere?
    Handshake(CmKey),
    /// Has this greeting over TCP got anywhere?
    Greeting(u64),
    /// May those that wait at the door begin?
    Door,
    /// Are there descriptors again for this listener?
    Accept(u64),
    /// Is the device of this listener back?
    Listen(u64),
    /// Try this handshake again.
    Retry(u64),
    /// A grant's time is over.
    Expiry(u64),
    /// A grant's users had time enough to let go.
    Revocation(u64),
    /// Is the device of this device back?
    Look(usize),
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

    /// The next whose time has come.
    pub(crate) fn due(&mut self, now: Instant) -> Option<Timer> {
        if self.soonest()? > now {
            return None;
        }
        self.0.pop().map(|Reverse((_, timer))| timer)
    }
}
