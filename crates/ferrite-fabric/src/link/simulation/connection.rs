//! A side on its TCP connection, as `link/state/tcp.rs` drives it.

use std::time::Instant;

use super::side::Side;
use super::wire::Wires;
use super::{Violation, violation};
use crate::device::slots::Held;
use crate::error::{Error, ErrorKind};
use crate::link::core::TcpOutput;
use crate::wire::{TcpFrame, TcpFrameKind};

/// A side that uses TCP stops writing while the connection buffers this many frames. Answers, and
/// the migration frames of a side that does not use TCP, are not limited.
const SOCKET_FRAMES: usize = 20;

impl Side {
    pub(super) fn write_all(&mut self, wires: &mut Wires, to: usize) {
        let Some(tcp) = self.tcp else { return };
        while wires.tcp(tcp).frames[to].len() < SOCKET_FRAMES {
            let asked = self.asked.len();
            match self.core.next_tcp_output(|_| asked < 4) {
                Some(TcpOutput::Frame { frame, body, request }) => {
                    wires.tcp(tcp).frames[to].push_back((frame, body.bytes().to_vec()));
                    if let Some(request) = request {
                        self.core.on_tcp_sent(request, &mut self.wakes);
                    }
                }
                Some(TcpOutput::Operation { mut frame, held, request }) => {
                    self.last_op += 1;
                    frame.op = self.last_op;
                    let bytes = match &held {
                        Held::Shared(buf) => buf.to_vec(),
                        _ => Vec::new(),
                    };
                    wires.tcp(tcp).frames[to].push_back((frame, bytes));
                    self.asked.push_back((self.last_op, held, request));
                }
                None => return,
            }
        }
    }

    pub(super) fn write_said(&mut self, wires: &mut Wires, to: usize) {
        if let Some(tcp) = self.tcp {
            while let Some((frame, body)) = self.core.next_said() {
                wires.tcp(tcp).frames[to].push_back((frame, body.bytes().to_vec()));
            }
        }
    }

    /// Processes the next frame of the connection.
    pub(super) fn on_tcp(
        &mut self,
        wires: &mut Wires,
        side: usize,
        now: Instant,
    ) -> Result<(), Violation> {
        let Some(tcp) = self.tcp.filter(|_| self.core.failure().is_none()) else { return Ok(()) };
        if self.core.is_to_be_detached() {
            return Ok(()); // the queue pair must be destroyed first
        }
        let Some((frame, bytes)) = wires.tcp(tcp).frames[side].pop_front() else { return Ok(()) };
        if self.is_shown && frame.kind.is_migration() {
            eprintln!(
                "side {side} (transport {:?}) receives {:?}",
                self.core.transport(),
                frame.kind
            );
        }
        self.core.on_heard(now);
        let answer = self.on_tcp_frame(&frame, &bytes, now)?;
        wires.tcp(tcp).frames[1 - side].extend(answer);
        if self.core.lost().is_some() {
            self.core.resume(&mut self.wakes);
        }
        self.answer_revocations();
        match self.core.failure() {
            Some(error) if error.kind() == ErrorKind::Protocol => violation(error.to_string()),
            _ => Ok(()),
        }
    }

    pub(super) fn on_tcp_frame(
        &mut self,
        frame: &TcpFrame,
        bytes: &[u8],
        now: Instant,
    ) -> Result<Option<(TcpFrame, Vec<u8>)>, Violation> {
        let &TcpFrame { kind, imm, op, grant, .. } = frame;
        let answer = |kind, bytes: Vec<u8>| {
            let len = bytes.len() as u32;
            (TcpFrame { kind, imm: 0, len, op, grant: 0, offset: 0 }, bytes)
        };
        if kind.is_migration() {
            let body = (!bytes.is_empty()).then_some(bytes);
            let heard = self.core.on_path_frame(frame, body, &mut self.wakes);
            if self.checked(heard)? {
                self.path = self.next.take();
            }
            return Ok(None);
        }
        let is_served = grant == self.application.grant && !self.application.is_revoked;
        match kind {
            TcpFrameKind::Frame => {
                let buf = self.buffer(bytes);
                let taken = self.core.on_frame(imm, Some(buf), now, &mut self.wakes);
                self.checked(taken)?;
                Ok(None)
            }
            TcpFrameKind::Write | TcpFrameKind::WriteImm => {
                if is_served {
                    let value = bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
                    self.application.on_write(grant, value)?;
                }
                if kind == TcpFrameKind::WriteImm && is_served {
                    let taken = self.core.on_frame(imm, None, now, &mut self.wakes);
                    self.checked(taken)?;
                } else if kind == TcpFrameKind::WriteImm {
                    self.core.on_refused_notice();
                }
                let done = if is_served { TcpFrameKind::Done } else { TcpFrameKind::Denied };
                Ok(Some(answer(done, Vec::new())))
            }
            TcpFrameKind::Read if is_served => {
                let value = self.application.on_read(grant)?;
                Ok(Some(answer(TcpFrameKind::Data, value.to_le_bytes().to_vec())))
            }
            TcpFrameKind::Read => Ok(Some(answer(TcpFrameKind::Denied, Vec::new()))),
            _ => {
                let Some((expected, held, request)) = self.asked.pop_front() else {
                    return violation("an answer arrived without a request");
                };
                if expected != op {
                    return violation("an answer has another number than its request");
                }
                let (held, data) = match kind {
                    TcpFrameKind::Data => (Held::Nothing, Some(self.buffer(bytes))),
                    _ => (held, None),
                };
                let result = match kind {
                    TcpFrameKind::Denied => Err(Error::new(ErrorKind::Denied, "refused")),
                    _ => Ok(()),
                };
                let taken = self.core.on_answer((held, request), data, result, &mut self.wakes);
                self.checked(taken)?;
                Ok(None)
            }
        }
    }
}
