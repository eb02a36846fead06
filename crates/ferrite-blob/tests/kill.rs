//! A process that uses a store is killed at random moments. Whatever it reported before, the next
//! process finds: all chunks that were put, and all blobs that were committed.
//!
//! A killed process loses nothing that the kernel has, so this shows less than the simulated
//! crashes of the host. It shows that the real file system is used as the simulated one.

mod shared {
    pub(crate) mod blobs;
}

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use ferrite_blob::{CHUNK_BYTES, Start};
use ferrite_testkit::process::{KillOnDrop, rerun_as, role};
use ferrite_testkit::{Random, TIMEOUT, TempDir, until};
use shared::blobs::{complete, contents, digest_of, open, put};

const TEST: &str = "a_killed_process_loses_nothing_that_it_reported";
const DIRECTORY: &str = "FERRITE_BLOB_DIRECTORY";
const ROUNDS: u64 = 12;

/// Returns the contents of blob `number`: up to three chunks.
fn blob(number: u64) -> Vec<u8> {
    let chunks = number % 3;
    contents(number, chunks as usize * CHUNK_BYTES as usize + 1000 + number as usize)
}

/// Downloads one blob after another, and appends what it has done to a file.
fn download_until_killed(directory: &Path) {
    let seed = std::process::id().into();
    let random = &mut Random::new(seed);
    let mut log = OpenOptions::new().append(true).open(directory.join("log")).expect("a log");
    let mut report = |line: String| log.write_all(line.as_bytes()).expect("a line");
    let store = open(&directory.join("store")).expect("a store");
    for number in 0.. {
        let bytes = blob(number);
        let start = store.begin(digest_of(&bytes), bytes.len() as u64).expect("a start");
        let Start::Partial(partial) = start else { continue };
        while let Some(chunk) = {
            let from = random.below(u64::from(partial.chunks())) as u32;
            partial.next_missing(from).or(partial.next_missing(0))
        } {
            put(&partial, chunk, &bytes).expect("a chunk");
            report(format!("put {number} {chunk}\n"));
            if random.below(4) == 0 {
                partial.sync().expect("synced");
            }
        }
        partial.commit().expect("a blob");
        report(format!("committed {number}\n"));
    }
}

/// Checks what the killed process reported. Returns the number of blobs that it committed.
fn check(directory: &Path) -> usize {
    let log = fs::read_to_string(directory.join("log")).expect("a log");
    let store = open(&directory.join("store")).expect("the lock of the killed process is free");
    let mut committed = 0;
    for line in log.lines() {
        let words: Vec<_> = line.split(' ').collect();
        let number = words[1].parse().expect("a number");
        let bytes = blob(number);
        let start = store.begin(digest_of(&bytes), bytes.len() as u64).expect("a start");
        match start {
            Start::Partial(partial) => {
                assert_eq!(words[0], "put", "blob {number} is lost");
                let chunk = words[2].parse().expect("a chunk");
                let mut read = vec![0; partial.chunk_len(chunk)];
                partial.read(chunk, &mut read).expect("the chunk");
                assert!(bytes[chunk as usize * CHUNK_BYTES as usize..].starts_with(&read));
            }
            Start::Whole(blob) => {
                let mut read = vec![0; bytes.len()];
                blob.read_at(&mut read, 0).expect("the blob");
                assert!(read == bytes, "blob {number} is wrong");
            }
        }
        committed += usize::from(words[0] == "committed");
    }
    committed
}

#[test]
fn a_killed_process_loses_nothing_that_it_reported() {
    if role().is_some() {
        download_until_killed(std::env::var_os(DIRECTORY).expect("a directory").as_ref());
        return;
    }
    let directory = TempDir::new("blob-kill");
    let mut committed = 0;
    for round in 0..ROUNDS {
        let random = &mut Random::new(round);
        let log = directory.join("log");
        File::create(&log).expect("a log");
        let mut command = rerun_as(TEST, "downloader", &[]);
        command.env(DIRECTORY, directory.path());
        let mut child = KillOnDrop(command.spawn().expect("a child"));
        let lines = 1 + random.below(8) as usize;
        until(TIMEOUT, "the child has done something", || {
            assert_eq!(child.0.try_wait().expect("a child"), None, "the child ended");
            fs::read_to_string(&log).expect("a log").lines().count() >= lines
        });
        // The moment is random, which is the load.
        std::thread::sleep(Duration::from_micros(random.below(20_000)));
        child.0.kill().expect("killed");
        child.0.wait().expect("ended");
        committed += check(directory.path());
    }
    assert!(committed > 0, "no child committed a blob");
    // The interrupted download can be completed.
    let store = open(&directory.join("store")).expect("a store");
    let next =
        (0..).map(blob).find(|bytes| store.blob(&digest_of(bytes)).expect("no error").is_none());
    complete(&store, &next.expect("an interrupted download")).expect("a blob");
}
