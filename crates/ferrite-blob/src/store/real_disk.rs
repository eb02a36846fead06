//! The real file system. All names are relative to open directories, and links are not followed, so
//! that nobody can replace a directory of the store by a link while the store runs.

use std::collections::BTreeMap;
use std::fs::{File, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags, Stat, Timespec, Timestamps,
    UTIME_NOW, UTIME_OMIT, flock, fstat, fstatvfs, fsync, futimens, mkdirat, openat, renameat,
    statat, unlinkat,
};
use rustix::process::geteuid;

use super::disk::{Access, Disk, DiskFile, Entry, Folder, Space};
use crate::error::{Error, ErrorKind};

/// The file whose lock shows that a process uses the store.
pub(super) const LOCK: &str = "LOCK";

/// A storage directory that this process has locked.
pub(super) struct RealDisk {
    folders: Mutex<BTreeMap<Folder, Arc<OwnedFd>>>,
    /// Holds the lock; the kernel releases it when the descriptor is closed.
    _lock: OwnedFd,
}

/// A file of a [`RealDisk`].
struct RealFile(File);

impl RealDisk {
    /// Opens the directory and locks it. Creates it, for this user alone, if it does not exist.
    pub(super) fn open(path: &Path) -> Result<Self, Error> {
        let cannot = |what: &str| format!("cannot {what} the storage directory {}", path.display());
        match mkdirat(CWD, path, Mode::RWXU) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(Error::io(cannot("create"), error.into())),
        }
        let root = openat(CWD, path, FOLDER_FLAGS.difference(OFlags::NOFOLLOW), Mode::empty())
            .map_err(|error| Error::io(cannot("open"), error.into()))?;
        check_folder(&root).map_err(|error| Error::io(cannot("use"), error))?;
        let lock = open_file(&root, LOCK, Access::Write)
            .or_else(|error| match error.kind() {
                // Another process may create it at the same time.
                io::ErrorKind::NotFound => {
                    check_new(&root)?;
                    open_file(&root, LOCK, Access::Create)
                        .or_else(|_| open_file(&root, LOCK, Access::Write))
                }
                _ => Err(error),
            })
            .map_err(|error| Error::io(cannot("lock"), error))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let what = format!(
                    "the storage directory {} is used by another process; stop that process, or \
                     choose another directory",
                    path.display()
                );
                return Err(Error::new(ErrorKind::InUse, what));
            }
            Err(error) => return Err(Error::io(cannot("lock"), error.into())),
        }
        let folders = Mutex::new(BTreeMap::from([(Folder::Root, Arc::new(root))]));
        Ok(Self { folders, _lock: lock })
    }

    fn folder(&self, folder: Folder) -> io::Result<Arc<OwnedFd>> {
        let folders = self.folders.lock().unwrap_or_else(PoisonError::into_inner);
        folders.get(&folder).cloned().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Disk for RealDisk {
    fn create_folder(&self, folder: Folder) -> io::Result<()> {
        let parent = self.folder(folder.parent())?;
        match mkdirat(&*parent, folder.name(), Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        let opened = openat(&*parent, folder.name(), FOLDER_FLAGS, Mode::empty())?;
        check_folder(&opened)?;
        let mut folders = self.folders.lock().unwrap_or_else(PoisonError::into_inner);
        folders.insert(folder, Arc::new(opened));
        Ok(())
    }

    fn list(&self, folder: Folder) -> io::Result<Vec<Entry>> {
        let opened = self.folder(folder)?;
        let mut entries = Vec::new();
        for entry in Dir::read_from(&*opened)? {
            let entry = entry?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let stat = match statat(&*opened, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => stat,
                Err(rustix::io::Errno::NOENT) => continue,
                Err(error) => return Err(error.into()),
            };
            entries.push(Entry {
                name: name.to_string_lossy().into_owned(),
                is_own_file: name.to_str().is_ok() && is_own_file(&stat),
                bytes: u64::try_from(stat.st_size).unwrap_or(0),
                allocated: u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512),
                read_time: i128::from(stat.st_atime) * 1_000_000_000
                    + i128::from(stat.st_atime_nsec),
            });
        }
        Ok(entries)
    }

    fn open(&self, folder: Folder, name: &str, access: Access) -> io::Result<Box<dyn DiskFile>> {
        let file = open_file(&*self.folder(folder)?, name, access)?;
        Ok(Box::new(RealFile(file.into())))
    }

    fn rename(&self, from: (Folder, &str), to: (Folder, &str)) -> io::Result<()> {
        Ok(renameat(&*self.folder(from.0)?, from.1, &*self.folder(to.0)?, to.1)?)
    }

    fn remove(&self, folder: Folder, name: &str) -> io::Result<()> {
        Ok(unlinkat(&*self.folder(folder)?, name, AtFlags::empty())?)
    }

    fn sync_folder(&self, folder: Folder) -> io::Result<()> {
        Ok(fsync(&*self.folder(folder)?)?)
    }

    fn space(&self) -> io::Result<Space> {
        let stat = fstatvfs(&*self.folder(Folder::Root)?)?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        Ok(Space { total: bytes(stat.f_blocks), available: bytes(stat.f_bavail) })
    }
}

impl DiskFile for RealFile {
    fn size(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        self.0.read_exact_at(buffer, at)
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, at)
    }

    fn set_size(&self, bytes: u64) -> io::Result<()> {
        self.0.set_len(bytes)
    }

    fn seal(&self) -> io::Result<()> {
        self.0.set_permissions(Permissions::from_mode(0o444))
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync_all()
    }

    fn touch(&self) -> io::Result<()> {
        let time = |nanoseconds| Timespec { tv_sec: 0, tv_nsec: nanoseconds };
        let times =
            Timestamps { last_access: time(UTIME_NOW), last_modification: time(UTIME_OMIT) };
        Ok(futimens(&self.0, &times)?)
    }
}

const FOLDER_FLAGS: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Refuses a directory in which others could replace files.
fn check_folder(folder: &OwnedFd) -> io::Result<()> {
    let stat = fstat(folder)?;
    if stat.st_uid != geteuid().as_raw() {
        return Err(denied("the directory belongs to another user"));
    }
    if stat.st_mode & 0o022 != 0 {
        return Err(denied("others may write to the directory; run chmod go-w on it"));
    }
    Ok(())
}

/// Refuses a directory without a lock if something else is in it, so that a wrong path changes
/// nothing. Recovery checks the rest.
fn check_new(folder: &OwnedFd) -> io::Result<()> {
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b".." | b"lost+found" | b"VERSION") {
            let name = entry.file_name().to_string_lossy();
            return Err(denied(&format!(
                "it is no store and has a file {name:?}; choose an empty directory"
            )));
        }
    }
    Ok(())
}

/// Opens a file without following a link, and checks what it is.
fn open_file(folder: &OwnedFd, name: &str, access: Access) -> io::Result<OwnedFd> {
    // The open of a pipe must not wait for another process.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let read = || openat(folder, name, flags | OFlags::RDONLY, Mode::empty());
    let write = || openat(folder, name, flags | OFlags::RDWR, Mode::empty());
    let file = match access {
        Access::Read => read()?,
        Access::Create => {
            let create = flags | OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
            openat(folder, name, create, Mode::RUSR | Mode::WUSR)?
        }
        Access::Write => match write() {
            // A crash may have undone the rename of a commit, but not its chmod.
            Err(rustix::io::Errno::ACCESS) => {
                let sealed = read()?;
                check_file(&sealed, access)?;
                File::from(sealed).set_permissions(Permissions::from_mode(0o600))?;
                write()?
            }
            opened => opened?,
        },
    };
    check_file(&file, access)?;
    Ok(file)
}

fn check_file(file: &OwnedFd, access: Access) -> io::Result<()> {
    let stat = fstat(file)?;
    if !is_own_file(&stat) {
        return Err(denied("not a regular file of this user"));
    }
    // Writes would change the file that has the other name.
    if access == Access::Write && stat.st_nlink != 1 {
        return Err(denied("the file has other names (hard links)"));
    }
    Ok(())
}

fn is_own_file(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
        && stat.st_uid == geteuid().as_raw()
}

fn denied(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, what)
}
