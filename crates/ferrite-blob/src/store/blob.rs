//! A whole blob, open for reads.

use std::fmt;
use std::sync::Arc;

use super::disk::DiskFile;
use super::index::InUse;
use crate::digest::Digest;
use crate::error::Error;

/// A whole blob whose digest was right when it was committed. It is not evicted while this handle
/// exists.
pub struct Blob {
    digest: Digest,
    size: u64,
    file: Arc<dyn DiskFile>,
    _in_use: InUse,
}

impl Blob {
    pub(super) fn new(digest: Digest, size: u64, file: Arc<dyn DiskFile>, in_use: InUse) -> Self {
        Self { digest, size, file, _in_use: in_use }
    }

    /// Returns the digest.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Returns the size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Reads the bytes at this place. Fills the buffer.
    ///
    /// # Errors
    /// If the disk fails, or the bytes are beyond the end of the blob.
    pub fn read_at(&self, buffer: &mut [u8], at: u64) -> Result<(), Error> {
        let is_inside = at.checked_add(buffer.len() as u64).is_some_and(|end| end <= self.size);
        if !is_inside {
            return Err(Error::misuse(format!(
                "{} bytes at {at} are not all in {}, which has {} bytes",
                buffer.len(),
                self.digest,
                self.size
            )));
        }
        let cannot = |error| Error::io(format!("cannot read {}", self.digest), error);
        self.file.read_at(buffer, at).map_err(cannot)
    }
}

impl fmt::Debug for Blob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { digest, size, .. } = self;
        f.debug_struct("Blob").field("digest", digest).field("size", size).finish_non_exhaustive()
    }
}
