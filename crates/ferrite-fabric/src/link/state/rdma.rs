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
use crate::mem::{BufMut, Pool, Purpose, Window};
use crate::wire::{CONTROL_BYTES, Control, Frame};

/// The queue pair of a link, with its state.
pub(crate) struct RdmaPath {
    pub(crate) queue: SendQueue<RequestContext>,
    /// The device whose queues the queue pair uses; `None` on TCP.
    pub(crate) device: Option<Arc<SharedDevice>>,
    pub(super) inline: usize,
    /// Whether there is a queue pair that was not stopped.
    is_running: bool,
    /// Whether a command is destroying the queue pair.
    pub(super) is_destroying: bool,
    /// Windows to bind to the queue pair.
    pub(super) binds: VecDeque<Arc<Window>>,
    /// The peer's rights to our memory, as far as the queue pair decides them.
    pub(super) rights: Access,
    pub(super) unsignaled: usize,
    /// The first generation of the slots of the next queue pair.
    pub(crate) generation: u32,
    /// Whether the request of [`Kind::Last`] was posted.
    last_posted: bool,
    /// Completions of requests that were flushed before the reason was known.
    pub(super) flushed: Vec<WorkCompletion>,
    /// Whether the fabric was told of the flushed requests.
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
            unsignaled: 0,
            generation: 0,
            last_posted: false,
            flushed: Vec::new(),
            flush_called: false,
        }
    }

    /// Reserves up to `wanted` entries of the completion queue.
    fn reserve(&self, wanted: usize) -> usize {
        self.device.as_ref().map_or(0, |device| device.reserve(wanted))
    }

    pub(super) fn release(&self, entries: usize) {
        if let Some(device) = &self.device {
            device.release(entries);
        }
    }

    fn is_pressed(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.is_pressed())
    }

    /// Queues the link to wait for entries of the completion queue.
    #[cold]
    fn wait(&self, link: u32) {
        if let Some(device) = &self.device {
            device.wait(link);
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
    /// stopped before the lock is released.
    pub(crate) fn take_back(&mut self, qp: ferrite_verbs::QueuePair) {
        self.queue.take_back(qp);
        self.is_running = true;
    }
}

impl LinkState {
    /// Stops the queue pair of a path or link that has ended.
    #[inline]
    pub(crate) fn stop_if_over(&mut self) {
        let is_over =
            self.core.failure().is_some() || self.core.transport() == ActiveTransport::Migrating;
        if is_over && self.rdma.is_running {
            self.stop();
        }
    }

    #[cold]
    fn stop(&mut self) {
        if let Some(qp) = self.rdma.queue.qp() {
            let _ = qp.stop(); // fails only if the device was removed, and then nothing runs
            self.rdma.is_running = false;
        }
        if self.core.failure().is_none() {
            self.core.stats.binds_dropped += self.rdma.binds.len() as u64;
        }
        self.rdma.binds.clear(); // the next device has its own windows
        self.end_raw();
    }

    /// Posts a small message at once, from the caller's bytes. Returns false if it must be queued.
    pub(super) fn post_now(&mut self, channel: u16, bytes: &[u8]) -> Result<bool, Error> {
        let most = self.rdma.inline.min(self.core.peer().segment_bytes as usize);
        let is_ready =
            bytes.len() <= most && self.core.may_send_now() && self.rdma.queue.room() > 0;
        if !is_ready || self.rdma.reserve(1) == 0 {
            return Ok(false);
        }
        let (imm, mut request) = self.core.send_now(channel, bytes);
        let signaled = self.signal(false);
        self.core.sample(signaled, &mut request);
        let operation = Operation::SendImm(imm);
        if let Err(refused) = self.rdma.queue.post_inline(operation, bytes, signaled, request) {
            self.rdma.release(1 - refused.posted);
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

    /// Decides whether the next request is signaled. `wanted` tells whether someone waits for the
    /// request or for its memory. A request is also signaled after too many unsignaled ones, and
    /// while many requests are in flight on the device.
    pub(super) fn signal(&mut self, wanted: bool) -> bool {
        let run = (self.rdma.queue.room() + self.rdma.queue.in_flight()) / 4;
        let signaled = wanted || self.rdma.unsignaled >= run || self.rdma.is_pressed();
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
            if room == 0 || self.rdma.queue.qp().is_none() {
                return Ok(());
            }
            let mut reserved = self.rdma.reserve(room);
            if reserved == 0 {
                self.rdma.wait(env.index);
                // Try again: entries that were freed just before `wait` do not wake this link.
                reserved = self.rdma.reserve(room);
                if reserved == 0 {
                    return Ok(());
                }
            }
            // Binds are posted first, so that they are done before the peer learns of them.
            if let Some(window) = self.rdma.binds.pop_front() {
                self.rdma.release(reserved - 1);
                self.post_bind(&window)?;
                continue;
            }
            let mut made = Ok(());
            while self.rdma.queue.added() < reserved {
                match self.add_next(env) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(error) => {
                        made = Err(error);
                        break;
                    }
                }
            }
            let count = self.rdma.queue.added();
            self.rdma.release(reserved - count);
            if count == 0 {
                return made;
            }
            if let Err((error, unposted)) = self.rdma.queue.post() {
                return self.on_unposted(Error::refused_post(error), unposted, wakes);
            }
            if made.is_err() || count < reserved {
                return made;
            }
        }
    }

    fn post_bind(&mut self, window: &Arc<Window>) -> Result<(), Error> {
        let signaled = self.signal(true); // the window is held until the bind completes
        let request = RequestContext { kind: Kind::Bind, ..RequestContext::default() };
        match self.rdma.queue.post_bind(window, signaled, request) {
            Ok(posted) => {
                self.rdma.release(usize::from(!posted));
                Ok(())
            }
            Err(refused) => {
                self.rdma.release(1 - refused.posted);
                Err(Error::refused_post(refused.error))
            }
        }
    }

    /// Handles the requests of a batch that the device did not accept.
    #[cold]
    fn on_unposted(
        &mut self,
        error: Error,
        unposted: Vec<InFlight<RequestContext>>,
        wakes: &mut Wakes,
    ) -> Result<(), Error> {
        self.rdma.release(unposted.len());
        let migrates = self.core.lose(&error);
        for InFlight { held, request } in unposted {
            if migrates {
                self.core.not_posted(held, request);
            } else {
                self.core.finish(request, held, Err(error.clone()), wakes);
            }
        }
        if migrates { Ok(()) } else { Err(error) }
    }

    /// Adds the next request to the batch to post. Returns false if there is none.
    fn add_next(&mut self, env: &LinkEnv<'_>) -> Result<bool, Error> {
        if self.raw.is_some() {
            let work = self.next_raw_work();
            return Ok(work.map(|work| self.rdma.queue.add(work)).is_some());
        }
        let segment_bytes = self.core.peer().segment_bytes as usize;
        match self.core.next_output(segment_bytes, true) {
            None => return Ok(false),
            Some(Output::Data { imm, more, piece, mut request }) => {
                let inline = request.bytes as usize <= self.rdma.inline;
                // The device copies inline requests at once, so their completions are not urgent.
                // Among the other frames, the last one of a message is always signaled.
                let signaled = self.signal(request.ticket.is_some() || !inline && !more);
                self.core.sample(signaled, &mut request);
                let held = piece.map_or(Held::Nothing, Held::Shared);
                let operation = Operation::SendImm(imm);
                self.rdma.queue.add(Work { operation, held, signaled, inline, request });
            }
            Some(Output::Control { imm, control }) => return self.add_control(imm, control, env),
            Some(Output::OneSided { held, place, request }) => {
                let inline =
                    request.kind != Kind::Read && request.bytes as usize <= self.rdma.inline;
                let signaled = self.signal(request.ticket.is_some() || !inline);
                let operation = one_sided(place, &request);
                self.rdma.queue.add(Work { operation, held, signaled, inline, request });
            }
        }
        Ok(true)
    }

    /// Adds a control frame. Returns false if there is no memory for it now. The frame is then sent
    /// with the next post, or when the fabric retries.
    fn add_control(
        &mut self,
        imm: u32,
        control: Control,
        env: &LinkEnv<'_>,
    ) -> Result<bool, Error> {
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
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
        };
        // Keepalives are signaled, to learn whether at least the peer's device acknowledges them.
        let signaled = self.signal(!inline || matches!(control, Control::Ping(_)));
        let operation = Operation::SendImm(imm);
        let request = RequestContext {
            kind: Kind::Control,
            bytes: CONTROL_BYTES as u32,
            ..RequestContext::default()
        };
        self.rdma.queue.add(Work { operation, held, signaled, inline, request });
        Ok(true)
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
            // The request stays until the queue pair is destroyed. It is then sent on another path.
            return;
        }
        if status == Status::FLUSHED && self.failure().is_none() {
            // The queue pair has failed. Another completion, an event or the peer tells the cause.
            self.rdma.flushed.push(*wc);
            return;
        }
        if ok {
            self.core.on_acknowledged_by_device();
        } else if self.failure().is_none() {
            // The peer has acknowledged everything that this side sent before the closing frames.
            // So if the peer is gone now, the link was closed in good order.
            let is_control =
                self.rdma.queue.get(wc).is_some_and(|it| it.request.kind == Kind::Control);
            let error = match self.core.has_answered_fin() && is_control {
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
        self.rdma.release(entries);
        self.on_raw_done(controls, notices, wakes);
        self.answer_revocations();
        if ok {
            self.pump(env, wakes);
        }
        self.post_last();
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
    pub(crate) fn post_last(&mut self) {
        let is_wanted =
            self.failure().is_some() && !self.rdma.last_posted && self.rdma.queue.in_flight() > 0;
        if !is_wanted || self.rdma.queue.room() == 0 || self.rdma.reserve(1) == 0 {
            return; // without this request, a timer ends the wait for the others
        }
        let request = RequestContext { kind: Kind::Last, ..RequestContext::default() };
        self.rdma.last_posted = true;
        if let Err(refused) = self.rdma.queue.post_inline(Operation::Send, &[], true, request) {
            self.rdma.release(1 - refused.posted);
        }
    }
}

/// Returns the operation on memory of the peer, whose grant begins at `base` with the key `rkey`.
fn one_sided((base, rkey): (u64, u32), request: &RequestContext) -> Operation {
    let addr = base.wrapping_add(request.offset);
    let remote = RemoteSlice { addr, len: request.bytes.into(), rkey };
    match request.kind {
        Kind::Read => Operation::Read(remote),
        Kind::Notice => Operation::WriteImm(remote, request.imm),
        _ => Operation::Write(remote),
    }
}

/// Copies a small part of a message. The part may stay here for long, and must not hold a large
/// receive buffer.
fn fitting(pool: &Pool, buf: BufMut) -> BufMut {
    const SMALL: usize = 8; // up to an eighth of the receive, copying costs next to nothing
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
