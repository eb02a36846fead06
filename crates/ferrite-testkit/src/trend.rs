//! Values that must stop growing.

/// Asserts that the median of the last third of the samples is at most a tenth and `slack` higher
/// than that of the middle third. The first third is for warming up. With less than 15 samples,
/// nothing is compared.
///
/// # Panics
/// If the value grew.
#[track_caller]
#[expect(clippy::print_stderr, reason = "people judge the values")]
pub fn assert_flat(name: &str, samples: &[u64], slack: u64) {
    let third = samples.len() / 3;
    if third < 5 {
        return;
    }
    let median = |from: usize| {
        let mut values = samples[from..from + third].to_vec();
        values.sort_unstable();
        values[third / 2]
    };
    let (middle, last) = (median(third), median(2 * third));
    eprintln!("{name}: {middle} in the middle third, {last} in the last");
    assert!(last <= middle + middle / 10 + slack, "{name} grew from {middle} to {last}");
}

#[cfg(test)]
mod tests {
    use super::assert_flat;

    #[test]
    fn growth_in_the_first_third_is_warming_up() {
        let samples: Vec<_> = (0..30).map(|at| at.min(10) * 100).collect();
        assert_flat("a value", &samples, 0);
    }

    #[test]
    #[should_panic(expected = "a value grew from 1500 to 2500")]
    fn growth_that_goes_on_is_reported() {
        let samples: Vec<_> = (0..30).map(|at| at * 100).collect();
        assert_flat("a value", &samples, 100);
    }
}
