//! What we may write at the peer: the registration that it announced last, and how far it is
//! filled.

use super::WindowError;
use crate::message::Registration;

/// One RDMA write with immediate. The driver gathers the bytes from wherever they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Write {
    /// Where the bytes go.
    pub remote_addr: u64,
    /// By which permission.
    pub rkey: u32,
    /// How many bytes.
    pub len: u32,
    /// What the peer is told: how many bytes there are since the last immediate. In host order:
    /// verbs wants it in network order.
    pub immediate: u32,
}

/// What we may write at the peer.
///
/// A registration is taken if none came before, if the one before is filled to the last byte, or if
/// nothing was written into the one before: then no byte is on its way to it, be the new one the
/// same or another. Any other is an error of the peer's, because it could not tell the bytes of the
/// old one from those of the new. Address, length and key may change from one to the next; every
/// registration is filled from its first byte.
///
/// ```
/// use ferrite_proto::{Registration, SendWindow, WindowError};
///
/// let memory = Registration { addr: 0x1000, length: 10, rkey: 7 };
/// let mut window = SendWindow::new(1 << 20);
/// assert_eq!(window.write(100, u32::MAX), None); // nothing is announced yet
///
/// window.register(memory)?;
/// let write = window.write(4, u32::MAX).unwrap();
/// assert_eq!((write.remote_addr, write.len, write.immediate), (0x1000, 4, 4));
/// assert_eq!(window.register(memory), Err(WindowError::Early { offset: 4, length: 10 }));
///
/// // Split at the end, never beyond it.
/// let write = window.write(100, u32::MAX).unwrap();
/// assert_eq!((write.remote_addr, write.len), (0x1004, 6));
/// assert_eq!(window.write(94, u32::MAX), None);
/// window.register(memory)?;
/// assert_eq!(window.room(), 10);
/// # Ok::<(), WindowError>(())
/// ```
#[derive(Debug, Clone)]
pub struct SendWindow {
    limit: u32,
    registration: Option<Registration>,
    /// Never more than the registration's length.
    offset: u32,
}

impl SendWindow {
    /// Nothing is announced yet. The peer may announce up to `limit` bytes.
    #[must_use]
    pub fn new(limit: u32) -> Self {
        Self { limit, registration: None, offset: 0 }
    }

    /// What the peer announced last.
    #[must_use]
    pub fn registration(&self) -> Option<Registration> {
        self.registration
    }

    /// How many bytes may be written before the peer has to announce anew.
    #[must_use]
    pub fn room(&self) -> u32 {
        self.registration.map_or(0, |registration| registration.length.saturating_sub(self.offset))
    }

    /// The peer announced memory.
    ///
    /// # Errors
    /// It is empty, too long, past the end of addresses, or not yet due. The window is then as it
    /// was.
    pub fn register(&mut self, registration: Registration) -> Result<(), WindowError> {
        let Registration { addr, length, .. } = registration;
        if length == 0 {
            return Err(WindowError::Empty);
        }
        if length > self.limit {
            return Err(WindowError::TooLong { length, limit: self.limit });
        }
        if addr.checked_add(u64::from(length) - 1).is_none() {
            return Err(WindowError::Address { addr, length });
        }
        if let Some(before) = self.registration
            && (1..before.length).contains(&self.offset)
        {
            return Err(WindowError::Early { offset: self.offset, length: before.length });
        }
        self.registration = Some(registration);
        self.offset = 0;
        Ok(())
    }

    /// Takes room for the next write of at most `available` and at most `max_write` bytes. `None`
    /// if there is nothing to write or no room. What is taken must be written, in order.
    pub fn write(&mut self, available: usize, max_write: u32) -> Option<Write> {
        let registration = self.registration?;
        let available = u32::try_from(available).unwrap_or(u32::MAX);
        let len = available.min(max_write).min(self.room());
        if len == 0 {
            return None;
        }
        // Within the registration, whose end is an address.
        let remote_addr = registration.addr.checked_add(self.offset.into())?;
        self.offset = self.offset.checked_add(len)?;
        Some(Write { remote_addr, rkey: registration.rkey, len, immediate: len })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: Registration = Registration { addr: 0x1000, length: 8, rkey: 1 };

    fn registered() -> SendWindow {
        let mut window = SendWindow::new(100);
        window.register(MEMORY).expect("a good one");
        window
    }

    #[test]
    fn what_is_refused_changes_nothing() {
        let mut window = registered();
        for (length, error) in
            [(0, WindowError::Empty), (101, WindowError::TooLong { length: 101, limit: 100 })]
        {
            assert_eq!(window.register(Registration { length, ..MEMORY }), Err(error));
        }
        let addr = u64::MAX - 6;
        let past = WindowError::Address { addr, length: 8 };
        assert_eq!(window.register(Registration { addr, ..MEMORY }), Err(past));
        assert_eq!(window.registration(), Some(MEMORY));
        assert_eq!(window.room(), 8);
    }

    #[test]
    fn the_last_address_can_be_written() {
        let mut window = SendWindow::new(100);
        window
            .register(Registration { addr: u64::MAX - 7, ..MEMORY })
            .expect("ends at the last address");
        assert_eq!(window.write(7, 100).map(|write| write.remote_addr), Some(u64::MAX - 7));
        assert_eq!(
            window.write(7, 100).map(|write| (write.remote_addr, write.len)),
            Some((u64::MAX, 1))
        );
    }

    #[test]
    fn which_registrations_are_taken() {
        // The first, the same again with nothing written, another with nothing written.
        let mut window = registered();
        window.register(MEMORY).expect("the same");
        let other = Registration { addr: 0x9000, length: 3, rkey: 2 };
        window.register(other).expect("another");
        assert_eq!(
            window.write(1, 100).map(|write| (write.remote_addr, write.rkey)),
            Some((0x9000, 2))
        );
        // Not while it is partly filled, but when it is full, with another length too.
        let early = WindowError::Early { offset: 1, length: 3 };
        assert_eq!(window.register(other), Err(early));
        assert_eq!(window.room(), 2);
        window.write(2, 100).expect("room");
        window.register(MEMORY).expect("it was full");
        assert_eq!(window.room(), 8);
    }

    #[test]
    fn a_write_is_split_and_bounded() {
        let mut window = registered();
        assert_eq!(window.write(0, 100), None);
        assert_eq!(window.write(100, 0), None);
        assert_eq!(window.write(usize::MAX, 3).map(|write| write.len), Some(3));
        assert_eq!(window.write(usize::MAX, u32::MAX).map(|write| write.len), Some(5));
        assert_eq!(window.write(1, 1), None);
    }
}
