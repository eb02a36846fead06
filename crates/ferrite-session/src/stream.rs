//! A Valkey Over RDMA connection as bytes.
//!
//! The protocol's decisions are [`ferrite_proto::Endpoint`]'s, memory and queues are the fabric's.
//! What is here: completions to the one, requests to the other, and a copy each way. Reading copies
//! out of a window that the peer may write at any time, so that nothing is looked at in place.
//!
//! There is no half-close in this protocol: shutting down delivers what was written and hangs up. A
//! server lets its client do so first, for a moment.

mod window;

use std::fmt;
use std::future::Future;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use ferrite_fabric::mem::{Buf, Exposed, Purpose};
use ferrite_fabric::{Arrival, Done, Error, ErrorKind, RawConnection};
use ferrite_proto::{Endpoint, ProtocolError, Role, Write};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use window::Window;

/// The most that goes in one write: a block of the pool.
const WRITE_MAX: usize = 64 << 10;
/// Between looks for memory while the pool has none.
const STARVED: Duration = Duration::from_millis(5);

/// How long a client may take to hang up by itself. Valkey's clients forget what they have not read
/// yet when they hear of the end: without this, valkey-cli missed 22 of 100 refusals and 3 of 60
/// answers to QUIT and CLIENT KILL.
const LINGER: Duration = Duration::from_millis(500);

/// A client that has heard nothing for so long, and at most for twice as long, asks the peer's
/// device whether the queue pair is still there. Servers of Valkey's protocol send a keepalive
/// every 3 s. One that died without a word, or whose farewell was lost (CM sends it once), would be
/// waited for without end.
const SILENCE: Duration = Duration::from_secs(10);

/// By tokio's clock, which a test may stop and move.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// How a [`ValkeyStream`] behaves.
#[derive(Debug, Clone)]
pub struct ValkeyConfig {
    /// The memory that the peer writes to at first, pinned for as long as the connection lasts.
    /// Valkey's own is 1 MiB. 64 KiB, 512 KiB and 2 MiB waste nothing of the pool's blocks. 64 KiB.
    pub window_bytes: u32,
    /// What a client gets that writes much at a time; less if there are many, who share half of the
    /// memory for receives. Servers only: towards a Valkey server the first window stays. 2 MiB.
    pub window_max_bytes: u32,
    /// Times and limits of the protocol.
    pub proto: ferrite_proto::Config,
}

impl Default for ValkeyConfig {
    fn default() -> Self {
        // A few writes under way keep the wire busy; more would be small ones that had better been
        // one. The queue pair of the fabric repeats to a peer without receives, so that silence is
        // no reason to stop.
        let proto = ferrite_proto::Config {
            max_writes_in_flight: 8,
            max_unseen: None,
            ..ferrite_proto::Config::default()
        };
        Self { window_bytes: 64 << 10, window_max_bytes: 2 << 20, proto }
    }
}

/// One end of a Valkey Over RDMA connection: [`AsyncRead`] and [`AsyncWrite`].
pub struct ValkeyStream {
    raw: RawConnection,
    window: Window,
    endpoint: Endpoint,
    /// What the endpoint knows to be done.
    done: Done,
    quiet: Quiet,
    role: Role,
    clock: Pin<Box<Sleep>>,
    /// When a client that has heard nothing until then asks whether anybody is there.
    ask_at: Option<Instant>,
    has_heard: bool,
    /// Since it was shut down.
    linger: Option<Pin<Box<Sleep>>>,
    /// Why nothing comes any more.
    over: Option<Error>,
}

impl ValkeyStream {
    /// Over a connection that stands. Registers the window on this thread: [`ValkeyStream::open`]
    /// does not.
    ///
    /// # Errors
    /// There is no memory for the window, or it cannot be registered.
    pub fn new(raw: RawConnection, role: Role, config: &ValkeyConfig) -> Result<Self, Error> {
        let mut buf = raw.pool().take_uncharged(config.window_bytes as usize, Purpose::Receive)?;
        buf.fill(0); // what the last user left is not for the peer
        let memory = raw.expose(buf).map_err(|(_, error)| Error::from(error))?;
        Self::over(raw, memory, role, config)
    }

    /// The same, with the window registered where the engine has that done.
    ///
    /// # Errors
    /// As [`ValkeyStream::new`].
    pub async fn open(
        raw: RawConnection,
        role: Role,
        config: &ValkeyConfig,
    ) -> Result<Self, Error> {
        let memory = raw.prepare(config.window_bytes as usize).await?;
        Self::over(raw, memory, role, config)
    }

    fn over(
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
        let (done, quiet) = (Done::default(), Quiet::new(config.proto.max_writes_in_flight));
        let ask_at = (role == Role::Client).then(|| now() + SILENCE);
        let (has_heard, linger, over) = (false, None, None);
        let mut stream = Self {
            raw,
            window,
            endpoint,
            done,
            quiet,
            role,
            clock,
            ask_at,
            has_heard,
            linger,
            over,
        };
        stream.endpoint.handle_established(now()).expect("nothing has come yet");
        stream.send_messages();
        Ok(stream)
    }

    /// The connection below.
    #[must_use]
    pub fn raw(&self) -> &RawConnection {
        &self.raw
    }

    /// What the protocol counted.
    #[must_use]
    pub fn stats(&self) -> ferrite_proto::Stats {
        self.endpoint.stats()
    }

    /// The peer's address.
    #[must_use]
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.raw.peer_addr()
    }

    /// Takes what has happened; afterwards `cx` is woken when there is more.
    fn drive(&mut self, cx: &mut Context<'_>) {
        self.count_done(cx);
        while self.over.is_none() {
            let arrival = self.raw.poll_arrival(cx.waker());
            self.has_heard |= arrival.is_ready();
            let taken = match arrival {
                Poll::Ready(Ok(Arrival::Message(message))) => {
                    self.endpoint.handle_message(&message)
                }
                Poll::Ready(Ok(Arrival::Written { notices, sum, bytes })) => {
                    self.window.on_written(notices);
                    let fits = |count| u32::try_from(count).unwrap_or(u32::MAX);
                    self.endpoint.handle_immediate(fits(sum), fits(bytes))
                }
                Poll::Ready(Err(error)) => {
                    self.over = Some(error);
                    break;
                }
                Poll::Pending => break,
            };
            self.judge(taken);
        }
        self.look_at_clock(cx);
        self.send_messages();
    }

    fn count_done(&mut self, cx: &Context<'_>) {
        let done = self.raw.done(Some(cx.waker()));
        (self.done.messages..done.messages).for_each(|_| self.endpoint.handle_message_sent());
        self.endpoint.handle_writes_sent((done.writes - self.done.writes) as u32); // a few
        self.done = done;
    }

    fn look_at_clock(&mut self, cx: &mut Context<'_>) {
        while self.over.is_none()
            && let Some(due) = self.endpoint.poll_timeout().into_iter().chain(self.ask_at).min()
        {
            if self.clock.deadline().into_std() != due {
                self.clock.as_mut().reset(due.into());
            }
            if self.clock.as_mut().poll(cx).is_pending() {
                return;
            }
            let looked = self.endpoint.handle_timeout(now());
            self.judge(looked);
            self.ask_if_silent();
        }
    }

    fn ask_if_silent(&mut self) {
        if self.ask_at.is_some_and(|due| due <= now()) {
            if !std::mem::take(&mut self.has_heard) {
                self.raw.probe();
            }
            self.ask_at = Some(now() + SILENCE);
        }
    }

    fn send_messages(&mut self) {
        while let Some(message) = self.endpoint.poll_message() {
            if let Err(error) = self.raw.send_message(&message) {
                self.over.get_or_insert(error);
                return;
            }
        }
    }

    /// A peer that broke a rule is hung up on.
    fn judge(&mut self, result: Result<(), ProtocolError>) {
        if let Err(broken) = result {
            self.raw.abort(&format!("the peer broke the protocol: {broken}"));
            self.over = self.raw.failure();
        }
    }

    /// Copies out what the peer has written, as much as fits; how much.
    fn copy_out(&mut self, out: &mut ReadBuf<'_>) -> usize {
        let readable = self.endpoint.readable();
        let count = readable.len().min(out.remaining());
        if count > 0 {
            self.window.read(readable.start, out.initialize_unfilled_to(count));
            out.advance(count);
            self.endpoint.consume(count as u32);
            if self.endpoint.is_to_announce() && self.window.renew(&self.raw) {
                self.endpoint.replace_memory(self.window.registration());
            }
            self.send_messages();
        }
        count
    }

    /// Copies `bytes` into one write, as many as may go now; how many.
    fn write_some(
        &mut self,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let total: usize = bytes.iter().map(|part| part.len()).sum();
        let count = ready!(self.poll_room(cx, total))?;
        if count == 0 {
            return Poll::Ready(Ok(0));
        }
        let mut buf = match self.raw.pool().take_uncharged(count, Purpose::Send) {
            Ok(buf) => buf,
            Err(error) if error.kind() == ferrite_fabric::mem::ErrorKind::Exhausted => {
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

    /// Writes some of `buf` from where it lies; how much. As [`AsyncWrite::poll_write`], without a
    /// copy.
    ///
    /// # Errors
    /// How the connection failed.
    pub fn poll_write_buf(&mut self, cx: &mut Context<'_>, buf: &Buf) -> Poll<io::Result<usize>> {
        let count = ready!(self.poll_room(cx, buf.len()))?;
        if count == 0 {
            return Poll::Ready(Ok(0));
        }
        let Some(plan) = self.endpoint.write_plan(count) else { return Poll::Pending };
        Poll::Ready(self.post(buf.slice(..plan.len as usize), &plan))
    }

    /// How many of so many bytes may go now; some, unless there are none.
    fn poll_room(&mut self, cx: &mut Context<'_>, total: usize) -> Poll<io::Result<usize>> {
        if total == 0 {
            return Poll::Ready(Ok(0));
        }
        self.drive(cx);
        if let Some(over) = &self.over {
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::BrokenPipe, over.clone())));
        }
        match total.min(self.endpoint.writable() as usize).min(WRITE_MAX) {
            0 => Poll::Pending, // until the peer has read, or a write is done
            count => Poll::Ready(Ok(count)),
        }
    }

    fn post(&mut self, buf: Buf, plan: &Write) -> io::Result<usize> {
        let written = match self.quiet.next(plan.len) {
            true => self.raw.write_quietly(buf, plan.remote_addr, plan.rkey, plan.immediate),
            false => self.raw.write(buf, plan.remote_addr, plan.rkey, plan.immediate),
        };
        match written {
            Ok(()) => Ok(plan.len as usize),
            Err(error) => {
                let failed = io::Error::new(io::ErrorKind::BrokenPipe, error.clone());
                self.over.get_or_insert(error);
                Err(failed)
            }
        }
    }

    /// Nobody tells when the pool has memory again.
    #[cold]
    fn wait_for_memory(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        self.clock.as_mut().reset((now() + STARVED).into());
        if self.clock.as_mut().poll(cx).is_ready() {
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }
}

/// Writes whose completion nobody was asked for: an interrupt for each answer is half of what a
/// small one costs. Those that do not go inline keep their memory until the next that reports,
/// which is a keepalive if nothing else.
struct Quiet {
    writes: u32,
    bytes: u32,
    /// Half of the writes that may be under way: one that reports is always among those.
    writes_max: u32,
}

impl Quiet {
    const BYTES_MAX: u32 = WRITE_MAX as u32;

    fn new(in_flight_max: u32) -> Self {
        Self { writes: 0, bytes: 0, writes_max: in_flight_max / 2 }
    }

    /// Whether the next write, of `bytes`, may be quiet.
    fn next(&mut self, bytes: u32) -> bool {
        (self.writes, self.bytes) = (self.writes + 1, self.bytes.saturating_add(bytes));
        let quiet = self.writes < self.writes_max && self.bytes < Self::BYTES_MAX;
        if !quiet {
            (self.writes, self.bytes) = (0, 0);
        }
        quiet
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
        match &this.over {
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

    /// What was written is on its way already.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.role == Role::Server {
            this.drive(cx);
            if this.over.is_none() {
                let linger =
                    this.linger.get_or_insert_with(|| Box::pin(tokio::time::sleep(LINGER)));
                if linger.as_mut().poll(cx).is_pending() {
                    return Poll::Pending;
                }
            }
        }
        drop(this.raw.close()); // it goes on by itself
        Poll::Ready(Ok(()))
    }
}

impl fmt::Debug for ValkeyStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ValkeyStream").field("raw", &self.raw).finish_non_exhaustive()
    }
}
