//! The file `pins`: one digest per line. Blobs that it names are never evicted. It may name blobs
//! that the store does not have yet.

use std::collections::BTreeSet;

use super::disk::Disk;
use super::small_file;
use crate::digest::Digest;
use crate::error::{Error, ErrorKind};

const NAME: &str = "pins";
/// Enough for 100,000 lines. An operator can edit the file, so its size is checked.
const LIMIT_BYTES: u64 = 16 << 20;

/// Reads the file. A line that is no digest is an error: to ignore it would mean to evict a blob
/// that an operator wanted to keep.
pub(super) fn read(disk: &dyn Disk) -> Result<BTreeSet<Digest>, Error> {
    let text = small_file::read(disk, NAME, LIMIT_BYTES)?.unwrap_or_default();
    let mut pins = BTreeSet::new();
    for (number, line) in (1..).zip(text.lines().map(str::trim)) {
        if !line.is_empty() {
            let digest = line.parse().map_err(|error| {
                let what = format!("{NAME}, line {number}: {error}; correct or remove the line");
                Error::new(ErrorKind::Denied, what)
            })?;
            pins.insert(digest);
        }
    }
    Ok(pins)
}

/// Replaces the file.
pub(super) fn write(disk: &dyn Disk, pins: &BTreeSet<Digest>) -> Result<(), Error> {
    let text: String = pins.iter().map(|digest| format!("{digest}\n")).collect();
    small_file::replace(disk, NAME, &text)
}
