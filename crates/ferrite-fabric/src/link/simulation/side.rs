//! One side: a core, and a driver that posts, writes and reaps for it as `link/state.rs` does.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::application::CHANNELS;
use super::wire::{Acknowledgement, Packet, Wires};
use super::{Application, Random, Violation, violation};
use crate::device::slots::{Held, InFlight};
use crate::error::{Error, ErrorKind};
use crate::latency::Latencies;
use crate::link::core::{
    ActiveTransport, LinkCore, Output, OwnLimits, PeerTimeouts, RequestContext, Wakes,
};
use crate::link::keepalive::Keepalive;
use crate::link::kind::Kind;
use crate::mem::{BufMut, Pool, Purpose};
use crate::wire::{Features, Hello, Program, Version};

/// Maximum number of requests in a queue pair.
const SEND_QUEUE: usize = 16;
pub(super) const SEGMENT_BYTES: u32 = 256;

/// A queue pair: its requests in flight, and its unprocessed completions.
pub(super) struct Path {
    pub(super) wire: u64,
    pub(super) in_flight: VecDeque<(u64, InFlight<RequestContext>)>,
    pub(super) last_work: u64,
    pub(super) completions: VecDeque<Completion>,
}

pub(super) enum Completion {
    Received { imm: u32, bytes: Option<Vec<u8>> },
    Sent(Acknowledgement),
}

impl Path {
    pub(super) fn new(wire: u64) -> Self {
        Self { wire, in_flight: VecDeque::new(), last_work: 0, completions: VecDeque::new() }
    }

    pub(super) fn post(
        &mut self,
        wires: &mut Wires,
        to: usize,
        packet: Packet,
        held: Held,
        request: RequestContext,
    ) {
        self.last_work += 1;
        self.in_flight.push_back((self.last_work, InFlight { held, request }));
        let wire = wires.rdma(self.wire);
        if !wire.is_cut {
            wire.packets[to].push_back((self.last_work, packet));
        }
    }
}

pub(super) struct Side {
    pub(super) core: LinkCore,
    pub(super) path: Option<Path>,
    /// The path that the link is upgraded to.
    pub(super) next: Option<Path>,
    pub(super) tcp: Option<u64>,
    pub(super) asked: VecDeque<(u32, Held, RequestContext)>,
    pub(super) last_op: u32,
    pub(super) application: Application,
    pub(super) pool: Pool,
    pub(super) wakes: Wakes,
    /// When the timer for probes expires.
    probe_at: Option<Instant>,
    pub(super) is_shown: bool,
}

/// Creates the two sides of an open link. The first side is the caller.
pub(super) fn pair(
    random: &mut Random,
    wires: &mut Wires,
    pool: &Pool,
    now: Instant,
    (begins_on_rdma, has_connection): (bool, bool),
) -> [Side; 2] {
    let hellos = [1, 2].map(|session| Hello {
        version: Version::CURRENT,
        features: Features::WRITE_IMM | Features::ONE_SIDED | Features::MOVE,
        segment_bytes: SEGMENT_BYTES,
        window: 2 + random.below(12) as u16,
        channels: CHANNELS,
        max_message_bytes: 2048,
        instance: session,
        session,
        mtu: 0,
        program: Program::UNKNOWN,
    });
    let rdma = begins_on_rdma.then(|| wires.lay());
    let tcp = has_connection.then(|| wires.connect());
    [0, 1].map(|side| {
        let limits = OwnLimits {
            hello: hellos[side],
            queue_messages: 8,
            queue_bytes: 8192,
            keepalive: Keepalive::new(Duration::from_secs(10), side as u64),
            timeouts: PeerTimeouts {
                answer: Duration::from_secs(5),
                silence: Duration::from_secs(5),
            },
            latencies: Arc::new(Latencies::default()),
            clock: quanta::Clock::new(),
        };
        let transport = if begins_on_rdma { ActiveTransport::Rdma } else { ActiveTransport::Tcp };
        let mut core = LinkCore::new(limits, transport, now);
        core.open(hellos[1 - side], now);
        core.set_caller(side == 0);
        core.set_connection(tcp.is_some());
        Side {
            core,
            path: rdma.map(Path::new),
            next: None,
            tcp,
            asked: VecDeque::new(),
            last_op: 0,
            application: Application::new(7 + side as u64),
            pool: pool.clone(),
            wakes: Wakes::new(),
            probe_at: None,
            is_shown: false,
        }
    })
}

impl Side {
    pub(super) fn buffer(&self, bytes: &[u8]) -> BufMut {
        let mut buf = self.pool.take_uncharged(bytes.len(), Purpose::Send).expect("memory");
        buf.copy_from_slice(bytes);
        buf
    }

    pub(super) fn checked<T>(&mut self, result: Result<T, Error>) -> Result<T, Violation> {
        result.or_else(|error| violation(format!("{}: {error}", self.describe())))
    }

    pub(super) fn describe(&self) -> String {
        let core = &self.core;
        format!(
            "{} {:?}, sent {} acknowledged {} received {}, {} operations, failure {:?}",
            if core.is_caller() { "caller" } else { "called" },
            core.transport(),
            core.credits.sent(),
            core.credits.acknowledged(),
            core.credits.received(),
            self.application.operations.len(),
            core.failure().map(ToString::to_string),
        )
    }

    pub(super) fn close(&mut self) {
        self.core.close();
    }

    pub(super) fn fail(&mut self, error: Error) {
        self.core.fail(error, &mut self.wakes);
    }

    pub(super) fn end(&mut self, error: Error) {
        self.core.end(error, &mut self.wakes);
    }

    /// Handles the end of the connection, which ends the link.
    pub(super) fn hang_up(&mut self) {
        self.end(self.core.hung_up());
    }

    /// Handles a disconnect by the peer's connection manager.
    pub(super) fn disconnected(&mut self) {
        let gone = || Error::new(ErrorKind::LinkDown, "the peer has disconnected");
        self.core.on_disconnected(&mut self.wakes, gone);
    }

    /// Handles the answer of a peer that no longer knows the link.
    pub(super) fn not_known(&mut self) {
        let kind = match self.core.peer_has_everything() {
            true => ErrorKind::Closed,
            false => ErrorKind::LinkDown,
        };
        self.end(Error::new(kind, "the peer does not know the link"));
    }

    /// Returns whether data from the peer is on its way or unprocessed.
    pub(super) fn has_unread(&self, wires: &mut Wires, side: usize) -> bool {
        let unread = |path: &Path, wires: &mut Wires| {
            !path.completions.is_empty() || !wires.rdma(path.wire).packets[side].is_empty()
        };
        self.path.iter().chain(&self.next).any(|path| unread(path, wires))
            || self.tcp.is_some_and(|tcp| !wires.tcp(tcp).frames[side].is_empty())
    }

    pub(super) fn ended_in_order(&self) -> bool {
        self.core.failure().is_some_and(|error| error.kind() == ErrorKind::Closed)
    }

    /// Sends everything that may be sent.
    pub(super) fn pump(
        &mut self,
        wires: &mut Wires,
        side: usize,
        (refuses, is_dry): (bool, bool),
    ) -> Result<(), Violation> {
        for _ in 0..2 {
            if !self.core.is_up() {
                return Ok(());
            }
            match self.core.transport() {
                ActiveTransport::Rdma => self.post_all(wires, 1 - side, refuses, is_dry),
                ActiveTransport::Tcp => self.write_all(wires, 1 - side),
                ActiveTransport::Migrating => self.write_said(wires, 1 - side),
            }
            if !self.core.is_up() || !self.core.after_sending(&mut self.wakes) {
                break;
            }
        }
        if self.core.transport() == ActiveTransport::Rdma {
            self.write_said(wires, 1 - side);
        }
        Ok(())
    }

    fn post_all(&mut self, wires: &mut Wires, to: usize, refuses: bool, is_dry: bool) {
        while self.path.as_ref().is_some_and(|path| path.in_flight.len() < SEND_QUEUE) {
            let Some(output) = self.core.next_output(SEGMENT_BYTES as usize, true) else { return };
            let (packet, held, request) = match output {
                Output::Data { imm, piece, request, .. } => {
                    let bytes = piece.as_ref().map_or(Vec::new(), |piece| piece.to_vec());
                    let held = piece.map_or(Held::Nothing, Held::Shared);
                    (Packet::Frame { imm, bytes }, held, request)
                }
                Output::Control { control, .. } if is_dry => {
                    self.core.put_back(control);
                    return;
                }
                Output::Control { imm, control } => {
                    let bytes = control.encode().to_vec();
                    (Packet::Frame { imm, bytes }, Held::Nothing, RequestContext::default())
                }
                Output::OneSided { held, request, .. } => {
                    (packet_of(&held, &request), held, request)
                }
            };
            let error = Error::new(ErrorKind::LinkDown, "the device refused a request");
            if refuses && self.core.lose(&error) {
                self.core.not_posted(held, request);
                return;
            }
            if let Some(path) = &mut self.path {
                path.post(wires, to, packet, held, request);
            }
        }
    }

    /// Returns the path that uses this wire, if its queue pair accepts requests. It accepts none
    /// after the link has failed, or if a link that is migrating has lost this path.
    fn path_on(&mut self, wire: u64) -> Option<&mut Path> {
        let is_stopped = self.core.failure().is_some();
        let is_lost = self.core.transport() == ActiveTransport::Migrating;
        let path = self.path.as_mut().filter(|path| path.wire == wire && !is_lost);
        path.or(self.next.as_mut().filter(|next| next.wire == wire)).filter(|_| !is_stopped)
    }

    /// Lets the device take the next packet and the next acknowledgement of a path.
    pub(super) fn on_packet(
        &mut self,
        wires: &mut Wires,
        id: u64,
        side: usize,
    ) -> Result<(), Violation> {
        let wire = wires.rdma(id);
        let (packet, acknowledged) =
            (wire.packets[side].pop_front(), wire.acknowledgements[side].pop_front());
        let Some(path) = self.path_on(id) else {
            if packet.is_some() {
                wires.cut(id); // the retries of the peer's device are exhausted
            }
            return Ok(());
        };
        path.completions.extend(acknowledged.map(Completion::Sent));
        let Some((work, packet)) = packet else { return Ok(()) };
        let mut value = None;
        match packet {
            Packet::Frame { imm, bytes } => {
                path.completions.push_back(Completion::Received { imm, bytes: Some(bytes) });
            }
            Packet::Write { grant, value, imm } => {
                path.completions.extend(imm.map(|imm| Completion::Received { imm, bytes: None }));
                self.application.on_write(grant, value)?;
            }
            Packet::Read { grant } => value = Some(self.application.on_read(grant)?),
        }
        wires.rdma(id).acknowledgements[1 - side].push_back(Acknowledgement { work, value });
        Ok(())
    }

    /// Processes up to `most` completions.
    pub(super) fn reap(&mut self, most: usize, now: Instant) -> Result<(), Violation> {
        for _ in 0..most {
            let next = self.next.as_mut().and_then(|next| next.completions.pop_front());
            if let Some(completion) = next {
                self.on_next_completion(completion)?;
                continue;
            }
            let Some(completion) = self.path.as_mut().and_then(|path| path.completions.pop_front())
            else {
                return Ok(());
            };
            match completion {
                Completion::Received { imm, bytes } => {
                    let buf = bytes.map(|bytes| self.buffer(&bytes));
                    let taken = self.core.on_frame(imm, buf, now, &mut self.wakes);
                    self.checked(taken)?;
                }
                Completion::Sent(Acknowledgement { work, value }) => self.on_sent(work, value),
            }
            self.answer_revocations();
        }
        Ok(())
    }

    fn on_sent(&mut self, work: u64, value: Option<u64>) {
        self.core.on_acknowledged_by_device();
        while let Some((_, InFlight { held, request })) =
            self.path.as_mut().and_then(|path| path.in_flight.pop_front_if(|(at, _)| *at <= work))
        {
            let held = match (held, value) {
                (Held::Unique(mut buf), Some(value)) => {
                    buf.copy_from_slice(&value.to_le_bytes());
                    Held::Unique(buf)
                }
                (held, _) => held,
            };
            self.core.complete(request, held, Ok(()), &mut self.wakes);
        }
    }

    fn on_next_completion(&mut self, completion: Completion) -> Result<(), Violation> {
        match completion {
            Completion::Received { bytes, .. } => {
                let heard = self.core.on_upgrade_frame(&bytes.unwrap_or_default());
                if self.checked(heard)? {
                    self.path = self.next.take();
                }
            }
            Completion::Sent(_) => {
                if let Some(next) = &mut self.next {
                    next.in_flight.clear();
                }
                self.core.on_probed(true);
            }
        }
        Ok(())
    }

    pub(super) fn answer_revocations(&mut self) {
        let Self { core, path, asked, .. } = self;
        core.answer_revocations(|grant| {
            let in_flight = path.iter().flat_map(|path| &path.in_flight);
            let mut in_flight = in_flight.map(|(_, it)| &it.request);
            in_flight.any(|it| it.uses(grant)) || asked.iter().any(|(_, _, it)| it.uses(grant))
        });
        if self.core.take_released().contains(&self.application.grant) {
            self.application.is_released = true;
        }
    }

    /// Processes the completions of a lost path, destroys it, and reports the received frames to
    /// the peer.
    pub(super) fn detach(&mut self, now: Instant) -> Result<(), Violation> {
        self.reap(usize::MAX, now)?;
        self.next = None;
        self.core.end_upgrade();
        if !self.core.is_to_be_detached() {
            return Ok(());
        }
        let path = self.path.take().map_or(VecDeque::new(), |path| path.in_flight);
        self.core.on_detached(path.into_iter().map(|(_, it)| it).collect());
        self.core.resume(&mut self.wakes);
        self.answer_revocations();
        Ok(())
    }

    /// Fails everything in flight, because the link is down.
    pub(super) fn tear_down(&mut self) {
        let error = self.core.failure_or_gone();
        for (_, held, request) in std::mem::take(&mut self.asked) {
            self.core.complete(request, held, Err(error.clone()), &mut self.wakes);
        }
        let in_flight = self.path.take().map_or(VecDeque::new(), |path| path.in_flight);
        for (_, InFlight { held, request }) in in_flight {
            self.core.finish(request, held, Err(error.clone()), &mut self.wakes);
        }
        self.next = None;
    }

    /// Continues over a new connection.
    pub(super) fn resume_over(&mut self, wire: u64, received: u64) -> Result<(), Violation> {
        if !self.core.resume_over(received, &mut self.wakes) {
            return violation("a link without a path refused to continue over a new connection");
        }
        self.tcp = Some(wire);
        self.answer_revocations();
        match self.core.failure() {
            Some(error) if error.kind() == ErrorKind::Protocol => violation(error.to_string()),
            _ => Ok(()),
        }
    }

    /// Detects a cut path, if something was sent over it.
    pub(super) fn notice_cut(&mut self, wires: &Wires) {
        let is_cut = |path: &Path| wires.is_cut(path.wire) && !path.in_flight.is_empty();
        if self.path.as_ref().is_some_and(is_cut) && self.core.transport() == ActiveTransport::Rdma
        {
            self.fail(Error::new(ErrorKind::LinkDown, "retries exceeded"));
        }
        if self.next.as_ref().is_some_and(is_cut) {
            if let Some(next) = &mut self.next {
                next.in_flight.clear();
            }
            self.core.on_probed(false);
        }
    }

    /// Starts the timer for probes if the core asks for it, and handles it if it has expired.
    /// Returns whether a probe was queued.
    pub(super) fn probe(&mut self, now: Instant) -> bool {
        if self.core.take_probe_request() {
            self.probe_at = self.core.begin_probing(now);
        }
        if self.probe_at.is_none_or(|at| at > now) {
            return false;
        }
        let was_idle = self.core.is_idle();
        self.probe_at = self.core.on_probe_timer(now);
        was_idle && !self.core.is_idle()
    }

    pub(super) fn on_timer(&mut self, now: Instant) -> Result<(), Violation> {
        if self.core.on_timer(now, || None).is_err() {
            self.fail(Error::new(ErrorKind::PeerStalled, "the peer has not answered"));
        }
        Ok(())
    }
}

fn packet_of(held: &Held, request: &RequestContext) -> Packet {
    let grant = request.grant;
    let value = match held {
        Held::Shared(buf) => buf.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes)),
        _ => 0,
    };
    match request.kind {
        Kind::Read => Packet::Read { grant },
        Kind::Notice => Packet::Write { grant, value, imm: Some(request.imm) },
        _ => Packet::Write { grant, value, imm: None },
    }
}
