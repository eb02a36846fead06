//! One end of a connection, client or server: the order of messages, windows, limits and
//! keepalives.
//!
//! ```text
//!   Connecting ── handle_established ──► Open ── close ──► Closed
//!       │                                 └── the peer breaks a rule, or is dead ──► Closed, with the error
//!       └── the same
//! ```
//!
//! The peer's announcement is taken while connecting: its completion may be reaped before the event
//! that says that the connection stands.

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
use outbox::{Next, Outbox};

/// Which end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// The one that connected. It sends no keepalives, and tells of features only who it asked.
    Client,
    /// The one that accepted. It sends keepalives and answers questions about features.
    Server,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Connecting,
    Open {
        /// Servers only.
        next_keepalive: Option<Instant>,
    },
    Closed(Option<ProtocolError>),
}

/// One end of a Valkey Over RDMA connection.
///
/// A driver reaps completions and calls the `handle_*` methods in their order, then asks
/// [`poll_message`](Self::poll_message) until it has nothing more, [`write_plan`](Self::write_plan)
/// while it has bytes to send, and copies out what is [`readable`](Self::readable);
/// [`poll_timeout`](Self::poll_timeout) says when [`handle_timeout`](Self::handle_timeout) is due.
/// Whatever `poll_message` and `write_plan` return must be posted, in the order in which it was
/// returned. An error of a `handle_*` method ends the connection: the driver disconnects. After
/// [`close`](Self::close) late events are ignored.
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
    /// What we announce.
    memory: Registration,
    receive: ReceiveWindow,
    send: SendWindow,
    outbox: Outbox,
    writes_in_flight: u32,
    /// Writes and messages handed out since the peer's last sign.
    unseen: u32,
    /// As of the last [`handle_timeout`](Self::handle_timeout).
    last_heard: Option<Instant>,
    /// Since then. A flag, because to ask the clock for each arrival costs more than the arrival
    /// where that is a system call.
    heard_since: bool,
    /// The page that the client asked for.
    question: Option<u16>,
    peer_features: Option<u64>,
    stats: Stats,
}

impl Endpoint {
    /// An end that is being connected. `memory` is what the peer will be told to write to.
    ///
    /// # Errors
    /// By this configuration, or with memory of no bytes, it could not work.
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
            last_heard: None,
            heard_since: false,
            question: None,
            peer_features: None,
            stats: Stats::default(),
        })
    }

    // ---- what is ---------------------------------------------------------------------------

    /// Which end it is.
    #[must_use]
    pub fn role(&self) -> Role {
        self.role
    }

    /// Its counts.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Whether it is over.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed(_))
    }

    /// What the peer did, if that ended it.
    #[must_use]
    pub fn error(&self) -> Option<ProtocolError> {
        match self.state {
            State::Closed(error) => error,
            _ => None,
        }
    }

    /// What the peer announced last. Before that nothing can be written, no refusal either.
    #[must_use]
    pub fn peer_window(&self) -> Option<Registration> {
        self.send.registration()
    }

    /// What the peer said of features: a server its own, a client those that it wants.
    #[must_use]
    pub fn peer_features(&self) -> Option<u64> {
        self.peer_features
    }

    /// Which bytes of our memory have come and were not consumed.
    #[must_use]
    pub fn readable(&self) -> std::ops::Range<u32> {
        self.receive.readable()
    }

    /// How many bytes [`write_plan`](Self::write_plan) would give at most.
    #[must_use]
    pub fn writable(&self) -> u32 {
        let free = self.is_open() && !self.too_many_in_flight() && !self.too_many_unseen();
        if free { self.send.room().min(self.config.max_write) } else { 0 }
    }

    // ---- what happened ---------------------------------------------------------------------

    /// The connection stands. A second time is no matter.
    ///
    /// # Errors
    /// It had ended before by an error of the peer's.
    pub fn handle_established(&mut self, now: Instant) -> Result<(), ProtocolError> {
        if self.alive()? && self.state == State::Connecting {
            let next_keepalive = match self.role {
                Role::Server => now.checked_add(self.config.keepalive_interval),
                Role::Client => None,
            };
            self.state = State::Open { next_keepalive };
            self.outbox.announce();
        }
        Ok(())
    }

    /// A receive completed without an immediate: a control message.
    ///
    /// # Errors
    /// The peer broke a rule. The connection is over.
    pub fn handle_message(&mut self, bytes: &[u8]) -> Result<(), ProtocolError> {
        if !self.alive()? {
            return Ok(());
        }
        let result =
            Message::decode(bytes).map_err(Into::into).and_then(|message| self.take(message));
        self.settle(result)?;
        self.heard();
        self.stats.messages_received += 1;
        Ok(())
    }

    /// A receive completed with an immediate (in host order): bytes of the stream are in our
    /// memory. `byte_len` is what the network card says of the write.
    ///
    /// # Errors
    /// The peer broke a rule. The connection is over.
    pub fn handle_immediate(&mut self, immediate: u32, byte_len: u32) -> Result<(), ProtocolError> {
        if !self.alive()? {
            return Ok(());
        }
        let result = if byte_len > immediate {
            Err(ProtocolError::Immediate { immediate, byte_len })
        } else {
            self.receive.fill(immediate).map_err(Into::into)
        };
        self.settle(result)?;
        self.heard();
        self.stats.immediates += 1;
        self.stats.bytes_received += u64::from(immediate);
        Ok(())
    }

    /// The oldest message in flight has its local completion.
    ///
    /// # Panics
    /// None is in flight.
    pub fn handle_message_sent(&mut self) {
        assert!(self.outbox.sent(), "a message was sent that was not polled");
    }

    /// The oldest `count` writes in flight have their local completion, or one after them has.
    ///
    /// # Panics
    /// That many are not in flight.
    pub fn handle_writes_sent(&mut self, count: u32) {
        assert!(
            count <= self.writes_in_flight,
            "{count} writes sent, {} planned",
            self.writes_in_flight
        );
        self.writes_in_flight -= count;
    }

    /// Time has passed. May be called at any time.
    ///
    /// # Errors
    /// The peer is dead. The connection is over.
    pub fn handle_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        if !self.alive()? {
            return Ok(());
        }
        if std::mem::take(&mut self.heard_since) {
            self.last_heard = Some(now);
        }
        if self.dead_at().is_some_and(|at| at <= now) {
            return self.settle(Err(ProtocolError::Dead { after: self.config.dead_after }));
        }
        if let State::Open { next_keepalive: Some(due) } = self.state
            && due <= now
        {
            if !self.outbox.keepalive(now, self.config.max_keepalives) {
                self.stats.keepalives_skipped += 1;
            }
            // From now, not from when it was due: who was late sends one and not many.
            self.state =
                State::Open { next_keepalive: now.checked_add(self.config.keepalive_interval) };
        }
        Ok(())
    }

    // ---- what is wanted --------------------------------------------------------------------

    /// Plans the next write of at most `available` bytes, the oldest first. The driver posts it
    /// with these bytes and reports it by [`handle_writes_sent`](Self::handle_writes_sent). `None`:
    /// nothing can be written now; try again after the next event.
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

    /// The reader has copied out the first `bytes` of what is readable.
    ///
    /// # Panics
    /// That many are not readable.
    pub fn consume(&mut self, bytes: u32) {
        if self.receive.consume(bytes) {
            self.outbox.announce();
        }
        self.stats.bytes_consumed += u64::from(bytes);
    }

    /// Whether our memory is full, everything in it was consumed, and it will be announced again by
    /// the next [`poll_message`](Self::poll_message).
    #[must_use]
    pub fn is_to_announce(&self) -> bool {
        self.is_open() && !self.receive.is_open() && self.outbox.is_to_announce()
    }

    /// Other memory than before is announced from now on, also of another length: Valkey's clients
    /// follow that.
    ///
    /// # Panics
    /// This is not the moment ([`is_to_announce`](Self::is_to_announce)), the memory has no bytes,
    /// or this is a client and the length another: a Valkey server takes one length only, and
    /// crashes otherwise.
    pub fn replace_memory(&mut self, memory: Registration) {
        assert!(self.is_to_announce(), "the peer may write to the memory it was told of");
        assert!(memory.length > 0, "memory of no bytes");
        let may = self.role == Role::Server || memory.length == self.memory.length;
        assert!(
            may,
            "a server takes one length only: {}, not {}",
            self.memory.length, memory.length
        );
        self.receive = ReceiveWindow::new(memory.length);
        self.memory = memory;
    }

    /// A client asks for the server's features; [`peer_features`](Self::peer_features) has the
    /// answer when it came. Whether it could ask: servers do not, nor who waits for an answer. Not
    /// to be sent unless an extension is wanted.
    pub fn ask_features(&mut self, select: u16) -> bool {
        let question = Message::GetServerFeature { select, features: 0 };
        let may = self.role == Role::Client && self.question.is_none() && !self.is_closed();
        let asked = may && self.outbox.feature(question);
        if asked {
            self.question = Some(select);
        }
        asked
    }

    /// A client says which features it will use. Whether it could.
    pub fn set_features(&mut self, select: u16, features: u64) -> bool {
        let may = self.role == Role::Client && !self.is_closed();
        may && self.outbox.feature(Message::SetClientFeature { select, features })
    }

    /// No more is sent, and what comes is ignored. The driver disconnects; there is no word for it
    /// in the protocol.
    pub fn close(&mut self) {
        if !self.is_closed() {
            self.state = State::Closed(None);
        }
    }

    // ---- what to do ------------------------------------------------------------------------

    /// The next control message to send, if any. The driver reports it by
    /// [`handle_message_sent`](Self::handle_message_sent).
    pub fn poll_message(&mut self) -> Option<[u8; MESSAGE_BYTES]> {
        if !self.is_open() {
            return None;
        }
        let message = match self.outbox.poll()? {
            Next::Announcement => {
                self.receive.announce();
                self.stats.registrations_sent += 1;
                Message::RegisterXferMemory(self.memory)
            }
            Next::Feature(message) => message,
            Next::Keepalive => {
                self.stats.keepalives_sent += 1;
                Message::Keepalive
            }
        };
        self.unseen = self.unseen.saturating_add(1);
        self.stats.messages_sent += 1;
        Some(message.encode())
    }

    /// When [`handle_timeout`](Self::handle_timeout) is due, if nothing happens before.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let State::Open { next_keepalive } = self.state else { return None };
        [next_keepalive, self.dead_at()].into_iter().flatten().min()
    }

    // ---- inside ----------------------------------------------------------------------------

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

    /// `false` after a close of our own.
    fn alive(&self) -> Result<bool, ProtocolError> {
        match self.state {
            State::Closed(Some(error)) => Err(error),
            State::Closed(None) => Ok(false),
            _ => Ok(true),
        }
    }

    fn settle(&mut self, result: Result<(), ProtocolError>) -> Result<(), ProtocolError> {
        if let Err(error) = result {
            self.state = State::Closed(Some(error));
        }
        result
    }

    fn heard(&mut self) {
        self.heard_since = true;
        self.unseen = 0;
    }

    fn dead_at(&self) -> Option<Instant> {
        let since = self.outbox.oldest_keepalive()?;
        since.max(self.last_heard.unwrap_or(since)).checked_add(self.config.dead_after)
    }
}
