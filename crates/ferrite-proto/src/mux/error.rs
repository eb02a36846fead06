//! Errors of a multiplexer: violations by the peer, which end the link, and refusals of `open`.

use super::config::CREDIT_MAX;
use super::id::{Class, StreamId};
use super::record::RecordError;

/// A violation of the protocol by the peer. It ends the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MuxError {
    /// The bytes are not a record.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A message arrived on a channel that no class uses.
    #[error("a message on channel {channel}, which no class uses")]
    Channel {
        /// The channel.
        channel: u16,
    },
    /// A record names a stream that was never opened.
    #[error("a record for stream {stream}, which was never opened")]
    NeverOpened {
        /// The stream.
        stream: StreamId,
    },
    /// The peer opened a stream with a name that only this side may use.
    #[error("the peer opened stream {stream} with a name that only this side may use")]
    ForeignName {
        /// The stream.
        stream: StreamId,
    },
    /// The peer opened a stream whose number is not higher than that of each earlier stream of its
    /// class.
    #[error("stream {stream} was opened after one of its class with the same or a higher number")]
    ReusedName {
        /// The stream.
        stream: StreamId,
    },
    /// A record arrived on the channel of another class.
    #[error("a record for stream {stream} on the channel of class {class:?}")]
    WrongClass {
        /// The stream.
        stream: StreamId,
        /// The class of the channel.
        class: Class,
    },
    /// The peer sent more bytes than it was granted.
    #[error("{length} bytes for stream {stream}, but only {credit} were granted")]
    BeyondCredit {
        /// The stream.
        stream: StreamId,
        /// The number of bytes.
        length: u32,
        /// The number of granted bytes.
        credit: u32,
    },
    /// The peer granted more than the largest credit.
    #[error("more than {} bytes were granted for stream {stream}", CREDIT_MAX)]
    TooMuchCredit {
        /// The stream.
        stream: StreamId,
    },
    /// The peer sent data or a second FIN after a FIN.
    #[error("stream {stream} continued after its end")]
    AfterFin {
        /// The stream.
        stream: StreamId,
    },
    /// The peer changes the class of a stream to the class that the stream already has.
    #[error("stream {stream} changed to the class that it already has")]
    SameClass {
        /// The stream.
        stream: StreamId,
    },
    /// The peer announced a change of class, and did not wait for the answer.
    #[error("stream {stream} continued before its change of class was answered")]
    EarlyMove {
        /// The stream.
        stream: StreamId,
    },
    /// The peer answered a change of class that was not announced.
    #[error("the peer answered a change of class that was not announced, on stream {stream}")]
    UnexpectedAnswer {
        /// The stream.
        stream: StreamId,
    },
    /// The peer sent a second GOAWAY.
    #[error("a second GOAWAY")]
    SecondGoAway,
    /// The GOAWAY names a stream that this side has not opened.
    #[error("a GOAWAY for stream {stream}, which this side has not opened")]
    GoAwayStream {
        /// The stream.
        stream: StreamId,
    },
    /// The peer keeps opening streams that are refused, and does not receive the refusals.
    #[error("the peer opened {refused} streams beyond its limits without reading the refusals")]
    TooManyRefused {
        /// The number of refusals that wait to be sent.
        refused: usize,
    },
}

/// Why a stream cannot be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// This side has as many streams as it may have. Try again when one has ended.
    #[error("too many streams on the link")]
    TooManyStreams,
    /// The peer accepts no further streams. Use another link.
    #[error("the peer accepts no new streams")]
    GoingAway,
    /// All names are used up. Use another link.
    #[error("the names for streams are used up")]
    NamesUsedUp,
    /// The link has ended.
    #[error("the link has ended")]
    Ended,
}
