//! The window that the peer writes: how much has arrived, and how much the reader has consumed.

use std::ops::Range;

use super::WindowError;

/// The window in our memory that the peer may write.
///
/// ```text
///   0          consumed         filled        length
///   ├─ taken ──────┼─ readable ────┼─ room ──────┤
/// ```
///
/// The window is closed until it is announced. A peer that writes earlier violates the protocol.
/// When the last byte is consumed, the window closes, and must be announced again with the same
/// length.
///
/// ```
/// use ferrite_proto::ReceiveWindow;
///
/// let mut window = ReceiveWindow::new(10);
/// window.announce();
/// window.fill(10)?;
/// assert_eq!(window.readable(), 0..10);
/// assert!(!window.consume(4));
/// assert!(window.consume(6)); // full and consumed: announce again
/// assert!(window.fill(1).is_err());
/// window.announce();
/// window.fill(1)?;
/// # Ok::<(), ferrite_proto::WindowError>(())
/// ```
#[derive(Debug, Clone)]
pub struct ReceiveWindow {
    length: u32,
    open: bool,
    /// The number of bytes that have arrived; at most `length`.
    filled: u32,
    /// The number of bytes that the reader has taken; at most `filled`.
    consumed: u32,
}

impl ReceiveWindow {
    /// Creates a closed window of `length` bytes.
    #[must_use]
    pub fn new(length: u32) -> Self {
        Self { length, open: false, filled: 0, consumed: 0 }
    }

    /// Returns how many bytes the peer may write in total from one announcement to the next.
    #[must_use]
    pub fn length(&self) -> u32 {
        self.length
    }

    /// Returns whether the window is open: it was announced, and not all of it is filled and
    /// consumed.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Returns how many bytes the peer may still write.
    #[must_use]
    pub fn room(&self) -> u32 {
        if self.open { self.length.saturating_sub(self.filled) } else { 0 }
    }

    /// Returns the range of bytes that have arrived and are not consumed.
    #[must_use]
    pub fn readable(&self) -> Range<u32> {
        self.consumed..self.filled
    }

    /// Opens the window. The caller sends the registration, so the peer may write from now on. Does
    /// nothing while the window is open.
    pub fn announce(&mut self) {
        self.open = true;
    }

    /// Adds the bytes that an immediate reports.
    ///
    /// # Errors
    /// If there is no room for them. The window is then unchanged.
    pub fn fill(&mut self, bytes: u32) -> Result<(), WindowError> {
        let overrun = WindowError::Overrun { bytes, room: self.room() };
        let filled = self.filled.checked_add(bytes).ok_or(overrun)?;
        if bytes > self.room() {
            return Err(overrun);
        }
        self.filled = filled;
        Ok(())
    }

    /// Consumes `bytes`, which the reader has taken. Returns whether the window must be announced
    /// again. The window is then closed and empty.
    ///
    /// # Panics
    /// If fewer bytes are readable.
    #[must_use]
    pub fn consume(&mut self, bytes: u32) -> bool {
        assert!(
            bytes <= self.filled - self.consumed,
            "cannot consume {bytes} bytes: only the range {:?} is readable",
            self.readable()
        );
        self.consumed += bytes;
        let done = self.open && self.consumed == self.length;
        if done {
            *self = Self::new(self.length);
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_closed_until_announced() {
        let mut window = ReceiveWindow::new(8);
        assert_eq!(window.fill(1), Err(WindowError::Overrun { bytes: 1, room: 0 }));
        assert_eq!(window.fill(0), Ok(()));
        window.announce();
        assert_eq!((window.room(), window.readable()), (8, 0..0));
    }

    #[test]
    fn refuses_immediates_beyond_the_room() {
        let mut window = ReceiveWindow::new(8);
        window.announce();
        window.fill(5).expect("the window has room");
        for bytes in [4, 8, u32::MAX - 4, u32::MAX] {
            assert_eq!(window.fill(bytes), Err(WindowError::Overrun { bytes, room: 3 }));
        }
        window.fill(3).expect("the bytes fit exactly");
        assert_eq!(window.readable(), 0..8);
    }

    #[test]
    fn announced_again_only_when_full_and_consumed() {
        let mut window = ReceiveWindow::new(4);
        window.announce();
        assert!(!window.consume(0), "nothing arrived");
        window.fill(3).expect("the window has room");
        assert!(!window.consume(3), "everything is consumed, but the window is not full");
        window.fill(1).expect("the window has room");
        assert!(!window.consume(0), "the window is full, but not everything is consumed");
        assert!(window.consume(1));
        assert!(!window.consume(0), "the announcement is due only once");
        assert_eq!((window.length(), window.room()), (4, 0));
    }

    #[test]
    #[should_panic(expected = "cannot consume 2 bytes: only the range 0..1 is readable")]
    fn panics_if_more_is_consumed_than_arrived() {
        let mut window = ReceiveWindow::new(4);
        window.announce();
        window.fill(1).expect("the window has room");
        let _ = window.consume(2);
    }
}
