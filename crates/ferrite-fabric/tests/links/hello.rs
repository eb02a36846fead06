//! What a peer by hand says of itself. For tests of other crates, too.

use ferrite_fabric::wire::{Features, Hello, Version};

/// A hello that nobody could object to.
pub(crate) const HELLO: Hello = Hello {
    version: Version::CURRENT,
    features: Features::from_bits(3), // WRITE_IMM and ONE_SIDED
    segment_bytes: 8 << 10,
    window: 64,
    channels: 64,
    max_message_bytes: 64 << 20,
    instance: 1,
    session: 0,
};
