//! Settings of the fabric's engine for sessions.
//!
//! A value comes in frames, and each frame has a request, an acknowledgement and a completion of
//! its own: at 64 KiB instead of the fabric's 8 KiB, values of megabytes were half as fast again on
//! Soft-RoCE. A mebibyte of them may be under way on a link: with more, a few links together have
//! so much before a slow device that acknowledgements come later than it waits for them, and it
//! sends again.

use ferrite_fabric::Config;

const FRAME_BYTES: u32 = 64 << 10;
const FRAMES_UNDER_WAY: u16 = 16;
/// A stream's messages are no larger. What has begun and not ended lies in memory of ours, before
/// anyone has logged in.
const MESSAGE_BYTES: u64 = 64 << 10;

/// For who takes many clients: receives for bursts of all of them, 32 MiB for each device.
#[must_use]
pub fn server_config() -> Config {
    Config {
        recv_buffer_size: FRAME_BYTES,
        window: FRAMES_UNDER_WAY,
        max_message_bytes: MESSAGE_BYTES,
        ..Config::default()
    }
}

/// For who has a few connections: 4 MiB for each device.
#[must_use]
pub fn client_config() -> Config {
    Config { recv_queue_depth: 64, ..server_config() }
}
