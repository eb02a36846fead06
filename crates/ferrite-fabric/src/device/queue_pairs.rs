//! Maps queue pairs to links. The map is used for every message that arrives.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Links by device and queue pair number.
#[derive(Default)]
pub(crate) struct QueuePairs(HashMap<u64, u32, BuildHasherDefault<Multiply>>);

impl QueuePairs {
    pub(crate) fn get(&self, device: usize, number: u32) -> Option<u32> {
        self.0.get(&key(device, number)).copied()
    }

    pub(crate) fn insert(&mut self, device: usize, number: u32, link: u32) {
        self.0.insert(key(device, number), link);
    }

    /// Removes a queue pair, if it belongs to `link`.
    pub(crate) fn remove(&mut self, device: usize, number: u32, link: u32) {
        if self.get(device, number) == Some(link) {
            self.0.remove(&key(device, number));
        }
    }
}

fn key(device: usize, number: u32) -> u64 {
    (device as u64) << 32 | u64::from(number)
}

/// A fast hasher. The device assigns the queue pair numbers that are the keys, so a peer cannot
/// choose colliding ones. Spreading the bits is enough.
#[derive(Default)]
struct Multiply(u64);

impl Hasher for Multiply {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write_u64(&mut self, number: u64) {
        // The hash table uses the highest and the lowest bits.
        self.0 = number.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(self.0 << 8 | u64::from(*byte)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_link_of_each_queue_pair() {
        let many = if cfg!(miri) { 100 } else { 10_000 };
        let mut pairs = QueuePairs::default();
        for number in 0..many {
            pairs.insert(0, number, number);
            pairs.insert(1, number, many + number);
        }
        pairs.remove(0, 7, 8); // belongs to another link: no effect
        pairs.remove(0, 9, 9);
        assert_eq!((pairs.get(0, 7), pairs.get(1, 7)), (Some(7), Some(many + 7)));
        assert_eq!(
            (pairs.get(0, 9), pairs.get(1, 9), pairs.get(2, 9)),
            (None, Some(many + 9), None)
        );
    }
}
