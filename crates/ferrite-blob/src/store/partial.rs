//! A download: chunks in any order, from several threads, until the whole blob is committed.
//!
//! ```text
//!   put:     write the chunk ─► write its checksum ─► set its bit
//!   sync:    sync data ─► sync map ─► sync folder (once)
//!   commit:  digest right ─► chmod ─► sync data ─► rename ─► sync folder ─► remove the map
//! ```
//!
//! - A committed blob is right: its bytes are synced before it has its name. This relies on nothing
//!   but the order of `commit`.
//! - A chunk is used only if it has the checksum in the map, so a map and data that do not belong
//!   together cost a second fetch of the chunk, not more.
//! - After a failed sync, the kernel may have dropped the bytes and will not say so again. Then the
//!   files are removed, because a later sync proves nothing.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::blob::Blob;
use super::disk::{DiskFile, Folder};
use super::files;
use super::index::InUse;
use super::map::{ChunkMap, Shape};
use super::shared::{Shared, data_name, map_name};
use crate::digest::{Digest, Hasher};
use crate::error::{Error, ErrorKind};

/// How many downloads with a wrong digest are kept in `bad`.
const BAD_LIMIT: usize = 16;

/// A download of one blob. Only one handle for a blob exists at a time; threads share it.
///
/// Drop keeps the files, and [`Store::begin`](super::Store::begin) resumes them.
pub struct Partial {
    shared: Arc<Shared>,
    digest: Digest,
    shape: Shape,
    data: Arc<dyn DiskFile>,
    map_file: Box<dyn DiskFile>,
    chunks: Mutex<Chunks>,
    prefix: Mutex<Prefix>,
    /// Held during a sync. The kernel reports a failed write to one sync only, so a commit must not
    /// sync while another thread does.
    syncing: Mutex<()>,
    _in_use: InUse,
}

/// The outcome of [`Partial::put`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Put {
    /// The chunk was written.
    Written,
    /// The chunk was present. The bytes were ignored.
    Present,
    /// Another thread writes this chunk, and may still fail. The bytes were ignored.
    Busy,
}

struct Chunks {
    map: ChunkMap,
    /// Chunks that threads write at the moment.
    writing: BTreeSet<u32>,
    /// The lowest chunk that was cleared since the prefix was hashed.
    cleared: Option<u32>,
    state: State,
    is_folder_synced: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    /// A commit is under way, so no chunk may change.
    Committing,
    /// Committed, rejected, or removed after an error.
    Ended,
}

/// The hash of the chunks before `next`.
struct Prefix {
    hasher: Hasher,
    next: u32,
    buffer: Vec<u8>,
}

impl Partial {
    pub(super) fn new(
        shared: Arc<Shared>,
        digest: Digest,
        shape: Shape,
        files: files::Opened,
        in_use: InUse,
    ) -> Self {
        let hasher = Hasher::new(digest.algorithm());
        let chunks = Chunks {
            map: files.chunks,
            writing: BTreeSet::new(),
            cleared: None,
            state: State::Open,
            is_folder_synced: false,
        };
        Self {
            shared,
            digest,
            shape,
            data: files.data.into(),
            map_file: files.map,
            chunks: Mutex::new(chunks),
            prefix: Mutex::new(Prefix { hasher, next: 0, buffer: Vec::new() }),
            syncing: Mutex::new(()),
            _in_use: in_use,
        }
    }

    /// Returns the digest that the whole blob must have.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Returns the size of the whole blob in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.shape.size()
    }

    /// Returns the number of chunks of the whole blob.
    #[must_use]
    pub fn chunks(&self) -> u32 {
        self.shape.chunks()
    }

    /// Returns the size of a chunk. The last chunk may be shorter, and chunks beyond it have no
    /// bytes.
    #[must_use]
    pub fn chunk_len(&self, chunk: u32) -> usize {
        self.shape.chunk_len(chunk)
    }

    /// Returns the checksum of a chunk, or `None` if the chunk is missing.
    #[must_use]
    pub fn checksum(&self, chunk: u32) -> Option<u32> {
        self.lock().map.sum(chunk)
    }

    /// Returns the number of chunks that are present.
    #[must_use]
    pub fn present(&self) -> u32 {
        self.lock().map.present()
    }

    /// Returns the first missing chunk at or after `from`, which no thread writes at the moment.
    #[must_use]
    pub fn next_missing(&self, from: u32) -> Option<u32> {
        let chunks = self.lock();
        let is_missing =
            |chunk: &u32| chunks.map.sum(*chunk).is_none() && !chunks.writing.contains(chunk);
        (from..self.shape.chunks()).find(is_missing)
    }

    /// Writes a chunk. `checksum` is what the source says, if it says anything.
    ///
    /// The chunk survives a crash of this process, and after [`Partial::sync`] also a crash of the
    /// host.
    ///
    /// # Errors
    /// [`ErrorKind::Mismatch`] if the checksum is wrong, [`ErrorKind::Full`] if there is no room,
    /// and errors of the disk. The chunk is missing then.
    pub fn put(&self, chunk: u32, bytes: &[u8], checksum: Option<u32>) -> Result<Put, Error> {
        if chunk >= self.shape.chunks() || bytes.len() != self.shape.chunk_len(chunk) {
            let (len, digest) = (bytes.len(), self.digest);
            return Err(Error::misuse(format!("{digest} has no chunk {chunk} of {len} bytes")));
        }
        let sum = crc32c::crc32c(bytes);
        if checksum.is_some_and(|expected| expected != sum) {
            let what = format!("chunk {chunk} of {} has a wrong checksum", self.digest);
            return Err(Error::new(ErrorKind::Mismatch, what));
        }
        {
            let mut chunks = self.lock();
            if chunks.map.sum(chunk).is_some() && chunks.state != State::Ended {
                return Ok(Put::Present);
            }
            self.check_open(&chunks)?;
            if !chunks.writing.insert(chunk) {
                return Ok(Put::Busy);
            }
        }
        let written = self.reserve(bytes.len() as u64).and_then(|()| {
            self.write(chunk, bytes).inspect_err(|_| self.release(bytes.len() as u64))
        });
        let mut chunks = self.lock();
        chunks.writing.remove(&chunk);
        written?;
        self.check_open(&chunks)?; // a failed sync may have removed the files meanwhile
        chunks.map.insert(chunk, sum);
        let marked = self.write_mark(&chunks, chunk, Some(sum));
        if marked.is_err() {
            chunks.map.remove(chunk);
            self.release(bytes.len() as u64);
        }
        marked.map(|()| Put::Written)
    }

    /// Marks a chunk as missing, because its source is not trusted any more. The next
    /// [`Partial::put`] replaces it.
    ///
    /// # Errors
    /// If a commit is under way or is done, or the disk fails. The chunk is missing all the same
    /// if the disk fails.
    pub fn clear(&self, chunk: u32) -> Result<(), Error> {
        let mut chunks = self.lock();
        if chunks.map.sum(chunk).is_none() {
            return Ok(());
        }
        self.check_open(&chunks)?;
        self.forget(&mut chunks, chunk)
    }

    /// Reads a chunk that is present, and checks it.
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`] if the chunk is missing or the buffer has another length than the
    /// chunk. [`ErrorKind::Damaged`] if the bytes do not have the checksum; the chunk is missing
    /// then.
    pub fn read(&self, chunk: u32, buffer: &mut [u8]) -> Result<(), Error> {
        if buffer.len() != self.shape.chunk_len(chunk) {
            let what = format!("chunk {chunk} has {} bytes", self.shape.chunk_len(chunk));
            return Err(Error::misuse(what));
        }
        let cannot = |error| Error::io(format!("cannot read {}", self.digest), error);
        loop {
            let Some(sum) = self.checksum(chunk) else {
                return Err(Error::misuse(format!("chunk {chunk} of {} is missing", self.digest)));
            };
            self.data.read_at(buffer, self.shape.offset(chunk)).map_err(cannot)?;
            if crc32c::crc32c(buffer) == sum {
                return Ok(());
            }
            let mut chunks = self.lock();
            // Otherwise, another thread has replaced the chunk meanwhile.
            if chunks.map.sum(chunk) == Some(sum) {
                if chunks.state != State::Ended {
                    self.forget(&mut chunks, chunk)?;
                }
                return Err(
                    self.damaged(&format!("the disk returned wrong bytes of chunk {chunk}"))
                );
            }
        }
    }

    /// Makes all chunks that are present durable.
    ///
    /// # Errors
    /// If the disk fails. The download and its files are gone then, because nobody knows which
    /// bytes are on the disk.
    pub fn sync(&self) -> Result<(), Error> {
        let _syncing = self.syncing.lock().unwrap_or_else(PoisonError::into_inner);
        let needs_folder = {
            let chunks = self.lock();
            self.check_open(&chunks)?;
            !chunks.is_folder_synced
        };
        let folder = Folder::Partials(self.digest.algorithm());
        let synced = self.data.sync().and_then(|()| self.map_file.sync()).and_then(|()| {
            if needs_folder { self.shared.disk.sync_folder(folder) } else { Ok(()) }
        });
        match synced {
            Ok(()) => {
                self.lock().is_folder_synced = true;
                Ok(())
            }
            Err(error) => {
                self.remove();
                Err(Error::io(format!("cannot sync {}", self.digest), error))
            }
        }
    }

    /// Hashes the chunks that follow the ones that are hashed already, up to the first missing one.
    /// Returns the number of chunks that are hashed.
    ///
    /// [`Partial::commit`] does this, too. A thread that calls this during the download leaves
    /// little work for the commit.
    ///
    /// # Errors
    /// As [`Partial::read`].
    pub fn hash(&self) -> Result<u32, Error> {
        let mut prefix = self.prefix.lock().unwrap_or_else(PoisonError::into_inner);
        self.advance(&mut prefix)?;
        Ok(prefix.next)
    }

    /// Checks the digest and turns the download into a blob. The blob is durable when this returns.
    ///
    /// # Errors
    /// - [`ErrorKind::Misuse`] if chunks are missing.
    /// - [`ErrorKind::Mismatch`] if the digest is wrong: clear chunks and fetch them again, or
    ///   [`Partial::reject`].
    /// - [`ErrorKind::Damaged`] as in [`Partial::read`].
    /// - Errors of the disk. If the sync of the data fails, the download and its files are gone.
    pub fn commit(&self) -> Result<Blob, Error> {
        let mut prefix = self.prefix.lock().unwrap_or_else(PoisonError::into_inner);
        {
            let mut chunks = self.lock();
            self.check_open(&chunks)?;
            let missing = self.shape.chunks() - chunks.map.present();
            if missing != 0 {
                let what = format!("{missing} chunks of {} are missing", self.digest);
                return Err(Error::misuse(what));
            }
            chunks.state = State::Committing;
        }
        let committed = self.check_digest(&mut prefix).and_then(|()| self.publish());
        let mut chunks = self.lock();
        match &committed {
            Ok(_) => chunks.state = State::Ended,
            Err(_) if chunks.state == State::Committing => chunks.state = State::Open,
            Err(_) => {}
        }
        committed
    }

    /// Moves the data into `bad`, for people, and ends the download. `bad` keeps the last 16.
    ///
    /// # Errors
    /// If the disk fails. The files are removed then.
    pub fn reject(&self) -> Result<(), Error> {
        {
            let mut chunks = self.lock();
            self.check_open(&chunks)?;
            chunks.state = State::Ended;
        }
        let mut index = self.shared.index();
        index.remove_partial(&self.digest);
        // The numbers make the order of names that of time.
        let last = index.last_bad().and_then(|name| name.get(..8)?.parse::<u32>().ok());
        let (number, algorithm) =
            (last.map_or(0, |n| n.wrapping_add(1) % 100_000_000), self.digest.algorithm());
        let name = format!("{number:08}-{}-{}", algorithm.name(), self.digest.hex());
        let from = data_name(&self.digest);
        let moved =
            self.shared.disk.rename((Folder::Partials(algorithm), &from), (Folder::Bad, &name));
        if moved.is_ok() {
            for oldest in index.add_bad(name, self.shape.size(), BAD_LIMIT) {
                let _ = self.shared.discard(Folder::Bad, &oldest);
            }
        }
        let removed = self.shared.discard_partial(&self.digest);
        let cannot = |error| Error::io(format!("cannot reject {}", self.digest), error);
        moved.and(removed).map_err(cannot)
    }

    fn lock(&self) -> MutexGuard<'_, Chunks> {
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_open(&self, chunks: &Chunks) -> Result<(), Error> {
        match chunks.state {
            State::Open => Ok(()),
            State::Committing => Err(Error::misuse(format!("{} is being committed", self.digest))),
            State::Ended => Err(Error::misuse(format!("the download of {} ended", self.digest))),
        }
    }

    fn damaged(&self, what: &str) -> Error {
        Error::new(ErrorKind::Damaged, format!("{}: {what}", self.digest))
    }

    fn reserve(&self, bytes: u64) -> Result<(), Error> {
        let mut index = self.shared.index();
        self.shared.make_room(&mut index, bytes)?;
        index.resize_partial(&self.digest, |size| size.saturating_add(bytes));
        Ok(())
    }

    fn release(&self, bytes: u64) {
        self.shared.index().resize_partial(&self.digest, |size| size.saturating_sub(bytes));
    }

    fn write(&self, chunk: u32, bytes: &[u8]) -> Result<(), Error> {
        let cannot = |error| Error::io(format!("cannot write {}", self.digest), error);
        self.data.write_at(bytes, self.shape.offset(chunk)).map_err(cannot)
    }

    /// Writes the checksum and then the bit of a chunk.
    fn write_mark(&self, chunks: &Chunks, chunk: u32, sum: Option<u32>) -> Result<(), Error> {
        files::write_mark(&*self.map_file, &self.shape, &chunks.map, chunk, sum)
            .map_err(|error| Error::io(format!("cannot write the map of {}", self.digest), error))
    }

    fn forget(&self, chunks: &mut Chunks, chunk: u32) -> Result<(), Error> {
        chunks.map.remove(chunk);
        chunks.cleared = Some(chunks.cleared.map_or(chunk, |other| other.min(chunk)));
        self.release(self.shape.chunk_len(chunk) as u64);
        self.write_mark(chunks, chunk, None)
    }

    fn advance(&self, prefix: &mut Prefix) -> Result<(), Error> {
        loop {
            {
                let mut chunks = self.lock();
                if chunks.cleared.take().is_some_and(|chunk| chunk < prefix.next) {
                    prefix.hasher = Hasher::new(self.digest.algorithm());
                    prefix.next = 0;
                }
                if chunks.map.sum(prefix.next).is_none() {
                    return Ok(());
                }
            }
            let mut buffer = std::mem::take(&mut prefix.buffer);
            buffer.resize(self.shape.chunk_len(prefix.next), 0);
            let read = self.read(prefix.next, &mut buffer);
            prefix.buffer = buffer;
            match read {
                // Another thread has cleared it meanwhile.
                Err(error) if error.kind() == ErrorKind::Misuse => return Ok(()),
                read => read?,
            }
            prefix.hasher.update(&prefix.buffer);
            prefix.next += 1;
        }
    }

    fn check_digest(&self, prefix: &mut Prefix) -> Result<(), Error> {
        self.advance(prefix)?;
        if prefix.next != self.shape.chunks() {
            return Err(self.damaged("a chunk was lost during the commit"));
        }
        let actual = prefix.hasher.clone().finish();
        if actual == self.digest {
            return Ok(());
        }
        let what = format!("the bytes of {} have the digest {actual}", self.digest);
        Err(Error::new(ErrorKind::Mismatch, what))
    }

    /// Gives the data its place among the blobs.
    fn publish(&self) -> Result<Blob, Error> {
        let cannot = |error| Error::io(format!("cannot commit {}", self.digest), error);
        let algorithm = self.digest.algorithm();
        let (from, to) = (data_name(&self.digest), self.digest.hex());
        let _syncing = self.syncing.lock().unwrap_or_else(PoisonError::into_inner);
        {
            // A sync or a read of another thread may have failed meanwhile.
            let chunks = self.lock();
            if chunks.state != State::Committing || chunks.map.present() != self.shape.chunks() {
                return Err(self.damaged("a chunk was lost during the commit"));
            }
        }
        self.data.seal().map_err(cannot)?;
        if let Err(error) = self.data.sync() {
            self.remove();
            return Err(cannot(error));
        }
        let (partials, blobs) = (Folder::Partials(algorithm), Folder::Blobs(algorithm));
        self.shared.disk.rename((partials, &from), (blobs, &to)).map_err(cannot)?;
        let in_use = {
            let mut index = self.shared.index();
            index.remove_partial(&self.digest);
            index.add_blob(self.digest, self.shape.size())
        };
        self.lock().state = State::Ended;
        // Before the map is removed: if a crash undoes the rename, the download can be resumed. If
        // this fails, the blob is right and stays, but a crash may undo it.
        self.shared.disk.sync_folder(blobs).map_err(cannot)?;
        // A map that is left does no harm, and the next start removes it.
        let _ = self.shared.discard(partials, &map_name(&self.digest));
        Ok(Blob::new(self.digest, self.shape.size(), Arc::clone(&self.data), in_use))
    }

    /// Ends the download and removes its files.
    fn remove(&self) {
        // If it has ended already, another download may have files of the same names.
        if std::mem::replace(&mut self.lock().state, State::Ended) == State::Ended {
            return;
        }
        let mut index = self.shared.index();
        index.remove_partial(&self.digest);
        if let Err(error) = self.shared.discard_partial(&self.digest) {
            tracing::error!("cannot remove the files of {} after an error: {error}", self.digest);
        }
    }
}

impl fmt::Debug for Partial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Partial")
            .field("digest", &self.digest)
            .field("size", &self.size())
            .field("present", &self.present())
            .finish_non_exhaustive()
    }
}
