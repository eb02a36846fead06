//! Blobs whose contents a number decides, for tests on the real file system.

use ferrite_blob::{Algorithm, Digest, Error, Hasher, Options, Partial, Put, Start, Store};
use ferrite_testkit::Random;

/// Returns the contents of a blob. All its blocks differ.
pub(crate) fn contents(number: u64, bytes: usize) -> Vec<u8> {
    const BLOCK: usize = 4096;
    let block = Random::new(number).bytes(BLOCK);
    let mut contents = vec![0; bytes];
    for (at, part) in contents.chunks_mut(BLOCK).enumerate() {
        part.copy_from_slice(&block[..part.len()]);
        if let Some(start) = part.first_chunk_mut() {
            *start = (at as u64).to_le_bytes();
        }
    }
    contents
}

/// Returns the digest of these bytes.
pub(crate) fn digest_of(bytes: &[u8]) -> Digest {
    let mut hasher = Hasher::new(Algorithm::Sha256);
    hasher.update(bytes);
    hasher.finish()
}

/// Opens a store.
pub(crate) fn open(path: &std::path::Path) -> Result<Store, Error> {
    // However full the disk of this machine is.
    Store::open(path, Options { max_disk_percent: 100, ..Options::default() })
}

/// Begins or resumes a download.
pub(crate) fn begin(store: &Store, bytes: &[u8]) -> Result<Box<Partial>, Error> {
    match store.begin(digest_of(bytes), bytes.len() as u64)? {
        Start::Partial(partial) => Ok(partial),
        Start::Whole(blob) => panic!("{blob:?} is in the store"),
    }
}

/// Puts the right bytes of a chunk.
pub(crate) fn put(partial: &Partial, chunk: u32, bytes: &[u8]) -> Result<Put, Error> {
    let at = chunk as usize * ferrite_blob::CHUNK_BYTES as usize;
    partial.put(chunk, &bytes[at..at + partial.chunk_len(chunk)], None)
}

/// Puts what is missing, and commits.
pub(crate) fn complete(store: &Store, bytes: &[u8]) -> Result<(), Error> {
    let partial = begin(store, bytes)?;
    while let Some(chunk) = partial.next_missing(0) {
        put(&partial, chunk, bytes)?;
    }
    let blob = partial.commit()?;
    let mut read = vec![0; bytes.len()];
    blob.read_at(&mut read, 0)?;
    assert_eq!(blob.size(), bytes.len() as u64);
    assert!(read == bytes, "wrong bytes");
    Ok(())
}
