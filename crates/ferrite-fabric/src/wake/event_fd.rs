//! An eventfd: a descriptor that stays readable from `signal` until `clear`. Under loom, it is a
//! plain flag (`event_fd/model.rs`).

#[cfg(not(all(test, loom)))]
pub use real::EventFd;

#[cfg(all(test, loom))]
pub(super) mod model;
#[cfg(all(test, loom))]
pub use model::EventFd;

#[cfg(not(all(test, loom)))]
mod real {
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

    use rustix::event::{EventfdFlags, eventfd};

    use crate::error::{Error, ErrorKind};

    /// An eventfd: readable from [`EventFd::signal`] until [`EventFd::clear`].
    #[derive(Debug)]
    pub struct EventFd(OwnedFd);

    impl EventFd {
        /// Creates an eventfd that is not readable.
        ///
        /// # Errors
        /// Fails if the process or the host has no descriptor or no memory left.
        pub fn new() -> Result<Self, Error> {
            eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
                .map(Self)
                .map_err(|errno| Error::new(ErrorKind::System, format!("eventfd: {errno}")))
        }

        /// Makes the eventfd readable.
        pub fn signal(&self) {
            // The write fails only if the counter is full. The eventfd is already readable then.
            let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
        }

        /// Makes the eventfd unreadable again.
        pub fn clear(&self) {
            let _ = rustix::io::read(&self.0, &mut [0; 8]);
        }
    }

    impl AsFd for EventFd {
        fn as_fd(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }
    }
}
