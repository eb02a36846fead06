//! A port of a device: state, speed, MTU, link layer.

use std::fmt;
use std::mem::offset_of;

use crate::code::codes;
use crate::context::Context;
use crate::error::{Error, check};
use crate::sys;

/// What a port reported.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Port {
    /// From 1.
    pub number: u8,
    /// Whether traffic can pass.
    pub state: PortState,
    /// What the wire is.
    pub link_layer: LinkLayer,
    /// The largest packet payload in use.
    pub active_mtu: Mtu,
    /// The largest the port could use.
    pub max_mtu: Mtu,
    /// The largest message.
    pub max_message_bytes: u32,
    /// Entries in the GID table, used or not.
    pub gid_table_len: u32,
    /// The local identifier (InfiniBand).
    pub lid: u16,
    /// Lanes times the speed of one, in Mbit/s; `None` if the port reports a code we do not know.
    pub mbit_per_s: Option<u32>,
}

impl Port {
    pub(crate) fn query(context: &Context, number: u8) -> Result<Self, Error> {
        let mut attr = sys::ibv_port_attr::default();
        let raw = context.raw();
        // ibv_query_port is an inline function in C: the extended context's own where it has one,
        // else the exported symbol, which fills only the fields of the first ABI.
        // SAFETY: the context is open; a context whose `abi_compat` is all ones is embedded in a
        // `verbs_context` of `sz` bytes counted from the end, of which `query_port` is the first
        // field: it may be read only if `sz` covers the whole struct as we know it.
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

    /// Whether traffic can pass.
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
        /// No link.
        DOWN = 1, "down";
        /// Link, but not configured by a subnet manager yet.
        INIT = 2, "initialising";
        /// Configured, not yet in use.
        ARMED = 3, "armed";
        /// In use.
        ACTIVE = 4, "active";
    }
}

codes! {
    /// What the wire is.
    pub struct LinkLayer, unknown: "unknown link layer" {
        /// An old driver that does not tell: InfiniBand.
        UNSPECIFIED = 0, "unspecified";
        /// InfiniBand.
        INFINIBAND = 1, "InfiniBand";
        /// RoCE or iWARP.
        ETHERNET = 2, "Ethernet";
    }
}

/// A packet size, in the encoding that queue pairs want.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mtu(pub(crate) u32);

impl Mtu {
    /// 1024 bytes: what a RoCE port on a 1500-byte Ethernet uses.
    pub const B1024: Self = Self(3);
    /// 4096 bytes.
    pub const B4096: Self = Self(5);

    /// By the number that verbs have for it, 1 to 5, which is also what peers tell each other.
    /// Others count as the smallest.
    #[must_use]
    pub fn from_code(code: u8) -> Self {
        Self(if (1..=5).contains(&code) { code.into() } else { 1 })
    }

    /// The number that verbs have for it.
    #[must_use]
    pub fn code(self) -> u8 {
        u8::try_from(self.0).unwrap_or(1)
    }

    /// In bytes; 0 for a code that is not known.
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
    fn unknown_codes_are_words_not_panics() {
        assert_eq!(Mtu(200).bytes(), 0);
        assert_eq!(speed(3, 3), None);
    }

    #[test]
    fn speeds_and_sizes() {
        assert_eq!(speed(2, 32), Some(100_000));
        assert_eq!(Mtu::B1024.bytes(), 1024);
        assert_eq!(Mtu::B4096.bytes(), 4096);
    }
}
