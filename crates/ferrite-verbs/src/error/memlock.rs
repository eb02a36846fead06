//! The locked-memory limit, explained with its numbers.
//!
//! `ibv_reg_mr` fails with ENOMEM both when the host is out of memory and when the process may not
//! pin more. A locked-memory limit that is too low is by far the most common failure of a first
//! RDMA set-up. So this module tells the two causes apart.
//!
//! Creating a queue can fail with ENOMEM for the same two causes. Providers keep queues in the
//! process's memory, and drivers pin that memory (`mlx5_ib_create_cq`, `create_srq_user` and
//! `_create_user_qp` in the kernel's `drivers/infiniband/hw/mlx5`). A program usually creates its
//! first queue before it registers memory, so that queue hits the limit first.

use std::fmt;

use rustix::process::{Resource, getrlimit};

/// Approximate size of an entry in a completion queue, or in a receive queue with one
/// scatter/gather element.
pub(crate) const ENTRY_BYTES: u64 = 64;
/// Approximate size of an entry in a send queue, including inline data.
pub(crate) const SEND_ENTRY_BYTES: u64 = 256;

/// The locked-memory limit, the locked memory of the process, and what the failed call needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memlock {
    /// RLIMIT_MEMLOCK, in bytes.
    pub limit_bytes: u64,
    /// Bytes that this process has already locked or pinned.
    pub in_use_bytes: u64,
    /// Bytes that the failed call needed. For a queue this is an estimate, because only the
    /// provider knows the size of an entry.
    pub needed_bytes: u64,
}

impl Memlock {
    /// Returns the limit if it does not allow `needed_bytes` more. Returns `None` if it does, or if
    /// no limit applies to this process.
    pub(crate) fn exceeded_by(needed_bytes: u64) -> Option<Self> {
        if cfg!(miri) {
            return None; // Miri has no resource limits
        }
        let limit_bytes = getrlimit(Resource::Memlock).current?;
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        if has_cap_ipc_lock(&status) {
            return None;
        }
        let in_use_bytes = status_bytes(&status, "VmLck:") + status_bytes(&status, "VmPin:");
        let memlock = Self { limit_bytes, in_use_bytes, needed_bytes };
        (in_use_bytes + needed_bytes > limit_bytes).then_some(memlock)
    }

    /// Returns how to raise the limit.
    #[must_use]
    pub fn remedy(&self) -> String {
        "raise the locked-memory limit: LimitMEMLOCK=infinity in the systemd unit, `ulimit -l \
         unlimited` in a shell, or `* - memlock unlimited` in /etc/security/limits.conf (log in \
         again)"
            .into()
    }
}

impl fmt::Display for Memlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the locked-memory limit is {}, but {} more are needed and {} are in use; set \
             LimitMEMLOCK=infinity",
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

fn status_bytes(status: &str, field: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()).unwrap_or(0)
        << 10
}

/// Returns whether the process has CAP_IPC_LOCK (bit 14), which lifts the limit.
fn has_cap_ipc_lock(status: &str) -> bool {
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
    fn reads_locked_and_pinned_bytes() {
        assert_eq!(status_bytes(STATUS, "VmLck:"), 64 << 10);
        assert_eq!(status_bytes(STATUS, "VmPin:"), 1 << 20);
        assert_eq!(status_bytes(STATUS, "VmNone:"), 0);
    }

    #[test]
    fn cap_ipc_lock_lifts_the_limit() {
        assert!(!has_cap_ipc_lock(STATUS));
        assert!(has_cap_ipc_lock("CapEff:\t000001ffffffffff\n"));
    }

    #[test]
    fn message_contains_numbers_and_remedy() {
        let memlock = Memlock { limit_bytes: 8 << 20, in_use_bytes: 4096, needed_bytes: 64 << 20 };
        assert_eq!(
            memlock.to_string(),
            "the locked-memory limit is 8 MiB, but 64 MiB more are needed and 4 KiB are in use; \
             set LimitMEMLOCK=infinity"
        );
    }
}
