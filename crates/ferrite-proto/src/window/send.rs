//! The window that we write at the peer: its last registration, and how much of that is filled.

use super::WindowError;
use crate::message::Registration;

/// One RDMA write with immediate. The driver gathers the bytes from wherever they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Write {
    /// The remote address of the bytes.
    pub remote_addr: u64,
    /// The key for the remote memory.
    pub rkey: u32,
    /// The number of bytes.
    pub len: u32,
    /// The number of bytes since the last immediate, for the peer. This is in host byte order;
    /// verbs expects network byte order.
    pub immediate: u32,
}

/// The memory of the peer that we may write.
///
/// A registration is accepted in three cases: it is the first, the previous one is filled to the
/// last byte, or nothing was written to the previous one. In each case a correct peer waits for no
/// byte in the old memory, whether the new memory is the same or not. Any other registration is an
/// error of the peer, because the peer could not tell the bytes in the old memory from those in the
/// new.
/// Address, length and key may differ between registrations. Every registration is filled from its
/// first byte.
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
/// // A write never goes beyond the end of the memory.
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
    /// The number of bytes written to the registration; at most its length.
    offset: u32,
}

impl SendWindow {
    /// Creates a window without a registration. The peer may register up to `limit` bytes.
    #[must_use]
    pub fn new(limit: u32) -> Self {
        Self { limit, registration: None, offset: 0 }
    }

    /// Returns the peer's last registration.
    #[must_use]
    pub fn registration(&self) -> Option<Registration> {
        self.registration
    }

    /// Returns how many bytes may be written before the peer must register memory again.
    #[must_use]
    pub fn room(&self) -> u32 {
        self.registration.map_or(0, |registration| registration.length.saturating_sub(self.offset))
    }

    /// Records a registration of the peer.
    ///
    /// # Errors
    /// If the registration is empty, too long, past the end of the address space, or too early. The
    /// window is then unchanged.
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

    /// Reserves room for the next write, of at most `available` and at most `max_write` bytes.
    /// Returns `None` if there is nothing to write or no room. The reserved bytes must be written,
    /// in order.
    pub fn write(&mut self, available: usize, max_write: u32) -> Option<Write> {
        let registration = self.registration?;
        let available = u32::try_from(available).unwrap_or(u32::MAX);
        let len = available.min(max_write).min(self.room());
        if len == 0 {
            return None;
        }
        // The sum cannot overflow: the offset is within the registration, which ends at a valid
        // address.
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
        window.register(MEMORY).expect("a valid registration");
        window
    }

    #[test]
    fn refused_registration_changes_nothing() {
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
    fn writes_up_to_the_last_address() {
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
    fn accepts_a_registration_when_empty_or_full() {
        // While nothing is written, the same registration and another one are accepted.
        let mut window = registered();
        window.register(MEMORY).expect("the same registration is accepted");
        let other = Registration { addr: 0x9000, length: 3, rkey: 2 };
        window.register(other).expect("another registration is accepted");
        assert_eq!(
            window.write(1, 100).map(|write| (write.remote_addr, write.rkey)),
            Some((0x9000, 2))
        );
        // A partly filled window refuses a registration. A full one accepts it, even with another
        // length.
        let early = WindowError::Early { offset: 1, length: 3 };
        assert_eq!(window.register(other), Err(early));
        assert_eq!(window.room(), 2);
        window.write(2, 100).expect("the window has room");
        window.register(MEMORY).expect("a full window accepts a registration");
        assert_eq!(window.room(), 8);
    }

    #[test]
    fn splits_and_bounds_writes() {
        let mut window = registered();
        assert_eq!(window.write(0, 100), None);
        assert_eq!(window.write(100, 0), None);
        assert_eq!(window.write(usize::MAX, 3).map(|write| write.len), Some(3));
        assert_eq!(window.write(usize::MAX, u32::MAX).map(|write| write.len), Some(5));
        assert_eq!(window.write(1, 1), None);
    }
}
