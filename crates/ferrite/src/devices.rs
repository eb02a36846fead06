//! `ferrite devices`: lists the RDMA devices of this host, as text or as JSON.
//!
//! This file queries the devices and builds the model. `devices/view.rs` formats it as text.

use anyhow::Context as _;
use clap::Args;
use ferrite_verbs::{Absence, Context, Device, Limits, Port, Verbs, choose_gid};
use serde::Serialize;

use crate::output;

mod view;

/// List the RDMA devices of this host: ports, addresses, limits
///
/// Shows for every device: driver, firmware and NUMA node; its ports with state, link layer, MTU,
/// speed and network interface; the addresses (GIDs) of each port, and which one connections would
/// use and why. Also shows whether connections can be made at all (RDMA CM).
#[derive(Args)]
#[command(after_help = JSON_HELP)]
pub(crate) struct Options {
    /// Print JSON (the fields are listed below)
    #[arg(long)]
    pub(crate) json: bool,
    /// Show every limit of the devices, not only the main ones
    #[arg(short, long)]
    verbose: bool,
}

const JSON_HELP: &str = "\
JSON fields (`name?` may be absent; `format` changes if others change):
  format (1), devices[], connection_manager {available, error?, remedy?}
  devices[]: name, driver?, software, guid, numa_node?, firmware, completion_vectors, limits {…},
    ports[], error? (the device could not be opened or queried; firmware, completion_vectors,
    limits and ports are then absent)
  ports[]: port, state, active, link_layer, mtu_bytes, max_mtu_bytes, mbit_per_s?, netdevs[],
    remedy? (if not active), gids[], chosen_gid? {index, why}
  gids[]: index, gid, address, type, netdev?
  limits: as in ibv_query_device(3)
A field with `?` is absent if it does not apply.
Failures print {error: {kind, missing?, message, remedy?}}; `missing` is library, kernel, device,
connection_manager or port.";

/// The devices and the connection manager of this host.
#[derive(Debug, Serialize)]
struct Inventory {
    /// Incremented when a field changes its meaning or is removed.
    format: u32,
    devices: Vec<DeviceEntry>,
    connection_manager: ConnectionManager,
}

#[derive(Debug, Serialize)]
struct DeviceEntry {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    driver: Option<String>,
    /// Whether the device is emulated in software.
    software: bool,
    guid: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    numa_node: Option<u32>,
    #[serde(flatten)]
    opened: Option<Opened>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Properties that only an open device reports.
#[derive(Debug, Serialize)]
struct Opened {
    firmware: String,
    completion_vectors: u32,
    ports: Vec<PortEntry>,
    limits: LimitsEntry,
}

#[derive(Debug, Serialize)]
struct PortEntry {
    port: u8,
    state: String,
    active: bool,
    link_layer: String,
    mtu_bytes: u32,
    max_mtu_bytes: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    mbit_per_s: Option<u32>,
    netdevs: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
    gids: Vec<GidRow>,
    #[serde(skip_serializing_if = "Option::is_none")]
    chosen_gid: Option<ChosenGid>,
}

#[derive(Debug, Serialize)]
struct GidRow {
    index: u32,
    gid: String,
    /// The GID as an IP address: IPv4 if it is mapped from one.
    address: String,
    #[serde(rename = "type")]
    kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    netdev: Option<String>,
}

#[derive(Debug, Serialize)]
struct ChosenGid {
    index: u32,
    why: &'static str,
}

#[derive(Debug, Serialize)]
struct ConnectionManager {
    available: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

/// The limits of a device, with the names of ibv_query_device(3).
#[derive(Debug, Default, Serialize)]
struct LimitsEntry {
    vendor_id: u32,
    vendor_part_id: u32,
    max_qp: u32,
    max_qp_wr: u32,
    max_sge: u32,
    max_cq: u32,
    max_cqe: u32,
    max_mr: u32,
    max_mr_size: u64,
    max_pd: u32,
    max_srq: u32,
    max_srq_wr: u32,
    max_srq_sge: u32,
    max_qp_rd_atom: u32,
    max_qp_init_rd_atom: u32,
    max_mw: u32,
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let inventory = collect()?;
    output::print(&inventory, options.json, |inventory| view::render(inventory, options.verbose))?;
    let broken: Vec<_> = inventory.devices.iter().filter(|device| device.error.is_some()).collect();
    if broken.len() < inventory.devices.len() {
        return Ok(());
    }
    // Opens the first device again to get its error. The kind of the error tells whether RDMA is
    // unavailable to this user.
    let first = Verbs::system()?.devices()?.first().map(Device::open);
    first.transpose().context("cannot open any of the devices")?;
    anyhow::bail!("cannot open any of the devices")
}

fn collect() -> anyhow::Result<Inventory> {
    let verbs = Verbs::system()?;
    let devices = verbs.devices()?.iter().map(DeviceEntry::of).collect();
    Ok(Inventory { format: 1, devices, connection_manager: ConnectionManager::of(&verbs) })
}

impl ConnectionManager {
    fn of(verbs: &Verbs) -> Self {
        match verbs.open_event_channel() {
            Ok(_) => Self { available: true, error: None, remedy: None },
            Err(error) => {
                Self { available: false, error: Some(error.to_string()), remedy: error.remedy() }
            }
        }
    }
}

impl DeviceEntry {
    fn of(device: &Device) -> Self {
        // A device that cannot be queried must not hide the others.
        let opened = device.open().map_err(Into::into).and_then(|context| Opened::of(&context));
        let (opened, error) = match opened {
            Ok(opened) => (Some(opened), None),
            Err(error) => (None, Some(format!("{error:#}"))),
        };
        Self {
            name: device.name(),
            driver: device.driver(),
            software: device.quirks().is_software,
            guid: guid_text(device.guid()),
            numa_node: device.numa_node(),
            opened,
            error,
        }
    }
}

impl Opened {
    fn of(context: &Context) -> anyhow::Result<Self> {
        let limits = context.limits()?;
        let ports = context.ports()?;
        Ok(Self {
            completion_vectors: context.completion_vectors(),
            ports: ports
                .iter()
                .map(|port| PortEntry::of(context, port))
                .collect::<Result<_, _>>()?,
            firmware: limits.firmware.clone(),
            limits: LimitsEntry::of(&limits),
        })
    }
}

impl PortEntry {
    fn of(context: &Context, port: &Port) -> anyhow::Result<Self> {
        let device = context.device().name();
        let gids = context.gids().with_context(|| format!("cannot read the GIDs of {device}"))?;
        let chosen = choose_gid(port, &gids);
        let rows = gids.iter().filter(|entry| entry.port == port.number).map(|entry| GidRow {
            index: entry.index,
            gid: entry.gid.to_string(),
            address: entry.gid.ip().to_string(),
            kind: entry.kind.to_string(),
            netdev: entry.netdev.clone(),
        });
        let rows: Vec<_> = rows.collect();
        let mut netdevs: Vec<_> = rows.iter().filter_map(|row| row.netdev.clone()).collect();
        netdevs.extend(netdevs_of(&device));
        netdevs.sort();
        netdevs.dedup();
        let state = port.state.to_string();
        Ok(Self {
            port: port.number,
            active: port.is_active(),
            link_layer: port.link_layer.to_string(),
            mtu_bytes: port.active_mtu.bytes(),
            max_mtu_bytes: port.max_mtu.bytes(),
            mbit_per_s: port.mbit_per_s,
            remedy: (!port.is_active()).then(|| match netdevs.as_slice() {
                [netdev] => format!("bring its network interface up: ip link set {netdev} up"),
                _ => Absence::PortDown { device, port: port.number, state: state.clone() }.remedy(),
            }),
            state,
            netdevs,
            gids: rows,
            chosen_gid: chosen
                .map(|choice| ChosenGid { index: choice.entry.index, why: choice.why }),
        })
    }
}

/// Returns the network interface of a device, even if the interface has no address: for Soft-RoCE
/// the interface that the device runs on, for a card its only interface. Returns nothing if the
/// card has several interfaces.
fn netdevs_of(device: &str) -> Vec<String> {
    let sysfs = std::path::Path::new("/sys/class/infiniband").join(device);
    if let Ok(parent) = std::fs::read_to_string(sysfs.join("parent")) {
        return vec![parent.trim().to_owned()];
    }
    // A card with several ports has an interface for each port, but this directory does not say
    // which interface belongs to which port.
    let Ok(entries) = std::fs::read_dir(sysfs.join("device/net")) else { return Vec::new() };
    let mut names: Vec<_> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.truncate(usize::from(names.len() == 1));
    names
}

/// Formats a GUID as `ibv_devices` and `rdma` do.
fn guid_text(guid: u64) -> String {
    let [a, b, c, d] = [48, 32, 16, 0].map(|shift| guid >> shift & 0xffff);
    format!("{a:04x}:{b:04x}:{c:04x}:{d:04x}")
}

impl LimitsEntry {
    fn of(limits: &Limits) -> Self {
        Self {
            vendor_id: limits.vendor_id,
            vendor_part_id: limits.vendor_part_id,
            max_qp: limits.max_qp,
            max_qp_wr: limits.max_qp_wr,
            max_sge: limits.max_sge,
            max_cq: limits.max_cq,
            max_cqe: limits.max_cqe,
            max_mr: limits.max_mr,
            max_mr_size: limits.max_mr_size,
            max_pd: limits.max_pd,
            max_srq: limits.max_srq,
            max_srq_wr: limits.max_srq_wr,
            max_srq_sge: limits.max_srq_sge,
            max_qp_rd_atom: limits.max_qp_rd_atom,
            max_qp_init_rd_atom: limits.max_qp_init_rd_atom,
            max_mw: limits.max_mw,
        }
    }
}
