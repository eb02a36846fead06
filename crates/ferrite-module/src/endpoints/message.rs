//! The cluster message with which a module announces its endpoints to the modules of other nodes.
//!
//! ```text
//!  byte  0..4   "FRTE"
//!        4      version: 1
//!        5      flags: bit 0 the sender asks for an announcement in return
//!        6      number of endpoints, at most 8
//!  then, for each endpoint:
//!        0      transports: 0 TCP only, 1 RDMA and TCP
//!        1      kind of address: 1 the node's own, 4 IPv4, 6 IPv6
//!        2..4   port, most significant byte first
//!        4..    address: 0, 4 or 16 bytes
//! ```
//!
//! "The node's own" address is the one that the node announces in the cluster. A module that
//! listens on all addresses sends this kind.
//!
//! The engine identifies the modules of a message only if their name has nine letters. All other
//! modules have the same id, so a message of another module may arrive here. The first four bytes
//! show whether a message is one of this module. Versions, flags and bytes at the end that this
//! version does not know are ignored.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The type of the message. Few modules send messages, and those use small numbers, so a conflict
/// is unlikely.
pub(crate) const TYPE: u8 = 0xF6;
/// The most endpoints of a node.
pub(crate) const ENDPOINTS_MAX: usize = 8;

const MAGIC: &[u8; 4] = b"FRTE";
const VERSION: u8 = 1;
const WANTS_ANSWER: u8 = 1 << 0;
const TCP_ONLY: u8 = 0;
const RDMA_AND_TCP: u8 = 1;
const KIND_OWN: u8 = 1;
const KIND_IPV4: u8 = 4;
const KIND_IPV6: u8 = 6;

/// An address and a port at which a module accepts clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Endpoint {
    /// `None` for the address that the node announces in the cluster.
    pub(crate) address: Option<IpAddr>,
    pub(crate) port: u16,
    /// Whether the endpoint accepts RDMA, beside TCP.
    pub(crate) has_rdma: bool,
}

/// The content of a message.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Announcement {
    pub(crate) wants_answer: bool,
    pub(crate) endpoints: Vec<Endpoint>,
}

/// Why a message was not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unusable {
    /// Another module, or another version of this one, has sent it.
    Foreign,
    /// It breaks the rules of its own version.
    Malformed,
}

impl Announcement {
    /// Returns the bytes of the message, with at most [`ENDPOINTS_MAX`] endpoints.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let endpoints = &self.endpoints[..self.endpoints.len().min(ENDPOINTS_MAX)];
        let mut out = MAGIC.to_vec();
        let flags = if self.wants_answer { WANTS_ANSWER } else { 0 };
        out.extend([VERSION, flags, endpoints.len() as u8]); // at most ENDPOINTS_MAX
        for Endpoint { address, port, has_rdma } in endpoints {
            out.push(if *has_rdma { RDMA_AND_TCP } else { TCP_ONLY });
            out.push(match address {
                None => KIND_OWN,
                Some(IpAddr::V4(_)) => KIND_IPV4,
                Some(IpAddr::V6(_)) => KIND_IPV6,
            });
            out.extend(port.to_be_bytes());
            match address {
                None => {}
                Some(IpAddr::V4(address)) => out.extend(address.octets()),
                Some(IpAddr::V6(address)) => out.extend(address.octets()),
            }
        }
        out
    }

    /// Reads a message.
    ///
    /// # Errors
    /// Returns an error if the message is not one of this version, or breaks its rules.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Unusable> {
        let behind = bytes.strip_prefix(MAGIC).ok_or(Unusable::Foreign)?;
        let (&version, behind) = behind.split_first().ok_or(Unusable::Malformed)?;
        if version != VERSION {
            return Err(Unusable::Foreign);
        }
        let (&[flags, count], mut rest) = behind.split_first_chunk().ok_or(Unusable::Malformed)?;
        if usize::from(count) > ENDPOINTS_MAX {
            return Err(Unusable::Malformed);
        }
        let mut endpoints = Vec::with_capacity(count.into());
        for _ in 0..count {
            let endpoint;
            (endpoint, rest) = decode_endpoint(rest).ok_or(Unusable::Malformed)?;
            endpoints.push(endpoint);
        }
        Ok(Self { wants_answer: flags & WANTS_ANSWER != 0, endpoints })
    }
}

/// Reads an endpoint. Returns it and the bytes behind it; `None` if it is malformed.
fn decode_endpoint(bytes: &[u8]) -> Option<(Endpoint, &[u8])> {
    let (&[transports, kind, high, low], rest) = bytes.split_first_chunk()?;
    let (address, rest) = match kind {
        KIND_OWN => (None, rest),
        KIND_IPV4 => {
            let (octets, rest) = rest.split_first_chunk::<4>()?;
            (Some(IpAddr::V4(Ipv4Addr::from(*octets))), rest)
        }
        KIND_IPV6 => {
            let (octets, rest) = rest.split_first_chunk::<16>()?;
            (Some(IpAddr::V6(Ipv6Addr::from(*octets))), rest)
        }
        _ => return None,
    };
    let has_rdma = match transports {
        TCP_ONLY => false,
        RDMA_AND_TCP => true,
        _ => return None,
    };
    let port = u16::from_be_bytes([high, low]);
    let is_usable = port != 0 && address.is_none_or(|address| is_announced(&address));
    is_usable.then_some((Endpoint { address, port, has_rdma }, rest))
}

/// Returns whether an address may be announced. Excludes wildcard and multicast addresses, which do
/// not name a host, and IPv6 link-local addresses, which need the name of an interface.
pub(crate) fn is_announced(address: &IpAddr) -> bool {
    let is_link_local = match address {
        IpAddr::V4(_) => false,
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    !address.is_unspecified() && !address.is_multicast() && !is_link_local
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(address: Option<&str>, port: u16, has_rdma: bool) -> Endpoint {
        let address = address.map(|address| address.parse().expect("an address"));
        Endpoint { address, port, has_rdma }
    }

    fn golden() -> (Announcement, Vec<u8>) {
        let announcement = Announcement {
            wants_answer: true,
            endpoints: vec![
                endpoint(Some("192.0.2.1"), 6380, true),
                endpoint(None, 7000, false),
                endpoint(Some("2001:db8::1"), 6380, true),
            ],
        };
        let bytes = [
            b"FRTE\x01\x01\x03".as_slice(),
            b"\x01\x04\x18\xec\xc0\x00\x02\x01",
            b"\x00\x01\x1b\x58",
            b"\x01\x06\x18\xec\x20\x01\x0d\xb8\0\0\0\0\0\0\0\0\0\0\0\x01",
        ];
        (announcement, bytes.concat())
    }

    #[test]
    fn the_bytes_of_version_1_stay_the_same() {
        let (announcement, bytes) = golden();
        assert_eq!(announcement.encode(), bytes);
        assert_eq!(Announcement::decode(&bytes), Ok(announcement));
        assert_eq!(Announcement::default().encode(), b"FRTE\x01\x00\x00");
        assert_eq!(Announcement::decode(b"FRTE\x01\x00\x00"), Ok(Announcement::default()));
    }

    #[test]
    fn ignores_unknown_flags_and_trailing_bytes() {
        let (announcement, mut bytes) = golden();
        bytes[5] |= 0xF0;
        bytes.extend(b"more");
        assert_eq!(Announcement::decode(&bytes), Ok(announcement));
    }

    #[test]
    fn ignores_other_versions_and_other_modules() {
        let (_, mut bytes) = golden();
        bytes[4] = 2;
        for foreign in [&bytes[..], b"FRTE\x00", b"", b"FRT", b"hello, cluster"] {
            assert_eq!(Announcement::decode(foreign), Err(Unusable::Foreign));
        }
    }

    #[test]
    fn rejects_malformed_messages() {
        let (_, bytes) = golden();
        for len in MAGIC.len()..bytes.len() {
            assert_eq!(Announcement::decode(&bytes[..len]), Err(Unusable::Malformed), "{len}");
        }
        for (at, byte) in [(6, 9), (6, 255), (7, 2), (8, 0), (8, 5), (11, 224)] {
            let mut bytes = bytes.clone();
            bytes[at] = byte;
            assert_eq!(Announcement::decode(&bytes), Err(Unusable::Malformed), "{at} {byte}");
        }
        for endpoint in [
            b"\x01\x04\x18\xec\0\0\0\0".as_slice(),
            b"\x01\x01\0\0",
            b"\x01\x06\x18\xec\xfe\x80\0\0\0\0\0\0\0\0\0\0\0\0\0\x01",
        ] {
            let bytes = [b"FRTE\x01\x00\x01", endpoint].concat();
            assert_eq!(Announcement::decode(&bytes), Err(Unusable::Malformed), "{bytes:x?}");
        }
    }

    #[test]
    fn no_bytes_cause_a_panic() {
        let (_, bytes) = golden();
        let mut random = 0x2545_F491_4F6C_DD1D_u64;
        for _ in 0..100_000 {
            let mut bytes = bytes.clone();
            for _ in 0..3 {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let at = (random >> 16) as usize % bytes.len();
                bytes[at] = random as u8;
                bytes.truncate((random >> 32) as usize % 64 + 1);
            }
            if let Ok(announcement) = Announcement::decode(&bytes) {
                assert!(announcement.endpoints.len() <= ENDPOINTS_MAX);
                assert_eq!(Announcement::decode(&announcement.encode()), Ok(announcement));
            }
        }
    }

    #[test]
    fn sends_a_bounded_number_of_endpoints() {
        let endpoints = vec![endpoint(None, 1, true); 300];
        let sent = Announcement { wants_answer: false, endpoints }.encode();
        assert_eq!(
            Announcement::decode(&sent).expect("a valid message").endpoints.len(),
            ENDPOINTS_MAX
        );
    }
}
