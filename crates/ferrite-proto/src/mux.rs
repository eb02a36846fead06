//! Many streams over one link: records, credit for each stream, turns, and three classes.
//!
//! ```text
//!   id         names of streams: opener, class, number        cause   why a stream was reset
//!   record     the six records and their bytes                decoder finds records in pieces
//!   stream     the two directions of a stream, with credit    table   the streams of a link
//!   schedule   what waits to be sent: turns, grants, resets   rate    limits over time
//! ```
//!
//! A link carries messages, in order on each of its channels. Each class has a channel. A message
//! consists of whole records of one or more streams. It is packed from the records that are ready
//! at that time, up to the maximum size. A message that is not full does not wait for more.

mod cause;
mod config;
mod decoder;
mod error;
mod id;
mod packing;
mod rate;
mod receiving;
mod record;
mod schedule;
#[cfg(test)]
mod simulation;
mod stats;
mod stream;
mod table;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

pub use cause::Cause;
pub use config::{Config, ConfigError};
pub use decoder::{Decoded, Decoder};
pub use error::{MuxError, OpenError};
pub use id::{Class, Side, StreamId};
pub use packing::Filled;
pub use record::{CONTROL_BYTES, Control, DataHead, Encoded, HEAD_BYTES, RecordError, Route};
pub use stats::Stats;

use rate::OpenRate;
use schedule::Schedule;
use stream::Stream;
use table::Table;

/// What [`Mux::handle_piece`] has received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Received<'a> {
    /// The peer has opened a stream. The driver connects it, or resets it.
    Opened {
        /// The stream.
        stream: StreamId,
        /// The destination and the source of the stream.
        route: Route,
    },
    /// Bytes of a stream. The driver passes them on and reports that with [`Mux::consume`]. It
    /// keeps a copy of the bytes that it cannot pass on yet.
    Data {
        /// The stream.
        stream: StreamId,
        /// The bytes.
        bytes: &'a [u8],
    },
    /// The peer sends nothing more on a stream.
    Fin {
        /// The stream.
        stream: StreamId,
    },
}

/// How a stream ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Both sides have sent all their bytes, and this side has consumed those of the peer.
    Finished,
    /// This side has reset the stream, because of a limit.
    Reset(Cause),
    /// The peer has reset the stream. Bytes that were not consumed are lost.
    ResetByPeer(Cause),
}

/// A stream that has ended, other than by [`Mux::reset`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// The stream.
    pub stream: StreamId,
    /// How the stream ended.
    pub end: End,
}

/// Whether this side accepts no further streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GoAway {
    No,
    Requested,
    /// GOAWAY was sent. This is the last stream of the peer that this side accepts; `None` if there
    /// was none.
    Sent(Option<StreamId>),
}

/// One end of a multiplexed link.
///
/// A driver passes each message of the link to [`handle_piece`](Self::handle_piece), in pieces of
/// any size and one message after another, and then calls
/// [`handle_message_end`](Self::handle_message_end). After each of these calls, and after each
/// command, it calls [`poll_ended`](Self::poll_ended) until that returns `None`. It tells with
/// [`set_ready`](Self::set_ready) which streams have bytes to send, calls
/// [`poll_message`](Self::poll_message) for each class until that returns `None`, and sends the
/// messages on the channels of their classes. An error of a `handle_*` method ends the link.
///
/// ```
/// use std::time::Instant;
/// use ferrite_proto::mux::{Class, Config, Filled, Mux, Received, Route, Side};
///
/// let new = |side| Mux::new(side, Config::default());
/// let (mut caller, mut called) = (new(Side::Caller)?, new(Side::Called)?);
/// let address = "10.0.0.2:6379".parse()?;
/// let route = Route { destination: address, source: address };
/// let stream = caller.open(Class::Interactive, route)?;
/// caller.set_ready(stream);
///
/// let (mut out, now) = (vec![0; 65536], Instant::now());
/// let len = caller.poll_message(Class::Interactive, &mut out, now, |_, room| {
///     room[..4].copy_from_slice(b"PING");
///     Filled::Bytes { len: 4, is_more: false }
/// });
/// let (mut piece, channel) = (&out[..len.unwrap()], Class::Interactive.channel());
/// let opened = called.handle_piece(channel, &mut piece, now)?;
/// assert_eq!(opened, Some(Received::Opened { stream, route }));
/// let data = called.handle_piece(channel, &mut piece, now)?;
/// assert_eq!(data, Some(Received::Data { stream, bytes: b"PING" }));
/// called.consume(stream, 4);
/// assert_eq!(called.handle_piece(channel, &mut piece, now)?, None);
/// called.handle_message_end()?;
/// caller.handle_sent(Class::Interactive);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Mux {
    side: Side,
    config: Config,
    decoder: Decoder,
    /// The stream of the DATA record whose bytes are arriving now.
    receiving: Option<StreamId>,
    table: Table,
    schedule: Schedule,
    opens: OpenRate,
    bus_opens: OpenRate,
    ended: VecDeque<Ended>,
    /// The number of bytes that all streams have received and not consumed.
    held: u64,
    /// Messages that are not sent yet, by class.
    in_flight: [u32; Class::ALL.len()],
    go_away: GoAway,
    /// Whether the peer accepts no further streams.
    is_peer_going_away: bool,
    error: Option<MuxError>,
    stats: Stats,
}

impl Mux {
    /// Creates one end. `side` is this side's role in the link.
    ///
    /// # Errors
    /// If a multiplexer cannot work with these limits.
    pub fn new(side: Side, config: Config) -> Result<Self, ConfigError> {
        config.check()?;
        Ok(Self {
            side,
            decoder: Decoder::default(),
            receiving: None,
            table: Table::new(side),
            schedule: Schedule::default(),
            opens: OpenRate::new(config.opens_per_second),
            bus_opens: OpenRate::new(config.opens_per_second),
            ended: VecDeque::new(),
            held: 0,
            in_flight: [0; 3],
            go_away: GoAway::No,
            is_peer_going_away: false,
            error: None,
            stats: Stats::default(),
            config,
        })
    }

    // ---- state ---------------------------------------------------------------------------

    /// Returns this side's role in the link.
    #[must_use]
    pub fn side(&self) -> Side {
        self.side
    }

    /// Returns the limits.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Returns the violation that ended the link, if there was one.
    #[must_use]
    pub fn error(&self) -> Option<MuxError> {
        self.error
    }

    /// Returns the number of streams that have not ended.
    #[must_use]
    pub fn streams(&self) -> usize {
        self.table.len()
    }

    /// Returns whether a stream has not ended.
    #[must_use]
    pub fn is_live(&self, stream: StreamId) -> bool {
        self.table.get(stream).is_some()
    }

    /// Returns the class in which this side sends on a stream; `None` if the stream has ended.
    #[must_use]
    pub fn class(&self, stream: StreamId) -> Option<Class> {
        self.table.get(stream).map(|stream| stream.sending.class)
    }

    /// Returns how many bytes the peer's credit allows a stream to send now.
    #[must_use]
    pub fn credit(&self, stream: StreamId) -> u32 {
        self.table.get(stream).map_or(0, |stream| stream.sending.credit)
    }

    /// Returns the number of bytes that all streams have received and that were not consumed.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.held
    }

    /// Returns whether the peer accepts no further streams.
    #[must_use]
    pub fn is_peer_going_away(&self) -> bool {
        self.is_peer_going_away
    }

    /// Returns whether this side has sent GOAWAY and every stream has ended, so that the link can
    /// be closed.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        let is_done = !Class::ALL.into_iter().any(|class| self.schedule.has_work(class));
        matches!(self.go_away, GoAway::Sent(_)) && self.table.len() == 0 && is_done
    }

    // ---- commands ------------------------------------------------------------------------

    /// Opens a stream. Its bytes may follow at once.
    ///
    /// # Errors
    /// If a limit is reached, the peer accepts no streams, or the link has ended.
    pub fn open(&mut self, class: Class, route: Route) -> Result<StreamId, OpenError> {
        if self.error.is_some() {
            return Err(OpenError::Ended);
        }
        if self.is_peer_going_away {
            return Err(OpenError::GoingAway);
        }
        // A stream whose RESET is not sent yet is still open at the peer.
        let open = self.table.opened_by(self.side) + self.schedule.waiting_resets(self.side);
        if !self.config.has_room(class, open) {
            return Err(OpenError::TooManyStreams);
        }
        let id = self.table.next_name(class).ok_or(OpenError::NamesUsedUp)?;
        self.insert(id, Some(route));
        self.stats.opened += 1;
        self.queue_turn(id);
        Ok(id)
    }

    /// Notes that a stream has bytes to send, or the end of its bytes. Does nothing if the stream
    /// has ended.
    pub fn set_ready(&mut self, stream: StreamId) {
        if let Some(it) = self.table.get_mut(stream) {
            it.sending.is_ready = true;
            self.queue_turn(stream);
        }
    }

    /// Notes that received bytes of a stream were passed on. Does nothing if the stream has ended.
    ///
    /// # Panics
    /// If fewer bytes are held.
    pub fn consume(&mut self, stream: StreamId, bytes: u32) {
        let Some(it) = self.table.get_mut(stream) else { return };
        let held = it.receiving.held;
        assert!(bytes <= held, "{bytes} bytes consumed, but only {held} are held");
        self.held -= u64::from(bytes);
        if it.receiving.consume(bytes, self.config.window) {
            self.queue_grant(stream);
        }
        self.finish(stream);
    }

    /// Ends a stream in both directions. The peer receives the cause, and resets the connection of
    /// its program. Does nothing if the stream has ended.
    pub fn reset(&mut self, stream: StreamId, cause: Cause) {
        let Some(it) = self.remove(stream) else { return };
        // The peer does not know a stream whose OPEN was not sent.
        if it.sending.open.is_none() {
            self.schedule.push_reset(it.sending.class, stream, cause);
        }
    }

    /// Accepts no further streams of the peer. Existing streams continue.
    pub fn go_away(&mut self) {
        if self.go_away == GoAway::No {
            self.go_away = GoAway::Requested;
        }
    }

    // ---- output --------------------------------------------------------------------------

    /// Returns the next stream that has ended other than by [`reset`](Self::reset). Nothing more
    /// is reported for it.
    pub fn poll_ended(&mut self) -> Option<Ended> {
        self.ended.pop_front()
    }

    // ---- internal ------------------------------------------------------------------------

    fn insert(&mut self, id: StreamId, open: Option<Route>) {
        let Config { window, bulk_bytes_per_second, .. } = self.config;
        self.table.insert(id, Stream::new(id.class(), open, window, bulk_bytes_per_second));
    }

    /// Removes a stream and everything that waits for it.
    fn remove(&mut self, id: StreamId) -> Option<Stream> {
        let stream = self.table.remove(id)?;
        self.held -= u64::from(stream.receiving.held);
        if stream.sending.is_queued {
            self.schedule.remove_turn(stream.sending.class, id);
        }
        if stream.receiving.is_grant_queued {
            self.schedule.remove_grant(id);
        }
        Some(stream)
    }

    fn end(&mut self, stream: StreamId, end: End) {
        self.ended.push_back(Ended { stream, end });
    }

    /// Removes a stream if it has finished.
    fn finish(&mut self, id: StreamId) {
        if self.table.get(id).is_some_and(Stream::is_finished) {
            self.remove(id);
            self.end(id, End::Finished);
        }
    }

    fn queue_turn(&mut self, id: StreamId) {
        let Some(Stream { sending, .. }) = self.table.get_mut(id) else { return };
        if sending.needs_turn() && !sending.is_queued {
            sending.is_queued = true;
            self.schedule.push_turn(sending.class, id);
        }
    }

    fn queue_grant(&mut self, id: StreamId) {
        let Some(Stream { receiving, .. }) = self.table.get_mut(id) else { return };
        if !std::mem::replace(&mut receiving.is_grant_queued, true) {
            self.schedule.push_grant(id);
        }
    }
}
