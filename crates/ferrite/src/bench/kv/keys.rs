//! Chooses the next key.

/// A pseudo-random number generator: SplitMix64.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Returns a random number that is at least 0 and less than 1.
    #[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// The keys of a test.
pub(super) enum Keys {
    Uniform(u32),
    /// The cumulative probability of each key; the last is 1.
    Zipf(Vec<f64>),
}

impl Keys {
    pub(super) fn new(count: u32, zipf: Option<f64>) -> Self {
        let Some(exponent) = zipf else { return Self::Uniform(count) };
        let mut sum = 0.0;
        let mut table: Vec<f64> = (1..=count)
            .map(|rank| {
                sum += f64::from(rank).powf(-exponent);
                sum
            })
            .collect();
        table.iter_mut().for_each(|part| *part /= sum);
        Self::Zipf(table)
    }

    /// Returns the next key for which `is_wanted` is true. There must be one.
    pub(super) fn next_of(&self, random: &mut Random, is_wanted: impl Fn(u32) -> bool) -> u32 {
        loop {
            let key = self.next(random);
            if is_wanted(key) {
                return key;
            }
        }
    }

    pub(super) fn next(&self, random: &mut Random) -> u32 {
        match self {
            Self::Uniform(count) => (random.next() % u64::from(*count)) as u32,
            Self::Zipf(table) => {
                let at = random.unit();
                table.partition_point(|part| *part <= at).min(table.len() - 1) as u32
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_follow_the_uniform_and_the_zipf_distribution() {
        let mut random = Random::new(1);
        let mut count = |keys: &Keys| {
            let mut counts = vec![0_u32; 100];
            (0..100_000).for_each(|_| counts[keys.next(&mut random) as usize] += 1);
            counts
        };
        let uniform = count(&Keys::new(100, None));
        assert!(uniform.iter().all(|count| (800..1200).contains(count)), "{uniform:?}");
        let zipf = count(&Keys::new(100, Some(1.0)));
        // With the exponent 1, the first key is twice as frequent as the second, and ten times as
        // frequent as the tenth.
        let first = f64::from(zipf[0]);
        assert!((1.8..2.2).contains(&(first / f64::from(zipf[1]))), "{zipf:?}");
        assert!((8.5..11.5).contains(&(first / f64::from(zipf[9]))), "{zipf:?}");
    }
}
