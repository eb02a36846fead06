//! The host's view of the network: routes, the ARP table, and the addresses of its RDMA devices.
//!
//! The tables are read from procfs, because services are often not allowed to use netlink. The
//! files that are read show only the main routing table, and only routes and neighbours with IPv4
//! addresses. The conclusions take that into account.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::files::{Roots, table, word};
use super::snapshot::Netdev;

/// Maximum number of bytes to read of a table: about 3,000 neighbours or 2,000 routes.
const TABLE_MAX: u64 = 256 << 10;
/// Maximum number of addresses per port to search, and of devices.
const GIDS_MAX: u32 = 16;
const DEVICES_MAX: usize = 16;

/// The routes, neighbours and local addresses of this host.
#[derive(Debug, Clone)]
pub(super) struct Surroundings {
    pub(super) taken: Instant,
    /// How long reading took.
    pub(super) cost: Duration,
    /// `None` if the routes cannot be read, or if there are too many.
    routes: Option<Vec<RouteEntry>>,
    /// The neighbours that fit into the read limit.
    neighbours: Vec<NeighbourEntry>,
    /// The addresses of this host's RDMA devices. They are read on demand, because that needs many
    /// files.
    own: OnceLock<Vec<OwnAddress>>,
    roots: Roots,
}

/// How packets to the peer leave this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Route {
    /// The route cannot be determined.
    Unknown,
    /// Through the link's own interface, with or without a gateway.
    Own { gateway: Option<Ipv4Addr> },
    /// Only through another interface.
    Other { netdev: String },
    /// There is no route.
    Missing,
}

/// The host's knowledge of the next host on the path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Neighbour {
    /// There is no entry, or it is not visible.
    Unknown,
    /// The next host did not answer ARP requests.
    Silent,
    /// The next host answered once, possibly long ago.
    Known,
}

/// A peer whose address belongs to this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LocalPeer {
    pub(super) device: String,
    pub(super) netdev: Option<Netdev>,
    /// Whether the interface accepts packets from an address of this host. Soft-RoCE needs that.
    pub(super) accepts_local: Option<bool>,
}

/// An address of an RDMA device of this host.
#[derive(Debug, Clone)]
struct OwnAddress {
    ip: IpAddr,
    device: String,
    netdev: Option<String>,
    /// Read on demand.
    local_peer: OnceLock<LocalPeer>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct RouteEntry {
    netdev: String,
    destination: u32,
    mask: u32,
    gateway: Option<Ipv4Addr>,
    metric: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct NeighbourEntry {
    ip: IpAddr,
    netdev: String,
    complete: bool,
}

impl Surroundings {
    /// Reads the tables.
    pub(super) fn read(roots: &Roots) -> Self {
        let started = Instant::now();
        let routes = table(&roots.proc.join("net/route"), TABLE_MAX);
        let neighbours = table(&roots.proc.join("net/arp"), TABLE_MAX);
        // If the table was truncated, use no routes, because the best one may be missing.
        let routes = routes.filter(|(_, whole)| *whole).map(|(text, _)| parse_routes(&text));
        let neighbours = neighbours.map(|(text, _)| parse_neighbours(&text)).unwrap_or_default();
        let taken = Instant::now();
        Self {
            taken,
            cost: taken - started,
            routes,
            neighbours,
            own: OnceLock::new(),
            roots: roots.clone(),
        }
    }

    /// Returns how packets to `peer` leave this host, if the link's interface is `netdev`.
    pub(super) fn route(&self, peer: IpAddr, netdev: &str) -> Route {
        let (Some(routes), IpAddr::V4(peer)) = (&self.routes, peer) else { return Route::Unknown };
        let fitting = |entry: &&RouteEntry| u32::from(peer) & entry.mask == entry.destination;
        let best = |routes: &mut dyn Iterator<Item = &RouteEntry>| {
            // Like the kernel, prefer the longest prefix, then the lowest metric.
            routes.min_by_key(|entry| (!entry.mask, entry.metric)).cloned()
        };
        // The kernel looks for a route through the link's interface, even if there is a better
        // route through another interface.
        let own = best(&mut routes.iter().filter(fitting).filter(|entry| entry.netdev == netdev));
        match (own, best(&mut routes.iter().filter(fitting))) {
            (Some(own), _) => Route::Own { gateway: own.gateway },
            (None, Some(other)) => Route::Other { netdev: other.netdev },
            (None, None) => Route::Missing,
        }
    }

    /// Returns the ARP state of `ip` on the interface `netdev`.
    pub(super) fn neighbour(&self, ip: IpAddr, netdev: &str) -> Neighbour {
        match self.neighbours.iter().find(|entry| entry.ip == ip && entry.netdev == netdev) {
            Some(entry) if entry.complete => Neighbour::Known,
            Some(_) => Neighbour::Silent,
            None => Neighbour::Unknown,
        }
    }

    /// Returns the device of this host that has the address `ip`.
    pub(super) fn local_peer(&self, ip: IpAddr) -> Option<&LocalPeer> {
        (self.roots.is_own)(ip).then_some(())?;
        let mut own = self.own.get_or_init(|| own_addresses(&self.roots)).iter();
        let OwnAddress { device, netdev, local_peer, .. } = own.find(|own| own.ip == ip)?;
        Some(local_peer.get_or_init(|| LocalPeer {
            device: device.clone(),
            netdev: netdev.clone().and_then(|name| Netdev::read(&self.roots, name)),
            accepts_local: netdev.as_ref().and_then(|name| {
                let file = self.roots.proc.join(format!("sys/net/ipv4/conf/{name}/accept_local"));
                word(&file).map(|value| value != "0")
            }),
        }))
    }
}

/// Parses `/proc/net/route`: a header line, then interface, destination, gateway, flags, …, metric
/// (decimal), mask. Each address is a hexadecimal number. Its bytes are in network order, and the
/// number is printed in this machine's byte order.
fn parse_routes(text: &str) -> Vec<RouteEntry> {
    const UP: u32 = 0x1;
    const REJECT: u32 = 0x200;
    let entry = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let hex = |at: usize| u32::from_str_radix(fields.get(at)?, 16).ok();
        let flags = hex(3)?;
        let gateway = Ipv4Addr::from(hex(2)?.to_ne_bytes());
        (flags & UP != 0 && flags & REJECT == 0).then_some(())?;
        Some(RouteEntry {
            netdev: (*fields.first()?).to_owned(),
            destination: u32::from_be_bytes(hex(1)?.to_ne_bytes()),
            mask: u32::from_be_bytes(hex(7)?.to_ne_bytes()),
            gateway: (!gateway.is_unspecified()).then_some(gateway),
            metric: fields.get(6)?.parse().ok()?,
        })
    };
    text.lines().skip(1).filter_map(entry).collect()
}

/// Parses `/proc/net/arp`: a header line, then address, type, flags, hardware address, mask,
/// interface.
fn parse_neighbours(text: &str) -> Vec<NeighbourEntry> {
    const COMPLETE: u32 = 0x2;
    let entry = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let flags = u32::from_str_radix(fields.get(2)?.strip_prefix("0x")?, 16).ok()?;
        Some(NeighbourEntry {
            ip: fields.first()?.parse().ok()?,
            netdev: (*fields.get(5)?).to_owned(),
            complete: flags & COMPLETE != 0,
        })
    };
    text.lines().skip(1).filter_map(entry).collect()
}

/// Reads the addresses of this host's RDMA devices from sysfs, so that the devices need not be
/// opened.
fn own_addresses(roots: &Roots) -> Vec<OwnAddress> {
    let Ok(devices) = roots.sys.join("class/infiniband").read_dir() else { return Vec::new() };
    let mut found = Vec::new();
    for device in devices.flatten().take(DEVICES_MAX) {
        let Ok(ports) = device.path().join("ports").read_dir() else { continue };
        for port in ports.flatten() {
            for index in 0..GIDS_MAX {
                let Some(gid) = word(&port.path().join(format!("gids/{index}"))) else { break };
                let Some(ip) = gid.parse::<Ipv6Addr>().ok().filter(|gid| !gid.is_unspecified())
                else {
                    continue;
                };
                let ip = ip.to_canonical();
                // The table can contain an address twice (RoCE v1 and v2).
                if found.iter().any(|own: &OwnAddress| own.ip == ip) {
                    continue;
                }
                let netdev = word(&port.path().join(format!("gid_attrs/ndevs/{index}")));
                let device = device.file_name().to_string_lossy().into_owned();
                found.push(OwnAddress { ip, device, netdev, local_peer: OnceLock::new() });
            }
        }
    }
    found
}
