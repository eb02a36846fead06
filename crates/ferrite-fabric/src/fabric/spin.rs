//! The pause of a driver between two passes that found nothing.
//!
//! The peer or the kernel may be waiting for our CPU. If the kernel emulates the device, it needs
//! our CPU for every message: its worker runs on the CPU that posted the message. A program that
//! only spins delays the worker for up to a scheduler tick. But yielding the CPU is a system call
//! in the middle of a round trip. So a driver first spins for about as long as a short message and
//! its answer take. From then on it yields every few passes.

use std::time::Duration;

/// How long to spin before yielding, if the kernel emulates no device. On a network card, a short
/// message and its answer take less time.
const ROUND_TRIP: Duration = Duration::from_micros(100);
/// How long to spin before yielding, if the kernel emulates the device. Most short messages and
/// their answers take about this long. If the driver yielded at once, the median of
/// `bench/fabric-ratio` was a tenth longer. With 100 us, its slowest messages took twice as long.
const SOFTWARE_ROUND_TRIP: Duration = Duration::from_micros(60);
/// After that time, one in this many passes yields.
const UNTIL_YIELD: u32 = 8;

pub(super) struct Spin {
    /// How long a driver spins before it starts to yield.
    until: Duration,
    passes: u32,
}

impl Spin {
    pub(super) fn new(has_software_device: bool) -> Self {
        let until = if has_software_device { SOFTWARE_ROUND_TRIP } else { ROUND_TRIP };
        Self { until, passes: 0 }
    }

    /// Pauses before the next pass. `idle` is how long the driver has found nothing.
    pub(super) fn pause(&mut self, idle: Duration) {
        if self.must_yield(idle) {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }

    fn must_yield(&mut self, idle: Duration) -> bool {
        self.passes = self.passes.wrapping_add(1);
        idle > self.until && self.passes.is_multiple_of(UNTIL_YIELD)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn yields(has_software_device: bool, idle_us: u64) -> usize {
        let mut spin = Spin::new(has_software_device);
        (0..80).filter(|_| spin.must_yield(Duration::from_micros(idle_us))).count()
    }

    #[test]
    fn yields_earlier_if_the_kernel_emulates_the_device() {
        assert_eq!([yields(true, 0), yields(true, 60), yields(true, 61)], [0, 0, 10]);
    }

    #[test]
    fn yields_now_and_then_in_long_waits_for_a_network_card() {
        assert_eq!([yields(false, 0), yields(false, 100), yields(false, 101)], [0, 0, 10]);
    }
}
