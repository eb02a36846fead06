//! Converts errors to the standard library's errors, so that a stream that replaces TCP fails like
//! TCP.

use std::io;

use super::{Error, ErrorKind, Source};

impl From<Error> for io::Error {
    /// Converts to the error kind that a TCP stream would report. The original error stays inside,
    /// with its text, causes and remedy. Get it with `io_error.get_ref()` and a downcast.
    ///
    /// ```
    /// # fn show(error: ferrite_fabric::Error) {
    /// let error = std::io::Error::from(error);
    /// let ours = error.get_ref().and_then(|inner| inner.downcast_ref::<ferrite_fabric::Error>());
    /// println!("{:?}: {:?}", error.kind(), ours.map(ferrite_fabric::Error::causes));
    /// # }
    /// ```
    fn from(error: Error) -> Self {
        Self::new(kind(&error), error)
    }
}

fn kind(error: &Error) -> io::ErrorKind {
    if let Some(Source::Verbs(verbs)) = &error.0.source
        && verbs.kind() == ferrite_verbs::ErrorKind::AddressInUse
    {
        return io::ErrorKind::AddrInUse; // the fabric reports it as `Misuse`
    }
    match error.kind() {
        ErrorKind::Absent => io::ErrorKind::Unsupported,
        ErrorKind::Resources => io::ErrorKind::OutOfMemory,
        ErrorKind::Full => io::ErrorKind::ResourceBusy,
        ErrorKind::Refused => io::ErrorKind::ConnectionRefused,
        ErrorKind::Unreachable => io::ErrorKind::HostUnreachable,
        ErrorKind::Timeout | ErrorKind::PeerStalled => io::ErrorKind::TimedOut,
        ErrorKind::LinkDown => io::ErrorKind::ConnectionReset,
        ErrorKind::Closed => io::ErrorKind::BrokenPipe,
        ErrorKind::Protocol => io::ErrorKind::InvalidData,
        ErrorKind::Denied => io::ErrorKind::PermissionDenied,
        ErrorKind::DeviceGone => io::ErrorKind::NetworkDown,
        ErrorKind::TooLarge | ErrorKind::Misuse => io::ErrorKind::InvalidInput,
        ErrorKind::System => io::ErrorKind::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_to_the_kinds_of_tcp_and_keeps_the_original_error() {
        for (ours, theirs) in [
            (ErrorKind::LinkDown, io::ErrorKind::ConnectionReset),
            (ErrorKind::PeerStalled, io::ErrorKind::TimedOut),
            (ErrorKind::Refused, io::ErrorKind::ConnectionRefused),
            (ErrorKind::Closed, io::ErrorKind::BrokenPipe),
        ] {
            let error = io::Error::from(Error::new(ours, "it broke"));
            assert_eq!((error.kind(), error.to_string().as_str()), (theirs, "it broke"));
            let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
            assert_eq!(inner.map(Error::kind), Some(ours));
        }
    }
}
