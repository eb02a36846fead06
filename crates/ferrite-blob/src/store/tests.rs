//! Tests of the store without crashes, on the simulated file system.

use std::io;
use std::sync::Arc;

use ferrite_testkit::Random;

use super::disk::Folder;
use super::shared::{data_name, map_name};
use super::simulation::{Fault, SimulatedDisk};
use super::{Blob, Options, Partial, Put, Recovered, Start, Store};
use crate::digest::{Algorithm, Digest, Hasher};
use crate::error::{Error, ErrorKind};

const CHUNK_BYTES: u32 = 32;

fn digest_of(bytes: &[u8]) -> Digest {
    let mut hasher = Hasher::new(Algorithm::Sha256);
    hasher.update(bytes);
    hasher.finish()
}

fn bytes(seed: u64, count: usize) -> Vec<u8> {
    Random::new(seed).bytes(count)
}

fn open(disk: &SimulatedDisk) -> Store {
    open_with(disk, None).expect("a store")
}

fn open_with(disk: &SimulatedDisk, max_bytes: Option<u64>) -> Result<Store, Error> {
    let options = Options { max_bytes, ..Options::default() };
    Store::open_on(Box::new(disk.clone()), options, CHUNK_BYTES)
}

fn begin(store: &Store, bytes: &[u8]) -> Box<Partial> {
    match store.begin(digest_of(bytes), bytes.len() as u64).expect("a download") {
        Start::Partial(partial) => partial,
        Start::Whole(blob) => panic!("{blob:?} is in the store"),
    }
}

fn put(partial: &Partial, chunk: u32, bytes: &[u8]) -> Result<Put, Error> {
    let chunk_bytes = bytes.chunks(CHUNK_BYTES as usize).nth(chunk as usize).expect("a chunk");
    partial.put(chunk, chunk_bytes, Some(super::chunk_checksum(chunk_bytes)))
}

fn store_blob(store: &Store, bytes: &[u8]) -> Result<Blob, Error> {
    let partial = begin(store, bytes);
    for chunk in (0..partial.chunks()).rev() {
        put(&partial, chunk, bytes)?;
    }
    partial.commit()
}

fn kind<T: std::fmt::Debug>(result: Result<T, Error>) -> ErrorKind {
    result.expect_err("an error").kind()
}

#[test]
fn returns_what_was_committed() {
    let disk = SimulatedDisk::new();
    for size in [0, 1, 31, 32, 33, 320] {
        let store = open(&disk);
        let bytes = bytes(size, size as usize);
        let blob = store_blob(&store, &bytes).expect("a blob");
        let mut read = vec![0; bytes.len()];
        blob.read_at(&mut read, 0).expect("bytes");
        assert_eq!((blob.size(), read), (size, bytes.clone()));
        assert!(matches!(store.begin(blob.digest(), size), Ok(Start::Whole(_))));
        drop((store, blob));
        let store = open(&disk);
        assert_eq!(store.blob(&digest_of(&bytes)).expect("a blob").expect("a blob").size(), size);
    }
    assert_eq!(open(&disk).recovered(), Recovered { blobs: 6, ..Recovered::default() });
}

#[test]
fn reads_only_inside_a_blob() {
    let store = open(&SimulatedDisk::new());
    let blob = store_blob(&store, &bytes(1, 50)).expect("a blob");
    blob.read_at(&mut [0; 10], 40).expect("the last bytes");
    for (len, at) in [(10, 41), (51, 0), (1, 50), (1, u64::MAX)] {
        assert_eq!(kind(blob.read_at(&mut vec![0; len], at)), ErrorKind::Misuse);
    }
}

#[test]
fn resumes_a_download_with_its_chunks() {
    let disk = SimulatedDisk::new();
    let bytes = bytes(1, 100);
    let partial = begin(&open(&disk), &bytes);
    for chunk in [1, 3] {
        assert_eq!(put(&partial, chunk, &bytes).expect("a chunk"), Put::Written);
    }
    assert_eq!(put(&partial, 1, &bytes).expect("a chunk"), Put::Present);
    drop(partial);
    let store = open(&disk);
    assert_eq!(store.usage().partials, 1);
    let partial = begin(&store, &bytes);
    assert_eq!((partial.present(), store.usage().partial_bytes), (2, 32 + 4));
    assert_eq!(
        [0, 1, 2, 3].map(|from| partial.next_missing(from)),
        [Some(0), Some(2), Some(2), None]
    );
    let mut read = [0; 4];
    partial.read(3, &mut read).expect("a chunk");
    assert_eq!(read, bytes[96..]);
}

#[test]
fn a_download_has_one_handle() {
    let store = open(&SimulatedDisk::new());
    let bytes = bytes(1, 100);
    let partial = begin(&store, &bytes);
    assert_eq!(kind(store.begin(digest_of(&bytes), 100)), ErrorKind::InUse);
    assert_eq!(kind(store.begin(digest_of(&bytes), 99)), ErrorKind::InUse);
    drop(partial);
    begin(&store, &bytes);
}

#[test]
fn another_size_begins_again() {
    let store = open(&SimulatedDisk::new());
    let bytes = bytes(1, 100);
    put(&begin(&store, &bytes), 0, &bytes).expect("a chunk");
    let Ok(Start::Partial(partial)) = store.begin(digest_of(&bytes), 99) else { panic!("no size") };
    assert_eq!((partial.present(), partial.size()), (0, 99));
}

#[test]
fn refuses_chunks_that_do_not_fit() {
    let store = open(&SimulatedDisk::new());
    let all = bytes(1, 100);
    let partial = begin(&store, &all);
    for (chunk, len) in [(0, 31), (0, 33), (3, 32), (4, 0), (4, 4), (u32::MAX, 32), (3, 0)] {
        assert_eq!(kind(partial.put(chunk, &bytes(1, len), None)), ErrorKind::Misuse);
    }
    assert_eq!(kind(partial.put(0, &all[..32], Some(1))), ErrorKind::Mismatch);
    assert_eq!(partial.present(), 0);
    assert_eq!(kind(partial.commit()), ErrorKind::Misuse);
}

#[test]
fn a_wrong_digest_is_not_committed_and_can_be_corrected() {
    let disk = SimulatedDisk::new();
    let store = open(&disk);
    let (right, wrong) = (bytes(1, 100), bytes(2, 100));
    let partial = begin(&store, &right);
    put(&partial, 0, &wrong).expect("a chunk");
    assert_eq!(partial.hash().expect("a hash"), 1);
    for chunk in 1..4 {
        put(&partial, chunk, &right).expect("a chunk");
    }
    assert_eq!(partial.hash().expect("a hash"), 4);
    assert_eq!(kind(partial.commit()), ErrorKind::Mismatch);
    assert!(store.blob(&digest_of(&right)).expect("no error").is_none());
    partial.clear(0).expect("no chunk");
    put(&partial, 0, &right).expect("a chunk");
    partial.commit().expect("a blob");
    assert_eq!(kind(partial.commit()), ErrorKind::Misuse);
    assert_eq!(kind(partial.clear(0)), ErrorKind::Misuse);
}

#[test]
fn keeps_the_last_16_rejected_downloads() {
    let disk = SimulatedDisk::new();
    for number in 0..20 {
        // A new store each time, because the numbers of names continue.
        let store = open(&disk);
        let partial = begin(&store, &bytes(number, 10));
        put(&partial, 0, &bytes(number + 100, 10)).expect("a chunk");
        assert_eq!(kind(partial.commit()), ErrorKind::Mismatch);
        partial.reject().expect("rejected");
        assert_eq!(kind(partial.put(0, &[0; 10], None)), ErrorKind::Misuse);
        begin(&store, &bytes(number, 10));
    }
    let names = disk.names();
    let bad: Vec<_> = names.iter().filter(|name| name.contains("bad/")).collect();
    assert_eq!(bad.len(), 16);
    assert!(bad[0].contains("/00000004-sha256-") && bad[15].contains("/00000019-sha256-"));
}

#[test]
fn a_chunk_that_the_disk_damaged_is_missing() {
    let disk = SimulatedDisk::new();
    let bytes = bytes(1, 100);
    let digest = digest_of(&bytes);
    let folder = Folder::Partials(Algorithm::Sha256);
    let store = open(&disk);
    let partial = begin(&store, &bytes);
    for chunk in 0..4 {
        put(&partial, chunk, &bytes).expect("a chunk");
    }
    disk.damage(folder, &data_name(&digest), 40);
    assert_eq!(kind(partial.commit()), ErrorKind::Damaged);
    assert_eq!(partial.next_missing(0), Some(1));
    put(&partial, 1, &bytes).expect("a chunk");
    disk.damage(folder, &data_name(&digest), 99);
    drop(partial);
    let partial = begin(&store, &bytes);
    assert_eq!((partial.next_missing(0), partial.present()), (Some(3), 3));
    put(&partial, 3, &bytes).expect("a chunk");
    partial.commit().expect("a blob");
}

#[test]
fn a_download_with_a_damaged_header_begins_again() {
    let disk = SimulatedDisk::new();
    let bytes = bytes(1, 100);
    for at in [0, 8, 12, 16, 24] {
        let store = open(&disk);
        put(&begin(&store, &bytes), 0, &bytes).expect("a chunk");
        disk.damage(Folder::Partials(Algorithm::Sha256), &map_name(&digest_of(&bytes)), at);
        assert_eq!(begin(&store, &bytes).present(), 0);
    }
}

#[test]
fn files_with_arbitrary_bytes_cost_no_more_than_their_chunks() {
    let folder = Folder::Partials(Algorithm::Sha256);
    for seed in 0..500 {
        let random = &mut Random::new(seed);
        let disk = SimulatedDisk::new();
        let size = 1 + random.index(300);
        let all = random.bytes(size);
        let partial = begin(&open(&disk), &all);
        for chunk in 0..partial.chunks() / 2 {
            put(&partial, chunk, &all).expect("a chunk");
        }
        drop(partial);
        let name = [data_name, map_name][random.index(2)](&digest_of(&all));
        disk.edit(folder, &name, |bytes| {
            let at = random.index(bytes.len() + 1);
            match random.below(3) {
                0 => bytes.truncate(at),
                1 => bytes.extend(random.bytes(at)),
                // Most of the map is unused, so this aims at its end.
                _ => bytes
                    .iter_mut()
                    .rev()
                    .take(at % 60)
                    .for_each(|byte| *byte = random.below(256) as u8),
            }
        });
        let store = open(&disk);
        let partial = begin(&store, &all);
        for chunk in (0..partial.chunks()).filter(|chunk| partial.checksum(*chunk).is_some()) {
            let mut bytes = vec![0; partial.chunk_len(chunk)];
            partial.read(chunk, &mut bytes).expect("a chunk");
            assert!(all[chunk as usize * 32..].starts_with(&bytes), "seed {seed}");
        }
        while let Some(chunk) = partial.next_missing(0) {
            put(&partial, chunk, &all).expect("a chunk");
        }
        partial.commit().expect("a blob");
    }
}

#[test]
fn evicts_what_was_not_read_for_the_longest_time() {
    let store = open_with(&SimulatedDisk::new(), Some(400)).expect("a store");
    let all: Vec<_> = (0..4).map(|number| bytes(number, 100)).collect();
    for bytes in &all {
        store_blob(&store, bytes).expect("a blob");
    }
    let has = |number: usize| store.shared.index().has_blob(&digest_of(&all[number]));
    store.blob(&digest_of(&all[0])).expect("a blob"); // the last read
    store_blob(&store, &bytes(9, 10)).expect("a blob");
    // 410 bytes are too many, and 300 are left at most.
    assert_eq!([0, 1, 2, 3].map(has), [true, false, false, true]);
    assert_eq!((store.usage().blob_bytes, store.usage().evicted_bytes), (210, 200));
}

#[test]
fn the_order_of_reads_survives_a_restart() {
    let disk = SimulatedDisk::new();
    let all: Vec<_> = (0..4).map(|number| bytes(number, 100)).collect();
    for bytes in &all {
        store_blob(&open(&disk), bytes).expect("a blob");
    }
    for number in [2, 0, 3, 1] {
        open(&disk).blob(&digest_of(&all[number])).expect("a blob").expect("a blob");
    }
    let store = open_with(&disk, Some(400)).expect("a store");
    store_blob(&store, &bytes(9, 10)).expect("a blob");
    let has = |number: usize| store.shared.index().has_blob(&digest_of(&all[number]));
    assert_eq!([0, 1, 2, 3].map(has), [false, true, false, true]);
}

#[test]
fn never_evicts_what_is_pinned_or_in_use() {
    let disk = SimulatedDisk::new();
    let store = open_with(&disk, Some(400)).expect("a store");
    let all: Vec<_> = (0..3).map(|number| bytes(number, 100)).collect();
    store.pin(digest_of(&all[0])).expect("a pin");
    for bytes in &all {
        store_blob(&store, bytes).expect("a blob");
    }
    let in_use = store.blob(&digest_of(&all[1])).expect("a blob");
    let download = bytes(8, 100);
    let partial = begin(&store, &download);
    put(&partial, 0, &download).expect("a chunk");
    // 332 bytes; only the third blob may go.
    assert_eq!(kind(store_blob(&store, &bytes(9, 200))), ErrorKind::Full);
    store_blob(&store, &bytes(7, 100)).expect("a blob");
    let has = |number: usize| store.shared.index().has_blob(&digest_of(&all[number]));
    assert_eq!([0, 1, 2].map(has), [true, true, false]);
    drop((in_use, partial));
    store.unpin(&digest_of(&all[0])).expect("no pin");
    assert_eq!(open(&disk).pins(), []);
    store_blob(&store, &bytes(9, 200)).expect("a blob");
}

#[test]
fn evicts_interrupted_downloads_before_blobs() {
    let store = open_with(&SimulatedDisk::new(), Some(400)).expect("a store");
    store_blob(&store, &bytes(1, 200)).expect("a blob");
    let download = bytes(2, 160);
    for chunk in 0..5 {
        put(&begin(&store, &download), chunk, &download).expect("a chunk");
    }
    store_blob(&store, &bytes(3, 60)).expect("a blob");
    assert!(store.shared.index().has_blob(&digest_of(&bytes(1, 200))));
    assert_eq!(begin(&store, &download).present(), 0);
}

#[test]
fn a_size_that_a_peer_invents_evicts_nothing() {
    let disk = SimulatedDisk::new();
    disk.set_space(10_000, 10_000);
    let store = open_with(&disk, Some(400)).expect("a store");
    let kept = bytes(1, 390);
    store_blob(&store, &kept).expect("a blob");
    let digest = digest_of(b"other");
    for size in [401, 8001, u64::MAX / 2, u64::MAX] {
        assert_eq!(kind(store.begin(digest, size)), ErrorKind::Full, "{size}");
    }
    assert!(matches!(store.begin(digest, 400), Ok(Start::Partial(_))));
    assert!(store.shared.index().has_blob(&digest_of(&kept)));
}

#[test]
fn evicts_when_the_disk_is_full() {
    let disk = SimulatedDisk::new();
    disk.set_space(1000, 500);
    let store = open(&disk);
    let (first, second) = (bytes(1, 96), bytes(2, 96));
    store_blob(&store, &first).expect("a blob");
    disk.set_space(1000, 210);
    store_blob(&store, &second)
        .expect_err("790 bytes and a blob exceed 80 %, with one blob to evict");
    assert!(!store.shared.index().has_blob(&digest_of(&first)));
    disk.set_space(1000, 150);
    assert_eq!(kind(put(&begin(&store, &first), 0, &first)), ErrorKind::Full);
}

#[test]
fn a_full_disk_fails_the_chunk_alone() {
    let disk = SimulatedDisk::new();
    let bytes = bytes(1, 100);
    let partial = begin(&open(&disk), &bytes);
    for operation in 1..=3 {
        let at = disk.operations() + operation;
        disk.set_fault(Fault::Fail(at, io::ErrorKind::StorageFull));
        assert_eq!(kind(put(&partial, 2, &bytes)), ErrorKind::Full);
        assert_eq!(partial.present(), 0);
    }
    for chunk in 0..4 {
        put(&partial, chunk, &bytes).expect("a chunk");
    }
    partial.commit().expect("a blob");
}

#[test]
fn a_failed_sync_removes_the_download() {
    let disk = SimulatedDisk::new();
    let bytes = bytes(1, 100);
    let store = open(&disk);
    let partial = begin(&store, &bytes);
    put(&partial, 0, &bytes).expect("a chunk");
    disk.set_fault(Fault::Fail(disk.operations() + 1, io::ErrorKind::Other));
    assert_eq!(kind(partial.sync()), ErrorKind::System);
    assert_eq!(kind(put(&partial, 1, &bytes)), ErrorKind::Misuse);
    let again = begin(&store, &bytes);
    assert_eq!(again.present(), 0);
    assert_eq!(kind(partial.sync()), ErrorKind::Misuse);
    drop(partial);
    assert_eq!(kind(store.begin(digest_of(&bytes), 100)), ErrorKind::InUse);
    for chunk in 0..4 {
        put(&again, chunk, &bytes).expect("a chunk");
    }
    again.commit().expect("a blob");
}

#[test]
fn refuses_a_pin_that_is_no_digest() {
    let disk = SimulatedDisk::new();
    open(&disk).pin(digest_of(b"")).expect("a pin");
    disk.damage(Folder::Root, "pins", 0);
    let error = open_with(&disk, None).expect_err("a damaged file");
    assert_eq!(error.kind(), ErrorKind::Denied);
    assert!(error.to_string().starts_with("pins, line 1: invalid digest \"rha256:"), "{error}");
}

#[test]
fn refuses_another_version() {
    let disk = SimulatedDisk::new();
    open(&disk);
    disk.damage(Folder::Root, "VERSION", 0);
    let error = open_with(&disk, None).expect_err("another version");
    assert_eq!(error.to_string(), "the store has version \"0\", and this program reads 1");
}

#[test]
fn threads_share_a_download() {
    let store = open(&SimulatedDisk::new());
    let bytes = bytes(1, 32 * 200 + 5);
    let partial: Arc<Partial> = Arc::from(begin(&store, &bytes));
    let threads: Vec<_> = (0..4u64)
        .map(|seed| {
            let (partial, bytes) = (Arc::clone(&partial), bytes.clone());
            std::thread::spawn(move || {
                let random = &mut Random::new(seed);
                while let Some(chunk) = partial.next_missing(random.below(200) as u32) {
                    match random.below(10) {
                        0 => partial.clear(chunk / 2).expect("no chunk"),
                        1 => partial.sync().expect("synced"),
                        2 => drop(partial.hash().expect("a hash")),
                        _ => drop(put(&partial, chunk, &bytes).expect("a chunk")),
                    }
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("no panic");
    }
    while let Some(chunk) = partial.next_missing(0) {
        put(&partial, chunk, &bytes).expect("a chunk");
    }
    partial.commit().expect("a blob");
}
