//! Fabric settings for sessions.
//!
//! A value is sent in frames, and each frame costs a work request, an acknowledgement and a
//! completion. With frames of 64 KiB instead of the fabric's default of 8 KiB, values of several
//! megabytes were 1.5 times as fast on Soft-RoCE.
//!
//! With these settings, each link may have 1 MiB of frames in flight. With more, a few links
//! together queue so much data for a slow device that acknowledgements arrive after its timeout,
//! and it retransmits.

use ferrite_fabric::Config;

const FRAME_BYTES: u32 = 64 << 10;
/// The maximum number of bytes in flight on a link. Only with frames of more than 512 KiB may a
/// link have more: two frames (`fabric_config`).
pub(crate) const IN_FLIGHT_BYTES: u32 = 1 << 20;
const FRAMES_IN_FLIGHT: u16 = (IN_FLIGHT_BYTES / FRAME_BYTES) as u16;
/// The largest message of a stream. A partly received message occupies our memory, even for a
/// client that has not logged in.
pub(crate) const MESSAGE_BYTES: u64 = 64 << 10;

/// Returns the settings for a server with many clients. The receive buffers, which all clients
/// share, take 32 MiB, and each device pins them. With more than eight devices they take more.
#[must_use]
pub fn server_config() -> Config {
    Config {
        recv_buffer_size: FRAME_BYTES,
        window: FRAMES_IN_FLIGHT,
        max_message_bytes: MESSAGE_BYTES,
        ..Config::default()
    }
}

/// Returns the settings for a client with a few connections. The receive buffers take 4 MiB for
/// each device, and each device pins all of them.
#[must_use]
pub fn client_config() -> Config {
    Config { recv_queue_depth: 64, ..server_config() }
}
