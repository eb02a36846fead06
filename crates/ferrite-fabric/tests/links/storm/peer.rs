//! A peer that accepts links: a fabric with a listener and regions, which is dropped as a whole.

use ferrite_fabric::mem::Pool;
use ferrite_fabric::wire::{GrantToken, Rights};
use ferrite_fabric::{Config, Fabric, Link, Listener, Region};

use crate::links::pair::{pattern, poll_once};
use crate::links::{Fixture, KIB};

/// Size of a region in bytes.
pub(super) const REGION: usize = 16 * KIB;
/// Size in bytes of a cell, which is always written as a whole.
pub(super) const CELL: usize = 256;

pub(super) struct Peer {
    pub(super) fabric: Fabric,
    pub(super) listener: Listener,
    /// Accepted links whose other end is not known yet.
    pub(super) unmatched: Vec<Link>,
    /// Distinguishes this peer from those that it replaced.
    pub(super) serial: u64,
}

impl Peer {
    pub(super) fn new(fixture: &Fixture, config: &Config, serial: u64) -> Self {
        let host = &fixture.hosts[0];
        let fabric = fixture.fabric(host, config);
        let listener = fabric.listen(host.any_port()).expect("listen");
        Self { fabric, listener, unmatched: Vec::new(), serial }
    }

    pub(super) fn pool(&self) -> Pool {
        self.fabric.pool().clone()
    }

    /// Accepts pending links.
    pub(super) fn accept(&mut self) {
        while let Some(link) = poll_once(&mut self.listener.accept()) {
            self.unmatched.push(link.expect("listener is up"));
        }
        // Links whose connecting side gave up end by themselves.
        self.unmatched.retain(|link| link.failure().is_none());
    }
}

/// The memory that the other end of a link may access: a region to read, and one with cells to read
/// and write.
pub(super) struct Granted {
    pub(super) name: u64,
    pub(super) readable: Region,
    pub(super) cells: Region,
    pub(super) tokens: [GrantToken; 2],
}

impl Granted {
    /// Registers and grants both regions. Returns `None` if there is no memory at the moment.
    pub(super) fn new(link: &Link, name: u64) -> Option<Self> {
        let fabric = link.fabric();
        let register = |bytes: &[u8], rights| {
            let mut buf = fabric.buffer(bytes.len()).ok()?;
            buf.copy_from_slice(bytes);
            link.register_memory(buf, rights).ok()
        };
        let readable = register(&pattern(name, REGION), Rights::READ)?;
        let empty_cells = (0..REGION / CELL).flat_map(|_| cell(0)).collect::<Vec<_>>();
        let cells = register(&empty_cells, Rights::READ_WRITE)?;
        let tokens = [readable.grant(link), cells.grant(link)];
        Some(Self { name, readable, cells, tokens })
    }
}

/// Returns the bytes of a cell, derived from the name of the write that made it.
pub(super) fn cell(name: u64) -> Vec<u8> {
    let mut bytes = name.to_le_bytes().to_vec();
    bytes.extend(pattern(name, CELL - 8));
    bytes
}

/// Checks that a cell consists of the bytes of one write.
pub(super) fn check_cell(bytes: &[u8]) {
    let name = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
    assert!(bytes == cell(name), "the cell with name {name:#x} has foreign bytes");
}
