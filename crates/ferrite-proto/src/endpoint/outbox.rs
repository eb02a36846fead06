//! Control messages on their way: those that wait to be polled, and those without a local
//! completion.
//!
//! Bounded whatever the peer does: an announcement is a flag, questions and answers have a limit,
//! keepalives too, and no more than [`MESSAGES_IN_FLIGHT`] are handed out before the first comes
//! back.

use std::collections::VecDeque;
use std::time::Instant;

use crate::message::Message;

/// Messages that [`poll_message`](super::Endpoint::poll_message) hands out before one is reported
/// as sent.
pub const MESSAGES_IN_FLIGHT: usize = 32;

/// Feature messages that may wait.
pub(super) const FEATURES_WAITING: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    Announcement,
    Feature(Message),
    Keepalive,
}

#[derive(Debug, Default)]
pub(super) struct Outbox {
    announcement: bool,
    features: VecDeque<Message>,
    /// When each keepalive was due that waits or is in flight; the oldest first.
    keepalives: VecDeque<Instant>,
    keepalives_waiting: usize,
    /// Whether each message in flight is a keepalive; the oldest first.
    in_flight: VecDeque<bool>,
}

impl Outbox {
    pub(super) fn announce(&mut self) {
        self.announcement = true;
    }

    pub(super) fn is_to_announce(&self) -> bool {
        self.announcement
    }

    /// Whether there was room.
    pub(super) fn feature(&mut self, message: Message) -> bool {
        let room = self.features.len() < FEATURES_WAITING;
        if room {
            self.features.push_back(message);
        }
        room
    }

    /// Whether fewer than `limit` were on their way.
    pub(super) fn keepalive(&mut self, now: Instant, limit: u32) -> bool {
        let room = self.keepalives.len() < limit as usize;
        if room {
            self.keepalives.push_back(now);
            self.keepalives_waiting += 1;
        }
        room
    }

    /// Since when the oldest keepalive waits for its completion.
    pub(super) fn oldest_keepalive(&self) -> Option<Instant> {
        self.keepalives.front().copied()
    }

    /// The next message, which is then in flight. Announcements first: the peer waits for them.
    pub(super) fn poll(&mut self) -> Option<Next> {
        if self.in_flight.len() >= MESSAGES_IN_FLIGHT {
            return None;
        }
        let next = if std::mem::take(&mut self.announcement) {
            Next::Announcement
        } else if let Some(message) = self.features.pop_front() {
            Next::Feature(message)
        } else if self.keepalives_waiting > 0 {
            self.keepalives_waiting -= 1;
            Next::Keepalive
        } else {
            return None;
        };
        self.in_flight.push_back(next == Next::Keepalive);
        Some(next)
    }

    /// The oldest message in flight completed. Whether there was one.
    pub(super) fn sent(&mut self) -> bool {
        let Some(keepalive) = self.in_flight.pop_front() else { return false };
        if keepalive {
            self.keepalives.pop_front();
        }
        true
    }
}
