//! A directory of blobs. Whatever happens to the host, a blob of the store has its digest, and a
//! download continues with the chunks that were synced.
//!
//! ```text
//! <storage-dir>/
//!   VERSION  LOCK                      one process at a time
//!   blobs/<algorithm>/<hex>            whole blobs, read-only, as in an OCI image directory
//!   partial/<algorithm>/<hex>.data     sparse; chunks at their place
//!   partial/<algorithm>/<hex>.map      which chunks are present, with their checksums
//!   pins                               a digest per line
//!   bad/                               the last 16 downloads with a wrong digest
//! ```
//!
//! | module | what it is |
//! |---|---|
//! | `disk` | the file operations that the store uses, as a trait |
//! | `real_disk`, `simulation` | the real file system, and one for tests that crashes |
//! | `map` | the layout of maps, without I/O |
//! | `index` | what the store holds and what may be evicted, without I/O |
//! | `shared` | disk and index together: makes room |
//! | `small_file`, `pins` | files that are replaced as a whole |
//! | `files` | the two files of a download |
//! | `recovery` | reads the directory at the start |
//! | `partial`, `blob` | the handles |
//!
//! All calls block. The store trusts nobody else who can write to its directory, but it refuses
//! directories that others may write to, and follows no links.

mod blob;
#[cfg(test)]
mod crash_tests;
mod disk;
mod files;
mod index;
mod map;
mod partial;
mod pins;
mod real_disk;
mod recovery;
mod shared;
#[cfg(test)]
mod simulation;
mod small_file;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::Path;
use std::sync::Arc;

pub use blob::Blob;
use disk::{Access, Disk, Folder};
use map::Shape;
pub use partial::{Partial, Put};
use real_disk::RealDisk;
use shared::Shared;

use crate::digest::Digest;
use crate::error::{Error, ErrorKind};

/// The size of a chunk: the largest block of the fabric's memory pool.
pub const CHUNK_BYTES: u32 = 2 << 20;

/// Returns the checksum of a chunk (CRC-32C).
#[must_use]
pub fn chunk_checksum(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes)
}

/// The limits of a store. Above a limit, the store evicts, down to three quarters of it.
#[derive(Debug, Clone)]
pub struct Options {
    /// The size of the store, if it has a limit (default: none).
    pub max_bytes: Option<u64>,
    /// How much of the disk may be used, by anybody, in percent (default: 80).
    pub max_disk_percent: u8,
}

impl Default for Options {
    fn default() -> Self {
        Self { max_bytes: None, max_disk_percent: 80 }
    }
}

/// A directory of blobs, which this process alone uses. Clones share it.
///
/// ```no_run
/// use ferrite_blob::{CHUNK_BYTES, Options, Start, Store};
///
/// let store = Store::open("/var/lib/ferrite-blob".as_ref(), Options::default())?;
/// let digest = format!("sha256:{}", "0f".repeat(32)).parse()?;
/// let blob = match store.begin(digest, 3_000_000)? {
///     Start::Whole(blob) => blob,
///     Start::Partial(download) => {
///         while let Some(chunk) = download.next_missing(0) {
///             let bytes = vec![0; download.chunk_len(chunk)]; // from another node
///             download.put(chunk, &bytes, None)?;
///         }
///         download.commit()?
///     }
/// };
/// blob.read_at(&mut [0; 1000], 0)?;
/// # Ok::<(), ferrite_blob::Error>(())
/// ```
#[derive(Clone)]
pub struct Store {
    shared: Arc<Shared>,
    recovered: Recovered,
}

/// What [`Store::open`] found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recovered {
    /// Whole blobs.
    pub blobs: usize,
    /// Downloads to resume.
    pub partials: usize,
    /// Files that a crash had left and that were removed.
    pub removed: usize,
    /// Files that do not belong to the store. They are left alone.
    pub ignored: usize,
}

/// How a store's blob can be had.
#[derive(Debug)]
pub enum Start {
    /// The store has the whole blob.
    Whole(Blob),
    /// The blob must be downloaded, or the rest of it.
    Partial(Box<Partial>),
}

/// What a store holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Number of whole blobs.
    pub blobs: usize,
    /// Size of whole blobs.
    pub blob_bytes: u64,
    /// Number of downloads, under way or interrupted.
    pub partials: usize,
    /// Size of the chunks of downloads.
    pub partial_bytes: u64,
    /// Size of whole blobs that are pinned.
    pub pinned_bytes: u64,
    /// Size of everything that was evicted since the store was opened.
    pub evicted_bytes: u64,
}

impl Store {
    /// Opens a storage directory and locks it. Creates it if it does not exist; its parent must
    /// exist.
    ///
    /// # Errors
    /// [`ErrorKind::InUse`] if another process has the lock. [`ErrorKind::Denied`] if the directory
    /// belongs to another user, others may write to it, or it has other files than those of a
    /// store. Errors of the disk.
    pub fn open(path: &Path, options: Options) -> Result<Self, Error> {
        Self::open_on(Box::new(RealDisk::open(path)?), options, CHUNK_BYTES)
    }

    fn open_on(disk: Box<dyn Disk>, options: Options, chunk_bytes: u32) -> Result<Self, Error> {
        let (index, recovered) = recovery::recover(&*disk)?;
        let shared = Arc::new(Shared::new(disk, options, chunk_bytes, index));
        Ok(Self { shared, recovered })
    }

    /// Returns what the store found when it was opened.
    #[must_use]
    pub fn recovered(&self) -> Recovered {
        self.recovered
    }

    /// Opens a whole blob. Returns `None` if the store does not have it.
    ///
    /// # Errors
    /// Errors of the disk.
    pub fn blob(&self, digest: &Digest) -> Result<Option<Blob>, Error> {
        let Some((bytes, in_use)) = self.shared.index().use_blob(digest) else { return Ok(None) };
        let (folder, name) = (Folder::Blobs(digest.algorithm()), digest.hex());
        let cannot = |error| Error::io(format!("cannot open {digest}"), error);
        let file = match self.shared.disk.open(folder, &name, Access::Read) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                tracing::warn!("somebody removed {digest} from the storage directory");
                self.shared.index().remove_blob(digest);
                return Ok(None);
            }
            Err(error) => return Err(cannot(error)),
        };
        if file.size().map_err(cannot)? != bytes {
            tracing::error!("somebody changed the size of {digest}; removing it");
            let mut index = self.shared.index();
            self.shared.discard(folder, &name).map_err(cannot)?;
            index.remove_blob(digest);
            return Ok(None);
        }
        let _ = file.touch(); // only the order of eviction after a restart depends on it
        Ok(Some(Blob::new(*digest, bytes, file.into(), in_use)))
    }

    /// Opens a blob, or begins or resumes its download. `size` is what the manifest or the upstream
    /// says. A download that was begun with another size is removed.
    ///
    /// # Errors
    /// [`ErrorKind::InUse`] if this process downloads the blob already. [`ErrorKind::Full`] if a
    /// blob of this size never fits. Errors of the disk.
    pub fn begin(&self, digest: Digest, size: u64) -> Result<Start, Error> {
        if let Some(blob) = self.blob(&digest)? {
            return Ok(Start::Whole(blob));
        }
        let shape = Shape::new(size, self.shared.chunk_bytes).ok_or_else(|| {
            Error::new(ErrorKind::Full, format!("{digest}: a size of {size} bytes is impossible"))
        })?;
        self.shared.check_size(size)?;
        let in_use = {
            let mut index = self.shared.index();
            if index.has_blob(&digest) || index.is_partial_in_use(&digest) {
                let what = format!("{digest} is being downloaded already");
                return Err(Error::new(ErrorKind::InUse, what));
            }
            index.add_partial(digest, 0)
        };
        match files::open(&self.shared, &digest, &shape) {
            Ok(files) => {
                let present =
                    (0..shape.chunks()).filter(|chunk| files.chunks.sum(*chunk).is_some());
                let bytes = present.map(|chunk| shape.chunk_len(chunk) as u64).sum();
                self.shared.index().resize_partial(&digest, |_| bytes);
                let shared = Arc::clone(&self.shared);
                let partial = Partial::new(shared, digest, shape, files, in_use);
                Ok(Start::Partial(Box::new(partial)))
            }
            Err(error) => {
                self.shared.index().remove_partial(&digest);
                Err(Error::io(format!("cannot begin the download of {digest}"), error))
            }
        }
    }

    /// Protects a blob from eviction, also one that the store does not have yet.
    ///
    /// # Errors
    /// Errors of the disk. The blob is not pinned then.
    pub fn pin(&self, digest: Digest) -> Result<(), Error> {
        self.change_pins(|pins| pins.insert(digest))
    }

    /// Allows the eviction of a blob again.
    ///
    /// # Errors
    /// Errors of the disk. The blob is still pinned then.
    pub fn unpin(&self, digest: &Digest) -> Result<(), Error> {
        self.change_pins(|pins| pins.remove(digest))
    }

    /// Returns the pinned digests.
    #[must_use]
    pub fn pins(&self) -> Vec<Digest> {
        self.shared.index().pins.iter().copied().collect()
    }

    /// Returns what the store holds.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let index = self.shared.index();
        let (blobs, partials) = index.counts();
        Usage {
            blobs,
            blob_bytes: index.blob_bytes(),
            partials,
            partial_bytes: index.partial_bytes(),
            pinned_bytes: index.pinned_bytes(),
            evicted_bytes: index.evicted_bytes,
        }
    }

    fn change_pins(
        &self,
        change: impl FnOnce(&mut std::collections::BTreeSet<Digest>) -> bool,
    ) -> Result<(), Error> {
        // The lock is held during the write, so that the file has the last change.
        let mut index = self.shared.index();
        let mut pins = index.pins.clone();
        if change(&mut pins) {
            pins::write(&*self.shared.disk, &pins)?;
            index.pins = pins;
        }
        Ok(())
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("usage", &self.usage()).finish_non_exhaustive()
    }
}
