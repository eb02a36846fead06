//! A file system in memory that crashes as POSIX permits. Tests run the store on it, let it crash
//! at any operation, and look at what is left.
//!
//! Until it is synced, a change may be lost or may survive, each independently of all others:
//!
//! - a write survives in part, sector by sector; a sector may also become garbage;
//! - the size of a file, its mode and its data survive independently;
//! - a change of a name survives or not, also if a later change of the same folder does. Only a
//!   rename never loses both names: file systems guarantee that, and may leave both;
//! - a folder that was created may be gone, with everything in it.
//!
//! A crash at an operation lets the operation itself survive, or not.

mod contents;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use contents::{DataChange, Fate, Inode};
use ferrite_testkit::Random;

use super::disk::{Access, Disk, DiskFile, Entry, Folder, Space};

type Place = (Folder, String);

/// A simulated file system. Clones share it.
#[derive(Clone)]
pub(super) struct SimulatedDisk(Arc<Mutex<State>>);

/// What goes wrong, and at which operation. Operations that change nothing do not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Fault {
    #[default]
    None,
    /// The host crashes: this operation and all later ones fail.
    Crash(u64),
    /// This operation fails with this error, and later ones succeed.
    Fail(u64, io::ErrorKind),
}

/// A sync that does nothing, for tests of the tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ignored {
    /// Syncs of the files of downloads.
    Files,
    /// Syncs of folders of blobs and downloads.
    Folders,
}

#[derive(Default)]
struct State {
    files: Vec<Inode>,
    names: BTreeMap<Place, usize>,
    durable_names: BTreeMap<Place, usize>,
    pending_names: Vec<NameChange>,
    folders: BTreeSet<Folder>,
    durable_folders: BTreeSet<Folder>,
    operations: u64,
    fault: Fault,
    crashed: bool,
    ignored: Option<Ignored>,
    space: Option<Space>,
    clock: i128,
    has_garbage: bool,
}

/// A name that a folder gets or loses.
#[derive(Clone)]
struct NameChange {
    place: Place,
    file: Option<usize>,
    /// The new name of a rename, if this is the loss of the old one.
    renamed_to: Option<Place>,
}

struct SimulatedFile {
    disk: SimulatedDisk,
    file: usize,
    can_write: bool,
}

impl SimulatedDisk {
    pub(super) fn new() -> Self {
        let root = BTreeSet::from([Folder::Root]);
        let state = State { folders: root.clone(), durable_folders: root, ..State::default() };
        Self(Arc::new(Mutex::new(state)))
    }

    pub(super) fn set_fault(&self, fault: Fault) {
        self.lock().fault = fault;
    }

    pub(super) fn set_ignored(&self, ignored: Ignored) {
        self.lock().ignored = Some(ignored);
    }

    pub(super) fn set_space(&self, total: u64, available: u64) {
        self.lock().space = Some(Space { total, available });
    }

    /// Returns the number of operations so far that changed or synced something.
    pub(super) fn operations(&self) -> u64 {
        self.lock().operations
    }

    /// Returns all names except those of folders.
    pub(super) fn names(&self) -> Vec<String> {
        let path =
            |(folder, name): &Place| format!("{}/{}/{name}", folder.parent().name(), folder.name());
        self.lock().names.keys().map(path).collect()
    }

    pub(super) fn has_crashed(&self) -> bool {
        self.lock().crashed
    }

    /// Returns whether a crash may have turned a sector into garbage. Then the disk may also have
    /// lost bytes that were synced, if they shared the sector with a later write.
    pub(super) fn has_garbage(&self) -> bool {
        self.lock().has_garbage
    }

    /// Changes a byte of a file behind the store's back.
    pub(super) fn damage(&self, folder: Folder, name: &str, at: usize) {
        self.edit(folder, name, |bytes| bytes[at] ^= 1);
    }

    /// Changes a file behind the store's back.
    pub(super) fn edit(&self, folder: Folder, name: &str, edit: impl FnOnce(&mut Vec<u8>)) {
        let mut state = self.lock();
        let file = state.names[&(folder, name.to_owned())];
        state.files[file].edit(edit);
    }

    /// Returns the disk after a crash of the host.
    pub(super) fn after_crash(&self, random: &mut Random) -> Self {
        let state = self.lock();
        // Of all changes none, all, or each with a probability.
        let mut odds = || [0, 1, 2, 2, 2, 4][random.below(6) as usize];
        let (data_odds, name_odds) = (odds(), odds());
        let survives = |random: &mut Random, odds: u64| random.below(4) < odds;
        let with_garbage = random.below(2) == 0;

        let folders: BTreeSet<_> = state
            .folders
            .iter()
            .copied()
            .filter(|folder| state.durable_folders.contains(folder) || survives(random, name_odds))
            .collect();
        let exists =
            |folder: Folder| folders.contains(&folder) && folders.contains(&folder.parent());

        let mut names = state.durable_names.clone();
        let mut surviving = BTreeSet::new();
        for (at, change) in state.pending_names.iter().enumerate() {
            let needs = change.renamed_to.as_ref().and_then(|to| {
                let is_new = |other: &NameChange| other.place == *to && other.file.is_some();
                state.pending_names[..at].iter().rposition(is_new)
            });
            if survives(random, name_odds) && needs.is_none_or(|link| surviving.contains(&link)) {
                surviving.insert(at);
                apply_name(&mut names, change);
            }
        }
        names.retain(|(folder, _), _| exists(*folder));

        let mut files = Vec::new();
        for file in &state.files {
            files.push(file.after_crash(random, |random| match survives(random, data_odds) {
                true if with_garbage && random.below(8) == 0 => Fate::Garbage,
                true => Fate::Survives,
                false => Fate::Lost,
            }));
        }
        let folders: BTreeSet<_> = folders.iter().copied().filter(|f| exists(*f)).collect();
        Self(Arc::new(Mutex::new(State {
            files,
            names: names.clone(),
            durable_names: names,
            folders: folders.clone(),
            durable_folders: folders,
            ignored: state.ignored,
            space: state.space,
            clock: state.clock,
            has_garbage: with_garbage || state.has_garbage,
            ..State::default()
        })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no panic in the simulation")
    }
}

fn apply_name(names: &mut BTreeMap<Place, usize>, change: &NameChange) {
    match change.file {
        Some(file) => drop(names.insert(change.place.clone(), file)),
        None => drop(names.remove(&change.place)),
    }
}

fn error(kind: io::ErrorKind) -> io::Error {
    io::Error::from(kind)
}

impl State {
    /// Counts an operation that changes something. Returns whether the operation still reaches the
    /// disk, and the result that the caller gets.
    fn operation(&mut self) -> (bool, io::Result<()>) {
        let crashed = || Err(io::Error::other("the host crashed"));
        if self.crashed {
            return (false, crashed());
        }
        self.operations += 1;
        match self.fault {
            Fault::Crash(at) if at == self.operations => {
                self.crashed = true;
                (true, crashed())
            }
            Fault::Fail(at, kind) if at == self.operations => (false, Err(error(kind))),
            _ => (true, Ok(())),
        }
    }

    fn check_running(&self) -> io::Result<()> {
        if self.crashed { Err(io::Error::other("the host crashed")) } else { Ok(()) }
    }

    fn find(&self, folder: Folder, name: &str) -> io::Result<usize> {
        let place = (folder, name.to_owned());
        self.names.get(&place).copied().ok_or_else(|| error(io::ErrorKind::NotFound))
    }

    fn change_names(&mut self, changes: Vec<NameChange>) {
        for change in changes {
            apply_name(&mut self.names, &change);
            self.pending_names.push(change);
        }
    }

    fn change_data(&mut self, file: usize, change: DataChange) {
        self.files[file].change(change);
    }

    fn sync_names(&mut self, folder: Folder) {
        // The new name of a rename becomes durable at the latest with the loss of the old one.
        let targets: Vec<_> = self
            .pending_names
            .iter()
            .filter(|change| change.place.0 == folder)
            .filter_map(|change| change.renamed_to.clone())
            .collect();
        let pending = std::mem::take(&mut self.pending_names);
        for change in pending {
            if change.place.0 == folder || targets.contains(&change.place) {
                apply_name(&mut self.durable_names, &change);
            } else {
                self.pending_names.push(change);
            }
        }
        let children = self.folders.iter().copied().filter(|child| child.parent() == folder);
        self.durable_folders.extend(children);
    }
}

impl Disk for SimulatedDisk {
    fn create_folder(&self, folder: Folder) -> io::Result<()> {
        let mut state = self.lock();
        let (reaches_disk, result) = state.operation();
        if reaches_disk {
            state.folders.insert(folder);
        }
        result
    }

    fn list(&self, folder: Folder) -> io::Result<Vec<Entry>> {
        let state = self.lock();
        state.check_running()?;
        let names = state.names.iter().filter(|((place, _), _)| *place == folder);
        let mut entries: Vec<_> = names
            .map(|((_, name), file)| {
                let bytes = state.files[*file].now.bytes.len() as u64;
                let read_time = state.files[*file].read_time;
                let name = name.clone();
                Entry { name, is_own_file: true, bytes, allocated: bytes, read_time }
            })
            .collect();
        let children =
            state.folders.iter().filter(|child| child.parent() == folder && **child != folder);
        entries.extend(children.map(|child| Entry {
            name: child.name().into(),
            is_own_file: false,
            bytes: 0,
            allocated: 0,
            read_time: 0,
        }));
        Ok(entries)
    }

    fn open(&self, folder: Folder, name: &str, access: Access) -> io::Result<Box<dyn DiskFile>> {
        let mut state = self.lock();
        state.check_running()?;
        if !state.folders.contains(&folder) {
            return Err(error(io::ErrorKind::NotFound));
        }
        let file = match access {
            Access::Read => state.find(folder, name)?,
            Access::Write => {
                let file = state.find(folder, name)?;
                state.files[file].now.is_sealed = false;
                file
            }
            Access::Create => {
                if state.find(folder, name).is_ok() {
                    return Err(error(io::ErrorKind::AlreadyExists));
                }
                let (reaches_disk, result) = state.operation();
                let file = state.files.len();
                if reaches_disk {
                    state.files.push(Inode { folder: Some(folder), ..Inode::default() });
                    let place = (folder, name.to_owned());
                    state.change_names(vec![NameChange {
                        place,
                        file: Some(file),
                        renamed_to: None,
                    }]);
                }
                result?;
                file
            }
        };
        Ok(Box::new(SimulatedFile { disk: self.clone(), file, can_write: access != Access::Read }))
    }

    fn rename(&self, from: (Folder, &str), to: (Folder, &str)) -> io::Result<()> {
        let mut state = self.lock();
        state.check_running()?;
        let file = state.find(from.0, from.1)?;
        let (reaches_disk, result) = state.operation();
        if reaches_disk {
            let (from, to) = ((from.0, from.1.to_owned()), (to.0, to.1.to_owned()));
            state.change_names(vec![
                NameChange { place: to.clone(), file: Some(file), renamed_to: None },
                NameChange { place: from, file: None, renamed_to: Some(to) },
            ]);
        }
        result
    }

    fn remove(&self, folder: Folder, name: &str) -> io::Result<()> {
        let mut state = self.lock();
        state.check_running()?;
        state.find(folder, name)?;
        let (reaches_disk, result) = state.operation();
        if reaches_disk {
            let place = (folder, name.to_owned());
            state.change_names(vec![NameChange { place, file: None, renamed_to: None }]);
        }
        result
    }

    fn sync_folder(&self, folder: Folder) -> io::Result<()> {
        let mut state = self.lock();
        let (_, result) = state.operation();
        result?;
        let is_ignored = state.ignored == Some(Ignored::Folders) && folder.parent() != Folder::Root;
        if !is_ignored {
            state.sync_names(folder);
        }
        Ok(())
    }

    fn space(&self) -> io::Result<Space> {
        let state = self.lock();
        state.check_running()?;
        Ok(state.space.unwrap_or(Space { total: 1 << 40, available: 1 << 40 }))
    }
}

impl SimulatedFile {
    fn change(&self, change: DataChange) -> io::Result<()> {
        if !self.can_write {
            return Err(error(io::ErrorKind::PermissionDenied));
        }
        let mut state = self.disk.lock();
        let (reaches_disk, result) = state.operation();
        if reaches_disk {
            state.change_data(self.file, change);
        }
        result
    }
}

impl DiskFile for SimulatedFile {
    fn size(&self) -> io::Result<u64> {
        let state = self.disk.lock();
        state.check_running()?;
        Ok(state.files[self.file].now.bytes.len() as u64)
    }

    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        let state = self.disk.lock();
        state.check_running()?;
        let at = at as usize;
        let bytes = state.files[self.file].now.bytes.get(at..at + buffer.len());
        buffer.copy_from_slice(bytes.ok_or_else(|| error(io::ErrorKind::UnexpectedEof))?);
        Ok(())
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.change(DataChange::Write { at: at as usize, bytes: bytes.to_vec() })
    }

    fn set_size(&self, bytes: u64) -> io::Result<()> {
        self.change(DataChange::Size(bytes as usize))
    }

    fn seal(&self) -> io::Result<()> {
        self.change(DataChange::Seal)
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.disk.lock();
        let (_, result) = state.operation();
        let is_partial = matches!(state.files[self.file].folder, Some(Folder::Partials(_)));
        let is_ignored = state.ignored == Some(Ignored::Files) && is_partial;
        let is_running = !state.crashed;
        let inode = &mut state.files[self.file];
        if result.is_err() {
            // The kernel drops what it could not write, and shows it until the next crash.
            if is_running {
                inode.pending.clear();
            }
        } else if !is_ignored {
            inode.sync();
        }
        result
    }

    fn touch(&self) -> io::Result<()> {
        let mut state = self.disk.lock();
        state.check_running()?;
        state.clock += 1;
        state.files[self.file].read_time = state.clock;
        Ok(())
    }
}
