//! One end of a connection, client or server: order of messages, windows, limits and keepalives.
//!
//! ```text
//!   Connecting       ── handle_established ──► Open
//!   Connecting, Open ── close ──► Closed
//!   Connecting, Open ── the peer violates the protocol, or is dead ──► Closed, with the error
//! ```
//!
//! An endpoint accepts the peer's announcement even while it is connecting. The reason is that the
//! driver may poll the completion of that message before the event that the connection is
//! established.

mod config;
mod error;
mod outbox;
mod stats;
mod take;
#[cfg(test)]
mod tests;

use std::time::Instant;

pub use config::{Config, ConfigError};
pub use error::ProtocolError;
pub use outbox::MESSAGES_IN_FLIGHT;
pub use stats::Stats;

use crate::message::{MESSAGE_BYTES, Message, Registration};
use crate::window::{ReceiveWindow, SendWindow, Write};
use outbox::{NextMessage, Outbox};

/// The two ends of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// The side that connected. It sends neither keepalives nor feature messages.
    Client,
    /// The side that accepted. It sends keepalives and answers questions about features.
    Server,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Connecting,
    Open {
        /// When the next keepalive is due; `None` for clients.
        next_keepalive: Option<Instant>,
    },
    Closed(Option<ProtocolError>),
}

/// One end of a Valkey Over RDMA connection.
///
/// A driver polls completions and calls the `handle_*` methods in their order. Then it calls
/// [`poll_message`](Self::poll_message) until that returns `None`, calls
/// [`write_plan`](Self::write_plan) while it has bytes to send, and copies out the bytes that are
/// [`readable`](Self::readable). [`poll_timeout`](Self::poll_timeout) returns when
/// [`handle_timeout`](Self::handle_timeout) is due. Everything that `poll_message` and `write_plan`
/// return must be posted, in the same order. An error of a `handle_*` method ends the connection:
/// the driver disconnects. After [`close`](Self::close), late events are ignored.
///
/// ```
/// use std::time::Instant;
/// use ferrite_proto::{Config, Endpoint, Registration, Role};
///
/// let now = Instant::now();
/// let at = |addr| Registration { addr, length: 1 << 20, rkey: 1 };
/// let mut client = Endpoint::new(Role::Client, Config::default(), at(0x1000))?;
/// let mut server = Endpoint::new(Role::Server, Config::default(), at(0x2000))?;
///
/// server.handle_established(now)?;
/// client.handle_established(now)?;
/// let announcement = server.poll_message().unwrap();
/// server.handle_message_sent();
/// client.handle_message(&announcement)?;
///
/// let write = client.write_plan(b"PING\r\n".len()).unwrap();
/// assert_eq!((write.remote_addr, write.len), (0x2000, 6));
/// server.handle_immediate(write.immediate, write.len)?;
/// assert_eq!(server.readable(), 0..6); // in the memory at 0x2000
/// server.consume(6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Endpoint {
    role: Role,
    config: Config,
    state: State,
    /// The memory that we announce to the peer.
    memory: Registration,
    receive: ReceiveWindow,
    send: SendWindow,
    outbox: Outbox,
    writes_in_flight: u32,
    /// Number of writes and messages that the caller was given to post since the last arrival from
    /// the peer.
    unseen: u32,
    /// When [`handle_timeout`](Self::handle_timeout) last saw that something had arrived.
    last_arrival: Option<Instant>,
    /// Whether something arrived since the last call of [`handle_timeout`](Self::handle_timeout).
    /// This is a flag and not a time, because reading the clock can be a system call, which would
    /// cost more than handling the arrival.
    has_arrival: bool,
    stats: Stats,
}

impl Endpoint {
    /// Creates an endpoint that is being connected. `memory` is announced to the peer for its
    /// writes.
    ///
    /// # Errors
    /// If the endpoint could not work with this configuration, or if the memory has no bytes.
    pub fn new(role: Role, config: Config, memory: Registration) -> Result<Self, ConfigError> {
        config.check()?;
        if memory.length == 0 {
            return Err(ConfigError { field: "length" });
        }
        Ok(Self {
            role,
            state: State::Connecting,
            memory,
            receive: ReceiveWindow::new(memory.length),
            send: SendWindow::new(config.max_peer_window),
            config,
            outbox: Outbox::default(),
            writes_in_flight: 0,
            unseen: 0,
            last_arrival: None,
            has_arrival: false,
            stats: Stats::default(),
        })
    }

    // ---- state ---------------------------------------------------------------------------

    /// Returns whether this is the client or the server.
    #[must_use]
    pub fn role(&self) -> Role {
        self.role
    }

    /// Returns the counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Returns whether the connection is closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed(_))
    }

    /// Returns the error that closed the connection, if the peer caused one.
    #[must_use]
    pub fn error(&self) -> Option<ProtocolError> {
        match self.state {
            State::Closed(error) => error,
            _ => None,
        }
    }

    /// Returns the peer's last announcement. Before the first announcement, this end cannot write
    /// anything, not even an error reply.
    #[must_use]
    pub fn peer_window(&self) -> Option<Registration> {
        self.send.registration()
    }

    /// Returns the range of our memory whose bytes have arrived and are not consumed.
    #[must_use]
    pub fn readable(&self) -> std::ops::Range<u32> {
        self.receive.readable()
    }

    /// Returns the maximum number of bytes that [`write_plan`](Self::write_plan) would return now.
    #[must_use]
    pub fn writable(&self) -> u32 {
        let free = self.is_open() && !self.too_many_in_flight() && !self.too_many_unseen();
        if free { self.send.room().min(self.config.max_write) } else { 0 }
    }

    // ---- events ---------------------------------------------------------------------

    /// Handles the event that the connection is established. A second call does nothing.
    ///
    /// # Errors
    /// If an error of the peer has already closed the connection.
    pub fn handle_established(&mut self, now: Instant) -> Result<(), ProtocolError> {
        if self.alive()? && self.state == State::Connecting {
            let next_keepalive = match self.role {
                Role::Server => now.checked_add(self.config.keepalive_interval),
                Role::Client => None,
            };
            self.state = State::Open { next_keepalive };
            self.outbox.queue_announcement();
        }
        Ok(())
    }

    /// Handles a receive that completed without an immediate: a control message.
    ///
    /// # Errors
    /// If the peer violated the protocol. The connection is then closed.
    pub fn handle_message(&mut self, bytes: &[u8]) -> Result<(), ProtocolError> {
        if !self.alive()? {
            return Ok(());
        }
        let result =
            Message::decode(bytes).map_err(Into::into).and_then(|message| self.apply(message));
        self.close_on_error(result)?;
        self.note_arrival();
        self.stats.messages_received += 1;
        Ok(())
    }

    /// Handles a receive that completed with an immediate (in host byte order): bytes of the stream
    /// are in our memory. `byte_len` is the length of the write, as the network card reports it.
    ///
    /// # Errors
    /// If the peer violated the protocol. The connection is then closed.
    pub fn handle_immediate(&mut self, immediate: u32, byte_len: u32) -> Result<(), ProtocolError> {
        if !self.alive()? {
            return Ok(());
        }
        let result = if byte_len > immediate {
            Err(ProtocolError::Immediate { immediate, byte_len })
        } else {
            self.receive.fill(immediate).map_err(Into::into)
        };
        self.close_on_error(result)?;
        self.note_arrival();
        self.stats.immediates += 1;
        self.stats.bytes_received += u64::from(immediate);
        Ok(())
    }

    /// Handles the local completion of the oldest message in flight.
    ///
    /// # Panics
    /// If none is in flight.
    pub fn handle_message_sent(&mut self) {
        assert!(self.outbox.complete_oldest(), "no message is in flight");
    }

    /// Handles the local completion of the oldest `count` writes in flight. They may have completed
    /// by their own completions or by that of a later request.
    ///
    /// # Panics
    /// If fewer writes are in flight.
    pub fn handle_writes_sent(&mut self, count: u32) {
        assert!(
            count <= self.writes_in_flight,
            "{count} writes completed, but only {} are in flight",
            self.writes_in_flight
        );
        self.writes_in_flight -= count;
    }

    /// Handles the passing of time. May be called at any time.
    ///
    /// # Errors
    /// If the peer is dead. The connection is then closed.
    pub fn handle_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        if !self.alive()? {
            return Ok(());
        }
        if std::mem::take(&mut self.has_arrival) {
            self.last_arrival = Some(now);
        }
        if self.dead_at().is_some_and(|at| at <= now) {
            return self.close_on_error(Err(ProtocolError::Dead { after: self.config.dead_after }));
        }
        if let State::Open { next_keepalive: Some(due) } = self.state
            && due <= now
        {
            if !self.outbox.queue_keepalive(now, self.config.max_keepalives) {
                self.stats.keepalives_skipped += 1;
            }
            // The interval counts from now, not from the time at which the keepalive was due. So a
            // late driver sends one keepalive, not several.
            self.state =
                State::Open { next_keepalive: now.checked_add(self.config.keepalive_interval) };
        }
        Ok(())
    }

    // ---- actions --------------------------------------------------------------------

    /// Plans the next write, of at most `available` bytes. The driver posts the write with the
    /// oldest bytes that it has to send, and reports the completion with
    /// [`handle_writes_sent`](Self::handle_writes_sent). Returns `None` if nothing can be written
    /// now; try again after the next event.
    pub fn write_plan(&mut self, available: usize) -> Option<Write> {
        if available == 0 || !self.is_open() {
            return None;
        }
        if self.send.room() == 0 {
            self.stats.stalled_by_window += 1;
            return None;
        }
        if self.too_many_in_flight() {
            self.stats.stalled_by_completions += 1;
            return None;
        }
        if self.too_many_unseen() {
            self.stats.stalled_by_silence += 1;
            return None;
        }
        let write = self.send.write(available, self.config.max_write)?;
        self.writes_in_flight += 1;
        self.unseen = self.unseen.saturating_add(1);
        self.stats.writes += 1;
        self.stats.bytes_written += u64::from(write.len);
        Some(write)
    }

    /// Consumes the first `bytes` readable bytes, which the reader has copied out.
    ///
    /// # Panics
    /// If fewer bytes are readable.
    pub fn consume(&mut self, bytes: u32) {
        if self.receive.consume(bytes) {
            self.outbox.queue_announcement();
        }
        self.stats.bytes_consumed += u64::from(bytes);
    }

    /// Returns whether our memory waits to be announced by [`poll_message`](Self::poll_message):
    /// for the first time, or again because it is full and everything in it is consumed.
    #[must_use]
    pub fn is_to_announce(&self) -> bool {
        self.is_open() && !self.receive.is_open() && self.outbox.has_announcement()
    }

    /// Announces other memory from now on. Its length may differ, because Valkey's clients support
    /// that.
    ///
    /// # Panics
    /// - If [`is_to_announce`](Self::is_to_announce) returns `false`.
    /// - If the memory has no bytes.
    /// - If this is a client and the length differs: a Valkey server accepts only one length, and
    ///   crashes otherwise.
    pub fn replace_memory(&mut self, memory: Registration) {
        assert!(self.is_to_announce(), "the peer may still write to the memory");
        assert!(memory.length > 0, "the memory has no bytes");
        let may = self.role == Role::Server || memory.length == self.memory.length;
        assert!(
            may,
            "a client's memory must keep its length of {} bytes, not {}",
            self.memory.length, memory.length
        );
        self.receive = ReceiveWindow::new(memory.length);
        self.memory = memory;
    }

    /// Closes the connection. Nothing more is sent, and arrivals are ignored. The driver must then
    /// disconnect, because the protocol has no message that closes a connection.
    pub fn close(&mut self) {
        if !self.is_closed() {
            self.state = State::Closed(None);
        }
    }

    // ---- output ------------------------------------------------------------------------

    /// Returns the next control message to send, if any. The driver reports its completion with
    /// [`handle_message_sent`](Self::handle_message_sent).
    pub fn poll_message(&mut self) -> Option<[u8; MESSAGE_BYTES]> {
        if !self.is_open() {
            return None;
        }
        let message = match self.outbox.poll()? {
            NextMessage::Announcement => {
                self.receive.announce();
                self.stats.registrations_sent += 1;
                Message::RegisterXferMemory(self.memory)
            }
            NextMessage::Feature(message) => message,
            NextMessage::Keepalive => {
                self.stats.keepalives_sent += 1;
                Message::Keepalive
            }
        };
        self.unseen = self.unseen.saturating_add(1);
        self.stats.messages_sent += 1;
        Some(message.encode())
    }

    /// Returns when [`handle_timeout`](Self::handle_timeout) is due, if nothing happens before.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let State::Open { next_keepalive } = self.state else { return None };
        [next_keepalive, self.dead_at()].into_iter().flatten().min()
    }

    // ---- internal ----------------------------------------------------------------------------

    fn is_open(&self) -> bool {
        matches!(self.state, State::Open { .. })
    }

    fn too_many_in_flight(&self) -> bool {
        self.writes_in_flight >= self.config.max_writes_in_flight
    }

    fn too_many_unseen(&self) -> bool {
        self.role == Role::Client
            && self.config.max_unseen.is_some_and(|limit| self.unseen >= limit)
    }

    /// Returns `true` while the connection is not closed, `false` after our own
    /// [`close`](Self::close), and the error if an error of the peer closed it.
    fn alive(&self) -> Result<bool, ProtocolError> {
        match self.state {
            State::Closed(Some(error)) => Err(error),
            State::Closed(None) => Ok(false),
            _ => Ok(true),
        }
    }

    fn close_on_error(&mut self, result: Result<(), ProtocolError>) -> Result<(), ProtocolError> {
        if let Err(error) = result {
            self.state = State::Closed(Some(error));
        }
        result
    }

    fn note_arrival(&mut self) {
        self.has_arrival = true;
        self.unseen = 0;
    }

    fn dead_at(&self) -> Option<Instant> {
        let since = self.outbox.oldest_keepalive()?;
        since.max(self.last_arrival.unwrap_or(since)).checked_add(self.config.dead_after)
    }
}
