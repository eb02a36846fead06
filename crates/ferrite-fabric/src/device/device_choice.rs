//! The choice of the port and of the GID table entry that links may use.

use std::net::IpAddr;

use ferrite_verbs::GidEntry;

use super::shared_device::SharedDevice;
use crate::config::Config;
use crate::error::{Error, ErrorKind};

/// The settings `device_port` and `gid_index`. `None` means any.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceChoice {
    port: Option<u8>,
    gid_index: Option<u32>,
}

impl DeviceChoice {
    pub(crate) fn new(config: &Config) -> Self {
        Self { port: config.device_port, gid_index: config.gid_index }
    }

    /// Reads the entry of the GID table that [`DeviceChoice::check`] needs, if one is configured.
    /// So the first connection does not wait for the kernel.
    pub(crate) fn prepare(self, device: &SharedDevice) {
        if let Some(index) = self.gid_index {
            device.gid_entry(self.port.unwrap_or(1), index);
        }
    }

    /// Returns whether links may use this entry.
    pub(crate) fn allows(self, entry: &GidEntry) -> bool {
        self.port.is_none_or(|port| port == entry.port)
            && self.gid_index.is_none_or(|index| index == entry.index)
    }

    /// Checks a path that the connection manager has chosen.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`] if the path is on another port, if the port's GID table has no
    /// entry with the chosen index, or if the path's local address belongs to another entry.
    pub(crate) fn check(
        self,
        device: &SharedDevice,
        port: u8,
        local: Option<IpAddr>,
    ) -> Result<(), Error> {
        let wrong = |what: String| Err(Error::new(ErrorKind::Unreachable, what));
        let name = &device.name;
        if let Some(only) = self.port.filter(|only| *only != port) {
            return wrong(format!(
                "the address belongs to port {port} of {name}, but only port {only} may be used"
            ));
        }
        let Some(index) = self.gid_index else { return Ok(()) };
        match (device.gid_entry(port, index), local.map(|local| local.to_canonical())) {
            (None, _) => wrong(format!("port {port} of {name} has no GID with index {index}")),
            (_, None) => Ok(()),
            // A listener on all addresses passes, because each of its connections is checked later.
            (_, Some(local)) if local.is_unspecified() => Ok(()),
            (Some(entry), Some(local)) if entry.gid.ip().to_canonical() == local => Ok(()),
            (Some(entry), Some(local)) => wrong(format!(
                "GID index {index} of {name} has the address {}, not {local}",
                entry.gid.ip()
            )),
        }
    }
}
