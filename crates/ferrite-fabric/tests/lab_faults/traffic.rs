//! Traffic of each kind over a link, with contents checked: messages both ways, reads and writes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferrite_fabric::wire::{GrantToken, Rights};
use ferrite_fabric::{Error, ErrorKind, Link};

use crate::harness::{TEST_TIMEOUT, join, until, within};

/// Bytes that the peer grants: the first half is only read, the second written and read back.
const REGION_BYTES: usize = 64 << 10;
const HALF: u64 = REGION_BYTES as u64 / 2;
/// Messages of a burst: empty, inline, of one frame and of several.
const SIZES: [usize; 8] = [0, 8, 64, 220, 1000, 8192, 8193, 30_000];
/// Longer than any test lets it run.
const LIFE: Duration = Duration::from_secs(300);

pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| (seed.wrapping_mul(31).wrapping_add(at) % 251) as u8).collect()
}

/// The peer's part: grants memory, and sends every message back. Returns how many.
pub(crate) async fn serve(link: Link) -> Result<u64, Error> {
    let mut buf = link.fabric().buffer(REGION_BYTES)?;
    buf.copy_from_slice(&pattern(0, REGION_BYTES));
    let region = link.register_memory(buf, Rights::READ_WRITE).map_err(|(_, error)| error)?;
    link.send_bytes(0, &region.grant(&link).encode()).await?;
    let mut echoed = 0;
    loop {
        match link.recv().await {
            Ok(message) => link.send_parts(message.channel(), message.into_pieces()).await?,
            Err(error) if error.kind() == ErrorKind::Closed => return Ok(echoed),
            Err(error) => return Err(error),
        }
        echoed += 1;
    }
}

/// The own part, on a thread of its own.
pub(crate) struct Traffic {
    shared: Arc<Shared>,
    thread: JoinHandle<Vec<Failed>>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    /// Rounds of messages, reads, writes.
    rounds: [AtomicU64; 3],
}

/// How one kind of traffic ended.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) kind: &'static str,
    pub(crate) error: Error,
    pub(crate) at: Instant,
}

impl Traffic {
    /// Begins; the peer's grant comes first.
    pub(crate) fn start(link: &Link) -> Self {
        Self::with_reads_of(HALF as usize, link)
    }

    /// The same, with reads of at most so many bytes.
    pub(crate) fn with_reads_of(read_bytes: usize, link: &Link) -> Self {
        let token = within(TEST_TIMEOUT, "the peer's grant", link.recv()).expect("the grant");
        let token = GrantToken::decode(&token.to_vec()).expect("a grant");
        let shared = Arc::new(Shared::default());
        let (link, inside) = (link.clone(), Arc::clone(&shared));
        let thread = std::thread::spawn(move || {
            within(LIFE, "traffic", async {
                let (messages, reads, writes) = futures_util::join!(
                    failed("messages", messages(&link, &inside)),
                    failed("reads", reads(&link, &token, &inside, read_bytes)),
                    failed("writes", writes(&link, &token, &inside, read_bytes)),
                );
                [messages, reads, writes].into_iter().flatten().collect()
            })
        });
        let traffic = Self { shared, thread };
        traffic.flows("at the start");
        traffic
    }

    /// Every kind of it goes on.
    #[track_caller]
    pub(crate) fn flows(&self, when: &str) {
        self.rounds(&[0, 1, 2], 3, when);
    }

    /// So does what needs the peer's device only.
    #[track_caller]
    pub(crate) fn flows_one_sided(&self) {
        self.rounds(&[1, 2], 3, "one-sided");
    }

    /// WaitSet for `count` more rounds of these kinds.
    #[track_caller]
    pub(crate) fn rounds(&self, kinds: &[usize], count: u64, when: &str) {
        let now = |kind: &usize| self.shared.rounds[*kind].load(Ordering::Relaxed);
        let before: Vec<u64> = kinds.iter().map(now).collect();
        until(TEST_TIMEOUT * 2, &format!("traffic flows {when}"), || {
            // How it ended is for the caller to find out.
            self.thread.is_finished()
                || kinds.iter().zip(&before).all(|(kind, was)| now(kind) >= was + count)
        });
    }

    pub(crate) fn is_over(&self) -> bool {
        self.thread.is_finished()
    }

    /// Ends it in good order.
    #[track_caller]
    pub(crate) fn stop(self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        let failed = join(self.thread, TEST_TIMEOUT, "traffic ends");
        assert!(failed.is_empty(), "{failed:?}");
    }

    /// How each kind ended, by itself and in time.
    #[track_caller]
    pub(crate) fn failures(self, limit: Duration) -> Vec<Failed> {
        join(self.thread, limit, "all traffic ends by the fault")
    }
}

async fn failed(
    kind: &'static str,
    traffic: impl Future<Output = Result<(), Error>>,
) -> Option<Failed> {
    traffic.await.err().map(|error| Failed { kind, error, at: Instant::now() })
}

async fn messages(link: &Link, shared: &Shared) -> Result<(), Error> {
    let mut seed = 0;
    while !shared.stop.load(Ordering::Relaxed) {
        let sent: Vec<_> =
            SIZES.iter().zip(seed..).map(|(len, seed)| pattern(seed, *len)).collect();
        for bytes in &sent {
            link.send_bytes(1, bytes).await?;
        }
        for (at, bytes) in sent.iter().enumerate() {
            let answer = link.recv().await?;
            assert!(
                answer.to_vec() == *bytes,
                "message {at} of burst {seed} came back as {answer:?}"
            );
        }
        seed += 1;
        shared.rounds[0].fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

async fn reads(
    link: &Link,
    token: &GrantToken,
    shared: &Shared,
    read_bytes: usize,
) -> Result<(), Error> {
    let expected = pattern(0, HALF as usize);
    while !shared.stop.load(Ordering::Relaxed) {
        let bytes = read_in_pieces(link, token, 0, HALF as usize, read_bytes).await?;
        assert!(
            bytes == expected,
            "what was read is what is there: {}",
            difference(&bytes, &expected)
        );
        shared.rounds[1].fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

async fn writes(
    link: &Link,
    token: &GrantToken,
    shared: &Shared,
    read_bytes: usize,
) -> Result<(), Error> {
    let mut seed = 0;
    while !shared.stop.load(Ordering::Relaxed) {
        for len in SIZES.into_iter().filter(|len| *len > 0) {
            seed += 1;
            let bytes = pattern(seed, len);
            let mut buf = link.fabric().buffer(len)?;
            buf.copy_from_slice(&bytes);
            link.rdma_write(token, HALF, buf)?.await?;
            let back = read_in_pieces(link, token, HALF, len, read_bytes).await?;
            assert!(
                back == bytes,
                "{len} bytes that were written are there: {}",
                difference(&back, &bytes)
            );
        }
        shared.rounds[2].fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// Which bytes are wrong: whole packets point at the device, anything else at a buffer.
fn difference(bytes: &[u8], expected: &[u8]) -> String {
    let wrong: Vec<usize> = (0..bytes.len()).filter(|at| bytes[*at] != expected[*at]).collect();
    format!("{} differ, from {:?} to {:?}", wrong.len(), wrong.first(), wrong.last())
}

async fn read_in_pieces(
    link: &Link,
    token: &GrantToken,
    offset: u64,
    len: usize,
    piece: usize,
) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        let buf = link.fabric().buffer(piece.min(len - bytes.len()))?;
        bytes.extend_from_slice(&link.rdma_read(token, offset + bytes.len() as u64, buf)?.await?);
    }
    Ok(bytes)
}
