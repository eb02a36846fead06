//! Chooses the local address of each attempt to reconnect a link over TCP.
//!
//! The first attempts come from the local address of the lost path, because the link can return to
//! RDMA only there. If that address is unusable, attempts from it alternate with attempts from any
//! address.

use crate::error::ErrorKind;

/// After this many attempts from the old address that the peer did not answer, the next comes from
/// any address. A single lost packet must not move the link.
const TIMEOUTS: u32 = 2;

/// The attempts to reconnect a link that has lost its path.
#[derive(Debug, Default)]
pub(crate) struct Redial {
    is_from_any: bool,
    timeouts: u32,
}

impl Redial {
    /// Returns whether the kernel chooses the local address of the next attempt.
    pub(crate) fn is_from_any(&self) -> bool {
        self.is_from_any
    }

    /// Handles a failed attempt. Returns whether the next one must follow at once, because it comes
    /// from any address.
    pub(crate) fn on_failed(&mut self, kind: ErrorKind) -> bool {
        if std::mem::take(&mut self.is_from_any) {
            return false;
        }
        if kind == ErrorKind::Timeout {
            self.timeouts = self.timeouts.saturating_add(1);
        }
        // An address that this host no longer has is also reported as unreachable.
        self.is_from_any = kind == ErrorKind::Unreachable || self.timeouts >= TIMEOUTS;
        self.is_from_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_timeout_keeps_the_local_address() {
        let mut redial = Redial::default();
        assert!(!redial.is_from_any(), "the first attempt");
        assert!(!redial.on_failed(ErrorKind::Timeout) && !redial.is_from_any());
        assert!(redial.on_failed(ErrorKind::Timeout) && redial.is_from_any());
        assert!(!redial.on_failed(ErrorKind::Timeout) && !redial.is_from_any(), "in turn");
    }

    #[test]
    fn other_failures_keep_the_local_address() {
        let mut redial = Redial::default();
        for kind in [ErrorKind::LinkDown, ErrorKind::Full, ErrorKind::Refused] {
            assert!(!redial.on_failed(kind) && !redial.is_from_any(), "{kind:?}");
        }
    }

    #[test]
    fn an_unusable_local_address_is_left_at_once() {
        let mut redial = Redial::default();
        assert!(redial.on_failed(ErrorKind::Unreachable) && redial.is_from_any());
        assert!(!redial.on_failed(ErrorKind::Unreachable) && !redial.is_from_any(), "in turn");
    }
}
