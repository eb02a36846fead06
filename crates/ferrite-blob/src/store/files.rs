//! The two files of a download: creates them, or opens and checks what an earlier run left.

use std::io;

use super::disk::{Access, Disk, DiskFile, Folder};
use super::map::{ChunkMap, HEADER_BYTES, Shape};
use super::shared::{Shared, data_name, map_name};
use crate::digest::Digest;

/// The open files of a download, and which chunks they have.
pub(super) struct Opened {
    pub(super) data: Box<dyn DiskFile>,
    pub(super) map: Box<dyn DiskFile>,
    pub(super) chunks: ChunkMap,
}

/// Opens the files of a download. Creates them if there are none, or if they are damaged or for
/// another size.
pub(super) fn open(shared: &Shared, digest: &Digest, shape: &Shape) -> io::Result<Opened> {
    if let Some(opened) = resume(&*shared.disk, digest, shape)? {
        return Ok(opened);
    }
    shared.discard_partial(digest)?;
    create(&*shared.disk, digest, shape).inspect_err(|_| drop(shared.discard_partial(digest)))
}

/// Writes the checksum of a chunk, if it has one, and then its bit.
pub(super) fn write_mark(
    file: &dyn DiskFile,
    shape: &Shape,
    chunks: &ChunkMap,
    chunk: u32,
    sum: Option<u32>,
) -> io::Result<()> {
    if let Some(sum) = sum {
        file.write_at(&sum.to_le_bytes(), shape.sum_at(chunk))?;
    }
    file.write_at(&[chunks.bit_byte(chunk)], shape.bit_at(chunk))
}

fn create(disk: &dyn Disk, digest: &Digest, shape: &Shape) -> io::Result<Opened> {
    let folder = Folder::Partials(digest.algorithm());
    let map = disk.open(folder, &map_name(digest), Access::Create)?;
    map.write_at(&shape.header(), 0)?;
    map.set_size(shape.map_bytes())?;
    let data = disk.open(folder, &data_name(digest), Access::Create)?;
    data.set_size(shape.size())?; // sparse
    Ok(Opened { data, map, chunks: ChunkMap::new(shape) })
}

/// Opens existing files. Returns `None` if nothing in them can be used.
fn resume(disk: &dyn Disk, digest: &Digest, shape: &Shape) -> io::Result<Option<Opened>> {
    let folder = Folder::Partials(digest.algorithm());
    let Some(map) = existing(disk.open(folder, &map_name(digest), Access::Write))? else {
        return Ok(None);
    };
    let Some(data) = existing(disk.open(folder, &data_name(digest), Access::Write))? else {
        return Ok(None);
    };
    // Sizes are compared before memory is allocated for the map.
    let mut header = [0; HEADER_BYTES];
    if map.size()? != shape.map_bytes()
        || data.size()? != shape.size()
        || map.read_at(&mut header, 0).is_err()
        || Shape::from_header(&header) != Some(*shape)
    {
        return Ok(None);
    }
    let (at, len) = ChunkMap::place(shape);
    let mut bytes = vec![0; len as usize];
    if map.read_at(&mut bytes, at).is_err() {
        return Ok(None);
    }
    let mut chunks = ChunkMap::from_bytes(shape, &bytes);
    let mut buffer = Vec::new();
    for chunk in 0..shape.chunks() {
        let Some(sum) = chunks.sum(chunk) else { continue };
        buffer.resize(shape.chunk_len(chunk), 0);
        let is_right = data.read_at(&mut buffer, shape.offset(chunk)).is_ok()
            && crc32c::crc32c(&buffer) == sum;
        if !is_right {
            chunks.remove(chunk);
            write_mark(&*map, shape, &chunks, chunk, None)?;
        }
    }
    Ok(Some(Opened { data, map, chunks }))
}

fn existing(opened: io::Result<Box<dyn DiskFile>>) -> io::Result<Option<Box<dyn DiskFile>>> {
    match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some),
    }
}
