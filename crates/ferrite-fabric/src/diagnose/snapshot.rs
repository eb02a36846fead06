//! The state of a port at one moment, with its device, its interfaces and its counters.
//!
//! Two snapshots are compared: one from the time when a link was healthy, and one from after its
//! failure.

use std::net::IpAddr;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use ferrite_verbs::{Context, ErrorKind, GidEntry, GidType, LinkLayer, PortState};

use super::counters::Counters;
use super::files::{Roots, number, word};

/// Maximum number of interfaces of a port to read, because VLANs can create many.
const NETDEVS_MAX: usize = 8;

/// The state of a port at one moment.
#[derive(Debug, Clone)]
pub(super) struct Snapshot {
    pub(super) taken: Instant,
    /// How long the measurement took.
    pub(super) cost: Duration,
    pub(super) device: String,
    pub(super) guid: u64,
    pub(super) number: u8,
    /// Distinguishes the device from earlier devices of the same name. A device that is created
    /// again has another number. `None` if the device is not in sysfs.
    pub(super) instance: Option<u64>,
    /// Whether the device is Soft-RoCE, whose packets go through the host's own IP stack.
    pub(super) soft: bool,
    pub(super) port: PortView,
    /// The port's addresses. `None` if the device did not report them.
    pub(super) addresses: Option<Vec<Address>>,
    /// The port's interfaces. The interface of the port's first address comes first.
    pub(super) netdevs: Vec<Netdev>,
    pub(super) counters: Counters,
}

/// The device's report about its port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PortView {
    /// The device reported nothing useful.
    Unknown,
    /// The device is gone. Contains its error.
    Gone(String),
    /// The port's state.
    Seen { state: PortState, link_layer: LinkLayer, mtu_bytes: u32 },
}

/// An address of a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) ip: IpAddr,
    pub(super) kind: GidType,
    pub(super) netdev: Option<String>,
}

/// A network interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Netdev {
    pub(super) name: String,
    /// Whether the administrator has enabled the interface (`ip link set … up`).
    pub(super) up: bool,
    /// `None` while the interface is not up.
    pub(super) carrier: Option<bool>,
    /// The kernel's summary of `up` and `carrier`.
    pub(super) operstate: String,
    pub(super) mtu_bytes: u32,
    /// How often the interface lost its carrier.
    pub(super) carrier_losses: Option<u64>,
    /// Number of received frames. On most cards it does not include RDMA frames.
    pub(super) frames_received: Option<u64>,
}

impl Snapshot {
    /// Takes a snapshot of a port, without waiting for the network.
    pub(super) fn take(roots: &Roots, context: &Context, number: u8) -> Self {
        let started = Instant::now();
        let device = context.device().name();
        let directory = roots.device(&device);
        let port_directory = directory.join("ports").join(number.to_string());
        let parent = word(&directory.join("parent"));
        let port = match context.port(number) {
            Ok(port) => PortView::Seen {
                state: port.state,
                link_layer: port.link_layer,
                mtu_bytes: port.active_mtu.bytes(),
            },
            Err(error) if error.kind() == ErrorKind::DeviceGone => {
                PortView::Gone(error.to_string())
            }
            Err(_) => PortView::Unknown,
        };
        let addresses: Option<Vec<Address>> = context.gids().ok().map(|gids| {
            gids.into_iter()
                .filter(|entry| entry.port == number)
                .map(|GidEntry { gid, kind, netdev, .. }| Address { ip: gid.ip(), kind, netdev })
                .collect()
        });
        let mut names: Vec<String> = Vec::new();
        let of_addresses = addresses.iter().flatten().filter_map(|address| address.netdev.clone());
        let of_port = word(&port_directory.join("gid_attrs/ndevs/0"));
        for name in of_addresses.chain(of_port).chain(parent.clone()) {
            if names.len() < NETDEVS_MAX && !names.contains(&name) {
                names.push(name);
            }
        }
        let netdevs = names.into_iter().filter_map(|name| Netdev::read(roots, name)).collect();
        let counters = Counters::read(&port_directory);
        let taken = Instant::now();
        Self {
            taken,
            cost: taken - started,
            guid: context.device().guid(),
            number,
            instance: std::fs::metadata(&directory).ok().map(|directory| directory.ino()),
            soft: parent.is_some(),
            port,
            addresses,
            netdevs,
            counters,
            device,
        }
    }

    /// Returns the address `ip` of this port.
    pub(super) fn address(&self, ip: IpAddr) -> Option<&Address> {
        // Prefer RoCE v2, because the table can contain an address twice.
        let mut found = self.addresses.iter().flatten().filter(|address| address.ip == ip);
        let first = found.next()?;
        Some(found.find(|other| other.kind == GidType::ROCE_V2).unwrap_or(first))
    }

    /// Returns the interface called `name`.
    pub(super) fn netdev(&self, name: &str) -> Option<&Netdev> {
        self.netdevs.iter().find(|netdev| netdev.name == name)
    }

    pub(super) fn is_infiniband(&self) -> bool {
        // A port whose old driver does not report the link layer counts as InfiniBand.
        matches!(self.port, PortView::Seen { link_layer, .. } if link_layer != LinkLayer::ETHERNET)
    }
}

impl Netdev {
    /// Reads an interface. Returns `None` if this process does not see the interface, which may be
    /// in another network namespace.
    pub(super) fn read(roots: &Roots, name: String) -> Option<Self> {
        let directory = roots.netdev(&name);
        let flags = hexadecimal(&directory.join("flags"))?;
        Some(Self {
            up: flags & 1 != 0,
            carrier: number::<u8>(&directory.join("carrier")).map(|carrier| carrier != 0),
            operstate: word(&directory.join("operstate")).unwrap_or_else(|| "unknown".into()),
            mtu_bytes: number(&directory.join("mtu")).unwrap_or(0),
            carrier_losses: number(&directory.join("carrier_down_count")),
            frames_received: number(&directory.join("statistics/rx_packets")),
            name,
        })
    }

    /// Returns whether frames can pass through the interface.
    pub(super) fn is_usable(&self) -> bool {
        self.up && self.carrier != Some(false)
    }
}

fn hexadecimal(path: &Path) -> Option<u32> {
    u32::from_str_radix(word(path)?.strip_prefix("0x")?, 16).ok()
}
