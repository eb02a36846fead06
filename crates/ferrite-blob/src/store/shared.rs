//! What all handles of a store share: the disk, the index, and the limits of space.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Options;
use super::disk::{Disk, Folder, Space};
use super::index::{Index, Victim};
use crate::digest::Digest;
use crate::error::{Error, ErrorKind};

/// A store, without its public methods.
pub(super) struct Shared {
    pub(super) disk: Box<dyn Disk>,
    pub(super) options: Options,
    pub(super) chunk_bytes: u32,
    index: Mutex<Index>,
}

/// Returns the name of a download's data file.
pub(super) fn data_name(digest: &Digest) -> String {
    format!("{}.data", digest.hex())
}

/// Returns the name of a download's map.
pub(super) fn map_name(digest: &Digest) -> String {
    format!("{}.map", digest.hex())
}

impl Shared {
    pub(super) fn new(
        disk: Box<dyn Disk>,
        options: Options,
        chunk_bytes: u32,
        index: Index,
    ) -> Self {
        Self { disk, options, chunk_bytes, index: Mutex::new(index) }
    }

    pub(super) fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes a file that may be missing.
    pub(super) fn discard(&self, folder: Folder, name: &str) -> io::Result<()> {
        match self.disk.remove(folder, name) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Removes the files of a download.
    pub(super) fn discard_partial(&self, digest: &Digest) -> io::Result<()> {
        let folder = Folder::Partials(digest.algorithm());
        self.discard(folder, &map_name(digest))?;
        self.discard(folder, &data_name(digest))
    }

    /// Checks that a blob of this size could be kept if everything else were evicted. The size is
    /// only what a peer says, so nothing is evicted for it yet.
    pub(super) fn check_size(&self, bytes: u64) -> Result<(), Error> {
        let limits = self.limits()?;
        if bytes > limits.store_high || bytes > limits.disk_high {
            let what = format!(
                "a blob of {bytes} bytes does not fit; the limit is {} bytes",
                limits.store_high.min(limits.disk_high)
            );
            return Err(Error::new(ErrorKind::Full, what));
        }
        Ok(())
    }

    /// Makes room for bytes that are about to be written, by eviction. Evicts nothing if that would
    /// not suffice.
    pub(super) fn make_room(&self, index: &mut Index, bytes: u64) -> Result<(), Error> {
        let limits = self.limits()?;
        let store = index.bytes().saturating_add(bytes);
        let disk = limits.disk_used.saturating_add(bytes);
        if store <= limits.store_high && disk <= limits.disk_high {
            return Ok(());
        }
        let victims = index.victims();
        let evictable = victims.iter().fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes));
        if store.saturating_sub(evictable) > limits.store_high
            || disk.saturating_sub(evictable) > limits.disk_high
        {
            return Err(Error::new(
                ErrorKind::Full,
                format!(
                    "no room for {bytes} bytes: the store has {}, of which {evictable} can be \
                     evicted",
                    index.bytes()
                ),
            ));
        }
        let mut freed: u64 = 0;
        for (victim, bytes) in victims {
            if store.saturating_sub(freed) <= limits.store_low
                && disk.saturating_sub(freed) <= limits.disk_low
            {
                break;
            }
            match self.evict(&victim) {
                Ok(()) => {
                    index.evicted(&victim, bytes);
                    freed = freed.saturating_add(bytes);
                }
                Err(error) => tracing::warn!("cannot evict {victim:?}: {error}"),
            }
        }
        if store.saturating_sub(freed) > limits.store_high
            || disk.saturating_sub(freed) > limits.disk_high
        {
            return Err(Error::new(ErrorKind::Full, format!("no room for {bytes} bytes")));
        }
        tracing::debug!("evicted {freed} bytes");
        Ok(())
    }

    fn evict(&self, victim: &Victim) -> io::Result<()> {
        match victim {
            Victim::Bad(name) => self.discard(Folder::Bad, name),
            Victim::Partial(digest) => self.discard_partial(digest),
            Victim::Blob(digest) => self.discard(Folder::Blobs(digest.algorithm()), &digest.hex()),
        }
    }

    fn limits(&self) -> Result<Limits, Error> {
        let cannot = |error| Error::io("cannot read the size of the file system", error);
        let space = self.disk.space().map_err(cannot)?;
        Ok(Limits::new(&self.options, space))
    }
}

/// The sizes above which the store evicts, and down to which it does.
#[derive(Debug, PartialEq)]
struct Limits {
    store_high: u64,
    store_low: u64,
    disk_used: u64,
    disk_high: u64,
    disk_low: u64,
}

impl Limits {
    fn new(options: &Options, space: Space) -> Self {
        let three_quarters = |bytes: u64| bytes / 4 * 3;
        let store_high = options.max_bytes.unwrap_or(u64::MAX);
        let disk_high = space.total / 100 * u64::from(options.max_disk_percent.min(100));
        Self {
            store_high,
            store_low: three_quarters(store_high),
            disk_used: space.total.saturating_sub(space.available),
            disk_high,
            disk_low: three_quarters(disk_high),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evicts_from_80_to_60_percent_of_the_disk() {
        let limits = Limits::new(&Options::default(), Space { total: 1000, available: 300 });
        assert_eq!((limits.disk_used, limits.disk_high, limits.disk_low), (700, 800, 600));
        assert_eq!(limits.store_high, u64::MAX);
    }

    #[test]
    fn evicts_from_max_bytes_to_three_quarters() {
        let options = Options { max_bytes: Some(400), max_disk_percent: 50 };
        let limits = Limits::new(&options, Space { total: 1000, available: 300 });
        assert_eq!((limits.store_high, limits.store_low), (400, 300));
        assert_eq!((limits.disk_used, limits.disk_high, limits.disk_low), (700, 500, 375));
    }
}
