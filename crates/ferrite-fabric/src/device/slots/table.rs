//! The slot table: requests in flight by key, in the order in which they were posted. This module
//! does not depend on devices.
//!
//! A key is a slot and its generation, which changes with each use of the slot. A completion has no
//! effect unless its key exactly matches a request in flight, even if it comes late or twice.

use std::collections::VecDeque;

/// Identifies one use of one slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Key {
    pub(crate) slot: u16,
    pub(crate) generation: u32,
}

/// Generations have 24 bits, so a key repeats after 16 million uses of its slot.
pub(crate) const GENERATION_MASK: u32 = 0x00ff_ffff;

struct Slot<T> {
    generation: u32,
    entry: Option<T>,
}

/// Entries in flight, at most `capacity`.
pub(crate) struct Table<T> {
    /// Grows on demand, so a link that has sent nothing has no slots.
    slots: Vec<Slot<T>>,
    free: Vec<u16>,
    /// The slots in flight, oldest first.
    order: VecDeque<u16>,
    capacity: u16,
    /// The first generation of new slots. It is higher than the generations that an earlier table
    /// of the same link number used.
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

    /// Puts `entry` into a slot, as the newest entry. Returns `entry` as the error if no slot is
    /// free.
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

    /// Takes the newest entry back, because it was not posted.
    pub(crate) fn undo(&mut self) -> Option<T> {
        let slot = self.order.pop_back()?;
        self.vacate(slot)
    }

    /// Returns the entry with this key, if it is in flight.
    pub(crate) fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        let place = self.slots.get_mut(usize::from(key.slot))?;
        if place.generation == key.generation { place.entry.as_mut() } else { None }
    }

    /// Completes the entry with this key and all older ones, because a reliable connection
    /// completes in order. Passes each entry to `each`. The entry with this key comes last, with
    /// `true`. Returns `false` if no entry with this key is in flight.
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

    /// Iterates over all entries in flight, oldest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.order.iter().filter_map(|slot| self.slots[usize::from(*slot)].entry.as_ref())
    }

    /// Removes all entries. Must be called only when no completion can arrive any more.
    pub(crate) fn drain(&mut self, mut each: impl FnMut(T)) {
        while let Some(slot) = self.order.pop_front() {
            if let Some(entry) = self.vacate(slot) {
                each(entry);
            }
        }
    }

    /// Returns the first generation for the next table of the same link number.
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
    fn a_completion_also_completes_older_entries() {
        let mut table = Table::new(3, 0);
        let keys = [1, 2, 3].map(|entry| table.claim(entry).expect("room"));
        assert_eq!(table.claim(4), Err(4), "the table is full");
        assert_eq!(completed(&mut table, keys[1]), [(1, false), (2, true)]);
        assert_eq!((table.in_flight(), table.room()), (1, 2));
        assert_eq!(completed(&mut table, keys[2]), [(3, true)]);
    }

    #[test]
    fn ignores_stale_and_repeated_completions() {
        let mut table = Table::new(2, 0);
        let first = table.claim(1).expect("room");
        assert_eq!(completed(&mut table, first).len(), 1);
        assert!(
            !table.complete(first, |_, _| unreachable!("already completed")),
            "a repeated completion must have no effect"
        );
        let again = table.claim(2).expect("room");
        assert_eq!(again.slot, first.slot);
        assert!(
            !table.complete(first, |_, _| unreachable!("a stale key")),
            "a stale key must match nothing"
        );
        let unknown = Key { slot: 9, generation: 0 };
        assert!(!table.complete(unknown, |_, _| unreachable!("an unknown key")));
        assert_eq!(table.in_flight(), 1);
    }

    #[test]
    fn undo_returns_the_newest_entry() {
        let mut table = Table::new(2, 0);
        let first = table.claim(1).expect("room");
        table.claim(2).expect("room");
        assert_eq!(table.undo(), Some(2));
        assert_eq!(completed(&mut table, first), [(1, true)]);
        assert_eq!(table.undo(), None);
    }

    #[test]
    fn next_generation_is_beyond_all_used_ones() {
        let mut table = Table::new(4, GENERATION_MASK - 1);
        for entry in 0..5 {
            let key = table.claim(entry).expect("room");
            table.complete(key, |_, _| {});
        }
        let next: Table<u32> = Table::new(4, table.next_generation());
        assert_eq!(next.first_generation, 4, "it wraps around");
        assert_eq!(Table::<u32>::new(4, 7).next_generation(), 8, "also when nothing was used");
    }
}
