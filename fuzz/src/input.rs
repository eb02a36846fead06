//! Bytes of chance as steps, numbers and pieces.

/// What is left of the bytes. Behind the last are zeros.
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

    /// What it is, and the rest of its byte.
    pub(super) fn step(&mut self) -> (u8, u8) {
        let byte = self.byte();
        (byte & 15, byte >> 4)
    }
}
