//! How long a peer may be silent before it gets a keepalive.
//!
//! Thousands of links may start, or become silent, at the same moment. If all sent keepalives
//! together, the burst would delay other traffic, and the answers might find no posted receives. So
//! each link waits for a pseudo-random time, and chooses a new one after each keepalive.
//!
//! If both sides have the same interval, normally only the caller sends keepalives, because the
//! side that accepted the link waits longer than the interval.

use std::time::Duration;

#[derive(Debug, Clone)]
pub(crate) struct Keepalive {
    keepalive: Duration,
    dice: u64,
    /// The current wait, if this side opened the link.
    wait: Duration,
}

impl Keepalive {
    /// Starts with a wait between half of the interval and all of it.
    pub(crate) fn new(keepalive: Duration, serial: u64) -> Self {
        let mut new = Self { keepalive, dice: serial, wait: Duration::ZERO };
        new.wait = keepalive / 2 + keepalive / 512 * new.roll();
        new
    }

    pub(crate) fn interval(&self) -> Duration {
        self.keepalive
    }

    pub(crate) fn wait(&self, is_caller: bool) -> Duration {
        if is_caller { self.wait } else { self.keepalive / 3 * 4 }
    }

    /// Chooses the next wait after a keepalive, between three quarters of the interval and all of
    /// it.
    pub(crate) fn asked(&mut self) {
        self.wait = self.keepalive / 4 * 3 + self.keepalive / 1024 * self.roll();
    }

    /// Returns a number from 0 to 255. The numbers are evenly distributed, even for consecutive
    /// serials.
    fn roll(&mut self) -> u32 {
        self.dice = self.dice.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (self.dice >> 56) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evenly_and_in_bounds() {
        let (links, rounds) = if cfg!(miri) { (100, 2) } else { (2000, 20) };
        let keepalive = Duration::from_secs(10);
        let mut all: Vec<_> = (0..links).map(|serial| Keepalive::new(keepalive, serial)).collect();
        let mut least = keepalive / 2;
        for _ in 0..rounds {
            let middle = least + (keepalive - least) / 2;
            let early = all.iter().filter(|each| each.wait(true) < middle).count();
            let even = links as usize * 2 / 5..links as usize * 3 / 5;
            assert!(even.contains(&early), "{early} of {links} waits are in the first half");
            assert!(all.iter().all(|each| (least..=keepalive).contains(&each.wait(true))));
            assert!(all.iter().all(|each| each.wait(false) > keepalive));
            all.iter_mut().for_each(Keepalive::asked);
            least = keepalive / 4 * 3;
        }
    }
}
