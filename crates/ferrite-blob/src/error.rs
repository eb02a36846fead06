//! The errors of this crate. [`ErrorKind`] tells the caller how to react.

use std::fmt;
use std::io;

use rustix::io::Errno;

/// The category of a failure, which decides how to react.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The peer or client sent text that is no digest. Reject its request.
    InvalidDigest,
    /// The source sent bytes with a wrong checksum or digest. Fetch them from another source.
    Mismatch,
    /// The disk did not return what was written to it. Fetch the bytes again.
    Damaged,
    /// There is no room for the blob, even after eviction. Pass it through without keeping it.
    Full,
    /// Another process uses the directory, or this process already downloads the blob.
    InUse,
    /// A file or directory belongs to another user, is of an unexpected type, or belongs to another
    /// version of the store. An operator must correct that.
    Denied,
    /// The call was invalid. Correct it, because retrying is useless.
    Misuse,
    /// Any other error that the system reported.
    System,
}

/// A failure of the store.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    what: String,
    source: Option<io::Error>,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, what: impl Into<String>) -> Self {
        Self { kind, what: what.into(), source: None }
    }

    pub(crate) fn misuse(what: impl Into<String>) -> Self {
        Self::new(ErrorKind::Misuse, what)
    }

    /// Describes a failed system call; `what` says what could not be done.
    pub(crate) fn io(what: impl Into<String>, source: io::Error) -> Self {
        let kind = match source.kind() {
            io::ErrorKind::StorageFull
            | io::ErrorKind::QuotaExceeded
            | io::ErrorKind::FileTooLarge => ErrorKind::Full,
            io::ErrorKind::PermissionDenied
            | io::ErrorKind::IsADirectory
            | io::ErrorKind::NotADirectory
            | io::ErrorKind::ReadOnlyFilesystem => ErrorKind::Denied,
            // A symbolic link, which is not followed.
            _ if source.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => ErrorKind::Denied,
            _ => ErrorKind::System,
        };
        Self { kind, what: what.into(), source: Some(source) }
    }

    /// Returns the category, which decides how to react.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            Some(source) => write!(f, "{}: {source}", self.what),
            None => f.write_str(&self.what),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| source as _)
    }
}
