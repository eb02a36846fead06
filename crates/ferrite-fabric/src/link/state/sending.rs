//! The sending half of a link's state: credits into posts, posts into completions.

use ferrite_verbs::{Operation, RemoteSlice, Status, WorkCompletion};

use super::{
    ActiveTransport, Kind, LinkEnv, LinkState, Phase, RequestContext, Wakes, outcome, took,
};
use crate::error::{Error, ErrorKind};
use crate::fabric::slots::{BATCH, Held, InFlight, Work};
use crate::link::outbox::{Allowed, Next, OneSided};
use crate::mem::Purpose;
use crate::wire::{CONTROL_BYTES, Control, Frame};

/// Frames that may be under way on a link, and bytes that are kept of them, whatever window the
/// peer has: all that it can make this side hold by never saying that it has consumed them.
const FRAMES_UNDER_WAY_MAX: usize = 1024;
const KEPT_BYTES_MAX: usize = 4 << 20;

impl LinkState {
    /// Posts a small message at once, from the caller's bytes; `false` if it has to be queued.
    pub(crate) fn send_now(
        &mut self,
        env: &LinkEnv<'_>,
        channel: u16,
        bytes: &[u8],
    ) -> Result<bool, Error> {
        if self.transport != ActiveTransport::Rdma {
            return self.send_now_over_tcp(channel, bytes);
        }
        let ready = matches!(self.phase, Phase::Up)
            && self.outbox.is_empty()
            && self.controls.is_empty()
            && bytes.len() <= self.inline.min(self.peer.segment_bytes as usize)
            && self.credits() > 0
            && self.queue.room() > 0;
        if !ready || env.reserve(1) == 0 {
            return Ok(false);
        }
        let operation = Operation::SendImm(self.data_frame(channel, false));
        let request = RequestContext {
            kind: Kind::Send,
            bytes: bytes.len() as u32,
            frame: self.sent,
            ..RequestContext::default()
        };
        self.keep_bytes(channel, bytes);
        let signaled = self.signal(env, false);
        if let Err(refused) = self.queue.post_inline(operation, bytes, signaled, request) {
            env.release(1 - refused.posted);
            let error = Error::from(refused.error);
            if !self.lose(&error) {
                return Err(error);
            }
            if refused.posted == 0 {
                self.not_posted(Held::Nothing, request);
            }
        }
        Ok(true)
    }

    pub(super) fn credits(&self) -> usize {
        let used = self.sent - self.acknowledged;
        // Frames are kept until the peer has consumed them: it does not decide alone how many those
        // are.
        let window = usize::from(self.peer.window).min(FRAMES_UNDER_WAY_MAX);
        if self.kept_bytes >= KEPT_BYTES_MAX {
            return 0;
        }
        window.saturating_sub(used as usize)
    }

    pub(super) fn data_frame(&mut self, channel: u16, more: bool) -> u32 {
        self.sent += 1;
        self.told = self.consumed;
        Frame { control: false, more, channel, consumed: self.consumed as u16 }.to_imm()
    }

    /// Whether the next request must report: someone waits for it or for its memory, or too many
    /// have not.
    pub(super) fn signal(&mut self, env: &LinkEnv<'_>, wanted: bool) -> bool {
        let run = (self.queue.room() + self.queue.in_flight()) / 4;
        let signaled = wanted || self.unsignaled >= run || env.is_pressed();
        self.unsignaled = if signaled { 0 } else { self.unsignaled + 1 };
        signaled
    }

    /// Posts whatever may go, and what follows from that.
    pub(crate) fn pump(&mut self, env: &LinkEnv<'_>, wakes: &mut Wakes) {
        if !matches!(self.phase, Phase::Up) {
            return;
        }
        if self.closing && self.raw.is_some() {
            self.push_raw_farewell();
        }
        if let Err(error) = self.post_all(env, wakes) {
            self.fail(error, wakes);
            return;
        }
        if self.raw.is_some() {
            if self.closing && self.raw_is_idle() {
                self.fail(Error::new(ErrorKind::Closed, "the link is closed"), wakes);
            }
            return;
        }
        if self.has_room(0) {
            wakes.append(&mut self.wait_for_room);
        }
        let mut more = false;
        let all_gone = self.outbox.is_empty()
            && self.again.is_empty()
            && self.transport != ActiveTransport::Moving;
        if self.closing && !self.fin_sent && all_gone {
            self.fin_sent = true;
            self.controls.push_back(Control::Fin);
            more = true;
        }
        if self.peer_fin && !self.fin_ack_sent && all_gone {
            self.fin_ack_sent = true;
            self.controls.push_back(Control::FinAck);
            more = true;
        }
        // Half a window at a time, unless a frame takes the news along.
        let untold = self.consumed - self.told;
        if !self.peer_fin
            && untold > 0
            && untold >= u64::from(self.limits.hello.window) / 2
            && self.controls.is_empty()
        {
            self.controls.push_back(Control::Credit);
            more = true;
        }
        if more && let Err(error) = self.post_all(env, wakes) {
            self.fail(error, wakes);
        }
    }

    fn post_all(&mut self, env: &LinkEnv<'_>, wakes: &mut Wakes) -> Result<(), Error> {
        match self.transport {
            ActiveTransport::Rdma => {}
            ActiveTransport::Tcp => return self.post_over_tcp(wakes),
            ActiveTransport::Moving => return Ok(()),
        }
        loop {
            let idle = self.controls.is_empty() && self.outbox.is_empty() && self.binds.is_empty();
            if idle && !self.has_raw_work() {
                return Ok(());
            }
            let room = self.queue.room().min(BATCH);
            if room == 0 {
                return Ok(());
            }
            let mut reserved = env.reserve(room);
            if reserved == 0 {
                env.wait();
                // Those that came back between the two would not call us.
                reserved = env.reserve(room);
                if reserved == 0 {
                    return Ok(());
                }
            }
            // First, so that it is done before the peer hears of it.
            if let Some(window) = self.binds.pop_front() {
                env.release(reserved - 1);
                let signaled = self.signal(env, true); // memory may wait for it
                let request = RequestContext { kind: Kind::Bind, ..RequestContext::default() };
                match self.queue.post_bind(&window, signaled, request) {
                    Ok(posted) => env.release(usize::from(!posted)),
                    Err(refused) => {
                        env.release(1 - refused.posted);
                        return Err(refused.error.into());
                    }
                }
                continue;
            }
            let mut made = Ok(());
            while self.batch.len() < reserved {
                match self.next_work(env) {
                    Ok(Some(work)) => self.batch.push(work),
                    Ok(None) => break,
                    Err(error) => {
                        made = Err(error);
                        break;
                    }
                }
            }
            let count = self.batch.len();
            env.release(reserved - count);
            if count == 0 {
                return made;
            }
            let posted = self.queue.post(&mut self.batch);
            if let Err(error) = posted {
                env.release(self.batch.len());
                let unposted = std::mem::take(&mut self.batch);
                let error = Error::from(error);
                if self.lose(&error) {
                    unposted
                        .into_iter()
                        .for_each(|Work { held, request, .. }| self.not_posted(held, request));
                    return Ok(());
                }
                for Work { held, request, .. } in unposted {
                    if let Some(ticket) = request.ticket {
                        wakes
                            .extend(self.tickets.finish(ticket, outcome(Err(error.clone()), held)));
                    }
                }
                return Err(error);
            }
            if made.is_err() || count < reserved {
                return made;
            }
        }
    }

    pub(super) fn allowed(&self, segment_bytes: usize) -> Allowed {
        Allowed {
            segment_bytes,
            credits: self.credits(),
            max_message_bytes: self.peer.max_message_bytes,
            max_frames: self.peer.max_frames(),
            one_sided: true,
        }
    }

    fn next_work(&mut self, env: &LinkEnv<'_>) -> Result<Option<Work<RequestContext>>, Error> {
        if self.raw.is_some() {
            return Ok(self.next_raw_work(env));
        }
        if let Some(control) = self.controls.pop_front() {
            return match self.control_work(control, env) {
                // No memory at the moment: it goes with the next that is posted.
                Err(error) if error.kind() == ErrorKind::Full => {
                    self.controls.push_front(control);
                    Ok(None)
                }
                work => work.map(Some),
            };
        }
        let allowed = self.allowed(self.peer.segment_bytes as usize);
        let Some(next) = self.outbox.next(allowed) else { return Ok(None) };
        Ok(Some(match next {
            Next::Frame { channel, more, piece, ticket } => {
                let bytes = piece.as_ref().map_or(0, |piece| piece.len());
                let inline = bytes <= self.inline;
                // What is inline holds no memory, so nobody waits for it. Of the rest the last
                // frame reports.
                let signaled = self.signal(env, ticket.is_some() || !inline && !more);
                let operation = Operation::SendImm(self.data_frame(channel, more));
                self.keep_piece(channel, more, piece.as_ref());
                Work {
                    operation,
                    held: piece.map_or(Held::Nothing, Held::Shared),
                    signaled,
                    inline,
                    request: RequestContext {
                        ticket,
                        kind: Kind::Send,
                        bytes: bytes as u32,
                        frame: self.sent,
                        begun: self.began(ticket),
                        ..RequestContext::default()
                    },
                }
            }
            Next::OneSided(one_sided) => {
                let operation = self.operation(&one_sided);
                let OneSided { kind, held, ticket, grant, offset, imm, bytes, .. } = one_sided;
                if kind == Kind::Notice {
                    self.sent += 1;
                    self.keep_notice();
                }
                let inline = kind != Kind::Read && bytes as usize <= self.inline;
                let signaled = self.signal(env, ticket.is_some() || !inline);
                let begun = self.began(ticket);
                let request = RequestContext {
                    ticket,
                    kind,
                    bytes,
                    frame: self.sent,
                    grant,
                    offset,
                    imm,
                    begun,
                };
                Work { operation, held, signaled, inline, request }
            }
        }))
    }

    /// On the device that carries the link, which may be another than when the grant was given.
    fn operation(&self, asked: &OneSided) -> Operation {
        let (base, rkey) =
            self.rekeyed.get(&asked.grant).copied().unwrap_or((asked.base, asked.rkey));
        let addr = base.wrapping_add(asked.offset);
        let remote = RemoteSlice { addr, len: asked.bytes.into(), rkey };
        match asked.kind {
            Kind::Read => Operation::Read(remote),
            Kind::Notice => Operation::WriteImm(remote, asked.imm),
            _ => Operation::Write(remote),
        }
    }

    fn control_work(
        &mut self,
        control: Control,
        env: &LinkEnv<'_>,
    ) -> Result<Work<RequestContext>, Error> {
        self.told = self.consumed;
        let frame =
            Frame { control: true, more: false, channel: 0, consumed: self.consumed as u16 };
        let inline = CONTROL_BYTES <= self.inline;
        let held = if inline {
            Held::Copied(control.encode())
        } else {
            let mut buf = env.pool.take_uncharged(CONTROL_BYTES, Purpose::Send)?;
            buf.copy_from_slice(&control.encode());
            Held::Shared(buf.freeze())
        };
        // That the peer's device took the question says something too.
        let signaled = self.signal(env, !inline || matches!(control, Control::Ping(_)));
        self.stats.controls_sent += 1;
        let request = RequestContext {
            kind: Kind::Control,
            bytes: CONTROL_BYTES as u32,
            ..RequestContext::default()
        };
        Ok(Work { operation: Operation::SendImm(frame.to_imm()), held, signaled, inline, request })
    }

    /// The link is down: now it is known what requests are told that were flushed before.
    #[cold]
    pub(crate) fn complete_flushed(&mut self, env: &LinkEnv<'_>, wakes: &mut Wakes) {
        if self.failure().is_some() {
            for wc in std::mem::take(&mut self.flushed) {
                self.on_sent(env, &wc, wakes, |_| Error::new(ErrorKind::LinkDown, "flushed"));
            }
        }
    }

    /// Requests that did not report and were done when the link went down do not report now either.
    /// One more, which is flushed at once, completes them.
    pub(crate) fn post_last(&mut self, env: &LinkEnv<'_>) {
        let wanted = self.failure().is_some() && !self.last_posted && self.queue.in_flight() > 0;
        if !wanted || self.queue.room() == 0 || env.reserve(1) == 0 {
            return; // or else the clock ends it
        }
        let request = RequestContext { kind: Kind::Last, ..RequestContext::default() };
        self.last_posted = true;
        if let Err(refused) = self.queue.post_inline(Operation::Send, &[], true, request) {
            env.release(1 - refused.posted);
        }
    }

    /// A send, write or read completed. `failure` makes the error if it is the first.
    pub(crate) fn on_sent(
        &mut self,
        env: &LinkEnv<'_>,
        wc: &WorkCompletion,
        wakes: &mut Wakes,
        failure: impl FnOnce(Status) -> Error,
    ) {
        if self.upgrade.is_some() && self.on_upgrade_sent(wc) {
            return;
        }
        let status = wc.status();
        let ok = status == Status::SUCCESS;
        if self.queue.get(wc).is_none() {
            self.stats.stale_completions += 1; // of a queue pair that is gone, perhaps
            return;
        }
        if !ok && self.transport == ActiveTransport::Moving {
            return; // it stays where it is until the queue pair is gone, and goes elsewhere then
        }
        if status == Status::FLUSHED && self.failure().is_none() {
            // Something else failed before it, and will be told: by an event, or by the peer.
            self.flushed.push(*wc);
            return;
        }
        self.acknowledged_since |= ok;
        if !ok && self.failure().is_none() {
            // All of ours was acknowledged before the farewell: a peer that has left by then has
            // left in good order.
            let is_control = self.queue.get(wc).is_some_and(|it| it.request.kind == Kind::Control);
            let error = match self.fin_ack_sent && is_control {
                true => Error::new(ErrorKind::Closed, "the peer has closed the link"),
                false => failure(status),
            };
            self.fail(error, wakes);
            if self.transport == ActiveTransport::Moving {
                return;
            }
        }
        let error = self.failure().cloned();
        let (tickets, stats, limits) = (&mut self.tickets, &mut self.stats, &self.limits);
        let (mut entries, mut controls, mut notices) = (0, 0, 0);
        self.queue.complete(wc, |InFlight { held, request }, last| {
            entries += 1;
            controls += u64::from(request.kind == Kind::Control);
            notices += u64::from(request.kind == Kind::Notice);
            let failed = last && !ok;
            stats.completed(request.kind, request.bytes, failed);
            if let Some(ticket) = request.ticket {
                took(limits, &request);
                let result = match (&error, failed) {
                    (Some(error), true) => Err(error.clone()),
                    _ => Ok(()),
                };
                wakes.extend(tickets.finish(ticket, outcome(result, held)));
            }
        });
        env.release(entries);
        self.on_raw_done(controls, notices, wakes);
        if !self.revoking.is_empty() {
            self.answer_revocations();
        }
        if ok {
            self.pump(env, wakes);
        }
        self.post_last(env);
    }
}
