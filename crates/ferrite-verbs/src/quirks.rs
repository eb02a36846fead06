//! Differences between providers that no query reports. Outside of tests, only this module makes
//! decisions by the driver of a device. All other code reads these properties.

/// The peculiarities of a device's provider: see [`Device::quirks`](crate::Device::quirks).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceQuirks {
    /// The kernel emulates the network card, which is slow.
    pub is_software: bool,
    /// The shared receive queue is a ring: the device takes receives in the order in which they
    /// were posted. If later receives complete and an earlier one does not, a failed queue pair may
    /// have lost the earlier one. For other providers, we do not know whether they keep the order
    /// or lose receives.
    pub takes_receives_in_order: bool,
    /// When the device refuses a request of the peer, the queue pair may fail without a completion
    /// and without an event.
    pub hides_refused_requests: bool,
    /// The device reports that a queue pair has taken its last receive, as the specification
    /// demands. Soft-RoCE does so since Linux 6.11 (`flush_recv_queue` in the kernel's
    /// `drivers/infiniband/sw/rxe/rxe_resp.c`).
    pub reports_last_receive: bool,
    /// How long a peer should wait before it resends a message for which we had no receive posted;
    /// encoded as in [`Path::rnr_timer`](crate::Path::rnr_timer).
    ///
    /// The value is 640 µs on network cards, as in most RDMA programs, and about 10 ms on
    /// Soft-RoCE. On Soft-RoCE, resending takes CPU time from the program that should post
    /// receives: with 640 µs and 200 busy links, most packets were resent ones. iWARP does not use
    /// this timer, and siw is software iWARP.
    pub rnr_timer: u8,
}

/// 640 µs and 10.24 ms, encoded as in table 45 of the InfiniBand specification.
const RNR_TIMER: u8 = 12;
const SOFTWARE_RNR_TIMER: u8 = 20;

impl DeviceQuirks {
    /// Returns the quirks of a driver. An unknown driver gets those of a network card.
    pub(crate) fn of_driver(driver: Option<&str>) -> Self {
        let none = Self {
            is_software: false,
            takes_receives_in_order: false,
            hides_refused_requests: false,
            reports_last_receive: true,
            rnr_timer: RNR_TIMER,
        };
        match driver {
            Some("rxe") => Self {
                is_software: true,
                takes_receives_in_order: true,
                hides_refused_requests: true,
                reports_last_receive: !is_before_6_11(&kernel_release()),
                rnr_timer: SOFTWARE_RNR_TIMER,
            },
            // iWARP has no `rnr_timer`: TCP makes the sender wait.
            Some("siw") => Self { is_software: true, ..none },
            _ => none,
        }
    }
}

fn kernel_release() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default()
}

fn is_before_6_11(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) < (6, 11),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Path;

    #[test]
    fn reads_the_release_of_the_kernel() {
        for release in ["5.15.0-91-generic", "6.10.14", "6.1.0-18-amd64", "4.18.0-553.el8"] {
            assert!(is_before_6_11(release), "{release}");
        }
        for release in ["6.11.0", "6.11-rc1", "7.0.3", "6.12+", "unknown", ""] {
            assert!(!is_before_6_11(release), "{release}");
        }
    }

    #[test]
    fn knows_soft_roce_and_siw_and_assumes_a_network_card_otherwise() {
        let [rxe, siw, mlx5, unknown] =
            [Some("rxe"), Some("siw"), Some("mlx5_core"), None].map(DeviceQuirks::of_driver);
        assert!(rxe.is_software && rxe.takes_receives_in_order && rxe.hides_refused_requests);
        assert!(siw.is_software && !siw.takes_receives_in_order && !siw.hides_refused_requests);
        assert!(!mlx5.is_software && mlx5 == unknown);
        assert!(rxe.rnr_timer > mlx5.rnr_timer && mlx5.rnr_timer == Path::default().rnr_timer);
    }
}
