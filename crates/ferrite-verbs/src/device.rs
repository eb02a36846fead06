//! The devices of this host, before they are opened.

use std::path::PathBuf;
use std::sync::Arc;

use rustix::io::Errno;

use crate::denied::{self, denied_file};
use crate::error::{Absence, Error, ErrorKind, last_errno};
use crate::quirks::DeviceQuirks;
use crate::sys;
use crate::table::{Verbs, text};

/// A device of this host; [`Device::open`] opens it.
#[derive(Clone)]
pub struct Device {
    list: Arc<List>,
    index: usize,
}

/// The array that libibverbs returned. Its device pointers are valid until the array is freed.
pub(crate) struct List {
    pub(crate) verbs: Verbs,
    array: *mut *mut sys::ibv_device,
    len: usize,
}

// SAFETY: nobody writes to the array after libibverbs returned it, and any thread may call
// libibverbs on a device.
unsafe impl Send for List {}
// SAFETY: as above.
unsafe impl Sync for List {}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: `array` came from ibv_get_device_list and is released once. No `Device` or
        // `Context` points into it any more, because each of them holds an `Arc` of this list.
        unsafe { (self.verbs.ibv.ibv_free_device_list)(self.array) };
    }
}

impl Verbs {
    /// Lists the devices of this host.
    ///
    /// # Errors
    /// [`Absence::NoKernel`] without ib_uverbs. If the list is empty, [`ErrorKind::Permission`] if
    /// the process may not open the file of a device, and [`Absence::NoDevice`] otherwise.
    pub fn devices(&self) -> Result<Vec<Device>, Error> {
        let mut len = 0;
        // SAFETY: `len` is valid for the write; the result is owned by `List` below.
        let array = self.call_global(|| unsafe { (self.ibv.ibv_get_device_list)(&raw mut len) });
        if array.is_null() {
            return Err(match last_errno() {
                errno @ (Errno::NOSYS | Errno::NOENT | Errno::NODEV) => {
                    Absence::NoKernel { detail: std::io::Error::from(errno).to_string() }.into()
                }
                errno => Error::os("ibv_get_device_list", errno, ""),
            });
        }
        let list =
            Arc::new(List { verbs: self.clone(), array, len: usize::try_from(len).unwrap_or(0) });
        if list.len == 0 {
            // libibverbs leaves out devices whose files it cannot see.
            if let Some(file) = denied_file(denied::DEVICES) {
                return Err(Error::denied("ibv_get_device_list", file));
            }
            return Err(Absence::NoDevice.into());
        }
        Ok((0..list.len).map(|index| Device { list: Arc::clone(&list), index }).collect())
    }

    /// Returns the device called `name`.
    ///
    /// # Errors
    /// As [`Verbs::devices`]. If no device has this name, the error lists the existing ones.
    pub fn device(&self, name: &str) -> Result<Device, Error> {
        let devices = self.devices()?;
        let names: Vec<String> = devices.iter().map(Device::name).collect();
        devices.into_iter().find(|device| device.name() == name).ok_or_else(|| {
            let why = format!("no such device; this host has {}", names.join(", "));
            Error::new(ErrorKind::DeviceGone, "RDMA device", name).because(why)
        })
    }
}

impl Device {
    pub(crate) fn raw(&self) -> *mut sys::ibv_device {
        // SAFETY: `index` is below the length that libibverbs reported for the array.
        unsafe { *self.list.array.add(self.index) }
    }

    pub(crate) fn verbs(&self) -> &Verbs {
        &self.list.verbs
    }

    /// Returns the name, such as `mlx5_0`.
    #[must_use]
    pub fn name(&self) -> String {
        // SAFETY: the device pointer is valid while the list is, and the device contains the name.
        unsafe { text((self.verbs().ibv.ibv_get_device_name)(self.raw())) }
    }

    /// Returns the node GUID, in host byte order.
    #[must_use]
    pub fn guid(&self) -> u64 {
        // SAFETY: the device pointer is valid while the list is.
        u64::from_be(unsafe { (self.verbs().ibv.ibv_get_device_guid)(self.raw()) })
    }

    /// Returns whether the device speaks iWARP (RFC 5040) instead of InfiniBand's transport.
    #[must_use]
    pub fn is_iwarp(&self) -> bool {
        // SAFETY: the device pointer is valid while the list is.
        let transport = unsafe { (*self.raw()).transport_type };
        transport == sys::ibv_transport_type::IBV_TRANSPORT_IWARP
    }

    /// Returns the NUMA node of the card, if it has one.
    #[must_use]
    pub fn numa_node(&self) -> Option<u32> {
        // The file contains −1 if the bus does not report a node. −1 does not parse as `u32`.
        self.sysfs("device/numa_node")?.parse().ok()
    }

    /// Returns the kernel driver (`rxe`, `mlx5_core`, …), if it is known.
    #[must_use]
    pub fn driver(&self) -> Option<String> {
        // Soft-RoCE has no bus driver; its attribute `parent` names the network interface below it.
        if self.sysfs("parent").is_some() {
            return Some("rxe".to_owned());
        }
        let link = std::fs::read_link(self.sysfs_path("device/driver")).ok()?;
        Some(link.file_name()?.to_string_lossy().into_owned())
    }

    /// Returns the quirks of the device's provider. Each call reads sysfs, so keep the result.
    #[must_use]
    pub fn quirks(&self) -> DeviceQuirks {
        DeviceQuirks::of_driver(self.driver().as_deref())
    }

    /// Returns the device's file, if this process may not open it.
    pub(crate) fn denied_file(&self) -> Option<PathBuf> {
        // The bus device names the file. Soft-RoCE has no bus device, so for Soft-RoCE this checks
        // the files of all devices.
        let files = self.sysfs_path("device/infiniband_verbs").read_dir();
        let file = files.ok().and_then(|mut files| files.next()?.ok());
        match file {
            Some(file) => denied_file(&file.file_name().to_string_lossy()),
            None => denied_file(denied::DEVICES),
        }
    }

    pub(crate) fn sysfs_path(&self, below: &str) -> PathBuf {
        PathBuf::from("/sys/class/infiniband").join(self.name()).join(below)
    }

    pub(crate) fn sysfs(&self, below: &str) -> Option<String> {
        std::fs::read_to_string(self.sysfs_path(below)).ok().map(|text| text.trim().to_owned())
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Device").field(&self.name()).finish()
    }
}
