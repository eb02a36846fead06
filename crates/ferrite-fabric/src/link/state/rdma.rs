//! The RDMA driver of a link: posts the core's output to the queue pair, and reports completions to
//! the core.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use ferrite_verbs::{Access, Opcode, Operation, RemoteSlice, Status, WorkCompletion};

use super::{LinkEnv, LinkState, NextPath};
use crate::device::shared_device::SharedDevice;
use crate::device::slots::{BATCH, Held, InFlight, SendQueue, Work};
use crate::error::{Error, ErrorKind};
use crate::link::core::{ActiveTransport, Output, RequestContext, Wakes, protocol};
use crate::link::kind::Kind;
use crate::link::outbox::OneSided;
use crate::mem::{BufMut, Pool, Purpose, Window};
use crate::wire::{CONTROL_BYTES, Control, Frame};

/// The queue pair of a link, with its state.
pub(crate) struct RdmaPath {
    pub(crate) queue: SendQueue<RequestContext>,
    /// The device whose queues the queue pair uses; `None` on TCP.
    pub(crate) device: Option<Arc<SharedDevice>>,
    pub(super) inline: usize,
    /// Whether the queue pair was not stopped.
    is_running: bool,
    /// Whether a command is destroying the queue pair.
    pub(super) is_destroying: bool,
    /// Windows to bind to the queue pair.
    pub(super) binds: VecDeque<Arc<Window>>,
    /// The peer's rights to our memory, as far as the queue pair decides them.
    pub(super) rights: Access,
    /// Reused for each post.
    batch: Vec<Work<RequestContext>>,
    pub(super) unsignaled: usize,
    /// The first generation of the slots of the next queue pair.
    pub(crate) generation: u32,
    /// Whether the last request was posted.
    last_posted: bool,
    /// Completions of requests that were flushed before the reason was known.
    pub(super) flushed: Vec<WorkCompletion>,
    /// Whether the fabric was told of them.
    pub(super) flush_called: bool,
}

impl RdmaPath {
    pub(super) fn new(
        queue: SendQueue<RequestContext>,
        device: Arc<SharedDevice>,
        inline: usize,
    ) -> Self {
        Self { queue, device: Some(device), inline, is_running: true, ..Self::none() }
    }

    /// Creates the state of a link on TCP, without a queue pair.
    pub(super) fn none() -> Self {
        Self {
            queue: SendQueue::none(),
            device: None,
            inline: 0,
            is_running: false,
            is_destroying: false,
            binds: VecDeque::new(),
            rights: Access::LOCAL,
            batch: Vec::new(),
            unsignaled: 0,
            generation: 0,
            last_posted: false,
            flushed: Vec::new(),
            flush_called: false,
        }
    }

    /// Switches to the queue pair of the upgrade.
    pub(super) fn adopt(&mut self, next: NextPath) {
        (self.queue, self.device, self.inline) = (next.queue, Some(next.device), next.inline);
        self.is_running = true;
    }

    /// Drops the state of a destroyed queue pair.
    pub(super) fn forget(&mut self, queue: &SendQueue<RequestContext>) {
        if self.device.take().is_some() {
            self.generation = queue.next_generation();
        }
        self.flushed.clear();
        (self.flush_called, self.unsignaled) = (false, 0);
    }

    /// Takes the queue pair back from a command. If the link went down meanwhile, the queue pair is
    /// stopped when the lock is released.
    pub(crate) fn take_back(&mut self, qp: ferrite_verbs::QueuePair) {
        self.queue.take_back(qp);
        self.is_running = true;
    }
}

impl LinkState {
    /// Stops the queue pair of a path or link that has ended.
    pub(crate) fn stop_if_over(&mut self) {
        let is_over =
            self.core.failure().is_some() || self.core.transport() == ActiveTransport::Migrating;
        if !is_over || !self.rdma.is_running {
            return;
        }
        if let Some(qp) = self.rdma.queue.qp() {
            let _ = qp.stop(); // a removed device has stopped it
            self.rdma.is_running = false;
        }
        if self.core.failure().is_none() {
            self.core.stats.binds_dropped += self.rdma.binds.len() as u64;
        }
        self.rdma.binds.clear(); // the next device has its own windows
        self.end_raw();
    }

    /// Posts a small message at once, from the caller's bytes. Returns false if it must be queued.
    pub(super) fn post_now(
        &mut self,
        env: &LinkEnv<'_>,
        channel: u16,
        bytes: &[u8],
    ) -> Result<bool, Error> {
        let most = self.rdma.inline.min(self.core.peer().segment_bytes as usize);
        let is_ready =
            bytes.len() <= most && self.core.may_send_now() && self.rdma.queue.room() > 0;
        if !is_ready || env.reserve(1) == 0 {
            return Ok(false);
        }
        let (imm, request) = self.core.send_now(channel, bytes);
        let signaled = self.signal(env, false);
        let operation = Operation::SendImm(imm);
        if let Err(refused) = self.rdma.queue.post_inline(operation, bytes, signaled, request) {
            env.release(1 - refused.posted);
            let error = Error::refused_post(refused.error);
            if !self.core.lose(&error) {
                return Err(error);
            }
            if refused.posted == 0 {
                self.core.not_posted(Held::Nothing, request);
            }
        }
        Ok(true)
    }

    /// Decides whether the next request is signaled. It is if someone waits for it or for its
    /// memory, or after too many unsignaled requests.
    pub(super) fn signal(&mut self, env: &LinkEnv<'_>, wanted: bool) -> bool {
        let run = (self.rdma.queue.room() + self.rdma.queue.in_flight()) / 4;
        let signaled = wanted || self.rdma.unsignaled >= run || env.is_pressed();
        self.rdma.unsignaled = if signaled { 0 } else { self.rdma.unsignaled + 1 };
        signaled
    }

    /// Posts everything that may be sent.
    pub(super) fn post_all(&mut self, env: &LinkEnv<'_>, wakes: &mut Wakes) -> Result<(), Error> {
        loop {
            let is_idle = self.core.is_idle() && self.rdma.binds.is_empty();
            if is_idle && !self.has_raw_work() {
                return Ok(());
            }
            let room = self.rdma.queue.room().min(BATCH);
            if room == 0 {
                return Ok(());
            }
            let mut reserved = env.reserve(room);
            if reserved == 0 {
                env.wait();
                // Entries that were freed between the two calls would not wake this link.
                reserved = env.reserve(room);
                if reserved == 0 {
                    return Ok(());
                }
            }
            // Binds are posted first, so that they are done before the peer learns of them.
            if let Some(window) = self.rdma.binds.pop_front() {
                env.release(reserved - 1);
                self.post_bind(&window, env)?;
                continue;
            }
            let mut made = Ok(());
            while self.rdma.batch.len() < reserved {
                match self.next_work(env) {
                    Ok(Some(work)) => self.rdma.batch.push(work),
                    Ok(None) => break,
                    Err(error) => {
                        made = Err(error);
                        break;
                    }
                }
            }
            let count = self.rdma.batch.len();
            env.release(reserved - count);
            if count == 0 {
                return made;
            }
            if let Err(error) = self.rdma.queue.post(&mut self.rdma.batch) {
                return self.on_unposted(env, Error::refused_post(error), wakes);
            }
            if made.is_err() || count < reserved {
                return made;
            }
        }
    }

    fn post_bind(&mut self, window: &Arc<Window>, env: &LinkEnv<'_>) -> Result<(), Error> {
        let signaled = self.signal(env, true); // its memory may be waited for
        let request = RequestContext { kind: Kind::Bind, ..RequestContext::default() };
        match self.rdma.queue.post_bind(window, signaled, request) {
            Ok(posted) => {
                env.release(usize::from(!posted));
                Ok(())
            }
            Err(refused) => {
                env.release(1 - refused.posted);
                Err(Error::refused_post(refused.error))
            }
        }
    }

    /// The device did not accept the rest of the batch.
    #[cold]
    fn on_unposted(
        &mut self,
        env: &LinkEnv<'_>,
        error: Error,
        wakes: &mut Wakes,
    ) -> Result<(), Error> {
        env.release(self.rdma.batch.len());
        let unposted = std::mem::take(&mut self.rdma.batch);
        let migrates = self.core.lose(&error);
        for Work { held, request, .. } in unposted {
            if migrates {
                self.core.not_posted(held, request);
            } else {
                self.core.finish(request, held, Err(error.clone()), wakes);
            }
        }
        if migrates { Ok(()) } else { Err(error) }
    }

    fn next_work(&mut self, env: &LinkEnv<'_>) -> Result<Option<Work<RequestContext>>, Error> {
        if self.raw.is_some() {
            return Ok(self.next_raw_work(env));
        }
        let segment_bytes = self.core.peer().segment_bytes as usize;
        let Some(output) = self.core.next_output(segment_bytes, true) else { return Ok(None) };
        Ok(Some(match output {
            Output::Data { imm, more, piece, request } => {
                let inline = request.bytes as usize <= self.rdma.inline;
                // Inline requests hold no memory, so nobody waits for them. Of the others, the last
                // frame of a message is signaled.
                let signaled = self.signal(env, request.ticket.is_some() || !inline && !more);
                let held = piece.map_or(Held::Nothing, Held::Shared);
                Work { operation: Operation::SendImm(imm), held, signaled, inline, request }
            }
            Output::Control { imm, control } => return self.control_work(imm, control, env),
            Output::OneSided { operation, request } => {
                let inline =
                    request.kind != Kind::Read && request.bytes as usize <= self.rdma.inline;
                let signaled = self.signal(env, request.ticket.is_some() || !inline);
                let posted = self.operation(&operation);
                Work { operation: posted, held: operation.held, signaled, inline, request }
            }
        }))
    }

    /// Finds the address of an operation on the device that the link uses now. It may differ from
    /// the device of the grant.
    fn operation(&self, asked: &OneSided) -> Operation {
        let place = self.core.place_of(asked.grant);
        let (base, rkey) = place.unwrap_or((asked.base, asked.rkey));
        let addr = base.wrapping_add(asked.offset);
        let remote = RemoteSlice { addr, len: asked.bytes.into(), rkey };
        match asked.kind {
            Kind::Read => Operation::Read(remote),
            Kind::Notice => Operation::WriteImm(remote, asked.imm),
            _ => Operation::Write(remote),
        }
    }

    /// Returns `None` if there is no memory now. The control frame then goes with the next post, or
    /// when the fabric looks for memory again.
    fn control_work(
        &mut self,
        imm: u32,
        control: Control,
        env: &LinkEnv<'_>,
    ) -> Result<Option<Work<RequestContext>>, Error> {
        let inline = CONTROL_BYTES <= self.rdma.inline;
        let held = if inline {
            Held::Copied(control.encode())
        } else {
            match env.pool.take_uncharged(CONTROL_BYTES, Purpose::Send).map_err(Error::from) {
                Ok(mut buf) => {
                    buf.copy_from_slice(&control.encode());
                    Held::Shared(buf.freeze())
                }
                // The pool is at its limit, or the device can register no more memory now.
                Err(error) if matches!(error.kind(), ErrorKind::Full | ErrorKind::Resources) => {
                    self.core.put_back(control);
                    self.is_starved = true;
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
        };
        // The acknowledgement of a keepalive by the peer's device is a sign of life, too.
        let signaled = self.signal(env, !inline || matches!(control, Control::Ping(_)));
        let operation = Operation::SendImm(imm);
        let request = RequestContext {
            kind: Kind::Control,
            bytes: CONTROL_BYTES as u32,
            ..RequestContext::default()
        };
        Ok(Some(Work { operation, held, signaled, inline, request }))
    }

    /// Handles a completed receive of this link.
    ///
    /// # Errors
    /// The peer violated the protocol.
    pub(crate) fn on_received(
        &mut self,
        pool: &Pool,
        wc: &WorkCompletion,
        mut buf: BufMut,
        now: Instant,
        wakes: &mut Wakes,
    ) -> Result<(), Error> {
        if self.raw.is_some() {
            return self.on_raw_received(wc, buf, wakes);
        }
        let Some(imm) = wc.imm() else { return Err(protocol("a frame without immediate data")) };
        if self.next_queue(wc.qp_num()).is_some() {
            buf.set_len((wc.byte_len() as usize).min(buf.capacity()));
            if self.core.on_upgrade_frame(&buf)? {
                self.adopt_next_path();
            }
            return Ok(());
        }
        if wc.opcode() == Opcode::RECV_WRITE_IMM {
            return self.core.on_frame(imm, None, now, wakes);
        }
        buf.set_len((wc.byte_len() as usize).min(buf.capacity()));
        if Frame::from_imm(imm).more {
            buf = fitting(pool, buf);
        } else if buf.len() < pool.copy_below() {
            buf = copied(pool, buf);
        }
        self.core.on_frame(imm, Some(buf), now, wakes)?;
        self.answer_revocations();
        Ok(())
    }

    /// Handles a completed send, write or read. `failure` creates the error if this is the first
    /// failure.
    pub(crate) fn on_sent(
        &mut self,
        env: &LinkEnv<'_>,
        wc: &WorkCompletion,
        wakes: &mut Wakes,
        failure: impl FnOnce(Status) -> Error,
    ) {
        if self.next.is_some() && self.on_next_sent(wc) {
            return;
        }
        let status = wc.status();
        let ok = status == Status::SUCCESS;
        if self.rdma.queue.get(wc).is_none() {
            self.core.stats.stale_completions += 1; // perhaps of a destroyed queue pair
            return;
        }
        if !ok && self.core.transport() == ActiveTransport::Migrating {
            return; // it stays until the queue pair is destroyed, and is then sent on another path
        }
        if status == Status::FLUSHED && self.failure().is_none() {
            // An earlier request failed. An event or the peer will tell the cause.
            self.rdma.flushed.push(*wc);
            return;
        }
        if ok {
            self.core.on_acknowledged_by_device();
        } else if self.failure().is_none() {
            // The peer acknowledged everything before the farewell, so a peer that is gone by then
            // has closed in an orderly way.
            let is_control =
                self.rdma.queue.get(wc).is_some_and(|it| it.request.kind == Kind::Control);
            let error = match self.core.has_answered_farewell() && is_control {
                true => Error::new(ErrorKind::Closed, "the peer has closed the link"),
                false => failure(status),
            };
            self.core.fail(error, wakes);
            if self.core.transport() == ActiveTransport::Migrating {
                return;
            }
        }
        let error = self.failure().cloned();
        let (mut entries, mut controls, mut notices) = (0, 0, 0);
        let Self { core, rdma, .. } = self;
        rdma.queue.complete(wc, |InFlight { held, request }, last| {
            entries += 1;
            controls += u64::from(request.kind == Kind::Control);
            notices += u64::from(request.kind == Kind::Notice);
            let result = match &error {
                Some(error) if last && !ok => Err(error.clone()),
                _ => Ok(()),
            };
            core.complete(request, held, result, wakes);
        });
        env.release(entries);
        self.on_raw_done(controls, notices, wakes);
        self.answer_revocations();
        if ok {
            self.pump(env, wakes);
        }
        self.post_last(env);
    }

    /// Fails the requests that were flushed before the link went down.
    #[cold]
    pub(crate) fn complete_flushed(&mut self, env: &LinkEnv<'_>, wakes: &mut Wakes) {
        if self.failure().is_some() {
            for wc in std::mem::take(&mut self.rdma.flushed) {
                let flushed = |_| Error::new(ErrorKind::LinkDown, "flushed");
                self.on_sent(env, &wc, wakes, flushed);
            }
        }
    }

    /// Posts one more request, which is flushed at once. It completes the unsignaled requests that
    /// were done when the link went down, since they produce no completions of their own.
    pub(crate) fn post_last(&mut self, env: &LinkEnv<'_>) {
        let is_wanted =
            self.failure().is_some() && !self.rdma.last_posted && self.rdma.queue.in_flight() > 0;
        if !is_wanted || self.rdma.queue.room() == 0 || env.reserve(1) == 0 {
            return; // otherwise the timeout ends it
        }
        let request = RequestContext { kind: Kind::Last, ..RequestContext::default() };
        self.rdma.last_posted = true;
        if let Err(refused) = self.rdma.queue.post_inline(Operation::Send, &[], true, request) {
            env.release(1 - refused.posted);
        }
    }
}

/// Copies a small part of a message that may stay here for long, so that it does not hold a large
/// receive.
fn fitting(pool: &Pool, buf: BufMut) -> BufMut {
    const SMALL: usize = 8; // the part is so small that copying it costs nothing
    if buf.len() > buf.capacity() / SMALL {
        return buf;
    }
    copied(pool, buf)
}

/// Copies a message into a block of its own size. Keeps the receive buffer if there is no memory.
fn copied(pool: &Pool, buf: BufMut) -> BufMut {
    match pool.take_uncharged(buf.len(), Purpose::Receive) {
        Ok(mut small) => {
            small.copy_from_slice(&buf);
            small
        }
        Err(_) => buf,
    }
}
