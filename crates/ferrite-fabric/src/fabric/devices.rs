//! Opens the devices that a fabric uses.
//!
//! A device that cannot be used is left out, and the reason is recorded. One NIC without shared
//! receive queues (EFA: `max_srq` is 0) must not prevent the use of the other devices.

use std::net::SocketAddr;
use std::sync::Arc;

use ferrite_verbs::{Absence, Device, EventChannel, ProtectionDomain, Verbs};

use crate::config::Config;
use crate::device::device_choice::DeviceChoice;
use crate::device::device_objects::DeviceObjects;
use crate::device::shared_device::{Life, SharedDevice};
use crate::error::{Error, ErrorKind};
use crate::mem::Pool;
use crate::wake::wait_set::WaitSet;

/// Minimum number of receives for a device, even if many devices share `recv_queue_depth`. If
/// `recv_queue_depth` itself is smaller, each device has `recv_queue_depth` receives.
const RECEIVES_MIN: u32 = 64;

/// The opened devices of a fabric, with everything it holds on them.
pub(super) struct Devices {
    pub(super) pool: Pool,
    pub(super) devices: Vec<Arc<SharedDevice>>,
    pub(super) device_objects: Vec<Option<DeviceObjects>>,
    pub(super) waits: WaitSet,
    /// Devices that cannot be used, each with the reason.
    pub(super) unused: Vec<(String, Error)>,
}

impl Devices {
    /// Opens the devices with these names. If there are no names, opens the devices with these
    /// addresses. If there are no addresses either, opens all devices. Divides the settings among
    /// several devices: see [`divide`].
    pub(super) fn open(
        verbs: &Verbs,
        names: &[String],
        addresses: &[SocketAddr],
        config: &mut Config,
    ) -> Result<Self, Error> {
        let mut devices = choose(verbs, names, addresses)?;
        let mut unused = Vec::new();
        loop {
            let shares = divide(config, devices.len());
            match Self::open_all(&devices, &shares) {
                Ok(opened) => {
                    for (name, error) in &unused {
                        tracing::warn!("RDMA device {name} is not used: {error}");
                    }
                    *config = shares;
                    return Ok(Self { unused, ..opened });
                }
                Err((at, mut error)) => {
                    if error.is_memlock() {
                        error = error.append(&memory_needed(&shares, devices.len()));
                    }
                    let name = devices.remove(at).name();
                    if devices.is_empty() {
                        let first = unused.into_iter().next();
                        return Err(first.map_or(error, |(_, error)| error));
                    }
                    unused.push((name, error));
                }
            }
        }
    }

    /// Opens all devices. The error has the index of a device that cannot be used.
    fn open_all(devices: &[Device], config: &Config) -> Result<Self, (usize, Error)> {
        let mut made = Vec::new();
        for (index, device) in devices.iter().enumerate() {
            made.push(open_device(index, device, config).map_err(|error| (index, error))?);
        }
        let domains: Vec<_> = made.iter().map(|(domain, ..)| domain.clone()).collect();
        let pool =
            Pool::builder(&domains).config(config.memory.clone()).build().map_err(|error| {
                let refuses = |domain: &ProtectionDomain| {
                    Pool::builder(std::slice::from_ref(domain))
                        .config(config.memory.clone())
                        .build()
                        .is_err()
                };
                (domains.iter().position(refuses).unwrap_or(domains.len() - 1), error.into())
            })?;
        let waits = WaitSet::new().map_err(|error| (0, error))?;
        let (mut devices, mut device_objects) = (Vec::new(), Vec::new());
        for (index, (_, life, mut objects)) in made.into_iter().enumerate() {
            let ready = objects.refill(&pool).and_then(|()| objects.attach(&waits, index));
            ready.map_err(|error| (index, error))?;
            let device = Arc::new(SharedDevice::new(index, life));
            objects.prepare_all(&device, config);
            DeviceChoice::new(config).prepare(&device);
            devices.push(device);
            device_objects.push(Some(objects));
        }
        Ok(Self { pool, devices, device_objects, waits, unused: Vec::new() })
    }

    pub(super) fn none(config: &Config) -> Result<Self, Error> {
        let pool = Pool::builder(&[]).config(config.memory.clone()).build()?;
        let (devices, device_objects, unused) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self { pool, devices, device_objects, waits: WaitSet::new()?, unused })
    }
}

/// Opens a device and creates its queues.
fn open_device(
    index: usize,
    device: &Device,
    config: &Config,
) -> Result<(ProtectionDomain, Life, DeviceObjects), Error> {
    let domain = device.open()?.allocate_protection_domain()?;
    let (life, objects) = DeviceObjects::open(index, &domain, config)?;
    Ok((domain, life, objects))
}

/// Returns the settings for a fabric with this number of devices.
///
/// Every device pins all of the pool's memory. Therefore each device gets a share of the limits.
/// All devices together then stay below `memory_pool_max`. The pinned memory grows with the number
/// of devices, and not with the square of that number.
fn divide(config: &Config, devices: usize) -> Config {
    let mut config = config.clone();
    if devices > 1 {
        config.memory.memory_pool_max /= devices;
        config.memory.receive_reserve /= devices;
        config.memory.memory_pool_initial =
            config.memory.memory_pool_initial.min(config.memory.memory_pool_max);
        config.memory.receive_initial =
            config.memory.receive_initial.min(config.memory.receive_reserve);
        let receives = config.recv_queue_depth / u32::try_from(devices).unwrap_or(u32::MAX);
        config.recv_queue_depth = receives.max(RECEIVES_MIN).min(config.recv_queue_depth);
    }
    config
}

/// Describes how much memory the devices pin when they are opened. The text is added to an error
/// about the locked-memory limit, because that error has only the size of the failed call.
fn memory_needed(config: &Config, devices: usize) -> String {
    /// Size of a queue's entry, on a device that pins the memory of its queues.
    const ENTRY_BYTES: usize = 64;
    let receives = config.recv_queue_depth as usize;
    let queues = (config.cq_size as usize + receives) * ENTRY_BYTES;
    // Every device pins the receives of all devices, because they share the pool.
    let all = receives.saturating_mul(devices);
    let each = config.memory.registered_at_start(all, config.recv_buffer_size as usize);
    let mib = ((each + queues) * devices).div_ceil(1 << 20);
    match devices {
        1 => format!("; about {mib} MiB are needed in all"),
        _ => format!("; about {mib} MiB are needed in all, for {devices} devices"),
    }
}

fn choose(verbs: &Verbs, names: &[String], addresses: &[SocketAddr]) -> Result<Vec<Device>, Error> {
    if !names.is_empty() {
        return names.iter().map(|name| named(verbs, name)).collect();
    }
    let devices = verbs.devices()?;
    if devices.is_empty() {
        return Err(no_device());
    }
    if addresses.is_empty() || addresses.iter().any(|address| address.ip().is_unspecified()) {
        return Ok(devices);
    }
    let channel = verbs.open_event_channel()?;
    let serve: Vec<_> =
        addresses.iter().filter_map(|address| device_at(&channel, *address)).collect();
    let devices: Vec<_> =
        devices.into_iter().filter(|device| serve.contains(&device.name())).collect();
    if devices.is_empty() {
        let addresses: Vec<_> = addresses.iter().map(|at| at.ip().to_string()).collect();
        let what = format!(
            "no RDMA device has the address {} (`ferrite devices` lists the addresses of RDMA \
             devices)",
            addresses.join(" or ")
        );
        return Err(Error::new(ErrorKind::Absent, what));
    }
    Ok(devices)
}

/// Returns the device with this name. If there is none, the error lists the devices that exist.
fn named(verbs: &Verbs, name: &str) -> Result<Device, Error> {
    let mut devices = verbs.devices()?;
    match devices.iter().position(|device| device.name() == name) {
        Some(at) => Ok(devices.swap_remove(at)),
        None => {
            let existing: Vec<_> = devices.iter().map(Device::name).collect();
            Err(Error::unknown_device(name, &existing))
        }
    }
}

/// Returns the name of the device that has an address. Asks the connection manager, which knows it
/// for Ethernet and for InfiniBand.
fn device_at(channel: &EventChannel, mut address: SocketAddr) -> Option<String> {
    let id = channel.create_id().ok()?;
    address.set_port(0); // any port, because the given port may be in use
    id.bind(address).ok()?;
    id.device().map(|(device, _)| device)
}

fn no_device() -> Error {
    ferrite_verbs::Error::from(Absence::NoDevice).into()
}
