//! Size classes and purposes, by which blocks are kept separate.

/// The size of a chunk, and of the largest block. Arenas are divided into chunks.
pub(super) const CHUNK_BYTES: usize = 2 << 20;

/// The size of a block. A buffer uses a block of the smallest class that holds it.
///
/// ```
/// use ferrite_fabric::mem::SizeClass;
///
/// assert_eq!(SizeClass::holding(300), Some(SizeClass::K1));
/// assert_eq!(SizeClass::holding(3 << 20), None); // larger than the largest block
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SizeClass {
    /// 256 bytes, for example for control messages.
    B256,
    /// 1 KiB.
    K1,
    /// 8 KiB.
    K8,
    /// 64 KiB.
    K64,
    /// 512 KiB.
    K512,
    /// 2 MiB: a whole chunk.
    M2,
}

impl SizeClass {
    /// All classes, the smallest first.
    pub const ALL: [Self; 6] = [Self::B256, Self::K1, Self::K8, Self::K64, Self::K512, Self::M2];

    /// Returns the size of a block.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::B256 => 256,
            Self::K1 => 1 << 10,
            Self::K8 => 8 << 10,
            Self::K64 => 64 << 10,
            Self::K512 => 512 << 10,
            Self::M2 => CHUNK_BYTES,
        }
    }

    /// Returns the smallest class that holds `len` bytes.
    #[must_use]
    pub fn holding(len: usize) -> Option<Self> {
        Self::ALL.into_iter().find(|class| len <= class.bytes())
    }

    pub(super) const fn index(self) -> usize {
        self as usize
    }

    pub(super) const fn blocks_per_chunk(self) -> usize {
        CHUNK_BYTES / self.bytes()
    }
}

/// The purpose of a buffer. Sends and receives have separate heaps, so that neither can starve the
/// other.
///
/// ```
/// use ferrite_fabric::mem::Purpose;
///
/// assert_eq!(Purpose::Receive.to_string(), "receive");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// Outgoing: sends, writes, the local buffers of reads, and all other buffers that the
    /// application takes with [`Fabric::buffer`](crate::Fabric::buffer).
    Send,
    /// Incoming: posted receives, data that was read from TCP, and memory that the peers of raw
    /// connections write to.
    Receive,
}

impl Purpose {
    /// Both purposes.
    pub const ALL: [Self; 2] = [Self::Send, Self::Receive];

    pub(super) const fn index(self) -> usize {
        self as usize
    }
}

impl std::fmt::Display for Purpose {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Send => "send",
            Self::Receive => "receive",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holding_returns_the_smallest_class() {
        for (len, class) in [
            (0, SizeClass::B256),
            (256, SizeClass::B256),
            (257, SizeClass::K1),
            (8 << 10, SizeClass::K8),
            ((8 << 10) + 1, SizeClass::K64),
            (CHUNK_BYTES, SizeClass::M2),
        ] {
            assert_eq!(SizeClass::holding(len), Some(class), "{len}");
        }
        assert_eq!(SizeClass::holding(CHUNK_BYTES + 1), None);
    }

    #[test]
    fn chunks_divide_evenly() {
        for (at, class) in SizeClass::ALL.into_iter().enumerate() {
            assert_eq!(class.index(), at);
            assert_eq!(class.blocks_per_chunk() * class.bytes(), CHUNK_BYTES);
        }
    }
}
