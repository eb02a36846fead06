//! How providers differ where no query tells. This is the only place that asks which driver a device
//! has: everything else asks for a property.

/// The peculiarities of a device's provider: see [`Device::quirks`](crate::Device::quirks).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceQuirks {
    /// The kernel emulates the network card: functional, but slow.
    pub is_software: bool,
    /// The shared receive queue is a ring, so receives are taken in the order in which they were
    /// posted. One that is overtaken by later ones is lost. Of other providers it is not known
    /// whether they keep the order, nor whether they lose receives.
    pub takes_receives_in_order: bool,
    /// When the device refuses a request of the peer, the queue pair may fail without a completion
    /// and without an event.
    pub hides_refused_requests: bool,
}

impl DeviceQuirks {
    /// Returns the quirks of a driver, or of a network card if the driver is unknown.
    pub(crate) fn of_driver(driver: Option<&str>) -> Self {
        let none = Self {
            is_software: false,
            takes_receives_in_order: false,
            hides_refused_requests: false,
        };
        match driver {
            Some("rxe") => Self {
                is_software: true,
                takes_receives_in_order: true,
                hides_refused_requests: true,
            },
            Some("siw") => Self { is_software: true, ..none },
            _ => none,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knows_soft_roce_and_siw_and_assumes_a_network_card_otherwise() {
        let [rxe, siw, mlx5, unknown] =
            [Some("rxe"), Some("siw"), Some("mlx5_core"), None].map(DeviceQuirks::of_driver);
        assert!(rxe.is_software && rxe.takes_receives_in_order && rxe.hides_refused_requests);
        assert!(siw.is_software && !siw.takes_receives_in_order && !siw.hides_refused_requests);
        assert!(!mlx5.is_software && mlx5 == unknown);
    }
}
