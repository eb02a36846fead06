//! What the host knows of its neighbours: routes, the ARP table, and the addresses of its other
//! RDMA devices.
//!
//! Read from procfs and not asked by netlink, which services are often not allowed. The price: only
//! the main routing table is seen, and of neighbours only those with IPv4 addresses. Conclusions
//! are drawn with that in mind.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::files::{Roots, table, word};
use super::snapshot::Netdev;

/// Bytes of a table that are read at most: about 3,000 neighbours or 2,000 routes.
const TABLE_MAX: u64 = 256 << 10;
/// Addresses per port, and devices, that are looked through.
const GIDS_MAX: u32 = 16;
const DEVICES_MAX: usize = 16;

/// See the head of this file.
#[derive(Debug, Clone)]
pub(super) struct Surroundings {
    pub(super) taken: Instant,
    /// How long it took to read.
    pub(super) cost: Duration,
    /// `None` if they cannot be read, or are too many.
    routes: Option<Vec<RouteEntry>>,
    /// As many as there was time for.
    neighbours: Vec<NeighbourEntry>,
    /// The addresses of RDMA devices of this host, once they are asked for: there are many files to
    /// read.
    own: OnceLock<Vec<OwnAddress>>,
    roots: Roots,
}

/// How packets to the peer leave this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Route {
    /// Not to be told from here.
    Unknown,
    /// By the link's own interface, through a gateway or not.
    Own { gateway: Option<Ipv4Addr> },
    /// Only by another interface.
    Other { netdev: String },
    /// There is none.
    Missing,
}

/// What is known of the next host on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Neighbour {
    /// Nothing: no entry, or none that can be seen.
    Unknown,
    /// It was asked for and does not answer.
    Silent,
    /// It answered once; that may be long ago.
    Known,
}

/// The peer's address is one of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Twin {
    pub(super) device: String,
    pub(super) netdev: Option<Netdev>,
    /// Whether the interface takes packets from an address of this host: Soft-RoCE needs that.
    pub(super) accepts_local: Option<bool>,
}

/// An address of an RDMA device of this host.
#[derive(Debug, Clone)]
struct OwnAddress {
    ip: IpAddr,
    device: String,
    netdev: Option<String>,
    /// Seen when it was first asked for.
    twin: OnceLock<Twin>,
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
        // A part of the routes is worse than none: the best one may be in the rest.
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

    /// How packets to `peer` leave, if the link's interface is `netdev`.
    pub(super) fn route(&self, peer: IpAddr, netdev: &str) -> Route {
        let (Some(routes), IpAddr::V4(peer)) = (&self.routes, peer) else { return Route::Unknown };
        let fitting = |entry: &&RouteEntry| u32::from(peer) & entry.mask == entry.destination;
        let best = |routes: &mut dyn Iterator<Item = &RouteEntry>| {
            // The longest prefix, then the lowest metric: as the kernel does it.
            routes.min_by_key(|entry| (!entry.mask, entry.metric)).cloned()
        };
        // The kernel asks for a route by the link's interface, so that a better one by another does
        // not count.
        let own = best(&mut routes.iter().filter(fitting).filter(|entry| entry.netdev == netdev));
        match (own, best(&mut routes.iter().filter(fitting))) {
            (Some(own), _) => Route::Own { gateway: own.gateway },
            (None, Some(other)) => Route::Other { netdev: other.netdev },
            (None, None) => Route::Missing,
        }
    }

    /// What is known of `ip` on the interface `netdev`.
    pub(super) fn neighbour(&self, ip: IpAddr, netdev: &str) -> Neighbour {
        match self.neighbours.iter().find(|entry| entry.ip == ip && entry.netdev == netdev) {
            Some(entry) if entry.complete => Neighbour::Known,
            Some(_) => Neighbour::Silent,
            None => Neighbour::Unknown,
        }
    }

    /// The device of this host that has the address `ip`.
    pub(super) fn twin(&self, ip: IpAddr) -> Option<&Twin> {
        (self.roots.is_own)(ip).then_some(())?;
        let mut own = self.own.get_or_init(|| own_addresses(&self.roots)).iter();
        let OwnAddress { device, netdev, twin, .. } = own.find(|own| own.ip == ip)?;
        Some(twin.get_or_init(|| Twin {
            device: device.clone(),
            netdev: netdev.clone().and_then(|name| Netdev::read(&self.roots, name)),
            accepts_local: netdev.as_ref().and_then(|name| {
                let file = self.roots.proc.join(format!("sys/net/ipv4/conf/{name}/accept_local"));
                word(&file).map(|value| value != "0")
            }),
        }))
    }
}

/// `/proc/net/route`: a head, then interface, destination, gateway, flags, …, metric (decimal),
/// mask; addresses are the bytes of the packet, shown as a number of this machine.
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

/// `/proc/net/arp`: a head, then address, type, flags, hardware address, mask, interface.
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

/// The addresses of this host's RDMA devices, from sysfs: other devices need not be opened for it.
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
                // Both types of an address (RoCE v1 and v2) can be in the table.
                if found.iter().any(|own: &OwnAddress| own.ip == ip) {
                    continue;
                }
                let netdev = word(&port.path().join(format!("gid_attrs/ndevs/{index}")));
                let device = device.file_name().to_string_lossy().into_owned();
                found.push(OwnAddress { ip, device, netdev, twin: OnceLock::new() });
            }
        }
    }
    found
}
