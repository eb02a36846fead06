//! Our errors where the standard library's are expected: a stream that stands in for TCP fails as
//! TCP does.

use std::io;

use super::{Error, ErrorKind, Source};

impl From<Error> for io::Error {
    /// The kind is what a TCP stream would say. Ours stays inside, with its text, its causes and
    /// its remedy: `io_error.get_ref()` and a downcast lead to it.
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
        return io::ErrorKind::AddrInUse; // to us a call that was wrong
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
    fn kinds_are_those_of_tcp_and_ours_stays_inside() {
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
