//! The start of a store: checks whether the directory is one, creates what is missing, and finds
//! out what it holds. The directory is the truth; there is no database.
//!
//! A crash leaves nothing to repair among the blobs. Of downloads, it leaves at most a data file
//! without a map, a map without data, or a download whose blob was committed. These are removed.
//! Chunks are checked when a download is resumed, because that reads all of them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use super::disk::{Disk, Entry, Folder};
use super::index::Index;
use super::{Recovered, pins, small_file};
use crate::digest::{Algorithm, Digest};
use crate::error::{Error, ErrorKind};

const VERSION: &str = "VERSION";
/// The layout of the directory that this code reads and writes.
const VERSION_TEXT: &str = "1\n";
/// What an empty directory may have: our lock, and what mkfs creates.
const IN_EMPTY: [&str; 2] = [super::real_disk::LOCK, "lost+found"];

/// Reads the directory, and returns what it holds and what was done.
pub(super) fn recover(disk: &dyn Disk) -> Result<(Index, Recovered), Error> {
    check_version(disk)?;
    let cannot = |error| Error::io("cannot create a directory of the store", error);
    for folder in Folder::BELOW_ROOT {
        disk.create_folder(folder).map_err(cannot)?;
    }
    for folder in [Folder::Root, Folder::AllBlobs, Folder::AllPartials] {
        disk.sync_folder(folder).map_err(cannot)?;
    }
    let mut scan = Scan { disk, index: Index::default(), recovered: Recovered::default() };
    scan.index.pins = pins::read(disk)?;
    let cannot = |error| Error::io("cannot read the storage directory", error);
    scan.root().map_err(cannot)?;
    scan.blobs().map_err(cannot)?;
    for algorithm in Algorithm::ALL {
        scan.partials(algorithm).map_err(cannot)?;
    }
    scan.bad().map_err(cannot)?;
    let (blobs, partials) = scan.index.counts();
    scan.recovered = Recovered { blobs, partials, ..scan.recovered };
    Ok((scan.index, scan.recovered))
}

/// Refuses a directory that is no store. Otherwise, a wrong path would fill any directory.
fn check_version(disk: &dyn Disk) -> Result<(), Error> {
    let denied = |what| Err(Error::new(ErrorKind::Denied, what));
    match small_file::read(disk, VERSION, 64)? {
        Some(text) if text == VERSION_TEXT => return Ok(()),
        Some(text) => {
            let what = format!("the store has version {:?}, and this program reads 1", text.trim());
            return denied(what);
        }
        None => {}
    }
    let cannot = |error| Error::io("cannot read the storage directory", error);
    let entries = disk.list(Folder::Root).map_err(cannot)?;
    let is_foreign = |entry: &&Entry| {
        let name = entry.name.as_str();
        !IN_EMPTY.contains(&name) && !small_file::is_unfinished(name)
    };
    if let Some(entry) = entries.iter().find(is_foreign) {
        return denied(format!(
            "the storage directory has no file {VERSION}, but a file {:?}; choose an empty \
             directory",
            entry.name
        ));
    }
    small_file::replace(disk, VERSION, VERSION_TEXT)
}

struct Scan<'a> {
    disk: &'a dyn Disk,
    index: Index,
    recovered: Recovered,
}

impl Scan<'_> {
    fn root(&mut self) -> io::Result<()> {
        for entry in self.disk.list(Folder::Root)? {
            if entry.is_own_file && small_file::is_unfinished(&entry.name) {
                self.remove(Folder::Root, &entry.name)?;
            }
        }
        Ok(())
    }

    fn blobs(&mut self) -> io::Result<()> {
        let mut found = Vec::new();
        for algorithm in Algorithm::ALL {
            for entry in self.own_files(Folder::Blobs(algorithm))? {
                match Digest::from_hex(algorithm, &entry.name) {
                    Some(digest) => found.push((entry.read_time, digest, entry.bytes)),
                    None => self.recovered.ignored += 1,
                }
            }
        }
        found.sort_unstable();
        for (_, digest, bytes) in found {
            self.index.add_blob(digest, bytes);
        }
        Ok(())
    }

    fn partials(&mut self, algorithm: Algorithm) -> io::Result<()> {
        let folder = Folder::Partials(algorithm);
        let (mut data, mut maps) = (BTreeMap::new(), BTreeSet::new());
        for entry in self.own_files(folder)? {
            let digest = |hex: &str| Digest::from_hex(algorithm, hex);
            if let Some(digest) = entry.name.strip_suffix(".data").and_then(digest) {
                data.insert(digest, entry);
            } else if let Some(digest) = entry.name.strip_suffix(".map").and_then(digest) {
                maps.insert(digest);
            } else {
                self.recovered.ignored += 1;
            }
        }
        let mut kept = Vec::new();
        for (digest, entry) in data {
            if !self.index.has_blob(&digest) && maps.remove(&digest) {
                kept.push((entry.read_time, digest, entry.allocated));
            } else {
                self.remove(folder, &entry.name)?;
            }
        }
        for digest in maps {
            self.remove(folder, &super::shared::map_name(&digest))?;
        }
        kept.sort_unstable();
        for (_, digest, bytes) in kept {
            self.index.add_partial(digest, bytes);
        }
        Ok(())
    }

    fn bad(&mut self) -> io::Result<()> {
        let mut entries = self.own_files(Folder::Bad)?;
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        for entry in entries {
            self.index.add_bad(entry.name, entry.allocated, usize::MAX);
        }
        Ok(())
    }

    /// Returns the files of a folder that may be ours, and counts the others.
    fn own_files(&mut self, folder: Folder) -> io::Result<Vec<Entry>> {
        let (own, others): (Vec<_>, Vec<_>) =
            self.disk.list(folder)?.into_iter().partition(|entry| entry.is_own_file);
        self.recovered.ignored += others.len();
        if let Some(entry) = others.first() {
            tracing::warn!(
                "{folder:?} has files that do not belong to the store, such as {:?}; remove them",
                entry.name
            );
        }
        Ok(own)
    }

    fn remove(&mut self, folder: Folder, name: &str) -> io::Result<()> {
        self.recovered.removed += 1;
        self.disk.remove(folder, name)
    }
}
