//! The streams of a link, and the names that were used.
//!
//! No name is used twice. The streams of one side have increasing numbers in each class, so one
//! number for each class says which names of the peer were used.

use std::collections::BTreeMap;

use super::error::MuxError;
use super::id::{Class, Opened, Side, StreamId};
use super::stream::Stream;

/// What is known about a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lookup {
    Live,
    /// The stream has ended. Records that were under way are ignored.
    Ended,
    Never,
}

#[derive(Debug)]
pub(super) struct Table {
    side: Side,
    /// Ordered, so that nothing depends on a random order.
    streams: BTreeMap<StreamId, Stream>,
    /// How many of these streams each side has opened.
    opened: [Opened; 2],
    /// The number of the next stream of this side.
    next_number: u32,
    /// The last number that the peer has used in each class; 0 before the first.
    peer_numbers: [u32; Class::ALL.len()],
}

impl Table {
    pub(super) fn new(side: Side) -> Self {
        let opened = [Opened::default(); 2];
        Self { side, streams: BTreeMap::new(), opened, next_number: 1, peer_numbers: [0; 3] }
    }

    pub(super) fn len(&self) -> usize {
        self.streams.len()
    }

    /// Returns the number of streams that a side has opened and that have not ended.
    pub(super) fn opened_by(&self, side: Side) -> Opened {
        self.opened[side as usize]
    }

    /// Returns the next name of this side, and marks it as used; `None` if there is none left.
    pub(super) fn next_name(&mut self, class: Class) -> Option<StreamId> {
        let id = StreamId::new(self.side, class, self.next_number)?;
        self.next_number += 1;
        Some(id)
    }

    /// Marks a name of the peer as used.
    pub(super) fn use_name(&mut self, stream: StreamId) -> Result<(), MuxError> {
        if stream.opener() == self.side {
            return Err(MuxError::ForeignName { stream });
        }
        let last = &mut self.peer_numbers[stream.class().index()];
        if stream.number() <= *last {
            return Err(MuxError::ReusedName { stream });
        }
        *last = stream.number();
        Ok(())
    }

    /// Returns the highest name that the peer has used.
    pub(super) fn last_of_peer(&self) -> Option<StreamId> {
        let names = Class::ALL.into_iter().filter_map(|class| {
            StreamId::new(self.side.other(), class, self.peer_numbers[class.index()])
        });
        names.max()
    }

    /// Returns whether this side has used the number of a name, in any class.
    pub(super) fn has_used(&self, stream: StreamId) -> bool {
        stream.opener() == self.side && stream.number() < self.next_number
    }

    pub(super) fn insert(&mut self, id: StreamId, stream: Stream) {
        *self.opened[id.opener() as usize].of(id.class()) += 1;
        self.streams.insert(id, stream);
    }

    pub(super) fn remove(&mut self, id: StreamId) -> Option<Stream> {
        let stream = self.streams.remove(&id)?;
        *self.opened[id.opener() as usize].of(id.class()) -= 1;
        Some(stream)
    }

    pub(super) fn get(&self, id: StreamId) -> Option<&Stream> {
        self.streams.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: StreamId) -> Option<&mut Stream> {
        self.streams.get_mut(&id)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (StreamId, &Stream)> {
        self.streams.iter().map(|(id, stream)| (*id, stream))
    }

    /// Looks up the stream of a record of the peer.
    pub(super) fn look_up(&self, id: StreamId) -> Lookup {
        let was_used = if id.opener() == self.side {
            id.number() < self.next_number
        } else {
            id.number() <= self.peer_numbers[id.class().index()]
        };
        match self.streams.get(&id) {
            // The peer does not know the stream yet.
            Some(stream) if stream.sending.open.is_some() => Lookup::Never,
            Some(_) => Lookup::Live,
            None if was_used => Lookup::Ended,
            None => Lookup::Never,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(side: Side, class: Class, number: u32) -> StreamId {
        StreamId::new(side, class, number).expect("a valid name")
    }

    #[test]
    fn names_of_the_peer_increase_in_each_class() {
        let mut table = Table::new(Side::Called);
        assert_eq!(table.last_of_peer(), None);
        for (class, number, is_new) in [
            (Class::Interactive, 2, true),
            (Class::Bus, 1, true), // a channel may be faster than another
            (Class::Interactive, 2, false),
            (Class::Interactive, 1, false),
            (Class::Bulk, 2, true),
            (Class::Interactive, 9, true),
        ] {
            let stream = name(Side::Caller, class, number);
            let expected = if is_new { Ok(()) } else { Err(MuxError::ReusedName { stream }) };
            assert_eq!(table.use_name(stream), expected);
        }
        assert_eq!(table.last_of_peer(), Some(name(Side::Caller, Class::Interactive, 9)));
        let stream = name(Side::Called, Class::Bus, 1);
        assert_eq!(table.use_name(stream), Err(MuxError::ForeignName { stream }));
    }

    #[test]
    fn distinguishes_ended_streams_from_streams_never_opened() {
        let mut table = Table::new(Side::Caller);
        let own = table.next_name(Class::Bus).expect("the first name");
        let route = "10.0.0.1:1".parse().expect("an address");
        let route = crate::mux::Route { destination: route, source: route };
        table.insert(own, Stream::new(Class::Bus, Some(route), 100, 100));
        assert_eq!(table.look_up(own), Lookup::Never, "its OPEN is not sent yet");
        table.get_mut(own).expect("a stream").sending.open = None;
        assert_eq!(table.look_up(own), Lookup::Live);
        let (one, none) = (Opened { bus: 1, others: 0 }, Opened::default());
        assert_eq!((table.opened_by(Side::Caller), table.opened_by(Side::Called)), (one, none));
        table.remove(own).expect("a stream");
        assert_eq!(table.look_up(own), Lookup::Ended);
        assert_eq!((table.len(), table.opened_by(Side::Caller)), (0, none));
        let next = name(Side::Caller, Class::Bus, 2);
        assert_eq!((table.look_up(next), table.has_used(next)), (Lookup::Never, false));
        let peers = name(Side::Called, Class::Bulk, 3);
        assert_eq!(table.look_up(peers), Lookup::Never);
        table.use_name(peers).expect("a new name");
        assert_eq!(table.look_up(peers), Lookup::Ended, "refused streams count as ended");
    }
}
