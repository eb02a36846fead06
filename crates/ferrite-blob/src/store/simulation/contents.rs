//! The contents of a simulated file: what programs see, what is durable, and the changes between.

use ferrite_testkit::Random;

use super::super::disk::Folder;

/// Writes survive a crash in units of this size. Real disks have 512 or 4096 bytes; the tests have
/// small chunks.
const SECTOR_BYTES: usize = 16;

#[derive(Default, Clone)]
pub(super) struct Inode {
    /// Where it was created.
    pub(super) folder: Option<Folder>,
    pub(super) now: Content,
    pub(super) durable: Content,
    pub(super) pending: Vec<DataChange>,
    pub(super) read_time: i128,
}

#[derive(Default, Clone, PartialEq)]
pub(super) struct Content {
    pub(super) bytes: Vec<u8>,
    pub(super) is_sealed: bool,
}

#[derive(Clone)]
pub(super) enum DataChange {
    Write { at: usize, bytes: Vec<u8> },
    Size(usize),
    Seal,
}

/// What a crash makes of a sector.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Fate {
    Survives,
    Lost,
    Garbage,
}

impl Inode {
    /// Returns the file after a crash. `fate` decides about each sector of each change.
    pub(super) fn after_crash(
        &self,
        random: &mut Random,
        fate: impl Fn(&mut Random) -> Fate,
    ) -> Self {
        let mut content = self.durable.clone();
        for change in &self.pending {
            change.apply_in_part(&mut content, &fate, random);
        }
        Self { now: content.clone(), durable: content, pending: Vec::new(), ..self.clone() }
    }

    /// Changes what programs see.
    pub(super) fn change(&mut self, change: DataChange) {
        change.apply(&mut self.now);
        self.pending.push(change);
    }

    /// Changes both what programs see and what is durable.
    pub(super) fn edit(&mut self, edit: impl FnOnce(&mut Vec<u8>)) {
        edit(&mut self.now.bytes);
        self.durable = self.now.clone();
    }

    /// Makes all changes durable.
    pub(super) fn sync(&mut self) {
        for change in std::mem::take(&mut self.pending) {
            change.apply(&mut self.durable);
        }
    }
}

impl DataChange {
    fn apply(&self, content: &mut Content) {
        match self {
            Self::Write { at, bytes } => write(content, *at, bytes),
            Self::Size(size) => resize(&mut content.bytes, *size),
            Self::Seal => content.is_sealed = true,
        }
    }

    fn apply_in_part(
        &self,
        content: &mut Content,
        fate: impl Fn(&mut Random) -> Fate,
        random: &mut Random,
    ) {
        let Self::Write { at, bytes } = self else {
            if fate(random) != Fate::Lost {
                self.apply(content);
            }
            return;
        };
        let end = at + bytes.len();
        let mut from = *at;
        while from < end {
            let sector = from / SECTOR_BYTES * SECTOR_BYTES;
            let to = end.min(sector + SECTOR_BYTES);
            match fate(random) {
                Fate::Survives => write(content, from, &bytes[from - at..to - at]),
                Fate::Lost => {}
                // The whole sector, also what the write does not touch.
                Fate::Garbage => {
                    let sector_end = (sector + SECTOR_BYTES).min(content.bytes.len().max(to));
                    let garbage: Vec<_> =
                        (sector..sector_end).map(|_| random.below(256) as u8).collect();
                    write(content, sector, &garbage);
                }
            }
            from = to;
        }
    }
}

/// As `Vec::resize`, which is slow in debug builds.
fn resize(bytes: &mut Vec<u8>, size: usize) {
    let mut resized = vec![0; size];
    let kept = size.min(bytes.len());
    resized[..kept].copy_from_slice(&bytes[..kept]);
    *bytes = resized;
}

fn write(content: &mut Content, at: usize, bytes: &[u8]) {
    let end = at + bytes.len();
    if content.bytes.len() < end {
        resize(&mut content.bytes, end);
    }
    content.bytes[at..end].copy_from_slice(bytes);
}
