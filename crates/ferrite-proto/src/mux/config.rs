//! Limits of a multiplexer, with their defaults.

use super::id::{Class, Opened};
use super::record::{CONTROL_BYTES, HEAD_BYTES};

/// The largest credit that a sender may have.
pub(super) const CREDIT_MAX: u32 = i32::MAX as u32;
/// The smallest room for a turn of a stream: an OPEN, a DATA record with one byte, and a FIN.
pub(super) const TURN_ROOM: usize = CONTROL_BYTES + 2 * HEAD_BYTES + 1;
/// The smallest [`Config::message_bytes`]. Grants and resets take at most half of a message.
pub(super) const MESSAGE_BYTES_MIN: usize = 2 * TURN_ROOM;

/// Limits of a [`Mux`](super::Mux). Both sides of a link must have the same `window`; the other
/// limits are local.
///
/// ```
/// use ferrite_proto::mux::Config;
///
/// assert_eq!(Config::default().check(), Ok(()));
/// let config = Config { max_streams: 0, ..Config::default() };
/// assert_eq!(config.check().unwrap_err().field, "max_streams");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Number of bytes that a side may send on a new stream before the first GRANT. Default
    /// 256 KiB.
    pub window: u32,
    /// Number of bytes that a stream may send before another stream of its class has its turn.
    /// Default 16 KiB.
    pub turn_bytes: u32,
    /// The largest message. Default 64 KiB.
    pub message_bytes: usize,
    /// Maximum number of messages of a class that are not sent yet. So a message of a more urgent
    /// class waits for at most this many messages of each other class. Default 4.
    pub max_in_flight: u32,
    /// Maximum number of streams that each side may have opened. Default 4,096.
    pub max_streams: usize,
    /// How many of the `max_streams` are reserved for streams of the class *bus*. Default 256.
    pub bus_streams: usize,
    /// Maximum number of streams that the peer may open in a second in the class *bus*, and as
    /// many in the other classes together. Default 1,000.
    pub opens_per_second: u32,
    /// Maximum number of refusals of the peer's streams that wait to be sent. A peer that opens
    /// more streams without reading the refusals loses the link. Default 16,384.
    pub max_refused: usize,
    /// Maximum number of bytes that all streams together have received and the application has not
    /// consumed. Beyond it, the stream that holds the most is reset. Default 64 MiB.
    pub max_held_bytes: u64,
    /// A stream that sends more than this in a second moves to the class *bulk*. It moves back
    /// after a second with less than a quarter of it. Default 1 MiB.
    pub bulk_bytes_per_second: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            window: 256 << 10,
            turn_bytes: 16 << 10,
            message_bytes: 64 << 10,
            max_in_flight: 4,
            max_streams: 4096,
            bus_streams: 256,
            opens_per_second: 1000,
            max_refused: 16_384,
            max_held_bytes: 64 << 20,
            bulk_bytes_per_second: 1 << 20,
        }
    }
}

impl Config {
    /// Checks whether a multiplexer can work with these limits.
    ///
    /// # Errors
    /// If a limit is too small, or the window exceeds what a sender may be granted.
    pub fn check(&self) -> Result<(), ConfigError> {
        let wrong = [
            ("window", self.window < 2 || self.window > CREDIT_MAX),
            ("turn_bytes", self.turn_bytes == 0),
            ("message_bytes", self.message_bytes < MESSAGE_BYTES_MIN),
            ("max_in_flight", self.max_in_flight == 0),
            ("max_streams", self.max_streams == 0),
            ("bus_streams", self.bus_streams >= self.max_streams),
            ("opens_per_second", self.opens_per_second == 0),
            ("max_held_bytes", self.max_held_bytes == 0),
            ("bulk_bytes_per_second", self.bulk_bytes_per_second == 0),
        ];
        match wrong.into_iter().find(|(_, is_wrong)| *is_wrong) {
            Some((field, _)) => Err(ConfigError { field }),
            None => Ok(()),
        }
    }

    /// Returns whether a side that has `open` streams may open one more of a class.
    ///
    /// The count of streams in the other classes may exceed their limit for a while: it includes
    /// streams whose resets are not sent yet, and these may be thousands. A stream of the class
    /// *bus* does not have to wait for them. So for it, the count stops at the limit of the other
    /// classes, and the reserve of the class *bus* stays free.
    pub(super) fn has_room(&self, class: Class, open: Opened) -> bool {
        let for_others = self.max_streams - self.bus_streams;
        match class {
            Class::Bus => open.bus + open.others.min(for_others) < self.max_streams,
            Class::Interactive | Class::Bulk => {
                open.others < for_others && open.bus + open.others < self.max_streams
            }
        }
    }
}

/// A limit that a multiplexer cannot work with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{field} is out of its range")]
pub struct ConfigError {
    /// The name of the field.
    pub field: &'static str,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_limits_that_stop_a_multiplexer() {
        let wrong = [
            Config { window: 1, ..Config::default() },
            Config { window: 1 << 31, ..Config::default() },
            Config { turn_bytes: 0, ..Config::default() },
            Config { message_bytes: MESSAGE_BYTES_MIN - 1, ..Config::default() },
            Config { max_in_flight: 0, ..Config::default() },
            Config { bus_streams: 4096, ..Config::default() },
            Config { opens_per_second: 0, ..Config::default() },
            Config { max_held_bytes: 0, ..Config::default() },
            Config { bulk_bytes_per_second: 0, ..Config::default() },
        ];
        let mut fields: Vec<_> =
            wrong.iter().map(|config| config.check().expect_err("out of range").field).collect();
        fields.dedup();
        assert_eq!(fields.len(), 8, "{fields:?}");
        let error = wrong[0].check().expect_err("out of range");
        assert_eq!(error.to_string(), "window is out of its range");
    }
}
