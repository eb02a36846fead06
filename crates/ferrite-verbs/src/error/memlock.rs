//! The locked-memory limit, explained with its numbers.
//!
//! `ibv_reg_mr` says ENOMEM whether the host is out of memory or the process may not pin more. The
//! second is by far the most common failure of a first RDMA set-up, so it is told apart here. The
//! same holds for queues, which providers keep in the process's memory and drivers pin
//! (`mlx5_ib_create_cq`, `create_srq_user` and `_create_user_qp` in the kernel's
//! `drivers/infiniband/hw/mlx5`), and the first of which is made before any memory is registered.

use std::fmt;

use rustix::process::{Resource, getrlimit};

/// About what an entry of a queue takes: of completions, and of receives in one piece.
pub(crate) const ENTRY_BYTES: u64 = 64;
/// The same of sends, with what is inline.
pub(crate) const SEND_ENTRY_BYTES: u64 = 256;

/// What the process may lock, what it has locked, and what was asked on top.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memlock {
    /// RLIMIT_MEMLOCK in bytes.
    pub limit_bytes: u64,
    /// Locked and pinned by this process already.
    pub in_use_bytes: u64,
    /// What the failed call needed; for a queue, whose entries are the provider's, about.
    pub needed_bytes: u64,
}

impl Memlock {
    /// The limit, if it is what refuses `needed_bytes` more; `None` if there is no limit for this
    /// process, or room enough under it.
    pub(crate) fn refuses(needed_bytes: u64) -> Option<Self> {
        if cfg!(miri) {
            return None; // it has no limits
        }
        let limit_bytes = getrlimit(Resource::Memlock).current?;
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        if may_ignore_limit(&status) {
            return None;
        }
        let in_use_bytes = kib(&status, "VmLck:") + kib(&status, "VmPin:");
        let memlock = Self { limit_bytes, in_use_bytes, needed_bytes };
        (in_use_bytes + needed_bytes > limit_bytes).then_some(memlock)
    }

    /// How to raise it.
    #[must_use]
    pub fn remedy(&self) -> String {
        "raise it: LimitMEMLOCK=infinity in the systemd unit, `ulimit -l unlimited` in a shell, or \
         `* - memlock unlimited` in /etc/security/limits.conf (log in again)"
            .into()
    }
}

impl fmt::Display for Memlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "memlock is {}, {} needed and {} in use: LimitMEMLOCK=infinity",
            Size(self.limit_bytes),
            Size(self.needed_bytes),
            Size(self.in_use_bytes)
        )
    }
}

struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes >= 1 << 20 => write!(f, "{} MiB", bytes >> 20),
            bytes => write!(f, "{} KiB", bytes >> 10),
        }
    }
}

fn kib(status: &str, field: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()).unwrap_or(0)
        << 10
}

/// CAP_IPC_LOCK (bit 14) lifts the limit.
fn may_ignore_limit(status: &str) -> bool {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|line| u64::from_str_radix(line.trim(), 16).ok())
        .is_some_and(|caps| caps >> 14 & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str =
        "Name:\tx\nVmLck:\t      64 kB\nVmPin:\t    1024 kB\nCapEff:\t0000000000000000\n";

    #[test]
    fn reads_what_is_locked_and_pinned() {
        assert_eq!(kib(STATUS, "VmLck:"), 64 << 10);
        assert_eq!(kib(STATUS, "VmPin:"), 1 << 20);
        assert_eq!(kib(STATUS, "VmNone:"), 0);
    }

    #[test]
    fn the_capability_lifts_the_limit() {
        assert!(!may_ignore_limit(STATUS));
        assert!(may_ignore_limit("CapEff:\t000001ffffffffff\n"));
    }

    #[test]
    fn says_numbers_and_remedy() {
        let memlock = Memlock { limit_bytes: 8 << 20, in_use_bytes: 4096, needed_bytes: 64 << 20 };
        assert_eq!(
            memlock.to_string(),
            "memlock is 8 MiB, 64 MiB needed and 4 KiB in use: LimitMEMLOCK=infinity"
        );
    }
}
