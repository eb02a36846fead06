//! Many connections of programs over one link, as streams of `ferrite_proto::mux`.
//!
//! ```text
//!   socket ─► registered memory behind a record's head ─► link      one task, `MuxDriver`, drives
//!   link ─► received message ─► socket                              all streams of a link
//!                           └─► heap, what the socket does not take at once
//! ```
//!
//! | file | what it is |
//! |---|---|
//! | `driver.rs` | the task: messages in and out, and what the multiplexer says about streams |
//! | `local.rs` | the local connection of a stream, and received bytes that wait for it |
//! | `socket.rs` | what a local connection must be able to do |
//! | `wakers.rs` | which streams have something to do |
//!
//! Received messages are always taken at once. So a program that does not read occupies heap, which
//! the multiplexer limits, and never the receives of the device.

mod driver;
mod local;
mod socket;
mod wakers;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrite_fabric::{Error, Link};
use ferrite_proto::mux::{Cause, Class, Config, ConfigError, MuxError, Route, Stats, StreamId};
use tokio::sync::{mpsc, oneshot};

pub use driver::MuxDriver;
pub use ferrite_proto::mux as protocol;
pub use ferrite_proto::mux::{OpenError, Side};
pub use socket::MuxSocket;

/// Starts the multiplexer on a link. Both ends must do so, with the same window, and one of them as
/// [`Side::Caller`]. Nothing else may use the link.
///
/// The caller spawns [`MuxDriver::run`].
///
/// # Errors
/// Returns an error if a limit is invalid, or if the link has too few channels or too small a queue
/// for the multiplexer's messages.
pub fn multiplex<S: MuxSocket>(
    link: Link,
    side: Side,
    config: &Config,
) -> Result<Multiplexer<S>, MuxSetupError> {
    let hello = link.peer_hello();
    let most = usize::try_from(hello.max_message_bytes).unwrap_or(usize::MAX);
    let message_bytes = config.message_bytes.min(most);
    let config = Config { message_bytes, ..config.clone() };
    config.check()?;
    let channels = Class::ALL.len() as u16;
    let own = link.fabric().config();
    if hello.channels.min(own.channels) < channels {
        return Err(MuxSetupError::Channels { channels: hello.channels.min(own.channels) });
    }
    // With room for all messages in flight, a message never waits outside of the link's queue,
    // where a later one could overtake it.
    let messages = config.max_in_flight as usize * Class::ALL.len();
    let bytes = (messages * message_bytes) as u64;
    if own.send_queue_messages < messages || own.send_queue_bytes < bytes {
        return Err(MuxSetupError::Queue { messages, bytes });
    }
    let (commands, received_commands) = mpsc::unbounded_channel();
    let (incoming, received_incoming) = mpsc::unbounded_channel();
    let shared = Arc::new(Shared::default());
    let driver = MuxDriver::new(link, side, config, received_commands, incoming, &shared)?;
    let handle = MuxHandle { commands: commands.clone(), shared };
    let incoming = MuxIncoming { received: received_incoming, commands };
    Ok(Multiplexer { handle, incoming, driver })
}

/// The parts of a multiplexer, for the tasks that use them.
#[derive(Debug)]
pub struct Multiplexer<S: MuxSocket> {
    /// Opens streams.
    pub handle: MuxHandle<S>,
    /// The streams that the peer opens.
    pub incoming: MuxIncoming<S>,
    /// Drives all streams.
    pub driver: MuxDriver<S>,
}

/// Why a link cannot carry streams.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MuxSetupError {
    /// A limit of the multiplexer is invalid.
    #[error("multiplexer: {0}")]
    Config(#[from] ConfigError),
    /// The link has too few channels.
    #[error("the link has {channels} channels; the multiplexer needs one for each class")]
    Channels {
        /// The number of channels.
        channels: u16,
    },
    /// The link's queue is too small.
    #[error(
        "the link's queue is too small; send_queue_messages must be at least {messages} and \
         send_queue_bytes at least {bytes}"
    )]
    Queue {
        /// The number of messages in flight.
        messages: usize,
        /// The number of their bytes.
        bytes: u64,
    },
}

/// Why the driver ended other than in an orderly way. The local connections of all streams were
/// reset.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum MuxFailure {
    /// The link has failed, or was closed while there were streams.
    #[error(transparent)]
    Link(#[from] Error),
    /// The peer has violated the multiplexer's protocol.
    #[error("the peer violated the multiplexer's protocol: {0}")]
    Peer(#[from] MuxError),
}

/// What the driver is asked to do.
enum Command<S> {
    Open {
        class: Class,
        route: Route,
        socket: S,
        opened: oneshot::Sender<Result<StreamId, (S, OpenError)>>,
    },
    Accept {
        stream: StreamId,
        socket: S,
    },
    Refuse {
        stream: StreamId,
        cause: Cause,
    },
    GoAway,
}

/// The state of a multiplexer, for diagnostics and metrics.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct MuxState {
    /// Counters.
    pub stats: Stats,
    /// Number of streams that have not ended.
    pub streams: usize,
    /// Received bytes that no local connection has taken, of all streams.
    pub held_bytes: u64,
    /// The highest value of `held_bytes` so far.
    pub most_held_bytes: u64,
    /// Whether the peer accepts no further streams.
    pub is_peer_going_away: bool,
}

#[derive(Debug, Default)]
struct Shared(Mutex<MuxState>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, MuxState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens streams. Clones share the multiplexer.
pub struct MuxHandle<S> {
    commands: mpsc::UnboundedSender<Command<S>>,
    shared: Arc<Shared>,
}

impl<S> MuxHandle<S> {
    /// Opens a stream for a local connection, whose bytes may be sent at once.
    ///
    /// # Errors
    /// Returns the connection if a limit is reached, the peer accepts no streams, or the link has
    /// ended. The connection is `None` if the driver ended meanwhile.
    pub async fn open(
        &self,
        class: Class,
        route: Route,
        socket: S,
    ) -> Result<StreamId, (Option<S>, OpenError)> {
        let (opened, answer) = oneshot::channel();
        let command = Command::Open { class, route, socket, opened };
        if let Err(mpsc::error::SendError(command)) = self.commands.send(command) {
            let socket = match command {
                Command::Open { socket, .. } | Command::Accept { socket, .. } => Some(socket),
                Command::Refuse { .. } | Command::GoAway => None,
            };
            return Err((socket, OpenError::Ended));
        }
        match answer.await {
            Ok(opened) => opened.map_err(|(socket, error)| (Some(socket), error)),
            Err(_) => Err((None, OpenError::Ended)),
        }
    }

    /// Accepts no further streams of the peer. The driver closes the link and ends when the streams
    /// that exist have ended.
    pub fn go_away(&self) {
        let _ = self.commands.send(Command::GoAway); // without a driver there is nothing to do
    }

    /// Returns the state of the multiplexer.
    #[must_use]
    pub fn state(&self) -> MuxState {
        *self.shared.lock()
    }
}

impl<S> Clone for MuxHandle<S> {
    fn clone(&self) -> Self {
        Self { commands: self.commands.clone(), shared: Arc::clone(&self.shared) }
    }
}

impl<S> fmt::Debug for MuxHandle<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MuxHandle").field("state", &self.state()).finish_non_exhaustive()
    }
}

/// The streams that the peer opens. If this is dropped, further streams are refused.
pub struct MuxIncoming<S> {
    received: mpsc::UnboundedReceiver<(StreamId, Route)>,
    commands: mpsc::UnboundedSender<Command<S>>,
}

impl<S> MuxIncoming<S> {
    /// Waits for the next stream. Returns `None` when the driver has ended.
    pub async fn next(&mut self) -> Option<IncomingStream<S>> {
        let (stream, route) = self.received.recv().await?;
        Some(IncomingStream { stream, route, commands: Some(self.commands.clone()) })
    }
}

impl<S> fmt::Debug for MuxIncoming<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MuxIncoming").finish_non_exhaustive()
    }
}

/// A stream that the peer has opened and that waits to be accepted or refused. Bytes that arrive
/// before that are kept. Dropping this value refuses the stream.
pub struct IncomingStream<S> {
    stream: StreamId,
    route: Route,
    /// `None` once the stream was answered.
    commands: Option<mpsc::UnboundedSender<Command<S>>>,
}

impl<S> IncomingStream<S> {
    /// Returns the identifier of the stream.
    #[must_use]
    pub fn id(&self) -> StreamId {
        self.stream
    }

    /// Returns where the stream leads.
    #[must_use]
    pub fn route(&self) -> Route {
        self.route
    }

    /// Returns the class in which the stream was opened.
    #[must_use]
    pub fn class(&self) -> Class {
        self.stream.class()
    }

    /// Connects the stream with a local connection. If the link has ended meanwhile, the connection
    /// is reset.
    pub fn accept(mut self, socket: S)
    where
        S: MuxSocket,
    {
        let Some(commands) = self.commands.take() else { return };
        let accepted = commands.send(Command::Accept { stream: self.stream, socket });
        if let Err(mpsc::error::SendError(Command::Accept { socket, .. })) = accepted {
            socket.reset();
        }
    }

    /// Refuses the stream. The peer's program gets a reset connection.
    pub fn refuse(mut self, cause: Cause) {
        self.answer(cause);
    }

    fn answer(&mut self, cause: Cause) {
        if let Some(commands) = self.commands.take() {
            let _ = commands.send(Command::Refuse { stream: self.stream, cause });
        }
    }
}

impl<S> Drop for IncomingStream<S> {
    fn drop(&mut self) {
        self.answer(Cause::REFUSED);
    }
}

impl<S> fmt::Debug for IncomingStream<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IncomingStream")
            .field("stream", &self.stream)
            .field("route", &self.route)
            .finish_non_exhaustive()
    }
}
