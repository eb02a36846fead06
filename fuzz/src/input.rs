//! Interprets random bytes as steps, numbers and payload.

/// The remaining bytes. Numbers read past the end are zero.
pub(super) struct Input<'a>(pub(super) &'a [u8]);

impl<'a> Input<'a> {
    pub(super) fn take(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    pub(super) fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or_default()
    }

    pub(super) fn word(&mut self) -> u32 {
        u32::from_be_bytes(std::array::from_fn(|_| self.byte()))
    }

    /// Returns the kind of a step and its argument, which are the low and the high 4 bits of a
    /// byte.
    pub(super) fn step(&mut self) -> (u8, u8) {
        let byte = self.byte();
        (byte & 15, byte >> 4)
    }
}
