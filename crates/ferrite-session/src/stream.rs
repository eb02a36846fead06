//! A Valkey Over RDMA connection as a byte stream.
//!
//! [`ferrite_proto::Endpoint`] makes the protocol's decisions; the fabric owns memory and queues.
//! This module passes completions to the endpoint and work requests to the fabric, and copies the
//! data. The peer may write to its window at any time, so bytes are copied out of the window before
//! they are looked at.
//!
//! The protocol has no half-close: a shutdown delivers what was written, then disconnects. A server
//! first gives its client a moment to disconnect by itself.

mod window;

use std::fmt;
use std::future::Future;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use ferrite_fabric::mem::{Buf, ErrorKind as MemoryError, Exposed, Purpose};
use ferrite_fabric::{Arrival, Done, Error, ErrorKind, RawConnection};
use ferrite_proto::{Endpoint, ProtocolError, Role, Write};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use window::Window;

/// The largest write, as large as a block of the pool.
const WRITE_MAX: usize = 64 << 10;
/// The time between attempts to get memory from an exhausted pool.
const MEMORY_RETRY: Duration = Duration::from_millis(5);

/// How long a server waits for its client to disconnect by itself. Valkey's clients drop unread
/// data when they see the disconnect. Without this wait, valkey-cli missed 22 of 100 rejections and
/// 3 of 60 replies to QUIT and CLIENT KILL.
const LINGER: Duration = Duration::from_millis(500);

/// How long a client receives nothing before it probes whether the peer's queue pair still exists.
/// The probe may come after up to twice this time. Valkey's server sends a keepalive every 3 s, and
/// ours at least every 9 s. Without the probe, a client would wait forever for a server that has
/// crashed, or whose disconnect message was lost (a process that exits does not send it again).
const PROBE_INTERVAL: Duration = Duration::from_secs(10);

/// Returns the time of tokio's clock, which tests can pause and advance.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// The settings of a [`ValkeyStream`].
#[derive(Debug, Clone)]
pub struct ValkeyConfig {
    /// The initial size of the window, the memory that the peer writes to (default 64 KiB). Each
    /// connection has a pinned window for as long as it lasts. 64 KiB, 512 KiB and 2 MiB waste no
    /// memory, because the pool has blocks of these sizes. Valkey's own windows have 1 MiB.
    pub window_bytes: u32,
    /// The largest window, for clients that write much data at once (default 2 MiB). With many of
    /// these clients the limit is smaller, because they share half of the receive memory. Only
    /// servers use this setting: towards a Valkey server the window keeps its initial size.
    pub window_max_bytes: u32,
    /// Timeouts and limits of the protocol.
    pub proto: ferrite_proto::Config,
}

impl Default for ValkeyConfig {
    fn default() -> Self {
        // A few writes in flight keep the wire busy. More of them would be small writes that are
        // better merged into one. If the peer has no receives posted, the fabric's queue pairs
        // retry forever. So a client may send any number of writes before the server answers.
        let proto = ferrite_proto::Config {
            max_writes_in_flight: 8,
            max_unseen: None,
            ..ferrite_proto::Config::default()
        };
        Self { window_bytes: 64 << 10, window_max_bytes: 2 << 20, proto }
    }
}

/// One end of a Valkey Over RDMA connection. Implements [`AsyncRead`] and [`AsyncWrite`].
pub struct ValkeyStream {
    raw: RawConnection,
    window: Window,
    endpoint: Endpoint,
    /// The completions that the endpoint already knows of.
    done: Done,
    unsignaled: UnsignaledWrites,
    role: Role,
    clock: Pin<Box<Sleep>>,
    /// When a client probes the peer, if it receives nothing until then.
    probe_at: Option<Instant>,
    has_received: bool,
    /// Limits how long a server that shuts down waits for its client to disconnect.
    linger: Option<Pin<Box<Sleep>>>,
    /// Why the connection has ended.
    failure: Option<Error>,
}

impl ValkeyStream {
    /// Creates a stream over an established connection. Registers the window on this thread, unlike
    /// [`ValkeyStream::open`].
    ///
    /// # Errors
    /// Returns an error if there is no memory for the window, or if it cannot be registered.
    pub fn new(raw: RawConnection, role: Role, config: &ValkeyConfig) -> Result<Self, Error> {
        let mut buf = raw.pool().take_uncharged(config.window_bytes as usize, Purpose::Receive)?;
        buf.fill(0); // the peer must not see data of the memory's last user
        let memory = raw.expose(buf).map_err(|(_, error)| Error::from(error))?;
        Self::with_memory(raw, memory, role, config)
    }

    /// Creates a stream over an established connection. The window is registered on the fabric's
    /// command threads, if the fabric has any.
    ///
    /// # Errors
    /// Returns the same errors as [`ValkeyStream::new`].
    pub async fn open(
        raw: RawConnection,
        role: Role,
        config: &ValkeyConfig,
    ) -> Result<Self, Error> {
        let memory = raw.prepare(config.window_bytes as usize).await?;
        Self::with_memory(raw, memory, role, config)
    }

    fn with_memory(
        raw: RawConnection,
        memory: Exposed,
        role: Role,
        config: &ValkeyConfig,
    ) -> Result<Self, Error> {
        let window = Window::new(memory, role, config);
        let endpoint =
            Endpoint::new(role, config.proto.clone(), window.registration()).map_err(|error| {
                Error::from(ferrite_fabric::mem::PoolError::Misuse(error.to_string()))
            })?;
        let clock = Box::pin(tokio::time::sleep(Duration::ZERO));
        let unsignaled = UnsignaledWrites::new(config.proto.max_writes_in_flight);
        let probe_at = (role == Role::Client).then(|| now() + PROBE_INTERVAL);
        let mut stream = Self {
            raw,
            window,
            endpoint,
            done: Done::default(),
            unsignaled,
            role,
            clock,
            probe_at,
            has_received: false,
            linger: None,
            failure: None,
        };
        stream.endpoint.handle_established(now()).expect("a new endpoint is not established yet");
        stream.send_messages();
        Ok(stream)
    }

    /// Returns the underlying connection.
    #[must_use]
    pub fn raw(&self) -> &RawConnection {
        &self.raw
    }

    /// Returns the counters of the protocol.
    #[must_use]
    pub fn stats(&self) -> ferrite_proto::Stats {
        self.endpoint.stats()
    }

    /// Returns the peer's address.
    #[must_use]
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.raw.peer_addr()
    }

    /// Processes everything that has happened. Afterwards `cx` is woken by the next event.
    fn drive(&mut self, cx: &mut Context<'_>) {
        self.handle_completions(cx);
        while self.failure.is_none() {
            let arrival = self.raw.poll_arrival(cx.waker());
            self.has_received |= arrival.is_ready();
            let handled = match arrival {
                Poll::Ready(Ok(Arrival::Message(message))) => {
                    self.endpoint.handle_message(&message)
                }
                Poll::Ready(Ok(Arrival::Written { notices, sum, bytes })) => {
                    self.window.on_written(notices);
                    let saturate = |count| u32::try_from(count).unwrap_or(u32::MAX);
                    self.endpoint.handle_immediate(saturate(sum), saturate(bytes))
                }
                Poll::Ready(Err(error)) => {
                    self.failure = Some(error);
                    break;
                }
                Poll::Pending => break,
            };
            self.abort_on_violation(handled);
        }
        self.handle_timeouts(cx);
        self.send_messages();
    }

    fn handle_completions(&mut self, cx: &Context<'_>) {
        let done = self.raw.done(Some(cx.waker()));
        (self.done.messages..done.messages).for_each(|_| self.endpoint.handle_message_sent());
        // At most the number of writes in flight, so that it fits.
        self.endpoint.handle_writes_sent((done.writes - self.done.writes) as u32);
        self.done = done;
    }

    fn handle_timeouts(&mut self, cx: &mut Context<'_>) {
        while self.failure.is_none()
            && let Some(due) = self.endpoint.poll_timeout().into_iter().chain(self.probe_at).min()
        {
            if self.clock.deadline().into_std() != due {
                self.clock.as_mut().reset(due.into());
            }
            if self.clock.as_mut().poll(cx).is_pending() {
                return;
            }
            let handled = self.endpoint.handle_timeout(now());
            self.abort_on_violation(handled);
            self.probe_if_silent();
        }
    }

    fn probe_if_silent(&mut self) {
        if self.probe_at.is_some_and(|due| due <= now()) {
            if !std::mem::take(&mut self.has_received) {
                self.raw.probe();
            }
            self.probe_at = Some(now() + PROBE_INTERVAL);
        }
    }

    fn send_messages(&mut self) {
        while let Some(message) = self.endpoint.poll_message() {
            if let Err(error) = self.raw.send_message(&message) {
                self.failure.get_or_insert(error);
                return;
            }
        }
    }

    /// Aborts the connection if the peer has violated the protocol.
    fn abort_on_violation(&mut self, result: Result<(), ProtocolError>) {
        if let Err(violation) = result {
            self.raw.abort(&format!("the peer broke the protocol: {violation}"));
            self.failure = self.raw.failure();
        }
    }

    /// Copies out as much of the peer's data as fits, and returns the number of bytes. Once a full
    /// window is read, resizes it if necessary and announces it again.
    fn copy_out(&mut self, out: &mut ReadBuf<'_>) -> usize {
        let readable = self.endpoint.readable();
        let count = readable.len().min(out.remaining());
        if count > 0 {
            self.window.read(readable.start, out.initialize_unfilled_to(count));
            out.advance(count);
            self.endpoint.consume(count as u32);
            if self.endpoint.is_to_announce() && self.window.resize(&self.raw) {
                self.endpoint.replace_memory(self.window.registration());
            }
            self.send_messages();
        }
        count
    }

    /// Copies as much of `bytes` as can be sent now, posts it as one write, and returns the number
    /// of bytes.
    fn write_some(
        &mut self,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let total: usize = bytes.iter().map(|part| part.len()).sum();
        let count = ready!(self.poll_writable(cx, total))?;
        if count == 0 {
            return Poll::Ready(Ok(0));
        }
        let mut buf = match self.raw.pool().take_uncharged(count, Purpose::Send) {
            Ok(buf) => buf,
            // The pool is at its limit, or the device can register no more memory now.
            Err(error) if matches!(error.kind(), MemoryError::Exhausted | MemoryError::Refused) => {
                return self.wait_for_memory(cx);
            }
            Err(error) => return Poll::Ready(Err(io::Error::other(error))),
        };
        let Some(plan) = self.endpoint.write_plan(count) else { return Poll::Pending };
        buf.set_len(plan.len as usize);
        let mut rest = &mut buf[..];
        for part in bytes {
            let count = part.len().min(rest.len());
            let (now, later) = rest.split_at_mut(count);
            now.copy_from_slice(&part[..count]);
            rest = later;
        }
        Poll::Ready(self.post(buf.freeze(), &plan))
    }

    /// Writes the beginning of `buf` like [`AsyncWrite::poll_write`], but without copying it.
    /// Returns the number of bytes.
    ///
    /// # Errors
    /// Returns an error if the connection has failed.
    pub fn poll_write_buf(&mut self, cx: &mut Context<'_>, buf: &Buf) -> Poll<io::Result<usize>> {
        let count = ready!(self.poll_writable(cx, buf.len()))?;
        if count == 0 {
            return Poll::Ready(Ok(0));
        }
        let Some(plan) = self.endpoint.write_plan(count) else { return Poll::Pending };
        Poll::Ready(self.post(buf.slice(..plan.len as usize), &plan))
    }

    /// Returns how many of `total` bytes can be sent now. Returns zero only if `total` is zero.
    /// Otherwise waits until at least one byte can be sent.
    fn poll_writable(&mut self, cx: &mut Context<'_>, total: usize) -> Poll<io::Result<usize>> {
        // A write that fits need not wait for events. They are processed by the next read, or by
        // the first write that does not fit.
        let wanted = total.min(WRITE_MAX);
        let has_room = self.endpoint.writable() as usize >= wanted && self.failure.is_none();
        if wanted == 0 || has_room {
            return Poll::Ready(Ok(wanted));
        }
        self.drive(cx);
        if let Some(error) = &self.failure {
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::BrokenPipe, error.clone())));
        }
        match wanted.min(self.endpoint.writable() as usize) {
            0 => Poll::Pending, // until the peer has read data, or a write completes
            count => Poll::Ready(Ok(count)),
        }
    }

    fn post(&mut self, buf: Buf, plan: &Write) -> io::Result<usize> {
        let written = match self.unsignaled.may_be_next(plan.len) {
            true => self.raw.write_quietly(buf, plan.remote_addr, plan.rkey, plan.immediate),
            false => self.raw.write(buf, plan.remote_addr, plan.rkey, plan.immediate),
        };
        match written {
            Ok(()) => Ok(plan.len as usize),
            Err(error) => {
                let failed = io::Error::new(io::ErrorKind::BrokenPipe, error.clone());
                self.failure.get_or_insert(error);
                Err(failed)
            }
        }
    }

    /// Waits a moment before the next attempt to get memory. The pool does not notify anyone when
    /// it has memory again.
    #[cold]
    fn wait_for_memory(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        self.clock.as_mut().reset((now() + MEMORY_RETRY).into());
        if self.clock.as_mut().poll(cx).is_ready() {
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }
}

/// Decides which writes are unsignaled, that is, posted without a completion of their own. A
/// completion's interrupt is half of the cost of a small reply. Unsignaled writes that are not
/// inline keep their memory until the next signaled request completes. On a server, this is the
/// next keepalive at the latest.
struct UnsignaledWrites {
    writes: u32,
    bytes: u32,
    /// Half of the number of writes that may be in flight. At least one of so many consecutive
    /// writes is signaled.
    writes_max: u32,
}

impl UnsignaledWrites {
    const BYTES_MAX: u32 = WRITE_MAX as u32;

    fn new(in_flight_max: u32) -> Self {
        Self { writes: 0, bytes: 0, writes_max: in_flight_max / 2 }
    }

    /// Counts the next write, of `bytes`, and returns whether it may be unsignaled.
    fn may_be_next(&mut self, bytes: u32) -> bool {
        (self.writes, self.bytes) = (self.writes + 1, self.bytes.saturating_add(bytes));
        let is_unsignaled = self.writes < self.writes_max && self.bytes < Self::BYTES_MAX;
        if !is_unsignaled {
            (self.writes, self.bytes) = (0, 0);
        }
        is_unsignaled
    }
}

impl AsyncRead for ValkeyStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if out.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        this.drive(cx);
        if this.copy_out(out) > 0 {
            return Poll::Ready(Ok(()));
        }
        match &this.failure {
            None => Poll::Pending,
            Some(error) if error.kind() == ErrorKind::Closed => Poll::Ready(Ok(())),
            Some(error) => {
                Poll::Ready(Err(io::Error::new(io::ErrorKind::ConnectionReset, error.clone())))
            }
        }
    }
}

impl AsyncWrite for ValkeyStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().write_some(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().write_some(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Does nothing: every write is posted at once.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.role == Role::Server {
            this.drive(cx);
            if this.failure.is_none() {
                let linger =
                    this.linger.get_or_insert_with(|| Box::pin(tokio::time::sleep(LINGER)));
                if linger.as_mut().poll(cx).is_pending() {
                    return Poll::Pending;
                }
            }
        }
        drop(this.raw.close()); // closing continues in the background
        Poll::Ready(Ok(()))
    }
}

impl fmt::Debug for ValkeyStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ValkeyStream").field("raw", &self.raw).finish_non_exhaustive()
    }
}
