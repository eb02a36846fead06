//! The TCP driver of a link: writes the core's output to the connection, and passes received frames
//! to the core.

use std::io::{self, IoSlice};
use std::time::Instant;

#[cfg(feature = "tokio")]
use tokio::io::ReadBuf;

use super::{LinkEnv, LinkState};
use crate::error::{Error, ErrorKind};
use crate::link::core::{ActiveTransport, Body, TcpOutput, Wakes, protocol};
use crate::link::tcp::{Arrival, Asked, TcpPath};
use crate::mem::BufMut;
#[cfg(feature = "tokio")]
use crate::mem::Pool;
#[cfg(feature = "tokio")]
use crate::wire::Frame;
use crate::wire::{TcpFrame, TcpFrameKind};

/// The number of bytes to read before other links are served. They fit into the CPU's cache, so
/// that the application reads them from there.
const SLICE_BYTES: usize = 256 << 10;

/// A request of the peer for our memory. `fabric/regions.rs` executes it.
pub(crate) enum Request<'a> {
    Write { grant: u64, offset: u64, bytes: &'a [u8] },
    Read { grant: u64, offset: u64, into: &'a mut [u8] },
}

/// The reason why reading stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reading {
    /// Everything that has arrived was read, or the link is down.
    Done,
    /// There may be more, but other links come first.
    More,
    /// There is no memory for more.
    NoMemory,
    /// The account for this peer's data is at its limit, until some of the data is dropped.
    OverBudget,
}

impl LinkState {
    /// Writes a small message at once, from the caller's memory. Returns false if the message must
    /// be queued, for example because it needs several frames.
    pub(super) fn write_now(&mut self, channel: u16, bytes: &[u8]) -> Result<bool, Error> {
        if bytes.len() > self.core.tcp_segment() {
            return Ok(false);
        }
        let sent = self.write_slices(channel, &[IoSlice::new(bytes)], bytes.len())?;
        Ok(sent.is_some())
    }

    /// Writes the first `len` bytes of the slices, or as many as the kernel and the peer's credits
    /// allow, as messages of one frame each. Returns the number of bytes; `None` if they must be
    /// queued.
    pub(crate) fn write_slices(
        &mut self,
        channel: u16,
        slices: &[IoSlice<'_>],
        len: usize,
    ) -> Result<Option<usize>, Error> {
        let is_ready = self.core.transport() == ActiveTransport::Tcp && self.core.may_send_now();
        let Some(tcp) = self.tcp.as_mut().filter(|tcp| is_ready && tcp.is_written()) else {
            return Ok(None);
        };
        let most = usize::try_from(self.core.peer().max_message_bytes).unwrap_or(usize::MAX);
        let most = self.core.tcp_segment().min(most).max(1);
        let len = len.min(self.core.credits().saturating_mul(most));
        let mut written = tcp.write_now(self.core.imm_of(channel), slices, len, most);
        if let Err(error) = tcp.flush(|_| {}) {
            written = Err(error);
        }
        let (frames, bytes) = written.map_err(|error| broken(&error))?;
        if frames == 0 {
            return Ok(None);
        }
        self.core.on_written(frames, bytes, most);
        Ok(Some(bytes))
    }

    /// Returns whether large writes go to the kernel without a copy, and large reads come from
    /// there without one. This needs TCP without TLS, because TLS copies anyway.
    #[cfg(feature = "tokio")]
    pub(crate) fn writes_through(&self) -> bool {
        self.core.transport() == ActiveTransport::Tcp
            && self.tcp.as_ref().is_some_and(TcpPath::is_plain)
    }

    /// Returns whether sending must wait for the kernel or the peer. The fabric gets an event for
    /// either, and then continues.
    #[cfg(feature = "tokio")]
    pub(crate) fn is_held_up(&self) -> bool {
        self.core.credits() == 0 || self.tcp.as_ref().is_some_and(TcpPath::is_blocked)
    }

    /// Reads the arrived bytes of large frames on `channel` into `out`, if no other data comes
    /// first. Returns false if there are none. The caller need not wake the fabric for other data:
    /// the fabric has an event for it, or [`LinkState::wants_attention`] reports it.
    #[cfg(feature = "tokio")]
    pub(crate) fn read_through(
        &mut self,
        pool: &Pool,
        channel: u16,
        out: &mut ReadBuf<'_>,
    ) -> Result<bool, Error> {
        let largest = self.core.own_tcp_segment();
        let takes = |imm| {
            let frame = Frame::from_imm(imm);
            !frame.control && !frame.more && frame.channel == channel
        };
        let (mut any, mut is_whole) = (false, false);
        while self.core.is_up()
            && self.writes_through()
            && self.core.lost().is_none()
            && self.core.is_all_read()
            && out.remaining() > 0
            && let Some(tcp) = &mut self.tcp
            && let Some((bytes, over)) =
                tcp.read_through(out, pool, largest, takes).map_err(|error| broken(&error))?
        {
            any = true;
            self.core.stats.recv_bytes += bytes as u64;
            if let Some(imm) = over {
                is_whole = true;
                self.core.on_read_through(imm)?;
            }
        }
        if any {
            let (now, limit) = (Instant::now(), self.core.frame_limit());
            let is_late = self.tcp.as_mut().is_some_and(|tcp| tcp.is_late(now, limit));
            if is_whole || !is_late {
                self.core.on_heard(now);
            }
        }
        Ok(any)
    }

    /// Writes what may be sent, until nothing is left or the socket accepts no more.
    pub(super) fn write_all(&mut self, wakes: &mut Wakes) -> Result<(), Error> {
        let Self { core, tcp: Some(tcp), .. } = self else { return Ok(()) };
        loop {
            while tcp.has_room() {
                match core.next_tcp_output(|bytes| tcp.may_ask(bytes)) {
                    Some(TcpOutput::Frame { frame, body, request }) => {
                        tcp.push(&frame, body, request);
                    }
                    Some(TcpOutput::Operation { frame, held, request }) => {
                        tcp.ask(frame, held, request);
                    }
                    None => break,
                }
            }
            let was_written = tcp.is_written();
            let flushed = tcp.flush(|request| core.on_tcp_sent(request, wakes));
            flushed.map_err(|error| broken(&error))?;
            if was_written || !tcp.is_written() {
                return Ok(());
            }
        }
    }

    /// Writes the migration frames, whichever transport carries the link.
    fn write_said(&mut self) -> io::Result<()> {
        let Some(tcp) = &mut self.tcp else { return Ok(()) };
        while let Some((frame, body)) = self.core.next_said() {
            tcp.push(&frame, body, None);
        }
        tcp.flush(|_| {})
    }

    /// Writes the frames that must go over the connection even while the link uses RDMA.
    pub(crate) fn flush_connection(&mut self, wakes: &mut Wakes) {
        if self.write_said().is_err() {
            self.core.end(Error::new(ErrorKind::LinkDown, "the TCP connection broke"), wakes);
        }
    }

    /// Handles a readable or writable connection. Reads and delivers up to about `SLICE_BYTES`, or
    /// leaves them to a waiting reader. Then sends what may be sent. `serve` executes the peer's
    /// requests for our memory, and returns false if one is not allowed.
    pub(crate) fn on_socket(
        &mut self,
        env: &LinkEnv<'_>,
        scratch: &mut [u8],
        now: Instant,
        wakes: &mut Wakes,
        serve: &mut dyn FnMut(Request<'_>) -> bool,
    ) -> Reading {
        let is_awaited = !self.core.waiters.message.is_empty();
        if is_awaited && self.tcp.as_mut().is_some_and(TcpPath::defers) {
            wakes.append(&mut self.core.waiters.message);
            self.pump(env, wakes);
            return Reading::More;
        }
        let Some(tcp) = &mut self.tcp else { return Reading::Done };
        tcp.begin_reading(scratch);
        let read = self.read_slice(env, scratch, now, wakes, serve);
        if let Some(tcp) = &mut self.tcp {
            tcp.end_reading(scratch);
        }
        let reading = match read {
            Ok(Some(reading)) => reading,
            // This also runs while the link uses RDMA: a closed connection shows that the peer has
            // ended.
            Ok(None) => {
                self.core.end(self.core.hung_up(), wakes);
                return Reading::Done;
            }
            Err(error) => {
                self.core.fail(error, wakes);
                return Reading::Done;
            }
        };
        if self.core.lost().is_some() {
            self.core.resume(wakes);
        }
        if self.core.transport() != ActiveTransport::Tcp && self.write_said().is_err() {
            self.core.end(self.core.hung_up(), wakes);
            return Reading::Done;
        }
        self.answer_revocations();
        self.pump(env, wakes);
        reading
    }

    /// Reads up to about `SLICE_BYTES`. Returns `None` if the peer has closed the connection.
    fn read_slice(
        &mut self,
        env: &LinkEnv<'_>,
        scratch: &mut [u8],
        now: Instant,
        wakes: &mut Wakes,
        serve: &mut dyn FnMut(Request<'_>) -> bool,
    ) -> Result<Option<Reading>, Error> {
        let largest = self.core.own_tcp_segment();
        let mut left = SLICE_BYTES;
        loop {
            // The queue pair of a lost path must be destroyed first.
            if self.core.is_to_be_detached() || left == 0 {
                return Ok(Some(Reading::More));
            }
            let Some(tcp) = &mut self.tcp else { return Ok(Some(Reading::Done)) };
            match tcp.next(scratch, env.pool, largest) {
                Ok(Arrival::TcpFrame(frame, body)) => {
                    left = left.saturating_sub(frame.follows() + size_of::<TcpFrame>());
                    self.on_tcp_frame(&frame, body, now, wakes, serve)?;
                    if self.failure().is_some() {
                        return Ok(Some(Reading::Done));
                    }
                }
                Ok(Arrival::Nothing) => {
                    // A part of a frame is a sign of life, too, but not for ever.
                    if !tcp.is_late(now, self.core.frame_limit()) && tcp.has_begun() {
                        self.core.on_heard(now);
                    }
                    return Ok(Some(Reading::Done));
                }
                Ok(Arrival::NoMemory) => return Ok(Some(Reading::NoMemory)),
                Ok(Arrival::OverBudget) => return Ok(Some(Reading::OverBudget)),
                Ok(Arrival::End) => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    return Err(protocol(&error.to_string()));
                }
                Err(error) => return Err(broken(&error)),
            }
        }
    }

    fn on_tcp_frame(
        &mut self,
        frame: &TcpFrame,
        body: Option<BufMut>,
        now: Instant,
        wakes: &mut Wakes,
        serve: &mut dyn FnMut(Request<'_>) -> bool,
    ) -> Result<(), Error> {
        self.core.on_heard(now);
        let Self { core, tcp: Some(tcp), .. } = self else { return Ok(()) };
        if tcp.is_flooded() {
            return Err(protocol("too many requests without reading the answers"));
        }
        let &TcpFrame { kind, imm, len, op, grant, offset } = frame;
        match (kind, body) {
            (kind, body) if kind.is_migration() => {
                if core.on_path_frame(frame, body.as_deref(), wakes)? {
                    self.adopt_next_path();
                }
            }
            (TcpFrameKind::Frame, Some(body)) => core.on_frame(imm, Some(body), now, wakes)?,
            (TcpFrameKind::Write | TcpFrameKind::WriteImm, Some(body)) => {
                let done = serve(Request::Write { grant, offset, bytes: &body });
                drop(body);
                match kind {
                    TcpFrameKind::WriteImm if done => core.on_frame(imm, None, now, wakes)?,
                    TcpFrameKind::WriteImm => core.on_refused_notice(),
                    _ => {}
                }
                tcp.answer(op, done, Body::Nothing);
            }
            (TcpFrameKind::Read, None) => {
                if tcp.exceeds_read_limit(len as usize) {
                    return Err(protocol("reads of too many bytes at once"));
                }
                let mut bytes = vec![0; len as usize].into_boxed_slice();
                let done = serve(Request::Read { grant, offset, into: &mut bytes });
                tcp.answer(op, done, Body::Loose(bytes));
            }
            (TcpFrameKind::Done, None) => self.on_answer(op, None, Ok(()), wakes)?,
            (TcpFrameKind::Data, Some(body)) => self.on_answer(op, Some(body), Ok(()), wakes)?,
            (TcpFrameKind::Denied, None) => {
                let what = "the peer refused: the grant has ended, or does not cover the access";
                self.on_answer(op, None, Err(Error::new(ErrorKind::Denied, what)), wakes)?;
            }
            _ => return Err(protocol("the payload of a TCP frame is missing or unexpected")),
        }
        Ok(())
    }

    fn on_answer(
        &mut self,
        op: u32,
        data: Option<BufMut>,
        result: Result<(), Error>,
        wakes: &mut Wakes,
    ) -> Result<(), Error> {
        let Some(Asked { held, request, .. }) = self.tcp.as_mut().and_then(|tcp| tcp.answered(op))
        else {
            return Err(protocol("an answer without a request"));
        };
        self.core.on_answer((held, request), data, result, wakes)
    }

    /// Closes the connection of a link that is down, after its last frames. Fails every request
    /// that waits for the connection. Returns false if there is no connection.
    pub(super) fn close_tcp(&mut self, wakes: &mut Wakes) -> bool {
        let _ = self.write_said();
        let Some(mut tcp) = self.tcp.take() else { return false };
        self.core.set_connection(false);
        let error = self.core.failure_or_gone();
        tcp.shut_down();
        let leaving = tcp.take_leaving().map(|request| (None, request)).collect::<Vec<_>>();
        let asked = tcp.take_asked().into_iter().map(|asked| (Some(asked.held), asked.request));
        for (held, request) in leaving.into_iter().chain(asked) {
            let held = held.unwrap_or(crate::device::slots::Held::Nothing);
            self.core.complete(request, held, Err(error.clone()), wakes);
        }
        true
    }
}

/// Creates the error for a broken connection.
fn broken(error: &io::Error) -> Error {
    Error::new(ErrorKind::LinkDown, format!("the TCP connection broke: {error}"))
}
