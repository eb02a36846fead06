//! The parts of RDMA CM's C interface that the safe types and the fake provider share: socket
//! addresses, and the sizes of private data.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use crate::sys;

const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;

/// Maximum size of the private data in a connection request (port space TCP), in bytes.
pub const REQUEST_PRIVATE_DATA_MAX: usize = 56;
/// Maximum size of the private data in an acceptance, in bytes.
pub const ACCEPT_PRIVATE_DATA_MAX: usize = 196;
/// Maximum size of the private data in a rejection, in bytes.
pub const REJECT_PRIVATE_DATA_MAX: usize = 148;

/// A C socket address that lives for one call.
pub(crate) struct RawAddress(sys::sockaddr_storage);

impl RawAddress {
    pub(crate) fn as_mut_ptr(&mut self) -> *mut sys::sockaddr {
        (&raw mut self.0).cast()
    }
}

impl From<SocketAddr> for RawAddress {
    fn from(addr: SocketAddr) -> Self {
        let mut storage = sys::sockaddr_storage::default();
        let at = &raw mut storage;
        // SAFETY: the storage is large enough and aligned for either form, and ours alone.
        unsafe {
            match addr {
                SocketAddr::V4(v4) => {
                    let mut raw = sys::sockaddr_in { sin_family: AF_INET, ..Default::default() };
                    raw.sin_port = v4.port().to_be();
                    raw.sin_addr.s_addr = u32::from_ne_bytes(v4.ip().octets());
                    at.cast::<sys::sockaddr_in>().write(raw);
                }
                SocketAddr::V6(v6) => {
                    let mut raw = sys::sockaddr_in6 { sin6_family: AF_INET6, ..Default::default() };
                    raw.sin6_port = v6.port().to_be();
                    raw.sin6_flowinfo = v6.flowinfo();
                    raw.sin6_scope_id = v6.scope_id();
                    raw.sin6_addr.__in6_u.__u6_addr8 = v6.ip().octets();
                    at.cast::<sys::sockaddr_in6>().write(raw);
                }
            }
        }
        Self(storage)
    }
}

/// Returns the address in `storage`; `None` if it is empty or of another family.
pub(crate) fn from_raw(storage: &sys::sockaddr_storage) -> Option<SocketAddr> {
    let at = std::ptr::from_ref(storage);
    // SAFETY: the storage is large enough and aligned for either form, and the family says which.
    unsafe {
        match storage.ss_family {
            AF_INET => {
                let raw = at.cast::<sys::sockaddr_in>().read();
                let ip = Ipv4Addr::from(raw.sin_addr.s_addr.to_ne_bytes());
                Some(SocketAddrV4::new(ip, u16::from_be(raw.sin_port)).into())
            }
            AF_INET6 => {
                let raw = at.cast::<sys::sockaddr_in6>().read();
                let ip = Ipv6Addr::from(raw.sin6_addr.__in6_u.__u6_addr8);
                Some(
                    SocketAddrV6::new(
                        ip,
                        u16::from_be(raw.sin6_port),
                        raw.sin6_flowinfo,
                        raw.sin6_scope_id,
                    )
                    .into(),
                )
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn converts_both_families_to_c_and_back() {
        for text in ["10.0.0.1:7471", "[2001:db8::17]:1", "0.0.0.0:0"] {
            let addr: SocketAddr = text.parse().expect("an address");
            assert_eq!(from_raw(&RawAddress::from(addr).0), Some(addr));
        }
        assert_eq!(from_raw(&sys::sockaddr_storage::default()), None);
    }
}
