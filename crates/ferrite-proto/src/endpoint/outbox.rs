//! Control messages that wait to be polled, and those in flight, which have not completed yet.
//!
//! The queue is bounded whatever the peer does. An announcement is a flag, feature messages and
//! keepalives have limits, and at most [`MESSAGES_IN_FLIGHT`] messages are in flight.

use std::collections::VecDeque;
use std::time::Instant;

use crate::message::Message;

/// Maximum number of messages that [`poll_message`](super::Endpoint::poll_message) has returned and
/// that the driver has not reported as sent.
pub const MESSAGES_IN_FLIGHT: usize = 32;

/// Maximum number of feature messages that wait to be polled.
pub(super) const FEATURES_WAITING: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NextMessage {
    Announcement,
    Feature(Message),
    Keepalive,
}

#[derive(Debug, Default)]
pub(super) struct Outbox {
    announcement: bool,
    features: VecDeque<Message>,
    /// When each keepalive that waits or is in flight was queued; the oldest first.
    keepalives: VecDeque<Instant>,
    keepalives_waiting: usize,
    /// Whether each message in flight is a keepalive; the oldest first.
    in_flight: VecDeque<bool>,
}

impl Outbox {
    pub(super) fn queue_announcement(&mut self) {
        self.announcement = true;
    }

    pub(super) fn has_announcement(&self) -> bool {
        self.announcement
    }

    /// Queues a feature message. Returns whether there was room.
    pub(super) fn queue_feature(&mut self, message: Message) -> bool {
        let room = self.features.len() < FEATURES_WAITING;
        if room {
            self.features.push_back(message);
        }
        room
    }

    /// Queues a keepalive, if fewer than `limit` are waiting or in flight. Returns whether it did.
    pub(super) fn queue_keepalive(&mut self, now: Instant, limit: u32) -> bool {
        let room = self.keepalives.len() < limit as usize;
        if room {
            self.keepalives.push_back(now);
            self.keepalives_waiting += 1;
        }
        room
    }

    /// Returns when the oldest keepalive without a completion was queued.
    pub(super) fn oldest_keepalive(&self) -> Option<Instant> {
        self.keepalives.front().copied()
    }

    /// Returns the next message, which is then in flight. Announcements come first, because the
    /// peer waits for them.
    pub(super) fn poll(&mut self) -> Option<NextMessage> {
        if self.in_flight.len() >= MESSAGES_IN_FLIGHT {
            return None;
        }
        let next = if std::mem::take(&mut self.announcement) {
            NextMessage::Announcement
        } else if let Some(message) = self.features.pop_front() {
            NextMessage::Feature(message)
        } else if self.keepalives_waiting > 0 {
            self.keepalives_waiting -= 1;
            NextMessage::Keepalive
        } else {
            return None;
        };
        self.in_flight.push_back(next == NextMessage::Keepalive);
        Some(next)
    }

    /// Removes the oldest message in flight, which has completed. Returns whether there was one.
    pub(super) fn complete_oldest(&mut self) -> bool {
        let Some(keepalive) = self.in_flight.pop_front() else { return false };
        if keepalive {
            self.keepalives.pop_front();
        }
        true
    }
}
