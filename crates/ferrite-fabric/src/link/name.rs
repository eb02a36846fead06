//! The name of a link within its fabric.

/// Identifies a link by its index, which later links reuse, and by its serial, which is unique.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct LinkName {
    pub(crate) index: u32,
    pub(crate) serial: u64,
}
