//! Finds the device file that this process may not use.
//!
//! rdma-core does not report a denied file. If librdmacm may not open the file that it found, it
//! searches for another one, and returns the error of that search. So this module checks the files
//! itself.

use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;

const DIRECTORY: &str = "/dev/infiniband";

/// The files of devices (`uverbs0` and so on).
pub(crate) const DEVICES: &str = "uverbs";
/// The file of the connection manager.
pub(crate) const CM: &str = "rdma_cm";

/// Returns the first file in `/dev/infiniband` whose name starts with `prefix` and which this
/// process may not open. Returns the directory if the process may not read the directory.
pub(crate) fn denied_file(prefix: &str) -> Option<PathBuf> {
    if cfg!(miri) {
        return None; // Miri has no accessat
    }
    denied_in(Path::new(DIRECTORY), prefix)
}

fn denied_in(directory: &Path, prefix: &str) -> Option<PathBuf> {
    if is_denied(directory, Access::EXEC_OK | Access::READ_OK) {
        return Some(directory.into());
    }
    let files = directory.read_dir().ok()?.flatten();
    let mut files: Vec<_> =
        files.filter(|file| file.file_name().to_string_lossy().starts_with(prefix)).collect();
    files.sort_by_key(std::fs::DirEntry::file_name);
    let paths = files.iter().map(std::fs::DirEntry::path);
    { paths }.find(|path| is_denied(path, Access::READ_OK | Access::WRITE_OK))
}

/// Returns whether the effective user lacks the permission. A missing file is not denied.
fn is_denied(path: &Path, access: Access) -> bool {
    let asked = match accessat(CWD, path, access, AtFlags::EACCESS) {
        // This error is not about the file. Old container engines refuse unknown system calls, here
        // faccessat2, with EPERM. The second, older call checks the real user instead of the
        // effective user.
        Err(Errno::PERM | Errno::NOSYS) => accessat(CWD, path, access, AtFlags::empty()),
        asked => asked,
    };
    asked == Err(Errno::ACCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_and_readable_files_are_not_denied() {
        assert_eq!(denied_in(Path::new("/nonexistent"), DEVICES), None);
        // Every user may use /dev/null.
        assert_eq!(denied_in(Path::new("/dev"), "null"), None);
    }

    #[test]
    fn names_the_first_file_that_is_denied() {
        use std::os::unix::fs::PermissionsExt as _;
        if rustix::process::geteuid().is_root() {
            return; // root may use every file; a lab test checks this as another user
        }
        let directory = std::env::temp_dir().join(format!("ferrite-denied-{}", std::process::id()));
        std::fs::create_dir(&directory).expect("a directory");
        for (name, mode) in [("uverbs0", 0o600), ("uverbs1", 0), ("uverbs2", 0), ("other", 0)] {
            let file = directory.join(name);
            std::fs::write(&file, "").expect("a file");
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).expect("a mode");
        }
        let found = denied_in(&directory, DEVICES);
        assert_eq!(found, Some(directory.join("uverbs1")));
        assert_eq!(denied_in(&directory, CM), None);
        std::fs::remove_dir_all(&directory).expect("removed");
    }
}
