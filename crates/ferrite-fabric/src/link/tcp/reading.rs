//! The reading half of a TCP path: parses TCP frames, and reads payload into its buffer.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::RecvFlags;
#[cfg(feature = "tokio")]
use tokio::io::ReadBuf;

use super::{Arrival, LARGE, OPERATION_BYTES, PEEK, TcpPath, invalid};
use crate::device::slots::Held;
use crate::link::socket::receive;
use crate::link::tls::Tls;
use crate::mem::{Account, Budget, BufMut, Pool, PoolError, Purpose, SizeClass};
use crate::wire::{TCP_FRAME_HEADER_BYTES, TcpFrame, TcpFrameKind};

impl TcpPath {
    /// Reads the payload of the next frame into `out`, if it is a large frame that `takes` accepts.
    /// Other data stays in the kernel, or waits for the fabric ([`TcpPath::has_left_over`]).
    ///
    /// Returns `None` if nothing could be read. Otherwise returns the number of bytes, and the
    /// frame's immediate data if the frame is complete. The rest of an incomplete frame is read by
    /// later calls in the same way.
    #[cfg(feature = "tokio")]
    pub(in crate::link) fn read_through(
        &mut self,
        out: &mut ReadBuf<'_>,
        pool: &Pool,
        largest: usize,
        takes: impl Fn(u32) -> bool,
    ) -> io::Result<Option<(usize, Option<u32>)>> {
        let takes = |tcp_frame: &TcpFrame| {
            tcp_frame.kind == TcpFrameKind::Frame
                && (LARGE..=largest).contains(&(tcp_frame.len as usize))
                && takes(tcp_frame.imm)
        };
        // The previous read ended with the head of this frame.
        if self.body.is_none() && self.head_len == 0 && self.stash.len() == TCP_FRAME_HEADER_BYTES {
            let next = self.stash.first_chunk().and_then(TcpFrame::decode).filter(takes);
            let Some((tcp_frame, buf)) = next.and_then(|tcp_frame| {
                let buf = take(pool, tcp_frame.len as usize, self.account.as_ref()).ok()?;
                Some((tcp_frame, buf))
            }) else {
                self.left_over = true;
                return Ok(None);
            };
            self.stash.clear();
            self.begin_body(tcp_frame, buf);
        }
        if self.body.is_none() {
            if self.head_len > 0 || !self.stash.is_empty() {
                return Ok(None);
            }
            let mut head = [0; TCP_FRAME_HEADER_BYTES];
            let Some(()) = peek(&self.socket, &mut head)? else {
                self.awaited = true;
                return Ok(None);
            };
            let next = TcpFrame::decode(&head);
            let Some(tcp_frame) = next.filter(takes) else { return Ok(None) };
            let len = tcp_frame.len as usize;
            let Ok(mut buf) = take(pool, len, self.account.as_ref()) else { return Ok(None) };
            let room = len.min(out.remaining());
            let mut next = [0; TCP_FRAME_HEADER_BYTES];
            let ahead = if room == len { TCP_FRAME_HEADER_BYTES } else { 0 };
            let got = {
                let place = IoSliceMut::new(out.initialize_unfilled_to(room));
                let next = IoSliceMut::new(&mut next[..ahead]);
                receive(&self.socket, &mut [IoSliceMut::new(&mut head), place, next])?
            };
            let Some(got) = got.and_then(|got| got.checked_sub(TCP_FRAME_HEADER_BYTES)) else {
                return Err(invalid("a frame header that was peeked cannot be read".into()));
            };
            self.stash.extend_from_slice(&next[..got.saturating_sub(room)]);
            let got = got.min(room);
            out.advance(got);
            self.large = true;
            if got == len {
                return Ok(Some((got, Some(tcp_frame.imm))));
            }
            buf.set_len(len - got);
            self.begin_body(tcp_frame, buf);
            return Ok(Some((got, None)));
        }
        let Some((tcp_frame, mut buf, filled)) = self.body.take_if(|(tcp_frame, buf, filled)| {
            takes(tcp_frame) && buf.len() - *filled >= PEEK && out.remaining() > *filled
        }) else {
            return Ok(None);
        };
        let len = buf.len();
        out.put_slice(&buf[..filled]);
        let room = (len - filled).min(out.remaining());
        let mut next = [0; TCP_FRAME_HEADER_BYTES];
        let ahead = if room == len - filled { TCP_FRAME_HEADER_BYTES } else { 0 };
        let read = {
            let place = IoSliceMut::new(out.initialize_unfilled_to(room));
            receive(&self.socket, &mut [place, IoSliceMut::new(&mut next[..ahead])])
        };
        let got = *read.as_ref().ok().and_then(Option::as_ref).unwrap_or(&0);
        self.stash.extend_from_slice(&next[..got.saturating_sub(room)]);
        let got = got.min(room);
        out.advance(got);
        let taken = filled + got;
        if taken < len {
            buf.set_len(len - taken);
            self.body = Some((tcp_frame, buf, 0));
        }
        self.awaited = read?.is_none();
        Ok((taken > 0).then_some((taken, (taken == len).then_some(tcp_frame.imm))))
    }

    /// Returns whether to leave the arrived data to a waiting reader, who reads it into the final
    /// buffer. If the previous arrival was left to the reader, too, the fabric reads this one.
    pub(in crate::link) fn defers(&mut self) -> bool {
        let awaited = std::mem::take(&mut self.awaited);
        self.deferred = awaited && self.large && !self.deferred;
        self.deferred
    }

    /// Returns whether there is data that only the fabric can process.
    pub(in crate::link) fn has_left_over(&self) -> bool {
        self.left_over
    }

    /// Begins to process arrived data. `scratch` belongs to the fabric, and is the same until
    /// [`TcpPath::end_reading`].
    pub(in crate::link) fn begin_reading(&mut self, scratch: &mut [u8]) {
        let len = self.stash.len();
        scratch[..len].copy_from_slice(&self.stash);
        self.stash.clear();
        self.left_over = false;
        self.chunk = 0..len;
    }

    /// Keeps the unprocessed data.
    pub(in crate::link) fn end_reading(&mut self, scratch: &[u8]) {
        self.stash.extend_from_slice(&scratch[std::mem::take(&mut self.chunk)]);
    }

    /// Returns the next TCP frame. `largest` is the maximum size of a frame.
    ///
    /// # Errors
    /// The connection broke, or the peer sent something that is not a TCP frame (`InvalidData`).
    pub(in crate::link) fn next(
        &mut self,
        scratch: &mut [u8],
        pool: &Pool,
        largest: usize,
    ) -> io::Result<Arrival> {
        loop {
            if let Some((tcp_frame, mut buf, mut filled)) = self.body.take() {
                let here = self.chunk.len().min(buf.len() - filled);
                buf[filled..filled + here]
                    .copy_from_slice(&scratch[self.chunk.start..self.chunk.start + here]);
                self.chunk.start += here;
                filled += here;
                if filled == buf.len() {
                    return Ok(Arrival::TcpFrame(tcp_frame, Some(buf)));
                }
                // Payload goes into its buffer, and the bytes after it into the scratch memory.
                let wanted = buf.len() - filled;
                let read = {
                    let ahead = if self.large { TCP_FRAME_HEADER_BYTES } else { scratch.len() };
                    let mut slices = [
                        IoSliceMut::new(&mut buf[filled..]),
                        IoSliceMut::new(&mut scratch[..ahead]),
                    ];
                    read(&self.socket, self.tls.as_deref_mut(), &mut slices)
                };
                let got = match read {
                    Ok(Some(got)) => got,
                    other => {
                        self.body = Some((tcp_frame, buf, filled));
                        return other.map(|_| Arrival::Nothing);
                    }
                };
                self.chunk = 0..got.saturating_sub(wanted);
                self.body = Some((tcp_frame, buf, filled + got.min(wanted)));
                if got == 0 {
                    return Ok(Arrival::End);
                }
                continue;
            }
            let here = self.chunk.len().min(TCP_FRAME_HEADER_BYTES - self.head_len);
            self.head[self.head_len..self.head_len + here]
                .copy_from_slice(&scratch[self.chunk.start..self.chunk.start + here]);
            self.chunk.start += here;
            self.head_len += here;
            if self.head_len < TCP_FRAME_HEADER_BYTES {
                let most = if self.large { PEEK } else { scratch.len() };
                let mut slices = [IoSliceMut::new(&mut scratch[..most])];
                match read(&self.socket, self.tls.as_deref_mut(), &mut slices)? {
                    Some(0) => return Ok(Arrival::End),
                    Some(got) => self.chunk = 0..got,
                    None => return Ok(Arrival::Nothing),
                }
                continue;
            }
            let Some(tcp_frame) = TcpFrame::decode(&self.head) else {
                return Err(invalid(format!("a TCP frame of unknown kind {}", self.head[0])));
            };
            let most =
                if tcp_frame.kind == TcpFrameKind::Frame { largest } else { OPERATION_BYTES };
            if tcp_frame.len as usize > most {
                return Err(invalid(format!(
                    "a TCP frame of {} bytes, at most {most} are allowed",
                    tcp_frame.len
                )));
            }
            if let Some(account) = &self.account
                && tcp_frame.has_payload()
                && SizeClass::holding(tcp_frame.len as usize)
                    .is_some_and(|class| class.bytes() as u64 > account.limit_bytes())
            {
                return Err(invalid(format!(
                    "a TCP frame of {} bytes, which needs more memory than the link may use",
                    tcp_frame.len
                )));
            }
            match self.place_for(&tcp_frame, pool) {
                Err(PoolError::OverBudget { which: Budget::Account(_), .. }) => {
                    return Ok(Arrival::OverBudget);
                }
                Err(_) => return Ok(Arrival::NoMemory),
                Ok(None) => {
                    self.head_len = 0;
                    return Ok(Arrival::TcpFrame(tcp_frame, None));
                }
                Ok(Some(buf)) => {
                    self.head_len = 0;
                    self.large = buf.len() >= LARGE;
                    self.begin_body(tcp_frame, buf);
                }
            }
        }
    }

    /// Returns the buffer for the payload. For the answer to a read, that is the buffer of the
    /// read.
    fn place_for(
        &mut self,
        tcp_frame: &TcpFrame,
        pool: &Pool,
    ) -> Result<Option<BufMut>, PoolError> {
        match tcp_frame.kind {
            _ if !tcp_frame.has_payload() => return Ok(None),
            TcpFrameKind::Data => {
                if let Some(asked) = self.asked.front_mut().filter(|asked| asked.op == tcp_frame.op)
                    && let Held::Unique(buf) = &asked.held
                    && buf.len() == tcp_frame.len as usize
                    && let Held::Unique(buf) = std::mem::replace(&mut asked.held, Held::Nothing)
                {
                    self.asked_reads -= buf.len() as u64;
                    return Ok(Some(buf));
                }
            }
            _ => {}
        }
        take(pool, tcp_frame.len as usize, self.account.as_ref()).map(Some)
    }

    fn begin_body(&mut self, tcp_frame: TcpFrame, buf: BufMut) {
        (self.body, self.begun) = (Some((tcp_frame, buf, 0)), None);
    }

    /// Returns whether a payload that has begun should have arrived: the rest of it is no sign of
    /// life. Otherwise a peer that sends a byte now and then would never be given up.
    pub(in crate::link) fn is_late(&mut self, now: Instant, limit: Duration) -> bool {
        self.body.is_some()
            && now.saturating_duration_since(*self.begun.get_or_insert(now)) >= limit
    }

    /// Returns whether a part of a payload was read.
    pub(in crate::link) fn has_begun(&self) -> bool {
        self.body.as_ref().is_some_and(|(_, _, filled)| *filled > 0)
    }
}

/// Returns a buffer for received data, charged to the account if there is one.
fn take(pool: &Pool, len: usize, account: Option<&Account>) -> Result<BufMut, PoolError> {
    match account {
        Some(account) => pool.take(len, Purpose::Receive, account),
        None => pool.take_uncharged(len, Purpose::Receive),
    }
}

fn read(
    socket: &OwnedFd,
    tls: Option<&mut Tls>,
    slices: &mut [IoSliceMut<'_>],
) -> io::Result<Option<usize>> {
    match tls {
        None => receive(socket, slices),
        Some(tls) => tls.read(socket, slices),
    }
}

/// Copies the next bytes to `head` without consuming them; `None` if there are fewer.
#[cfg(feature = "tokio")]
fn peek(socket: &OwnedFd, head: &mut [u8]) -> io::Result<Option<()>> {
    let wanted = head.len();
    match rustix::net::recv(socket.as_fd(), head, RecvFlags::DONTWAIT | RecvFlags::PEEK) {
        Ok((len, _)) => Ok((len == wanted).then_some(())),
        Err(Errno::INTR | Errno::AGAIN) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}
