//! The addresses of a port, and which one to use.

use std::cmp::Reverse;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::code::codes;
use crate::context::Context;
use crate::error::{Error, check};
use crate::port::{LinkLayer, Port};
use crate::sys;

/// A 16-byte address: an InfiniBand GID, or an IP address for RoCE.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// Returns the IP address that the GID represents on RoCE (IPv4 is stored as `::ffff:a.b.c.d`).
    #[must_use]
    pub fn ip(self) -> IpAddr {
        let v6 = Ipv6Addr::from(self.0);
        v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)
    }

    /// Returns the IPv4 address, if the GID represents one.
    #[must_use]
    pub fn ipv4(self) -> Option<Ipv4Addr> {
        Ipv6Addr::from(self.0).to_ipv4_mapped()
    }

    /// Returns whether the address is valid on one link only (fe80::/10).
    #[must_use]
    pub fn is_link_local(self) -> bool {
        self.0[0] == 0xfe && self.0[1] & 0xc0 == 0x80
    }

    fn is_unset(self) -> bool {
        // Unused entries are all zeros, or have the default prefix (fe80::) and a zero interface
        // identifier.
        self.0 == [0; 16] || (self.is_link_local() && self.0[8..] == [0; 8])
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

codes! {
    /// The packet format for an address.
    pub struct GidType, unknown: "unknown type" {
        /// InfiniBand packets.
        INFINIBAND = 0, "InfiniBand";
        /// Ethernet frames with their own EtherType; not routable.
        ROCE_V1 = 1, "RoCE v1";
        /// UDP packets to port 4791; routable.
        ROCE_V2 = 2, "RoCE v2";
    }
}

/// One entry of a port's GID table.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GidEntry {
    /// The number of the port that the entry belongs to.
    pub port: u8,
    /// The index in the table, as in `rdma_gid_index` and `ib_send_lat -x`.
    pub index: u32,
    /// The address.
    pub gid: Gid,
    /// The packet format.
    pub kind: GidType,
    /// The network interface that has this address (RoCE).
    pub netdev: Option<String>,
}

impl Context {
    /// Returns the GID table entries in use, of all ports.
    ///
    /// # Errors
    /// If the device was removed.
    pub fn gids(&self) -> Result<Vec<GidEntry>, Error> {
        GidEntry::query_all(self)
    }
}

impl GidEntry {
    fn query_all(context: &Context) -> Result<Vec<Self>, Error> {
        match context.verbs().ibv._ibv_query_gid_table {
            Some(query) => Self::query_table(context, query),
            None => Self::query_each(context),
        }
    }

    /// Queries all entries with one call (rdma-core 32 and later).
    fn query_table(context: &Context, query: QueryGidTable) -> Result<Vec<Self>, Error> {
        let mut capacity = 0;
        for port in context.ports()? {
            capacity += port.gid_table_len as usize;
        }
        let mut entries = vec![sys::ibv_gid_entry::default(); capacity.max(1)];
        // SAFETY: the context is open; the array has as many entries of this size as we say.
        let len = unsafe {
            query(
                context.raw(),
                entries.as_mut_ptr(),
                entries.len(),
                0,
                size_of::<sys::ibv_gid_entry>(),
            )
        };
        if len < 0 {
            return Err(Error::os(
                "ibv_query_gid_table",
                rustix::io::Errno::from_raw_os_error(i32::try_from(-len).unwrap_or(5)),
                context.device().name(),
            ));
        }
        entries.truncate(len.unsigned_abs());
        let usable = entries.iter().map(|entry| Self {
            port: u8::try_from(entry.port_num).unwrap_or(0),
            index: entry.gid_index,
            // SAFETY: both members of the union are plain bytes.
            gid: Gid(unsafe { entry.gid.raw }),
            kind: GidType(entry.gid_type),
            netdev: netdev(entry.ndev_ifindex),
        });
        Ok(usable.filter(|entry| !entry.gid.is_unset()).collect())
    }

    /// Queries the entries one by one and reads type and interface from sysfs, for older versions
    /// of libibverbs.
    fn query_each(context: &Context) -> Result<Vec<Self>, Error> {
        let mut found = Vec::new();
        for port in context.ports()? {
            for index in 0..port.gid_table_len {
                let mut raw = sys::ibv_gid::default();
                let at = i32::try_from(index).unwrap_or(i32::MAX);
                // SAFETY: the context is open and `raw` is valid for the write.
                let rc = unsafe {
                    (context.verbs().ibv.ibv_query_gid)(
                        context.raw(),
                        port.number,
                        at,
                        &raw mut raw,
                    )
                };
                check("ibv_query_gid", rc, || {
                    format!("{} index {index}", context.device().name())
                })?;
                // SAFETY: both members of the union are plain bytes.
                let gid = Gid(unsafe { raw.raw });
                if !gid.is_unset() {
                    found.push(Self::from_sysfs(context, &port, index, gid));
                }
            }
        }
        Ok(found)
    }

    fn from_sysfs(context: &Context, port: &Port, index: u32, gid: Gid) -> Self {
        let attribute = |name: &str| {
            context.device().sysfs(&format!("ports/{}/gid_attrs/{name}/{index}", port.number))
        };
        let kind = match attribute("types").as_deref() {
            Some("RoCE v2") => GidType::ROCE_V2,
            Some("IB/RoCE v1") if port.link_layer == LinkLayer::ETHERNET => GidType::ROCE_V1,
            _ => GidType::INFINIBAND,
        };
        Self { port: port.number, index, gid, kind, netdev: attribute("ndevs") }
    }
}

type QueryGidTable = unsafe extern "C" fn(
    *mut sys::ibv_context,
    *mut sys::ibv_gid_entry,
    usize,
    u32,
    usize,
) -> isize;

fn netdev(ifindex: u32) -> Option<String> {
    if ifindex == 0 || cfg!(miri) {
        return None;
    }
    // Any socket will do to ask the kernel for the name.
    let socket =
        rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::DGRAM, None)
            .ok()?;
    rustix::net::netdevice::index_to_name(socket, ifindex).ok()
}

/// The entry that connections should use, and the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GidChoice {
    /// The entry.
    pub entry: GidEntry,
    /// The reason, as one clause for display.
    pub why: &'static str,
}

/// Chooses the best entry of `port`.
///
/// RoCE v2 is preferred to v1, because only v2 is routable and most switches are set up for v2.
/// Among entries of one type, the order is IPv4, global IPv6, link-local. Among equal entries, the
/// lowest index wins.
#[must_use]
pub fn choose_gid(port: &Port, entries: &[GidEntry]) -> Option<GidChoice> {
    let rank = |entry: &GidEntry| {
        let kind = u8::from(entry.kind == GidType::ROCE_V2);
        let scope =
            if entry.gid.ipv4().is_some() { 2 } else { u8::from(!entry.gid.is_link_local()) };
        (kind, scope, Reverse(entry.index))
    };
    let of_port = entries.iter().filter(|entry| entry.port == port.number);
    let entry = of_port.max_by_key(|entry| rank(entry))?.clone();
    let why = match rank(&entry) {
        _ if port.link_layer == LinkLayer::INFINIBAND => "InfiniBand: the port's own address",
        (1, 2, _) => "RoCE v2 with an IPv4 address: routable, and found by RDMA CM",
        (1, 1, _) => "RoCE v2 with a global IPv6 address: routable; no IPv4 address here",
        (1, _, _) => "RoCE v2, but link-local only: give the interface an IP address",
        _ => "RoCE v1 only: works within one Ethernet segment",
    };
    Some(GidChoice { entry, why })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::tests::port;

    fn entry(index: u32, ip: &str, kind: GidType) -> GidEntry {
        let ip: Ipv6Addr = ip.parse().expect("an address");
        GidEntry { port: 1, index, gid: Gid(ip.octets()), kind, netdev: None }
    }

    #[test]
    fn prefers_roce_v2_with_ipv4() {
        let entries = [
            entry(0, "fe80::1", GidType::ROCE_V1),
            entry(1, "fe80::1", GidType::ROCE_V2),
            entry(2, "::ffff:10.0.0.1", GidType::ROCE_V1),
            entry(3, "::ffff:10.0.0.1", GidType::ROCE_V2),
            entry(4, "2001:db8::1", GidType::ROCE_V2),
        ];
        let chosen = choose_gid(&port(LinkLayer::ETHERNET), &entries).expect("an entry");
        assert_eq!(chosen.entry.index, 3);
        let chosen = choose_gid(&port(LinkLayer::ETHERNET), &entries[..3]).expect("an entry");
        assert_eq!((chosen.entry.index, chosen.why.starts_with("RoCE v2, but")), (1, true));
    }

    #[test]
    fn prefers_the_lowest_index_of_the_given_port() {
        let mut entries = vec![
            entry(5, "::ffff:10.0.0.1", GidType::ROCE_V2),
            entry(4, "::ffff:10.0.0.2", GidType::ROCE_V2),
        ];
        assert_eq!(
            choose_gid(&port(LinkLayer::ETHERNET), &entries).map(|c| c.entry.index),
            Some(4)
        );
        entries.iter_mut().for_each(|entry| entry.port = 2);
        assert_eq!(choose_gid(&port(LinkLayer::ETHERNET), &entries), None);
    }

    #[test]
    fn recognises_unset_entries() {
        assert!(Gid([0; 16]).is_unset());
        assert!(!Gid(Ipv6Addr::LOCALHOST.octets()).is_unset());
        assert!(entry(0, "fe80::", GidType::ROCE_V2).gid.is_unset());
    }
}
