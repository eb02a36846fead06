//! Traffic of each kind over a link with checked contents: messages both ways, reads and writes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferrite_fabric::wire::{GrantToken, Rights};
use ferrite_fabric::{Error, ErrorKind, Link};
use ferrite_testkit::lab::TEST_TIMEOUT;
use ferrite_testkit::{join, until, within};

/// Number of bytes that the peer grants. The first half is only read, the second is written and
/// read back.
const REGION_BYTES: usize = 64 << 10;
const HALF: u64 = REGION_BYTES as u64 / 2;
/// Sizes of the messages of a burst: empty, inline, of one frame and of several. The writes have
/// the same sizes, except 0.
const SIZES: [usize; 8] = [0, 8, 64, 220, 1000, 8192, 8193, 30_000];
/// The time limit of the traffic: longer than any test.
const LIFETIME: Duration = Duration::from_secs(300);

pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| (seed.wrapping_mul(31).wrapping_add(at) % 251) as u8).collect()
}

/// Plays the peer: grants memory and echoes every message. Returns the number of echoed messages.
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

/// The traffic of the local side, on a thread of its own.
pub(crate) struct Traffic {
    shared: Arc<Shared>,
    thread: JoinHandle<Vec<Failed>>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    /// Numbers of completed rounds: of messages, of reads, and of writes.
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
    /// Waits for the peer's grant and starts.
    pub(crate) fn start(link: &Link) -> Self {
        Self::with_reads_of(HALF as usize, link)
    }

    /// Starts with reads of at most `read_bytes` bytes.
    pub(crate) fn with_reads_of(read_bytes: usize, link: &Link) -> Self {
        let token = within(TEST_TIMEOUT, "the peer's grant", link.recv())
            .expect("a message with the grant");
        let token = GrantToken::decode(&token.to_vec()).expect("a grant");
        let shared = Arc::new(Shared::default());
        let (link, inside) = (link.clone(), Arc::clone(&shared));
        let thread = std::thread::spawn(move || {
            within(LIFETIME, "traffic", async {
                let (messages, reads, writes) = futures_util::join!(
                    failed("messages", messages(&link, &inside)),
                    failed("reads", reads(&link, &token, &inside, read_bytes)),
                    failed("writes", writes(&link, &token, &inside, read_bytes)),
                );
                [messages, reads, writes].into_iter().flatten().collect()
            })
        });
        let traffic = Self { shared, thread };
        traffic.check_progress("at the start");
        traffic
    }

    /// Waits until every kind of traffic has completed three more rounds, or all traffic has ended.
    /// [`stop`](Self::stop) finds failures.
    #[track_caller]
    pub(crate) fn check_progress(&self, when: &str) {
        self.rounds(&[0, 1, 2], 3, when);
    }

    /// Waits for three more rounds of reads and of writes, which need only the peer's device, or
    /// for the end of all traffic.
    #[track_caller]
    pub(crate) fn check_one_sided_progress(&self) {
        self.rounds(&[1, 2], 3, "one-sided");
    }

    /// Waits for `count` more rounds of these kinds, or for the end of the traffic.
    #[track_caller]
    pub(crate) fn rounds(&self, kinds: &[usize], count: u64, when: &str) {
        let now = |kind: &usize| self.shared.rounds[*kind].load(Ordering::Relaxed);
        let before: Vec<u64> = kinds.iter().map(now).collect();
        until(TEST_TIMEOUT * 2, &format!("traffic flows ({when})"), || {
            // The caller finds out how the traffic ended.
            self.thread.is_finished()
                || kinds.iter().zip(&before).all(|(kind, was)| now(kind) >= was + count)
        });
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Stops the traffic and checks that nothing failed.
    #[track_caller]
    pub(crate) fn stop(self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        let failed = join(self.thread, TEST_TIMEOUT, "traffic ends");
        assert!(failed.is_empty(), "{failed:?}");
    }

    /// Returns how each kind of traffic failed, which must happen within the time limit.
    #[track_caller]
    pub(crate) fn failures(self, limit: Duration) -> Vec<Failed> {
        join(self.thread, limit, "the fault ends all traffic")
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
        assert!(bytes == expected, "read wrong bytes: {}", difference(&bytes, &expected));
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
                "a write of {len} bytes read back wrong: {}",
                difference(&back, &bytes)
            );
        }
        shared.rounds[2].fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// Describes which bytes are wrong. If whole packets are wrong, suspect the device, otherwise a
/// buffer.
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
