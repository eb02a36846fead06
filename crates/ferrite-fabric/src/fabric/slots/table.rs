//! The slot table: what is in flight, by number, in the order it was posted. Knows nothing of
//! devices.
//!
//! A key is a slot and its generation, which changes each time the slot is used. A completion whose
//! key is not exactly what is in flight finds nothing and frees nothing, however late or often it
//! comes.

use std::collections::VecDeque;

/// The name of one use of one slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Key {
    pub(crate) slot: u16,
    pub(crate) generation: u32,
}

/// Generations have 24 bits: a key comes again after 16 million uses of its slot.
pub(crate) const GENERATION_MASK: u32 = 0x00ff_ffff;

struct Slot<T> {
    generation: u32,
    entry: Option<T>,
}

/// Entries in flight, at most `capacity`.
pub(crate) struct Table<T> {
    /// Grows with use: an idle link has none.
    slots: Vec<Slot<T>>,
    free: Vec<u16>,
    /// What is in flight, oldest first.
    order: VecDeque<u16>,
    capacity: u16,
    /// Where generations of new slots begin: what an earlier owner of the same numbers used lies
    /// behind it.
    first_generation: u32,
}

impl<T> Table<T> {
    pub(crate) fn new(capacity: u16, first_generation: u32) -> Self {
        let first_generation = first_generation & GENERATION_MASK;
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            order: VecDeque::new(),
            capacity,
            first_generation,
        }
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.order.len()
    }

    pub(crate) fn room(&self) -> usize {
        usize::from(self.capacity) - self.order.len()
    }

    /// Puts `entry` into a slot, as the newest; gives it back if there is none free.
    pub(crate) fn claim(&mut self, entry: T) -> Result<Key, T> {
        if self.room() == 0 {
            return Err(entry);
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: self.first_generation, entry: None });
            (self.slots.len() - 1) as u16 // at most `capacity`
        });
        let place = &mut self.slots[usize::from(slot)];
        place.entry = Some(entry);
        self.order.push_back(slot);
        Ok(Key { slot, generation: place.generation })
    }

    /// Takes the newest entry back: it was not posted after all.
    pub(crate) fn undo(&mut self) -> Option<T> {
        let slot = self.order.pop_back()?;
        self.vacate(slot)
    }

    /// The entry with this key, while it is in flight.
    pub(crate) fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        let place = self.slots.get_mut(usize::from(key.slot))?;
        if place.generation == key.generation { place.entry.as_mut() } else { None }
    }

    /// The entry with this key has completed, and with it all older ones, since a reliable
    /// connection completes in order. Each goes to `each`, the named one last and marked so.
    /// `false` if nothing with this key is in flight.
    pub(crate) fn complete(&mut self, key: Key, mut each: impl FnMut(T, bool)) -> bool {
        if self.get_mut(key).is_none() {
            return false;
        }
        while let Some(slot) = self.order.pop_front() {
            let last = slot == key.slot;
            if let Some(entry) = self.vacate(slot) {
                each(entry, last);
            }
            if last {
                break;
            }
        }
        true
    }

    /// Everything in flight, oldest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.order.iter().filter_map(|slot| self.slots[usize::from(*slot)].entry.as_ref())
    }

    /// Empties it: for when no completion can come any more.
    pub(crate) fn drain(&mut self, mut each: impl FnMut(T)) {
        while let Some(slot) = self.order.pop_front() {
            if let Some(entry) = self.vacate(slot) {
                each(entry);
            }
        }
    }

    /// Where the generations of the next owner of these numbers may begin.
    pub(crate) fn next_generation(&self) -> u32 {
        let used =
            self.slots.iter().map(|slot| slot.generation.wrapping_sub(self.first_generation));
        let most = used.map(|used| used & GENERATION_MASK).max().unwrap_or(0);
        self.first_generation.wrapping_add(most).wrapping_add(1) & GENERATION_MASK
    }

    fn vacate(&mut self, slot: u16) -> Option<T> {
        let place = &mut self.slots[usize::from(slot)];
        place.generation = place.generation.wrapping_add(1) & GENERATION_MASK;
        self.free.push(slot);
        place.entry.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completed(table: &mut Table<u32>, key: Key) -> Vec<(u32, bool)> {
        let mut out = Vec::new();
        table.complete(key, |entry, last| out.push((entry, last)));
        out
    }

    #[test]
    fn a_completion_takes_the_older_ones_along() {
        let mut table = Table::new(3, 0);
        let keys = [1, 2, 3].map(|entry| table.claim(entry).expect("room"));
        assert_eq!(table.claim(4), Err(4), "full");
        assert_eq!(completed(&mut table, keys[1]), [(1, false), (2, true)]);
        assert_eq!((table.in_flight(), table.room()), (1, 2));
        assert_eq!(completed(&mut table, keys[2]), [(3, true)]);
    }

    #[test]
    fn stale_and_repeated_completions_find_nothing() {
        let mut table = Table::new(2, 0);
        let first = table.claim(1).expect("room");
        assert_eq!(completed(&mut table, first).len(), 1);
        assert!(!table.complete(first, |_, _| unreachable!("gone")), "twice");
        let again = table.claim(2).expect("room");
        assert_eq!(again.slot, first.slot);
        assert!(!table.complete(first, |_, _| unreachable!("of the one before")), "late");
        let made_up = Key { slot: 9, generation: 0 };
        assert!(!table.complete(made_up, |_, _| unreachable!("never was")));
        assert_eq!(table.in_flight(), 1);
    }

    #[test]
    fn what_was_not_posted_comes_back() {
        let mut table = Table::new(2, 0);
        let first = table.claim(1).expect("room");
        table.claim(2).expect("room");
        assert_eq!(table.undo(), Some(2));
        assert_eq!(completed(&mut table, first), [(1, true)]);
        assert_eq!(table.undo(), None);
    }

    #[test]
    fn the_next_owner_begins_behind_all_that_was_used() {
        let mut table = Table::new(4, GENERATION_MASK - 1);
        for entry in 0..5 {
            let key = table.claim(entry).expect("room");
            table.complete(key, |_, _| {});
        }
        let next: Table<u32> = Table::new(4, table.next_generation());
        assert_eq!(next.first_generation, 4, "over the end and on");
        assert_eq!(Table::<u32>::new(4, 7).next_generation(), 8, "also when nothing was used");
    }
}
