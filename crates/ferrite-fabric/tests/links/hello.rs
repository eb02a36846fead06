//! The hello of a peer that tests play by hand. Tests of other crates use it, too.

use ferrite_fabric::wire::{Features, Hello, Version};

/// A valid hello.
pub(crate) const HELLO: Hello = Hello {
    version: Version::CURRENT,
    features: Features::from_bits(3), // WRITE_IMM and ONE_SIDED
    segment_bytes: 8 << 10,
    window: 64,
    channels: 64,
    max_message_bytes: 64 << 20,
    instance: 1,
    session: 0,
    mtu: 0,
};
