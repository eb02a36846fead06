//! The file operations that the store uses, as a trait. The store's crash tests replace the disk by
//! a simulated one (`simulation.rs`), which forgets what was not synced. So the store uses files
//! only through this trait.
//!
//! A file has a folder and a name. There are few folders, and names are made by the store, never by
//! a peer.

use std::io;

use crate::digest::Algorithm;

/// A directory of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Folder {
    /// The storage directory itself.
    Root,
    /// `blobs`
    AllBlobs,
    /// `blobs/<algorithm>`: whole blobs, whose digests were right.
    Blobs(Algorithm),
    /// `partial`
    AllPartials,
    /// `partial/<algorithm>`: data and maps of downloads.
    Partials(Algorithm),
    /// `bad`: the last downloads with a wrong digest.
    Bad,
}

impl Folder {
    /// All folders below the root; a parent comes before its children.
    pub(super) const BELOW_ROOT: [Self; 7] = [
        Self::AllBlobs,
        Self::Blobs(Algorithm::Sha256),
        Self::Blobs(Algorithm::Sha512),
        Self::AllPartials,
        Self::Partials(Algorithm::Sha256),
        Self::Partials(Algorithm::Sha512),
        Self::Bad,
    ];

    pub(super) fn parent(self) -> Self {
        match self {
            Self::Root | Self::AllBlobs | Self::AllPartials | Self::Bad => Self::Root,
            Self::Blobs(_) => Self::AllBlobs,
            Self::Partials(_) => Self::AllPartials,
        }
    }

    /// Returns the name in the parent.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Root => ".",
            Self::AllBlobs => "blobs",
            Self::AllPartials => "partial",
            Self::Blobs(algorithm) | Self::Partials(algorithm) => algorithm.name(),
            Self::Bad => "bad",
        }
    }
}

/// What a file is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    /// To read and write an existing file.
    Write,
    /// To read and write a new file. Fails if the name exists.
    Create,
}

/// An entry of a folder.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) name: String,
    /// Whether it is a regular file of this process's user, with a name in UTF-8. The store leaves
    /// all other entries alone.
    pub(super) is_own_file: bool,
    pub(super) bytes: u64,
    /// What it occupies on the disk, which is less than `bytes` for a sparse file.
    pub(super) allocated: u64,
    /// When it was last read, in nanoseconds, for comparisons only.
    pub(super) read_time: i128,
}

/// The size of the file system, and what is free for this user.
#[derive(Debug, Clone, Copy)]
pub(super) struct Space {
    pub(super) total: u64,
    pub(super) available: u64,
}

/// A file system. No method follows symbolic links.
///
/// As in POSIX, changes of names are durable after [`Disk::sync_folder`] of the folders, and
/// changes of a file after [`DiskFile::sync`].
pub(super) trait Disk: Send + Sync {
    /// Creates a folder and opens it. It may exist already.
    fn create_folder(&self, folder: Folder) -> io::Result<()>;

    /// Returns all entries except `.` and `..`.
    fn list(&self, folder: Folder) -> io::Result<Vec<Entry>>;

    /// Opens a regular file of this process's user. A file to write must have one name only.
    fn open(&self, folder: Folder, name: &str, access: Access) -> io::Result<Box<dyn DiskFile>>;

    /// Gives a file another name, and replaces a file that has it.
    fn rename(&self, from: (Folder, &str), to: (Folder, &str)) -> io::Result<()>;

    fn remove(&self, folder: Folder, name: &str) -> io::Result<()>;

    fn sync_folder(&self, folder: Folder) -> io::Result<()>;

    fn space(&self) -> io::Result<Space>;
}

/// An open file.
pub(super) trait DiskFile: Send + Sync {
    fn size(&self) -> io::Result<u64>;

    /// Fills the buffer, or fails.
    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()>;

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()>;

    fn set_size(&self, bytes: u64) -> io::Result<()>;

    /// Makes the file read-only for everybody (0444).
    fn seal(&self) -> io::Result<()>;

    /// Writes data and metadata to the disk. After an error, the data may be lost although later
    /// calls succeed.
    fn sync(&self) -> io::Result<()>;

    /// Records that the file is read now.
    fn touch(&self) -> io::Result<()>;
}
