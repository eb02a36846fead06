//! What the store holds, in memory: sizes, users, the order of reads, pins. It has no I/O. Handles
//! keep an `Arc` of their entry, so a dropped handle needs no lock: an entry is in use while
//! somebody else has its `Arc`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use crate::digest::Digest;

/// Shows that an entry is in use, while a handle has a clone.
pub(super) type InUse = Arc<()>;

/// A blob or a download.
#[derive(Debug)]
struct Held {
    bytes: u64,
    /// When it was last used; a larger number is later.
    used: u64,
    in_use: InUse,
}

impl Held {
    fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.in_use) > 1
    }
}

/// Something that eviction may remove.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Victim {
    /// A file in `bad`.
    Bad(String),
    Partial(Digest),
    Blob(Digest),
}

/// The contents of a store.
#[derive(Debug, Default)]
pub(super) struct Index {
    blobs: BTreeMap<Digest, Held>,
    partials: BTreeMap<Digest, Held>,
    /// Names and sizes, the oldest first.
    bad: VecDeque<(String, u64)>,
    pub(super) pins: BTreeSet<Digest>,
    clock: u64,
    pub(super) evicted_bytes: u64,
}

impl Index {
    fn held(&mut self, bytes: u64) -> Held {
        self.clock += 1;
        Held { bytes, used: self.clock, in_use: InUse::default() }
    }

    /// Adds a blob, as the one that was used last.
    pub(super) fn add_blob(&mut self, digest: Digest, bytes: u64) -> InUse {
        let held = self.held(bytes);
        let in_use = Arc::clone(&held.in_use);
        self.blobs.insert(digest, held);
        in_use
    }

    pub(super) fn has_blob(&self, digest: &Digest) -> bool {
        self.blobs.contains_key(digest)
    }

    /// Returns size and mark of a blob, and makes it the one that was used last.
    pub(super) fn use_blob(&mut self, digest: &Digest) -> Option<(u64, InUse)> {
        self.clock += 1;
        let held = self.blobs.get_mut(digest)?;
        held.used = self.clock;
        Some((held.bytes, Arc::clone(&held.in_use)))
    }

    pub(super) fn remove_blob(&mut self, digest: &Digest) {
        self.blobs.remove(digest);
    }

    /// Adds a download, or begins to use one again. It counts with the size of its chunks, not with
    /// that of the whole blob, which a peer may have invented.
    pub(super) fn add_partial(&mut self, digest: Digest, bytes: u64) -> InUse {
        let held = self.held(bytes);
        let in_use = Arc::clone(&held.in_use);
        self.partials.insert(digest, held);
        in_use
    }

    pub(super) fn is_partial_in_use(&self, digest: &Digest) -> bool {
        self.partials.get(digest).is_some_and(Held::is_in_use)
    }

    /// Changes the size of a download.
    pub(super) fn resize_partial(&mut self, digest: &Digest, change: impl FnOnce(u64) -> u64) {
        if let Some(held) = self.partials.get_mut(digest) {
            held.bytes = change(held.bytes);
        }
    }

    pub(super) fn remove_partial(&mut self, digest: &Digest) {
        self.partials.remove(digest);
    }

    /// Adds a file of `bad`. Returns the oldest ones, beyond `limit`, which are to be removed.
    pub(super) fn add_bad(&mut self, name: String, bytes: u64, limit: usize) -> Vec<String> {
        self.bad.push_back((name, bytes));
        let excess = self.bad.len().saturating_sub(limit);
        self.bad.drain(..excess).map(|(name, _)| name).collect()
    }

    /// Returns the name of the latest file of `bad`.
    pub(super) fn last_bad(&self) -> Option<&str> {
        self.bad.back().map(|(name, _)| name.as_str())
    }

    /// Returns the size of everything.
    pub(super) fn bytes(&self) -> u64 {
        let bad = self.bad.iter().fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes));
        bad.saturating_add(self.blob_bytes()).saturating_add(self.partial_bytes())
    }

    pub(super) fn blob_bytes(&self) -> u64 {
        sum(self.blobs.values())
    }

    pub(super) fn partial_bytes(&self) -> u64 {
        sum(self.partials.values())
    }

    pub(super) fn pinned_bytes(&self) -> u64 {
        sum(self.pins.iter().filter_map(|digest| self.blobs.get(digest)))
    }

    /// Returns the number of blobs and of downloads.
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.blobs.len(), self.partials.len())
    }

    /// Returns what may be removed, with its size, in order: files of `bad`, downloads that nobody
    /// uses, blobs that were not read for the longest time.
    pub(super) fn victims(&self) -> Vec<(Victim, u64)> {
        let mut partials: Vec<_> = self.unused(&self.partials).collect();
        let mut blobs: Vec<_> = self.unused(&self.blobs).collect();
        partials.sort_by_key(|(_, held)| held.used);
        blobs.sort_by_key(|(_, held)| held.used);
        let bad = self.bad.iter().map(|(name, bytes)| (Victim::Bad(name.clone()), *bytes));
        bad.chain(partials.into_iter().map(|(digest, held)| (Victim::Partial(digest), held.bytes)))
            .chain(blobs.into_iter().map(|(digest, held)| (Victim::Blob(digest), held.bytes)))
            .collect()
    }

    fn unused<'a>(
        &'a self,
        all: &'a BTreeMap<Digest, Held>,
    ) -> impl Iterator<Item = (Digest, &'a Held)> {
        let may_go =
            |(digest, held): &(&Digest, &Held)| !held.is_in_use() && !self.pins.contains(*digest);
        all.iter().filter(may_go).map(|(digest, held)| (*digest, held))
    }

    /// Removes what was evicted.
    pub(super) fn evicted(&mut self, victim: &Victim, bytes: u64) {
        match victim {
            Victim::Bad(name) => self.bad.retain(|(other, _)| other != name),
            Victim::Partial(digest) => self.remove_partial(digest),
            Victim::Blob(digest) => self.remove_blob(digest),
        }
        self.evicted_bytes = self.evicted_bytes.saturating_add(bytes);
    }
}

fn sum<'a>(all: impl Iterator<Item = &'a Held>) -> u64 {
    all.fold(0, |sum, held| sum.saturating_add(held.bytes))
}
