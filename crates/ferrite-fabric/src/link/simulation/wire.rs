//! The wires between the two sides: RDMA paths and TCP connections.

use std::collections::{BTreeMap, VecDeque};

use super::Random;
use crate::wire::TcpFrame;

/// A request on its way to the peer's device.
#[derive(Debug)]
pub(super) enum Packet {
    Frame { imm: u32, bytes: Vec<u8> },
    Write { grant: u64, value: u64, imm: Option<u32> },
    Read { grant: u64 },
}

/// An acknowledgement: the peer's device has executed the request with this number.
#[derive(Debug)]
pub(super) struct Acknowledgement {
    pub(super) work: u64,
    /// The data of a read.
    pub(super) value: Option<u64>,
}

/// An RDMA path. The arrays are indexed by the side at which packets arrive.
#[derive(Default)]
pub(super) struct RdmaWire {
    pub(super) packets: [VecDeque<(u64, Packet)>; 2],
    pub(super) acknowledgements: [VecDeque<Acknowledgement>; 2],
    pub(super) is_cut: bool,
}

/// A TCP connection.
#[derive(Default)]
pub(super) struct TcpWire {
    pub(super) frames: [VecDeque<(TcpFrame, Vec<u8>)>; 2],
}

#[derive(Default)]
pub(super) struct Wires {
    rdma: BTreeMap<u64, RdmaWire>,
    tcp: BTreeMap<u64, TcpWire>,
    last: u64,
}

impl Wires {
    /// Creates an RDMA path.
    pub(super) fn lay(&mut self) -> u64 {
        self.last += 1;
        self.rdma.insert(self.last, RdmaWire::default());
        self.last
    }

    /// Creates a TCP connection.
    pub(super) fn connect(&mut self) -> u64 {
        self.last += 1;
        self.tcp.insert(self.last, TcpWire::default());
        self.last
    }

    pub(super) fn rdma(&mut self, wire: u64) -> &mut RdmaWire {
        self.rdma.entry(wire).or_default()
    }

    pub(super) fn tcp(&mut self, wire: u64) -> &mut TcpWire {
        self.tcp.entry(wire).or_default()
    }

    pub(super) fn is_cut(&self, wire: u64) -> bool {
        self.rdma.get(&wire).is_none_or(|wire| wire.is_cut)
    }

    /// Cuts the wire: nothing passes any more.
    pub(super) fn cut(&mut self, wire: u64) {
        let wire = self.rdma(wire);
        wire.is_cut = true;
        wire.packets = <[VecDeque<_>; 2]>::default();
        wire.acknowledgements = <[VecDeque<_>; 2]>::default();
    }

    /// Returns one of the intact paths.
    pub(super) fn pick_rdma(&mut self, random: &mut Random) -> Option<u64> {
        let whole: Vec<_> =
            self.rdma.iter().filter(|(_, it)| !it.is_cut).map(|(id, _)| *id).collect();
        // Mostly picks the newest path, because older paths are seldom in use.
        match whole.len() {
            0 => None,
            len if random.chance(80) => Some(whole[len - 1]),
            len => Some(whole[random.below(len)]),
        }
    }
}
