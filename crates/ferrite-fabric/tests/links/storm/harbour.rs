//! A peer that others call: a fabric with a listener and regions, to be dropped as a whole.

use ferrite_fabric::mem::Pool;
use ferrite_fabric::wire::{GrantToken, Rights};
use ferrite_fabric::{Config, Fabric, Link, Listener, Region};

use crate::links::pair::{once, pattern};
use crate::links::{Fixture, KIB};

/// Bytes of a region, and of a cell that is written as a whole.
pub(super) const REGION: usize = 16 * KIB;
pub(super) const CELL: usize = 256;

pub(super) struct Harbour {
    pub(super) fabric: Fabric,
    pub(super) listener: Listener,
    /// Links that came and whose other end is not known yet.
    pub(super) came: Vec<Link>,
    /// Tells it from those that had its place before.
    pub(super) serial: u64,
}

impl Harbour {
    pub(super) fn new(fixture: &Fixture, config: &Config, serial: u64) -> Self {
        let host = &fixture.hosts[0];
        let fabric = fixture.fabric(host, config);
        let listener = fabric.listen(host.any_port()).expect("listen");
        Self { fabric, listener, came: Vec::new(), serial }
    }

    pub(super) fn pool(&self) -> Pool {
        self.fabric.pool().clone()
    }

    /// Takes links that came.
    pub(super) fn accept(&mut self) {
        while let Some(link) = once(&mut self.listener.accept()) {
            self.came.push(link.expect("it listens"));
        }
        // Those whose caller gave up end by themselves.
        self.came.retain(|link| link.failure().is_none());
    }
}

/// What a link's peer may reach: a region to read, and one with cells to read and write.
pub(super) struct Granted {
    pub(super) name: u64,
    pub(super) readable: Region,
    pub(super) cells: Region,
    pub(super) tokens: [GrantToken; 2],
}

impl Granted {
    /// `None` when there is no memory now.
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

/// A cell by the name of the write that made it.
pub(super) fn cell(name: u64) -> Vec<u8> {
    let mut bytes = name.to_le_bytes().to_vec();
    bytes.extend(pattern(name, CELL - 8));
    bytes
}

/// A cell must be wholly that of one write.
pub(super) fn check_cell(bytes: &[u8]) {
    let name = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
    assert!(bytes == cell(name), "a cell said to be {name:#x} has others' bytes");
}
