//! The hosts of the lab: Soft-RoCE devices in one guest, which `cargo xtask lab-test` starts.

#[cfg(feature = "tokio")]
mod losses;
mod net;
mod resources;

#[cfg(feature = "fabric")]
mod host;

use std::net::SocketAddr;
use std::time::Duration;

use ferrite_verbs::Verbs;

#[cfg(feature = "fabric")]
pub use host::{Host, short_timeouts, stalled_after};
#[cfg(all(feature = "redis", feature = "tokio"))]
pub use losses::module_sessions;
#[cfg(feature = "tokio")]
pub use losses::{UsedTransport, lose_paths};
pub use net::{RecreateDevices, Restore, Wire, fault, sh};
pub use resources::{LeakCheck, held_on, resources};

/// Device and address of the peer and of the local host.
pub const HOSTS: [(&str, &str); 2] = [PEER, OWN];
/// Device and address of the host that listens.
pub const PEER: (&str, &str) = ("rxe1", "10.0.0.1");
/// Device and address of the host that connects.
pub const OWN: (&str, &str) = ("rxe2", "10.0.0.2");
/// Longer than any step takes in the lab without a fault, on the slowest kernel.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Returns the system's verbs.
///
/// # Panics
/// If rdma-core is not installed.
#[must_use]
pub fn verbs() -> Verbs {
    Verbs::system().expect("rdma-core")
}

/// Returns the factor for deadlines: 4 on the emulated kernels of the lab, which are slow, and 1 on
/// User-Mode Linux and outside of the lab.
#[must_use]
pub fn slowdown() -> u32 {
    if std::env::var("FERRITE_LAB_KERNEL").is_ok_and(|kernel| kernel != "uml") { 4 } else { 1 }
}

/// Returns the address of a host with port 0, so that the system picks the port.
///
/// # Panics
/// If the host's address is not an IP address.
#[must_use]
pub fn any_port((_, ip): (&str, &str)) -> SocketAddr {
    SocketAddr::new(ip.parse().expect("an address"), 0)
}
