//! A port of a device: state, speed, MTU, link layer.

use std::fmt;
use std::mem::offset_of;

use rustix::io::Errno;

use crate::code::codes;
use crate::context::Context;
use crate::error::{Absence, Error, check};
use crate::sys;

/// The attributes that a port reported.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Port {
    /// The port number, from 1.
    pub number: u8,
    /// Whether traffic can pass.
    pub state: PortState,
    /// InfiniBand or Ethernet.
    pub link_layer: LinkLayer,
    /// The largest packet payload in use.
    pub active_mtu: Mtu,
    /// The largest packet payload that the port supports.
    pub max_mtu: Mtu,
    /// The largest message, in bytes.
    pub max_message_bytes: u32,
    /// Number of entries in the GID table, used or not.
    pub gid_table_len: u32,
    /// The local identifier (InfiniBand).
    pub lid: u16,
    /// Number of lanes times the speed of a lane, in Mbit/s; `None` if the port reports an unknown
    /// code.
    pub mbit_per_s: Option<u32>,
}

impl Context {
    /// Returns all ports, numbered from 1.
    ///
    /// # Errors
    /// If the device was removed.
    pub fn ports(&self) -> Result<Vec<Port>, Error> {
        (1..=self.limits()?.ports).map(|number| self.port(number)).collect()
    }

    /// Returns one port.
    ///
    /// # Errors
    /// If there is no such port, or the device was removed.
    pub fn port(&self, number: u8) -> Result<Port, Error> {
        Port::query(self, number)
    }

    /// Returns one port, if it is active.
    ///
    /// # Errors
    /// [`Absence::PortDown`] if the port is not active. Other errors if there is no such port, or
    /// the device was removed.
    pub fn active_port_numbered(&self, number: u8) -> Result<Port, Error> {
        let port = self.port(number)?;
        if port.is_active() {
            return Ok(port);
        }
        let (device, state) = (self.device().name(), port.state.to_string());
        Err(Absence::PortDown { device, port: number, state }.into())
    }

    /// Returns the first active port.
    ///
    /// # Errors
    /// [`Absence::PortDown`] if there is none.
    pub fn active_port(&self) -> Result<Port, Error> {
        let ports = self.ports()?;
        if let Some(port) = ports.iter().find(|port| port.is_active()) {
            return Ok(port.clone());
        }
        let (port, state) =
            ports.first().map_or((1, "missing".to_owned()), |p| (p.number, p.state.to_string()));
        Err(Absence::PortDown { device: self.device().name(), port, state }.into())
    }

    /// Returns whether the device no longer carries out commands. This is so if the device was
    /// removed, or if it has failed and the kernel has not taken it away yet. The check queries a
    /// port, because a port query reaches the device (`mlx5_query_port` in the kernel's
    /// `drivers/infiniband/hw/mlx5/main.c`). The kernel may answer a query of the device's limits
    /// from a cache.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        let gone = [Errno::IO, Errno::NODEV].map(|errno| Some(errno.raw_os_error()));
        self.is_disassociated()
            || self.port(1).is_err_and(|error| gone.contains(&error.raw_os_error()))
    }
}

impl Port {
    fn query(context: &Context, number: u8) -> Result<Self, Error> {
        let mut attr = sys::ibv_port_attr::default();
        let raw = context.raw();
        // In C, ibv_query_port is an inline function. It calls `query_port` of the extended context
        // if there is one. Otherwise it calls the exported symbol, which fills only the fields of
        // the first ABI. This code does the same.
        // SAFETY: the context is open. If `abi_compat` is all ones, the context is embedded in a
        // `verbs_context`. New fields are added at the front of that struct, so its `sz` counts
        // bytes from the end. `query_port` may be read only if `sz` covers everything from
        // `query_port` to the end.
        let rc = unsafe {
            let extended = raw
                .cast::<u8>()
                .wrapping_sub(offset_of!(sys::verbs_context, context))
                .cast::<sys::verbs_context>();
            let query = ((*raw).abi_compat.addr() == usize::MAX
                && (*extended).sz
                    >= size_of::<sys::verbs_context>()
                        - offset_of!(sys::verbs_context, query_port))
            .then(|| (*extended).query_port)
            .flatten();
            match query {
                Some(query) => query(raw, number, &raw mut attr, size_of::<sys::ibv_port_attr>()),
                None => (context.verbs().ibv.ibv_query_port)(raw, number, (&raw mut attr).cast()),
            }
        };
        check("ibv_query_port", rc, || format!("{} port {number}", context.device().name()))?;
        Ok(Self {
            number,
            state: PortState(attr.state.0),
            link_layer: LinkLayer(attr.link_layer.into()),
            active_mtu: Mtu(attr.active_mtu.0),
            max_mtu: Mtu(attr.max_mtu.0),
            max_message_bytes: attr.max_msg_sz,
            gid_table_len: u32::try_from(attr.gid_tbl_len).unwrap_or(0),
            lid: attr.lid,
            mbit_per_s: speed(attr.active_width, attr.active_speed),
        })
    }

    /// Returns whether traffic can pass.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.state == PortState::ACTIVE
    }
}

fn speed(width: u8, speed: u8) -> Option<u32> {
    let lanes = match width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => return None,
    };
    let lane_mbit_per_s = match speed {
        1 => 2_500,
        2 => 5_000,
        4 | 8 => 10_000,
        16 => 14_000,
        32 => 25_000,
        64 => 50_000,
        128 => 100_000,
        _ => return None,
    };
    Some(lanes * lane_mbit_per_s)
}

codes! {
    /// The state of a port.
    pub struct PortState, unknown: "in unknown state" {
        /// The port has no link.
        DOWN = 1, "down";
        /// The link is up, but no subnet manager has configured it yet.
        INIT = 2, "initialising";
        /// The port is configured, but not yet in use.
        ARMED = 3, "armed";
        /// The port is in use.
        ACTIVE = 4, "active";
    }
}

codes! {
    /// The link layer of a port.
    pub struct LinkLayer, unknown: "unknown link layer" {
        /// An old driver did not report the link layer; the link is InfiniBand.
        UNSPECIFIED = 0, "unspecified";
        /// InfiniBand.
        INFINIBAND = 1, "InfiniBand";
        /// RoCE or iWARP.
        ETHERNET = 2, "Ethernet";
    }
}

/// A packet payload size, in the encoding of verbs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mtu(pub(crate) u32);

impl Mtu {
    /// 1024 bytes: the MTU of a RoCE port if Ethernet's MTU is 1500 bytes.
    pub const B1024: Self = Self(3);
    /// 4096 bytes.
    pub const B4096: Self = Self(5);

    /// Creates an MTU from its verbs code, 1 to 5. Peers exchange this code. Any other code counts
    /// as the smallest MTU.
    #[must_use]
    pub fn from_code(code: u8) -> Self {
        Self(if (1..=5).contains(&code) { code.into() } else { 1 })
    }

    /// Returns the verbs code.
    #[must_use]
    pub fn code(self) -> u8 {
        u8::try_from(self.0).unwrap_or(1)
    }

    /// Returns the size in bytes, or 0 for an unknown code.
    #[must_use]
    pub fn bytes(self) -> u32 {
        if (1..=5).contains(&self.0) { 128 << self.0 } else { 0 }
    }
}

impl fmt::Display for Mtu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bytes().fmt(f)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn port(link_layer: LinkLayer) -> Port {
        Port {
            number: 1,
            state: PortState::ACTIVE,
            link_layer,
            active_mtu: Mtu::B1024,
            max_mtu: Mtu::B4096,
            max_message_bytes: 1 << 30,
            gid_table_len: 16,
            lid: 0,
            mbit_per_s: None,
        }
    }

    #[test]
    fn unknown_codes_do_not_panic() {
        assert_eq!(Mtu(200).bytes(), 0);
        assert_eq!(speed(3, 3), None);
    }

    #[test]
    fn decodes_speeds_and_sizes() {
        assert_eq!(speed(2, 32), Some(100_000));
        assert_eq!(Mtu::B1024.bytes(), 1024);
        assert_eq!(Mtu::B4096.bytes(), 4096);
    }
}
