//! The frame: the meaning of the 32 bits of immediate data that come with a payload.
//!
//! ```text
//!    31       30     29             16 15              0
//!   ┌─────────┬──────┬────────────────┬────────────────┐
//!   │ control │ more │    channel     │    consumed    │
//!   │    1    │  1   │       14       │       16       │
//!   └─────────┴──────┴────────────────┴────────────────┘
//! ```
//!
//! So a payload has no header: it arrives in the receiver's buffer exactly as it was in the
//! sender's. Every frame returns credits.

/// The immediate data of a two-sided frame.
///
/// ```
/// use ferrite_fabric::wire::Frame;
///
/// let frame = Frame { control: false, more: true, channel: 5, consumed: 300 };
/// assert_eq!(frame.to_imm(), 0x4005_012C);
/// assert_eq!(Frame::from_imm(0x4005_012C), frame);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame {
    /// Whether the payload is a [`Control`](super::Control) message, not a message of the
    /// application.
    pub control: bool,
    /// Whether another frame of this message follows on the channel.
    pub more: bool,
    /// The channel of the message, up to [`Frame::CHANNEL_MAX`].
    pub channel: u16,
    /// How many of the peer's frames the sender has consumed since the link was opened, modulo
    /// 65,536.
    pub consumed: u16,
}

impl Frame {
    /// The last channel.
    pub const CHANNEL_MAX: u16 = (1 << 14) - 1;

    const CONTROL: u32 = 1 << 31;
    const MORE: u32 = 1 << 30;

    /// Encodes the frame. A channel beyond [`Frame::CHANNEL_MAX`] is a mistake of the caller: the
    /// channel's upper bits are lost.
    #[must_use]
    pub const fn to_imm(self) -> u32 {
        debug_assert!(self.channel <= Self::CHANNEL_MAX, "a channel of more than 14 bits");
        let control = if self.control { Self::CONTROL } else { 0 };
        let more = if self.more { Self::MORE } else { 0 };
        let [low, high] = (self.channel & Self::CHANNEL_MAX).to_le_bytes();
        let [consumed_low, consumed_high] = self.consumed.to_le_bytes();
        control | more | u32::from_le_bytes([consumed_low, consumed_high, low, high])
    }

    /// Decodes a frame. Every number is a valid frame. The receiver must check whether the channel
    /// exists.
    #[must_use]
    pub const fn from_imm(imm: u32) -> Self {
        let [consumed_low, consumed_high, low, high] = imm.to_le_bytes();
        Self {
            control: imm & Self::CONTROL != 0,
            more: imm & Self::MORE != 0,
            channel: u16::from_le_bytes([low, high]) & Self::CHANNEL_MAX,
            consumed: u16::from_le_bytes([consumed_low, consumed_high]),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn golden_bits() {
        let nothing = Frame { control: false, more: false, channel: 0, consumed: 0 };
        for (frame, imm) in [
            (nothing, 0),
            (Frame { control: true, ..nothing }, 0x8000_0000),
            (Frame { more: true, ..nothing }, 0x4000_0000),
            (Frame { channel: Frame::CHANNEL_MAX, ..nothing }, 0x3FFF_0000),
            (Frame { channel: 0x0102, consumed: 0x0304, ..nothing }, 0x0102_0304),
            (Frame { consumed: u16::MAX, ..nothing }, 0x0000_FFFF),
        ] {
            assert_eq!((frame.to_imm(), Frame::from_imm(imm)), (imm, frame), "{imm:#x}");
        }
    }

    proptest! {
        #[test]
        fn decodes_every_number(imm: u32) {
            prop_assert_eq!(Frame::from_imm(imm).to_imm(), imm);
        }
    }
}
