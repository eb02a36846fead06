//! The cluster's nodes, messages between the modules of its nodes, and the timer that sends them.
//!
//! The functions of the API for messages crash an engine that is not a node of a cluster. So a
//! [`Cluster`] exists only in a cluster.
#![expect(
    unsafe_code,
    reason = "calls by function pointers, with pointers that the engine gave us"
)]

use std::ffi::{c_char, c_int};
use std::fmt;
use std::net::IpAddr;
use std::ptr;
use std::time::Duration;

use super::calls::state;
use super::table::{ClusterMessageFn, TimerFn};
use super::{Context, OK, api};

/// The most nodes that are read, more than any cluster has. It is the number of slots, so there are
/// no more primaries with slots.
const NODES_MAX: usize = 16_384;

/// Flags of a node; constants of the module API.
mod node_flag {
    pub(super) const MYSELF: i32 = 1 << 0;
    pub(super) const FAIL: i32 = 1 << 4;
}

/// The id of a node: 40 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct NodeId([u8; Self::LEN]);

impl NodeId {
    pub(crate) const LEN: usize = 40;

    #[cfg(test)]
    pub(crate) fn of(digit: u8) -> Self {
        Self([digit; Self::LEN])
    }

    /// Copies an id.
    ///
    /// # Safety
    /// `raw` is null, or points to an id of the engine, which has no zero at its end.
    pub(crate) unsafe fn copy(raw: *const c_char) -> Option<Self> {
        // SAFETY: the caller guarantees that there are `LEN` bytes if the pointer is not null.
        unsafe { raw.cast::<[u8; Self::LEN]>().as_ref().map(|id| Self(*id)) }
    }

    /// Returns the id with a zero at its end.
    fn terminated(&self) -> [u8; Self::LEN + 1] {
        let mut id = [0; Self::LEN + 1];
        id[..Self::LEN].copy_from_slice(&self.0);
        id
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.0))
    }
}

/// What the engine says about a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) id: NodeId,
    /// The address that the node announces. Unless `cluster-announce-ip` sets it, a node that has
    /// never met another one (CLUSTER MEET) does not know its own address.
    pub(crate) address: Option<IpAddr>,
    pub(crate) is_myself: bool,
    /// Whether the cluster agrees that the node has failed.
    pub(crate) has_failed: bool,
}

/// A context in an engine that is a node of a cluster.
#[derive(Clone, Copy)]
pub(crate) struct Cluster<'a>(Context<'a>);

impl<'a> Context<'a> {
    /// Returns the cluster; `None` if the engine is not a node of one.
    pub(crate) fn cluster(self) -> Option<Cluster<'a>> {
        // SAFETY: the context is the engine's.
        let flags = unsafe { (api().context_flags)(self.raw()) };
        (flags & state::CLUSTER != 0).then_some(Cluster(self))
    }

    /// Makes the engine call a function once, on its main thread, after this time.
    pub(crate) fn call_after(self, time: Duration, call: TimerFn) {
        let ms = i64::try_from(time.as_millis()).unwrap_or(i64::MAX);
        // SAFETY: the context is the engine's. The function remains valid, since the library is
        // never unloaded, and gets no pointer of ours.
        unsafe { (api().create_timer)(self.raw(), ms, call, ptr::null_mut()) };
    }
}

impl Cluster<'_> {
    /// Makes the engine pass the messages of this type to a function. Must be called only when the
    /// load can no longer fail, since the engine keeps the registrations of a failed load.
    pub(crate) fn receive(self, kind: u8, call: ClusterMessageFn) {
        // SAFETY: the function remains valid, since the library is never unloaded.
        unsafe { (api().register_cluster_message_receiver)(self.0.raw(), kind, call) };
    }

    /// Returns all nodes that this node knows. The engine leaves out nodes that are still in a
    /// handshake, and nodes that are marked as having no address.
    pub(crate) fn nodes(self) -> Vec<Node> {
        let mut count = 0;
        // SAFETY: the context is the engine's, in a cluster. The engine returns null, or a list of
        // `count` ids, which is valid until it is freed here, after its last use.
        unsafe {
            let list = (api().cluster_nodes_list)(self.0.raw(), &raw mut count);
            if list.is_null() {
                return Vec::new();
            }
            let ids: Vec<_> = (0..count.min(NODES_MAX))
                .filter_map(|index| NodeId::copy((*list.add(index)).cast_const()))
                .collect();
            (api().free_cluster_nodes_list)(list);
            ids.into_iter().filter_map(|id| self.node(id)).collect()
        }
    }

    /// Returns a node; `None` if this node does not know it.
    fn node(self, id: NodeId) -> Option<Node> {
        // The engine writes at most 46 bytes: an address, with or without a zero at its end.
        let mut address = [0_u8; 64];
        let mut primary = [0_u8; NodeId::LEN + 1];
        let (mut port, mut flags): (c_int, c_int) = (0, 0);
        // SAFETY: the context is the engine's, in a cluster. The id ends with a zero, and the
        // places to write to are at least as long as the engine needs.
        let found = unsafe {
            (api().cluster_node_info)(
                self.0.raw(),
                id.terminated().as_ptr().cast(),
                address.as_mut_ptr().cast(),
                primary.as_mut_ptr().cast(),
                &raw mut port,
                &raw mut flags,
            )
        };
        if found != OK {
            return None;
        }
        let end = address.iter().position(|byte| *byte == 0).unwrap_or(address.len());
        let address = std::str::from_utf8(&address[..end]).ok().and_then(|text| text.parse().ok());
        Some(Node {
            id,
            address,
            is_myself: flags & node_flag::MYSELF != 0,
            has_failed: flags & node_flag::FAIL != 0,
        })
    }

    /// Sends a message to a node. Returns false if there is no link to the node at present. The
    /// engine queues nothing for a node that it cannot reach.
    pub(crate) fn send(self, to: NodeId, kind: u8, message: &[u8]) -> bool {
        let Ok(len) = u32::try_from(message.len()) else { return false };
        // SAFETY: the context is the engine's and belongs to this module, in a cluster. The id ends
        // with a zero, and the engine copies the message.
        let sent = unsafe {
            (api().send_cluster_message)(
                self.0.raw(),
                to.terminated().as_ptr().cast(),
                kind,
                message.as_ptr().cast(),
                len,
            )
        };
        sent == OK
    }
}
