//! Small files in the storage directory, which are replaced as a whole: `VERSION` and `pins`. After
//! a crash, such a file has either its old or its new content.

use std::io;

use super::disk::{Access, Disk, Folder};
use crate::error::{Error, ErrorKind};

/// What is added to the name while the file is written.
const NEW: &str = ".new";

/// Returns the contents of a file, or `None` if there is no such file. Refuses more than `limit`
/// bytes.
pub(super) fn read(disk: &dyn Disk, name: &str, limit: u64) -> Result<Option<String>, Error> {
    let cannot = |error| Error::io(format!("cannot read {name}"), error);
    let file = match disk.open(Folder::Root, name, Access::Read) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(cannot(error)),
    };
    let size = file.size().map_err(cannot)?;
    if size > limit {
        let what = format!("{name} has {size} bytes, and at most {limit} are allowed; correct it");
        return Err(Error::new(ErrorKind::Denied, what));
    }
    let mut bytes = vec![0; size as usize];
    file.read_at(&mut bytes, 0).map_err(cannot)?;
    let no_text = |_| Error::new(ErrorKind::Denied, format!("{name} is no text; correct it"));
    String::from_utf8(bytes).map(Some).map_err(no_text)
}

/// Replaces the contents of a file. They are durable when this returns.
pub(super) fn replace(disk: &dyn Disk, name: &str, text: &str) -> Result<(), Error> {
    let new = format!("{name}{NEW}");
    let write = || {
        discard(disk, &new)?;
        let file = disk.open(Folder::Root, &new, Access::Create)?;
        file.write_at(text.as_bytes(), 0)?;
        file.sync()?;
        disk.rename((Folder::Root, &new), (Folder::Root, name))?;
        disk.sync_folder(Folder::Root)
    };
    write().map_err(|error| Error::io(format!("cannot write {name}"), error))
}

/// Returns whether a crash left this file, in mid replacement.
pub(super) fn is_unfinished(name: &str) -> bool {
    name.ends_with(NEW)
}

fn discard(disk: &dyn Disk, name: &str) -> io::Result<()> {
    match disk.remove(Folder::Root, name) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
