//! The CPU time of a process, as the kernel counts it.

use anyhow::Context as _;

/// Returns the microseconds that a process has used so far, in user and kernel mode.
pub(super) fn used(pid: u32) -> anyhow::Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .with_context(|| format!("--server-pid {pid}: this host has no such process"))?;
    let ticks = ticks(&stat).with_context(|| format!("cannot parse /proc/{pid}/stat"))?;
    let per_second = rustix::param::clock_ticks_per_second();
    #[expect(clippy::cast_precision_loss, reason = "2^53 ticks are longer than any process lives")]
    Ok(ticks as f64 * 1e6 / per_second as f64)
}

/// Returns the sum of fields 14 and 15: clock ticks in user and in kernel mode. Field 2 is the
/// process name in brackets. The name may itself contain closing brackets.
fn ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let (user, kernel) = (fields.next()?.parse::<u64>().ok()?, fields.next()?.parse::<u64>().ok()?);
    Some(user + kernel)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_process_names_with_brackets() {
        let stat = "42 (a) b) (c) S 1 42 42 0 -1 4194560 1 2 3 4 70 30 0 0 20 0 1 0 5 6 7";
        assert_eq!(ticks(stat), Some(100));
        assert_eq!(ticks("nonsense"), None);
        assert!(used(std::process::id()).is_ok());
    }
}
