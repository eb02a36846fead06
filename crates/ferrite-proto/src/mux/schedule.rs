//! What waits to be sent: turns of streams in each class, grants, and resets.
//!
//! A peer cannot make the queues grow without bound: a stream is at most once in each queue, and
//! the resets of one opener are limited.

use std::collections::VecDeque;

use super::cause::Cause;
use super::id::{Class, Opened, Side, StreamId};

#[derive(Debug, Default)]
pub(super) struct Schedule {
    /// Streams that need a turn, by the class in which they send.
    turns: [VecDeque<StreamId>; Class::ALL.len()],
    grants: VecDeque<StreamId>,
    /// Streams that ended with a RESET that is not sent yet, by the class in which they sent.
    resets: [VecDeque<(StreamId, Cause)>; Class::ALL.len()],
    /// The number of these streams by opener.
    waiting_resets: [Opened; 2],
}

impl Schedule {
    pub(super) fn push_turn(&mut self, class: Class, stream: StreamId) {
        self.turns[class.index()].push_back(stream);
    }

    pub(super) fn pop_turn(&mut self, class: Class) -> Option<StreamId> {
        self.turns[class.index()].pop_front()
    }

    pub(super) fn remove_turn(&mut self, class: Class, stream: StreamId) {
        self.turns[class.index()].retain(|it| *it != stream);
    }

    pub(super) fn push_grant(&mut self, stream: StreamId) {
        self.grants.push_back(stream);
    }

    pub(super) fn pop_grant(&mut self) -> Option<StreamId> {
        self.grants.pop_front()
    }

    pub(super) fn remove_grant(&mut self, stream: StreamId) {
        self.grants.retain(|it| *it != stream);
    }

    pub(super) fn push_reset(&mut self, class: Class, stream: StreamId, cause: Cause) {
        *self.waiting_resets[stream.opener() as usize].of(stream.class()) += 1;
        self.resets[class.index()].push_back((stream, cause));
    }

    pub(super) fn pop_reset(&mut self, class: Class) -> Option<(StreamId, Cause)> {
        let (stream, cause) = self.resets[class.index()].pop_front()?;
        *self.waiting_resets[stream.opener() as usize].of(stream.class()) -= 1;
        Some((stream, cause))
    }

    /// Returns the number of resets that wait, for streams of one opener.
    pub(super) fn waiting_resets(&self, opener: Side) -> Opened {
        self.waiting_resets[opener as usize]
    }

    /// Returns whether something of a class waits.
    pub(super) fn has_work(&self, class: Class) -> bool {
        let has_grants = class == Class::Bus && !self.grants.is_empty();
        let at = class.index();
        has_grants || !self.turns[at].is_empty() || !self.resets[at].is_empty()
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.grants.len()
            + self.turns.iter().map(VecDeque::len).sum::<usize>()
            + self.resets.iter().map(VecDeque::len).sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_classes_apart_and_counts_resets() {
        let mut schedule = Schedule::default();
        let [one, two] = [Side::Caller, Side::Called]
            .map(|side| StreamId::new(side, Class::Bulk, 1).expect("a valid name"));
        schedule.push_turn(Class::Bulk, one);
        schedule.push_turn(Class::Bulk, two);
        schedule.push_grant(one);
        schedule.push_reset(Class::Interactive, two, Cause::REFUSED);
        assert!(Class::ALL.into_iter().all(|class| schedule.has_work(class)));
        assert_eq!(schedule.waiting_resets(Side::Called), Opened { bus: 0, others: 1 });
        assert_eq!(schedule.waiting_resets(Side::Caller), Opened::default());
        assert_eq!(schedule.pop_turn(Class::Interactive), None);
        schedule.remove_turn(Class::Bulk, one);
        assert_eq!(schedule.pop_turn(Class::Bulk), Some(two));
        assert_eq!(schedule.pop_reset(Class::Interactive), Some((two, Cause::REFUSED)));
        schedule.remove_grant(one);
        assert_eq!((schedule.pop_grant(), schedule.len()), (None, 0));
        assert!(!Class::ALL.into_iter().any(|class| schedule.has_work(class)));
    }
}
