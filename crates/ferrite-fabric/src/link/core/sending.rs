//! Sending: chooses the next frame or one-sided operation, within the peer's credits.

use super::migration::ActiveTransport;
use super::{LinkCore, RequestContext, Wakes};
use crate::device::slots::Held;
use crate::error::{Error, ErrorKind};
use crate::link::kind::Kind;
use crate::link::outbox::{Allowed, Next, OneSided};
use crate::mem::Buf;
use crate::wire::{Control, Features, Frame};

/// The next thing to send.
pub(crate) enum Output {
    /// A frame of a message.
    Data {
        imm: u32,
        more: bool,
        piece: Option<Buf>,
        request: RequestContext,
    },
    Control {
        imm: u32,
        control: Control,
    },
    /// A one-sided operation. `place` is the address and the key of the granted memory, on the
    /// device that carries the link.
    OneSided {
        held: Held,
        place: (u64, u32),
        request: RequestContext,
    },
}

impl LinkCore {
    /// Checks whether the link may carry a one-sided operation of this kind.
    pub(crate) fn check_one_sided(&self, kind: Kind) -> Result<(), Error> {
        let (features, what) = match kind {
            Kind::Notice => (Features::ONE_SIDED | Features::WRITE_IMM, "writes with a notice"),
            _ => (Features::ONE_SIDED, "one-sided operations"),
        };
        if self.uses(features) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Misuse, format!("the peer does not support {what}")))
    }

    /// Returns how many frames may be sent; 0 while too many bytes are kept for a migration.
    pub(crate) fn credits(&self) -> usize {
        if self.migration.keeps_too_much() { 0 } else { self.credits.available() }
    }

    /// Returns whether a message may be sent at once: the link is up and has a transport, nothing
    /// must be sent before the message, and the peer's credits allow a frame.
    pub(crate) fn may_send_now(&self) -> bool {
        self.is_up()
            && self.outbox.is_empty()
            && self.outbox.controls.is_empty()
            && self.credits() > 0
            && (self.migration.transport == ActiveTransport::Rdma || self.may_write_now())
    }

    /// Returns whether the link uses TCP and nothing must be sent before a new frame.
    fn may_write_now(&self) -> bool {
        self.migration.transport == ActiveTransport::Tcp
            && self.migration.is_all_said()
            && !self.upgrade.is_switching()
    }

    /// Begins a message of one frame that is sent at once over RDMA. Returns the frame's immediate
    /// data and its request context.
    pub(crate) fn send_now(&mut self, channel: u16, bytes: &[u8]) -> (u32, RequestContext) {
        let imm = self.data_frame(channel, false);
        self.migration.keep_bytes(self.credits.sent(), channel, bytes);
        let request = RequestContext {
            kind: Kind::Send,
            bytes: bytes.len() as u32,
            frame: self.credits.sent(),
            ..RequestContext::default()
        };
        (imm, request)
    }

    /// Returns the immediate data for frames on this channel that the driver writes by itself,
    /// without [`LinkCore::next_tcp_output`]. [`LinkCore::on_written`] counts these frames.
    pub(crate) fn imm_of(&self, channel: u16) -> u32 {
        let consumed = self.credits.unannounced();
        Frame { control: false, more: false, channel, consumed }.to_imm()
    }

    /// Counts frames that the driver has written by itself, with `bytes` bytes in total. Every
    /// frame except the last has `most` bytes.
    pub(crate) fn on_written(&mut self, frames: usize, bytes: usize, most: usize) {
        self.credits.send(frames as u64);
        self.credits.announce();
        for frame in 0..frames {
            self.stats.completed(Kind::Send, most.min(bytes - frame * most) as u32, false);
        }
        self.stats.tcp_bytes += bytes as u64;
    }

    fn data_frame(&mut self, channel: u16, more: bool) -> u32 {
        self.credits.send(1);
        Frame { control: false, more, channel, consumed: self.credits.announce() }.to_imm()
    }

    /// Returns the immediate data of a control frame.
    pub(super) fn control_frame(&mut self) -> u32 {
        let consumed = self.credits.announce();
        Frame { control: true, more: false, channel: 0, consumed }.to_imm()
    }

    /// Returns whether nothing waits to be sent.
    pub(crate) fn is_idle(&self) -> bool {
        self.outbox.controls.is_empty() && self.outbox.is_empty()
    }

    /// Returns the next frame, of at most `segment_bytes`, or the next one-sided operation, if
    /// `one_sided` allows one.
    #[inline]
    pub(crate) fn next_output(&mut self, segment_bytes: usize, one_sided: bool) -> Option<Output> {
        // Senders call this until it returns `None`, so the call that returns `None` must be cheap.
        if self.is_idle() { None } else { self.take_output(segment_bytes, one_sided) }
    }

    fn take_output(&mut self, segment_bytes: usize, one_sided: bool) -> Option<Output> {
        if let Some(control) = self.outbox.controls.pop_front() {
            self.stats.controls_sent += 1;
            return Some(Output::Control { imm: self.control_frame(), control });
        }
        let credits = self.credits();
        let allowed = Allowed { segment_bytes, credits, peer: &self.peer, one_sided };
        match self.outbox.next(&allowed)? {
            Next::Frame { channel, more, piece, ticket } => {
                let bytes = piece.as_ref().map_or(0, Buf::len);
                let imm = self.data_frame(channel, more);
                let frame = self.credits.sent();
                self.migration.keep_piece(frame, channel, more, piece.as_ref());
                let request = RequestContext {
                    ticket,
                    kind: Kind::Send,
                    bytes: bytes as u32,
                    frame,
                    begun: self.began(ticket),
                    ..RequestContext::default()
                };
                Some(Output::Data { imm, more, piece, request })
            }
            Next::OneSided(operation) => {
                let OneSided { kind, held, ticket, grant, base, rkey, offset, bytes, imm } =
                    operation;
                if kind == Kind::Notice {
                    self.credits.send(1);
                    self.migration.keep_notice(self.credits.sent());
                }
                let (frame, begun) = (self.credits.sent(), self.began(ticket));
                let request =
                    RequestContext { ticket, kind, bytes, frame, grant, offset, imm, begun };
                let place = self.grants.place_of(grant).unwrap_or((base, rkey));
                Some(Output::OneSided { held, place, request })
            }
        }
    }

    /// Takes back a control frame for which there was no memory. It becomes the next output.
    pub(crate) fn put_back(&mut self, control: Control) {
        self.stats.controls_sent -= 1;
        self.outbox.controls.push_front(control);
    }

    /// Wakes the tasks that wait for room. Queues the closing frames once everything else was sent,
    /// and a credit frame if one is due. Returns whether there is anything new to send.
    pub(crate) fn after_sending(&mut self, wakes: &mut Wakes) -> bool {
        if self.has_room(0) {
            wakes.append(&mut self.waiters.room);
        }
        let before = self.outbox.controls.len();
        if self.outbox.is_empty()
            && self.migration.is_all_said()
            && self.migration.transport != ActiveTransport::Migrating
        {
            while let Some(frame) = self.closing.next_closing_frame() {
                self.outbox.controls.push_back(frame);
            }
        }
        // Credits are returned after half a window, unless another frame carries them earlier.
        let is_due = !self.closing.peer_has_closed() && self.credits.is_announcement_due();
        if is_due && self.outbox.controls.is_empty() {
            self.outbox.controls.push_back(Control::Credit);
        }
        self.outbox.controls.len() > before
    }
}
