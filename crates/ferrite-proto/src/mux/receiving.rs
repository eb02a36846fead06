//! What arrives: messages of the peer, and the news that messages of this side were sent.

use std::time::Instant;

use super::record::Route;
use super::stream::{HalfState, Stream};
use super::table::Lookup;
use super::{
    Cause, Class, Control, DataHead, Decoded, End, GoAway, Mux, MuxError, Received, StreamId,
};

impl Mux {
    /// Handles a piece of a message that arrived on a channel of the link. Returns the first event
    /// that concerns the driver, and removes the bytes up to there from the front of `piece`. Call
    /// it until it returns `None`; the piece is then used up.
    ///
    /// # Errors
    /// If the peer violated the protocol. The link must then end.
    pub fn handle_piece<'a>(
        &mut self,
        channel: u16,
        piece: &mut &'a [u8],
        now: Instant,
    ) -> Result<Option<Received<'a>>, MuxError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        let result = self.next_received(channel, piece, now);
        self.end_on_error(result)
    }

    /// Handles the end of a message.
    ///
    /// # Errors
    /// If the message ends within a record. The link must then end.
    pub fn handle_message_end(&mut self) -> Result<(), MuxError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        let result = self.decoder.end_message().map_err(Into::into);
        self.end_on_error(result)
    }

    /// Handles the event that the oldest message of a class was sent. Another one may be packed.
    ///
    /// # Panics
    /// If no message of the class is in flight.
    pub fn handle_sent(&mut self, class: Class) {
        let in_flight = &mut self.in_flight[class.index()];
        assert!(*in_flight > 0, "no message of class {class:?} is in flight");
        *in_flight -= 1;
    }

    fn end_on_error<T>(&mut self, result: Result<T, MuxError>) -> Result<T, MuxError> {
        result.inspect_err(|error| self.error = Some(*error))
    }

    fn next_received<'a>(
        &mut self,
        channel: u16,
        piece: &mut &'a [u8],
        now: Instant,
    ) -> Result<Option<Received<'a>>, MuxError> {
        let class = Class::from_channel(channel).ok_or(MuxError::Channel { channel })?;
        while let Some(decoded) = self.decoder.next(piece)? {
            let received = match decoded {
                Decoded::Data(head) => {
                    self.on_data(&head, class)?;
                    None
                }
                Decoded::Bytes(bytes) => self.on_bytes(bytes),
                Decoded::Control(control) => self.on_control(control, class, now)?,
            };
            if received.is_some() {
                return Ok(received);
            }
        }
        Ok(None)
    }

    fn on_control(
        &mut self,
        control: Control,
        class: Class,
        now: Instant,
    ) -> Result<Option<Received<'static>>, MuxError> {
        match control {
            Control::Open { stream, route } => return self.on_open(stream, route, class, now),
            Control::Grant { stream, bytes, answers_move } => {
                if let Some(it) = self.find(stream)? {
                    it.sending.grant(stream, bytes, answers_move)?;
                    self.queue_turn(stream);
                }
            }
            Control::Fin { stream } => {
                if let Some(it) = self.find(stream)? {
                    it.receiving.fin(stream, class)?;
                    self.finish(stream);
                    return Ok(Some(Received::Fin { stream }));
                }
            }
            Control::Reset { stream, cause } => {
                if self.find(stream)?.is_some() {
                    self.remove(stream);
                    self.end(stream, End::ResetByPeer(cause));
                }
            }
            Control::GoAway { last } => self.on_go_away(last)?,
        }
        Ok(None)
    }

    fn on_open(
        &mut self,
        stream: StreamId,
        route: Route,
        class: Class,
        now: Instant,
    ) -> Result<Option<Received<'static>>, MuxError> {
        if stream.class() != class {
            return Err(MuxError::WrongClass { stream, class });
        }
        if self.is_beyond_go_away(stream) {
            // The peer learns from the GOAWAY that this stream was not accepted.
            self.stats.ignored += 1;
            return Ok(None);
        }
        self.table.use_name(stream)?;
        let peer = self.side.other();
        let waiting = self.schedule.waiting_resets(peer);
        let opens = if class == Class::Bus { &mut self.bus_opens } else { &mut self.opens };
        let cause = if !self.config.has_room(class, self.table.opened_by(peer) + waiting) {
            Cause::TOO_MANY_STREAMS
        } else if !opens.admit(now) {
            Cause::TOO_MANY_OPENS
        } else {
            self.insert(stream, None);
            self.stats.accepted += 1;
            return Ok(Some(Received::Opened { stream, route }));
        };
        let refused = waiting.bus + waiting.others;
        if refused >= self.config.max_refused {
            return Err(MuxError::TooManyRefused { refused });
        }
        self.schedule.push_reset(class, stream, cause);
        self.stats.refused += 1;
        Ok(None)
    }

    fn on_data(&mut self, head: &DataHead, class: Class) -> Result<(), MuxError> {
        let stream = head.stream;
        self.receiving = Some(stream);
        if let Some(it) = self.find(stream)?
            && it.receiving.data(head, class)?
        {
            self.queue_grant(stream);
        }
        Ok(())
    }

    fn on_bytes<'a>(&mut self, bytes: &'a [u8]) -> Option<Received<'a>> {
        let stream = self.receiving?;
        let it = self.table.get_mut(stream)?; // it may have ended since the head has arrived
        let len = bytes.len() as u32; // at most the length of a record
        it.receiving.held += len;
        self.held += u64::from(len);
        while self.held > self.config.max_held_bytes {
            self.reset_largest_holder();
        }
        self.table.get(stream)?;
        self.stats.bytes_received += u64::from(len);
        Some(Received::Data { stream, bytes })
    }

    /// Resets the stream that holds the most bytes.
    fn reset_largest_holder(&mut self) {
        let largest = self.table.iter().max_by_key(|(id, it)| (it.receiving.held, *id));
        let Some((stream, _)) = largest else { return };
        self.reset(stream, Cause::NO_MEMORY);
        self.stats.out_of_memory += 1;
        self.end(stream, End::Reset(Cause::NO_MEMORY));
    }

    fn on_go_away(&mut self, last: Option<StreamId>) -> Result<(), MuxError> {
        if std::mem::replace(&mut self.is_peer_going_away, true) {
            return Err(MuxError::SecondGoAway);
        }
        if let Some(stream) = last.filter(|last| !self.table.has_used(*last)) {
            return Err(MuxError::GoAwayStream { stream });
        }
        let refused: Vec<_> = self
            .table
            .iter()
            .map(|(id, _)| id)
            .filter(|id| id.opener() == self.side && Some(*id) > last)
            .collect();
        for stream in refused {
            self.remove(stream);
            self.end(stream, End::ResetByPeer(Cause::GOING_AWAY));
        }
        Ok(())
    }

    /// Returns whether a stream of the peer comes after the last that this side accepts.
    fn is_beyond_go_away(&self, stream: StreamId) -> bool {
        let is_of_peer = stream.opener() != self.side;
        matches!(self.go_away, GoAway::Sent(last) if is_of_peer && Some(stream) > last)
    }

    /// Returns the stream of a record; `None` if it has ended, and the record must be ignored.
    fn find(&mut self, stream: StreamId) -> Result<Option<&mut Stream>, MuxError> {
        match self.table.look_up(stream) {
            Lookup::Live => return Ok(self.table.get_mut(stream)),
            Lookup::Never if !self.is_beyond_go_away(stream) => {
                return Err(MuxError::NeverOpened { stream });
            }
            Lookup::Never | Lookup::Ended => self.stats.ignored += 1,
        }
        Ok(None)
    }

    /// Returns whether the peer has ended its direction of a stream.
    #[must_use]
    pub fn has_fin(&self, stream: StreamId) -> bool {
        self.table.get(stream).is_some_and(|it| it.receiving.state == HalfState::Finished)
    }
}
