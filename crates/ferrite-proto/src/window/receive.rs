//! What the peer may write here: how much of it has come, and how much the reader took.

use std::ops::Range;

use super::WindowError;

/// What the peer may write here.
///
/// ```text
///   0          consumed         filled        length
///   ├─ taken ──────┼─ readable ────┼─ room ──────┤
/// ```
///
/// It is closed until it is announced: a peer that writes before breaks the rules. When the last
/// byte was consumed it is closed again, and to be announced with the same length.
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
    /// Never more than `length`.
    filled: u32,
    /// Never more than `filled`.
    consumed: u32,
}

impl ReceiveWindow {
    /// A window of `length` bytes, closed.
    #[must_use]
    pub fn new(length: u32) -> Self {
        Self { length, open: false, filled: 0, consumed: 0 }
    }

    /// How many bytes the peer may write in all, from one announcement to the next.
    #[must_use]
    pub fn length(&self) -> u32 {
        self.length
    }

    /// Whether it was announced, and not filled and consumed since.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// How many bytes the peer may still write.
    #[must_use]
    pub fn room(&self) -> u32 {
        if self.open { self.length.saturating_sub(self.filled) } else { 0 }
    }

    /// Which bytes of the window have come and were not consumed.
    #[must_use]
    pub fn readable(&self) -> Range<u32> {
        self.consumed..self.filled
    }

    /// The registration goes out: the peer may write from now on. Does nothing while the window is
    /// open.
    pub fn announce(&mut self) {
        self.open = true;
    }

    /// An immediate came: that many bytes more.
    ///
    /// # Errors
    /// There is no room for them. The window is then as it was.
    pub fn fill(&mut self, bytes: u32) -> Result<(), WindowError> {
        let overrun = WindowError::Overrun { bytes, room: self.room() };
        let filled = self.filled.checked_add(bytes).ok_or(overrun)?;
        if bytes > self.room() {
            return Err(overrun);
        }
        self.filled = filled;
        Ok(())
    }

    /// The reader took `bytes`. Whether the window is to be announced again: it is then closed and
    /// empty.
    ///
    /// # Panics
    /// That many are not readable.
    #[must_use]
    pub fn consume(&mut self, bytes: u32) -> bool {
        assert!(
            bytes <= self.filled - self.consumed,
            "{bytes} bytes of {:?} consumed",
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
    fn closed_until_announced() {
        let mut window = ReceiveWindow::new(8);
        assert_eq!(window.fill(1), Err(WindowError::Overrun { bytes: 1, room: 0 }));
        assert_eq!(window.fill(0), Ok(()));
        window.announce();
        assert_eq!((window.room(), window.readable()), (8, 0..0));
    }

    #[test]
    fn no_immediate_is_too_large_to_be_refused() {
        let mut window = ReceiveWindow::new(8);
        window.announce();
        window.fill(5).expect("room");
        for bytes in [4, 8, u32::MAX - 4, u32::MAX] {
            assert_eq!(window.fill(bytes), Err(WindowError::Overrun { bytes, room: 3 }));
        }
        window.fill(3).expect("exactly full");
        assert_eq!(window.readable(), 0..8);
    }

    #[test]
    fn announced_again_only_when_full_and_consumed() {
        let mut window = ReceiveWindow::new(4);
        window.announce();
        assert!(!window.consume(0), "nothing came");
        window.fill(3).expect("room");
        assert!(!window.consume(3), "consumed, not full");
        window.fill(1).expect("room");
        assert!(!window.consume(0), "full, not consumed");
        assert!(window.consume(1));
        assert!(!window.consume(0), "only once");
        assert_eq!((window.length(), window.room()), (4, 0));
    }

    #[test]
    #[should_panic(expected = "2 bytes of 0..1 consumed")]
    fn more_than_came_is_a_mistake_of_the_caller() {
        let mut window = ReceiveWindow::new(4);
        window.announce();
        window.fill(1).expect("room");
        let _ = window.consume(2);
    }
}
