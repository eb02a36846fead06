//! One queue pair with its memory and its completions.
//!
//! ```text
//! region  | outgoing: size bytes | incoming: size bytes |      each rounded up to a cache line
//! message | number of the round, 8 bytes | pattern … | low byte of the number |
//! ```
//!
//! A message of up to 8 bytes has no number at its start, only the last byte. The last byte changes
//! with every round; the receiver of a write polls it.

use std::os::fd::AsFd as _;

use anyhow::{Context as _, ensure};
use ferrite_verbs::{
    Access, CmId, CompletionChannel, CompletionQueue, Context, ErrorKind, MemoryRegion, QueuePair,
    QueuePairConfig, RecvRequest, RemoteSlice, SendRequest, State, WorkCompletion,
};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::watch::Watch;
use super::wire::Memory;
use super::{Mode, Op};

const CACHE_LINE: usize = 64;
/// Number of posted receives. Only one message is in flight; the other receives allow a side to
/// repost late.
const RECV_DEPTH: u32 = 16;
const SEND_DEPTH: u32 = 128;
/// One in this many sends or writes is signaled. Its completion frees the queue entries of all
/// requests up to it.
const SIGNAL_EVERY: u64 = 50;
/// The `wr_id` of receives. The `wr_id` of a request in the send queue is its number, from 1.
const RECV_ID: u64 = u64::MAX;
/// Number of empty polls between two checks of the connection.
const SPINS_PER_CHECK: u32 = 1 << 14;

/// Returns the peer's rights to our memory.
pub(super) fn access() -> Access {
    Access::REMOTE_WRITE | Access::REMOTE_READ
}

/// Creates the queue pair and its endpoint on the device that the CM chose.
///
/// Posts receives if the operation needs them, because the peer may send as soon as the connection
/// is established.
pub(super) fn open(
    context: &Context,
    id: &CmId,
    op: Op,
    mode: Mode,
    size: u32,
    inline: u32,
) -> anyhow::Result<(QueuePair, Endpoint)> {
    let domain = context.allocate_protection_domain()?;
    let channel = match mode {
        Mode::Event => Some(blocking_channel(context)?),
        Mode::Poll => None,
    };
    let cq = context.create_completion_queue(SEND_DEPTH + RECV_DEPTH, channel.as_ref(), 0)?;
    let mut config = QueuePairConfig::new(&cq);
    config.max_send_wr = SEND_DEPTH;
    config.max_recv_wr = RECV_DEPTH;
    config.max_inline = if size <= inline && op != Op::Read { size } else { 0 };
    let qp = match domain.create_queue_pair(&config) {
        // The only way to find the device's inline limit is to try. Continues without inline data.
        Err(error) if config.max_inline > 0 && error.kind() == ErrorKind::DeviceLimit => {
            config.max_inline = 0;
            domain.create_queue_pair(&config)?
        }
        other => other?,
    };
    let size = usize::try_from(size)?;
    let stride = size.next_multiple_of(CACHE_LINE);
    let region = domain.allocate(2 * stride, access())?;
    let inline = config.max_inline > 0;
    let mut endpoint =
        Endpoint { cq, channel, region, size, stride, inline, armed: false, posted: 0, reaped: 0 };
    let pattern: Vec<u8> = (0..size).map(pattern_byte).collect();
    endpoint.region.write(0, &pattern);

    qp.modify(&id.queue_pair_attributes(State::INIT)?.access(access()))?;
    if op == Op::Send {
        for _ in 0..RECV_DEPTH {
            endpoint.post_recv(&qp)?;
        }
    }
    Ok((qp, endpoint))
}

/// Creates a channel that waits for an event in one system call. A wait needs no timeout: if the
/// peer is dead, the watcher stops the queue pair, which ends the wait.
fn blocking_channel(context: &Context) -> anyhow::Result<CompletionChannel> {
    let channel = context.create_completion_channel()?;
    let flags = fcntl_getfl(channel.as_fd())?;
    fcntl_setfl(channel.as_fd(), flags & !OFlags::NONBLOCK)?;
    Ok(channel)
}

/// The memory and the completions of one queue pair.
pub(super) struct Endpoint {
    cq: CompletionQueue,
    channel: Option<CompletionChannel>,
    region: MemoryRegion,
    size: usize,
    stride: usize,
    inline: bool,
    /// Whether the next completion raises an event.
    armed: bool,
    /// Number of requests posted to the send queue. The first `reaped` of these are known to have
    /// left it.
    posted: u64,
    reaped: u64,
}

impl Endpoint {
    /// Returns whether messages are sent inline, inside the work request.
    pub(super) fn inline(&self) -> bool {
        self.inline
    }

    /// Returns the memory that the peer writes to.
    pub(super) fn incoming(&self) -> Memory {
        let remote = self.region.remote(self.stride..self.stride + self.size);
        Memory { addr: remote.addr, rkey: remote.rkey }
    }

    /// Returns the memory that the peer reads.
    pub(super) fn outgoing(&self) -> Memory {
        let remote = self.region.remote(0..self.size);
        Memory { addr: remote.addr, rkey: remote.rkey }
    }

    /// Converts memory that the peer announced.
    pub(super) fn remote(&self, memory: Memory) -> RemoteSlice {
        RemoteSlice { addr: memory.addr, len: self.size as u64, rkey: memory.rkey }
    }

    /// Writes the round's number into the outgoing message.
    pub(super) fn stamp(&mut self, round: u64) {
        if self.size > size_of::<u64>() {
            self.region.write(0, &round.to_be_bytes());
        }
        self.region.write(self.size - 1, &[low_byte(round)]);
    }

    /// Checks the number of the incoming message.
    pub(super) fn verify(&self, round: u64) -> anyhow::Result<()> {
        let mut number = [0; size_of::<u64>()];
        if self.size > number.len() {
            self.region.read(self.stride, &mut number);
        } else {
            number = round.to_be_bytes();
        }
        let last = self.region.load(self.stride + self.size - 1);
        ensure!(
            u64::from_be_bytes(number) == round && last == low_byte(round),
            "message {round} arrived with number {} and last byte {last:#04x}: the data is corrupt",
            u64::from_be_bytes(number)
        );
        Ok(())
    }

    /// Checks the incoming message against the pattern, without the bytes that hold the number.
    pub(super) fn verify_pattern(&self) -> anyhow::Result<()> {
        let numbered = if self.size > size_of::<u64>() { size_of::<u64>() } else { 0 };
        let bytes = self.region.to_vec(self.stride, self.size);
        let wrong = (numbered..self.size - 1).find(|at| bytes[*at] != pattern_byte(*at));
        ensure!(
            wrong.is_none(),
            "byte {} of the message is wrong: the data is corrupt",
            wrong.unwrap_or(0)
        );
        Ok(())
    }

    /// Overwrites the last byte, which the next read must restore.
    pub(super) fn wipe(&mut self) {
        self.region.write(self.stride + self.size - 1, &[!low_byte(0)]);
    }

    /// Sends the outgoing message, or writes it to `remote`.
    pub(super) fn post(
        &mut self,
        qp: &QueuePair,
        remote: Option<RemoteSlice>,
    ) -> anyhow::Result<()> {
        while self.posted - self.reaped >= SEND_DEPTH.into() {
            self.reap_one(None)?;
        }
        self.posted += 1;
        let local = [self.region.sge(0..self.size)];
        let mut request = match remote {
            None => SendRequest::send(self.posted, &local),
            Some(remote) => SendRequest::write(self.posted, &local, remote),
        };
        if self.inline {
            request = request.inline();
        }
        if self.posted.is_multiple_of(SIGNAL_EVERY) {
            request = request.signaled();
        }
        Ok(qp.post_send(&[request])?)
    }

    /// Reads `remote` into the incoming message.
    pub(super) fn post_read(&mut self, qp: &QueuePair, remote: RemoteSlice) -> anyhow::Result<()> {
        self.posted += 1;
        let local = [self.region.sge(self.stride..self.stride + self.size)];
        Ok(qp.post_send(&[SendRequest::read(self.posted, &local, remote).signaled()])?)
    }

    /// Posts a write of no bytes. It completes with success while the peer's device answers.
    pub(super) fn probe(&mut self, qp: &QueuePair) -> anyhow::Result<()> {
        self.posted += 1;
        let nowhere = RemoteSlice { addr: 0, len: 0, rkey: 0 };
        qp.post_send(&[SendRequest::write(self.posted, &[], nowhere).signaled()])?;
        Ok(())
    }

    /// Posts a receive for the incoming message.
    pub(super) fn post_recv(&self, qp: &QueuePair) -> anyhow::Result<()> {
        let local = [self.region.sge(self.stride..self.stride + self.size)];
        Ok(qp.post_recv(&[RecvRequest::new(RECV_ID, &local)])?)
    }

    /// Waits until a message has been received.
    pub(super) fn wait_recv(&mut self, watch: &Watch) -> anyhow::Result<()> {
        loop {
            let completion = self.next(Some(watch))?;
            if completion.wr_id() == RECV_ID {
                let len = completion.byte_len() as usize;
                ensure!(
                    len == self.size,
                    "received a message of {len} bytes, expected {}",
                    self.size
                );
                return Ok(());
            }
            self.reaped = completion.wr_id();
        }
    }

    /// Waits for everything that was posted to the send queue.
    pub(super) fn wait_sends(&mut self, watch: &Watch) -> anyhow::Result<()> {
        while self.reaped < self.posted {
            self.reap_one(Some(watch))?;
        }
        Ok(())
    }

    /// Waits until a write has reached the last byte of the incoming message. Then checks the
    /// number of the message.
    pub(super) fn wait_write(&mut self, round: u64, watch: &Watch) -> anyhow::Result<()> {
        let last = self.stride + self.size - 1;
        let mut spins = 0_u32;
        while self.region.load(last) != low_byte(round) {
            spins += 1;
            if spins.is_multiple_of(SPINS_PER_CHECK) {
                self.reap_ready()?;
                watch.check()?;
            }
        }
        // A device may write the bytes of a packet in any order, so other bytes may arrive a moment
        // after the last byte of the message.
        let mut tries = 0;
        while let Err(error) = self.verify(round) {
            tries += 1;
            ensure!(tries < SPINS_PER_CHECK, error);
        }
        if self.posted - self.reaped >= 2 * SIGNAL_EVERY { self.reap_ready() } else { Ok(()) }
    }

    /// Takes the completions of sends that are ready, without waiting.
    fn reap_ready(&mut self) -> anyhow::Result<()> {
        let mut completion = [WorkCompletion::default()];
        while self.cq.poll(&mut completion)? > 0 {
            completion[0].ok()?;
            self.reaped = completion[0].wr_id();
        }
        Ok(())
    }

    fn reap_one(&mut self, watch: Option<&Watch>) -> anyhow::Result<()> {
        self.reaped = self.next(watch)?.wr_id();
        Ok(())
    }

    /// Waits for the next completion by polling or by sleeping.
    ///
    /// # Errors
    ///
    /// The completion has failed, or the connection has ended.
    fn next(&mut self, watch: Option<&Watch>) -> anyhow::Result<WorkCompletion> {
        let mut completion = [WorkCompletion::default()];
        let mut spins = 0_u32;
        while self.cq.poll(&mut completion)? == 0 {
            match &self.channel {
                // Arms the queue right after the event, so that the next sleep is one system call,
                // as in perftest. A completion that arrived before the arming raises no event, so
                // the loop polls once more.
                Some(channel) => {
                    if self.armed {
                        channel.next_event()?;
                    }
                    self.cq.request_notify(false)?;
                    self.armed = true;
                }
                None => {
                    spins += 1;
                    if spins.is_multiple_of(SPINS_PER_CHECK)
                        && let Some(watch) = watch
                    {
                        watch.check()?;
                    }
                }
            }
        }
        completion[0].ok().context("the connection broke")?;
        Ok(completion[0])
    }
}

fn pattern_byte(at: usize) -> u8 {
    // 251 is prime, so that a message shifted by a power of two does not match.
    u8::try_from(at % 251).unwrap_or(0)
}

fn low_byte(round: u64) -> u8 {
    round.to_le_bytes()[0]
}
