//! Crashes at every operation of random workloads. Each seed is a workload. It runs once to count
//! its operations, and then again and again, with a crash at each of them. After each crash, the
//! disk has one of the states that POSIX permits, and the store must show that
//!
//! - every blob that it has is right, and every blob that was committed is there;
//! - a download has only chunks that were put, and all that were synced;
//! - every download can be resumed and committed, and no other file is left.
//!
//! `FERRITE_BLOB_SEEDS` sets the number of seeds.

use std::collections::BTreeSet;
use std::io;

use ferrite_testkit::Random;

use super::simulation::{Fault, Ignored, SimulatedDisk};
use super::{Options, Partial, Start, Store};
use crate::digest::{Algorithm, Digest, Hasher};
use crate::error::ErrorKind;

/// Two sectors, so that no sector belongs to two chunks.
const CHUNK_BYTES: u32 = 32;

/// A blob, and what the store has promised about it.
#[derive(Clone)]
struct Truth {
    digest: Digest,
    bytes: Vec<u8>,
    /// All bytes that were put, by chunk.
    put: Vec<BTreeSet<Vec<u8>>>,
    /// Chunks that must survive a crash.
    synced: BTreeSet<u32>,
    is_committed: bool,
    is_pinned: bool,
}

impl Truth {
    fn new(random: &mut Random) -> Self {
        let chunks = random.below(6);
        let size = chunks * u64::from(CHUNK_BYTES) + [0, 1, 13][random.index(3)];
        let bytes = random.bytes(size as usize);
        let mut hasher = Hasher::new(Algorithm::ALL[random.index(2)]);
        hasher.update(&bytes);
        Self {
            digest: hasher.finish(),
            put: bytes.chunks(CHUNK_BYTES as usize).map(|_| BTreeSet::new()).collect(),
            bytes,
            synced: BTreeSet::new(),
            is_committed: false,
            is_pinned: false,
        }
    }

    fn chunk(&self, chunk: u32) -> &[u8] {
        self.bytes.chunks(CHUNK_BYTES as usize).nth(chunk as usize).expect("a chunk")
    }

    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn put(&mut self, partial: &Partial, chunk: u32, bytes: Vec<u8>) {
        let _ = partial.put(chunk, &bytes, None);
        self.put[chunk as usize].insert(bytes);
    }

    fn clear(&mut self, partial: &Partial, chunk: u32) {
        self.synced.remove(&chunk);
        let _ = partial.clear(chunk);
    }

    /// Clears the chunks that a source lied about.
    fn clear_wrong_chunks(&mut self, partial: &Partial) {
        for chunk in 0..partial.chunks() {
            let mut bytes = vec![0; partial.chunk_len(chunk)];
            if partial.read(chunk, &mut bytes).is_ok() && bytes != self.chunk(chunk) {
                self.clear(partial, chunk);
            }
        }
    }
}

fn open(disk: &SimulatedDisk, max_bytes: Option<u64>) -> Result<Store, crate::Error> {
    let options = Options { max_bytes, ..Options::default() };
    Store::open_on(Box::new(disk.clone()), options, CHUNK_BYTES)
}

/// Runs a workload, and records what the store promises. Errors of the disk do not end it. A store
/// that evicts promises only to keep what is pinned.
fn run(disk: &SimulatedDisk, truths: &mut [Truth], random: &mut Random) {
    let max_bytes = if random.below(4) == 0 { Some(200) } else { None };
    run_steps(disk, truths, max_bytes, random);
    for truth in truths.iter_mut().filter(|truth| max_bytes.is_some() && !truth.is_pinned) {
        truth.synced.clear();
        truth.is_committed = false;
    }
}

fn run_steps(
    disk: &SimulatedDisk,
    truths: &mut [Truth],
    max_bytes: Option<u64>,
    random: &mut Random,
) {
    let Ok(store) = open(disk, max_bytes) else { return };
    let mut partials: Vec<Option<Box<Partial>>> = truths.iter().map(|_| None).collect();
    for _ in 0..10 + random.below(24) {
        let at = random.index(truths.len());
        let truth = &mut truths[at];
        let Some(partial) = &partials[at] else {
            let lie = random.below(10) == 0;
            if lie {
                truth.synced.clear();
            }
            match store.begin(truth.digest, truth.size() + u64::from(lie)) {
                // The next step begins it with the right size.
                Ok(Start::Partial(_)) if lie => {}
                Ok(Start::Partial(partial)) => {
                    if max_bytes.is_some() && !truth.is_pinned {
                        // It may have been evicted.
                        truth.is_committed = false;
                        truth.synced.retain(|chunk| partial.checksum(*chunk).is_some());
                    }
                    partials[at] = Some(partial);
                }
                _ => {}
            }
            continue;
        };
        match random.below(20) {
            0 if !truth.bytes.is_empty() => {
                let chunk = random.below(u64::from(partial.chunks())) as u32;
                truth.clear(partial, chunk);
            }
            1 => {
                if let Some(chunk) = partial.next_missing(0) {
                    truth.put(partial, chunk, random.bytes(partial.chunk_len(chunk)));
                }
            }
            2 | 3 => match partial.sync() {
                Ok(()) => {
                    let present = |chunk: &u32| partial.checksum(*chunk).is_some();
                    truth.synced = (0..partial.chunks()).filter(present).collect();
                }
                // The files are removed, unless the host crashed.
                Err(_) if !disk.has_crashed() => truth.synced.clear(),
                Err(_) => {}
            },
            4 => drop(partial.hash()),
            5 => partials[at] = None,
            6 => truth.is_pinned |= store.pin(truth.digest).is_ok(),
            _ => match partial.next_missing(random.below(6) as u32).or(partial.next_missing(0)) {
                Some(chunk) => truth.put(partial, chunk, truth.chunk(chunk).to_vec()),
                None => match partial.commit() {
                    Ok(_) => {
                        truth.is_committed = true;
                        partials[at] = None;
                    }
                    Err(error) if error.kind() == ErrorKind::Mismatch => {
                        if random.below(2) == 0 {
                            truth.clear_wrong_chunks(partial);
                        } else {
                            truth.synced.clear();
                            let _ = partial.reject();
                            partials[at] = None;
                        }
                    }
                    Err(_) => {
                        if !disk.has_crashed() {
                            truth.synced.clear();
                        }
                        partials[at] = None;
                    }
                },
            },
        }
    }
}

/// Checks the promises, and completes all downloads.
fn check(disk: &SimulatedDisk, truths: &mut [Truth]) -> Result<(), String> {
    let store = open(disk, None).map_err(|error| format!("cannot open the store: {error}"))?;
    for truth in &mut *truths {
        let digest = truth.digest;
        if truth.is_pinned && !store.pins().contains(&digest) {
            return Err(format!("the pin of {digest} is lost"));
        }
        match store.begin(digest, truth.size()).map_err(|error| error.to_string())? {
            Start::Whole(_) => {}
            Start::Partial(_) if truth.is_committed => return Err(format!("{digest} is lost")),
            Start::Partial(partial) => {
                check_chunks(&partial, truth, disk.has_garbage())?;
                truth.clear_wrong_chunks(&partial);
                while let Some(chunk) = partial.next_missing(0) {
                    let bytes = truth.chunk(chunk).to_vec();
                    let stored = partial.put(chunk, &bytes, None);
                    truth.put[chunk as usize].insert(bytes);
                    stored.map_err(|error| error.to_string())?;
                }
                partial.commit().map_err(|error| format!("cannot commit: {error}"))?;
                truth.is_committed = true;
            }
        }
        let blob = store.blob(&digest).map_err(|error| error.to_string())?.ok_or("no blob")?;
        let mut bytes = vec![0; truth.bytes.len()];
        blob.read_at(&mut bytes, 0).map_err(|error| error.to_string())?;
        if blob.size() != truth.size() || bytes != truth.bytes {
            return Err(format!("the committed blob {digest} is wrong"));
        }
    }
    let is_left = |name: &String| name.contains("partial/") || name.ends_with(".new");
    match disk.names().into_iter().find(is_left) {
        Some(name) => Err(format!("{name} is left")),
        None => Ok(()),
    }
}

fn check_chunks(partial: &Partial, truth: &Truth, has_garbage: bool) -> Result<(), String> {
    let digest = truth.digest;
    for chunk in 0..partial.chunks() {
        let mut bytes = vec![0; partial.chunk_len(chunk)];
        match partial.checksum(chunk).is_some() {
            true => {
                partial.read(chunk, &mut bytes).map_err(|error| error.to_string())?;
                if !truth.put[chunk as usize].contains(&bytes) {
                    return Err(format!("chunk {chunk} of {digest} was never put"));
                }
            }
            false if truth.synced.contains(&chunk) && !has_garbage => {
                return Err(format!("chunk {chunk} of {digest} was synced and is lost"));
            }
            false => {}
        }
    }
    Ok(())
}

/// One workload.
struct Workload {
    seed: u64,
    ignored: Option<Ignored>,
}

impl Workload {
    /// Runs the workload with a fault. Returns the disk and the promises.
    fn run(&self, fault: Fault) -> (SimulatedDisk, Vec<Truth>) {
        let random = &mut Random::new(self.seed);
        let disk = SimulatedDisk::new();
        disk.set_fault(fault);
        if let Some(ignored) = self.ignored {
            disk.set_ignored(ignored);
        }
        let mut truths: Vec<_> = (0..=random.below(2)).map(|_| Truth::new(random)).collect();
        truths.dedup_by_key(|truth| truth.digest);
        run(&disk, &mut truths, random);
        (disk, truths)
    }

    /// Runs it with a fault and a crash after it, and checks what is left.
    fn check(&self, fault: Fault, at: u64) -> Result<(), String> {
        let (disk, mut truths) = self.run(fault);
        let random = &mut Random::new(self.seed << 16 | at);
        let mut disk = disk.after_crash(random);
        // Some hosts crash again during the recovery.
        while random.below(4) == 0 {
            disk.set_fault(Fault::Crash(random.below(20)));
            let _ = check(&disk, &mut truths);
            disk = disk.after_crash(random);
        }
        disk.set_fault(Fault::None);
        check(&disk, &mut truths)
            .map_err(|error| format!("seed {}, {fault:?}, operation {at}: {error}", self.seed))
    }

    fn crash_at_every_operation(&self) -> Result<u64, String> {
        let operations = self.run(Fault::None).0.operations();
        for at in 1..=operations {
            self.check(Fault::Crash(at), at)?;
        }
        Ok(operations)
    }
}

fn seeds() -> std::ops::Range<u64> {
    let number = std::env::var("FERRITE_BLOB_SEEDS").ok();
    0..number.map_or(1000, |number| number.parse().expect("FERRITE_BLOB_SEEDS: a number"))
}

#[test]
fn a_crash_at_any_operation_loses_no_promise() {
    let mut crashes = 0;
    for seed in seeds() {
        let workload = Workload { seed, ignored: None };
        crashes += workload.crash_at_every_operation().expect("all promises kept");
    }

    assert!(crashes > 20 * seeds().end, "workloads are too short: {crashes} crashes");
}

#[test]
fn a_failed_operation_and_a_later_crash_lose_no_promise() {
    for seed in seeds() {
        let workload = Workload { seed, ignored: None };
        let operations = workload.run(Fault::None).0.operations();
        let random = &mut Random::new(seed);
        for kind in [io::ErrorKind::StorageFull, io::ErrorKind::Other] {
            let at = 1 + random.below(operations);
            workload.check(Fault::Fail(at, kind), at).expect("all promises kept");
        }
    }
}

/// Returns what the checks say of a disk that ignores a sync.
fn found_on_disk_that(ignored: Ignored) -> String {
    let check = |seed| Workload { seed, ignored: Some(ignored) }.crash_at_every_operation().err();
    (0..200).find_map(check).expect("an error")
}

#[test]
fn notices_when_files_are_not_synced() {
    let found = found_on_disk_that(Ignored::Files);
    assert!(found.contains("is wrong"), "{found}");
}

#[test]
fn notices_when_folders_are_not_synced() {
    let found = found_on_disk_that(Ignored::Folders);
    assert!(found.contains("is lost"), "{found}");
}
