//! What is sent: the next message of a class.
//!
//! ```text
//!   class bus: GOAWAY, grants of all streams    then in each class: resets, turns of streams
//! ```
//!
//! Grants and resets take at most half of a message, so that a flood of them leaves room for turns.
//! Grants travel in the class *bus*, so they may overtake everything else of their streams. This
//! does no harm, because the receiver of a grant already knows the stream. A reset travels in the
//! class of its stream, after the OPEN.

use std::time::Instant;

use super::config::TURN_ROOM;
use super::record::{CONTROL_BYTES, HEAD_BYTES};
use super::stream::HalfState;
use super::{Cause, Class, Control, DataHead, GoAway, Mux, StreamId};

/// What a driver has put into the room for a stream's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filled {
    /// Bytes, possibly none.
    Bytes {
        /// The number of bytes.
        len: usize,
        /// Whether the stream has, or may have, more bytes. If `false`, or if `len` is 0, the
        /// stream gets no turn until [`Mux::set_ready`] is called for it.
        is_more: bool,
    },
    /// No bytes, and there are no more: the stream ends in this direction.
    End,
    /// The source has failed. The stream is reset.
    Failed(Cause),
}

/// A message that is being packed.
struct Packer<'a> {
    out: &'a mut [u8],
    len: usize,
    records: u64,
}

impl Packer<'_> {
    fn room(&self) -> usize {
        self.out.len() - self.len
    }

    fn put(&mut self, control: Control) {
        let record = control.encode();
        self.out[self.len..self.len + record.len()].copy_from_slice(&record);
        self.len += record.len();
        self.records += 1;
    }
}

impl Mux {
    /// Packs the next message of a class into the first [`message_bytes`](super::Config) of `out`.
    /// Calls `fill` with a stream and the room for its next bytes. Returns the length of the
    /// message; `None` if nothing is to be sent now. The driver sends it on the channel of the
    /// class, and then calls [`handle_sent`](Self::handle_sent).
    ///
    /// # Panics
    /// If `out` is shorter than a message, or `fill` reports more bytes than it had room for.
    pub fn poll_message(
        &mut self,
        class: Class,
        out: &mut [u8],
        now: Instant,
        mut fill: impl FnMut(StreamId, &mut [u8]) -> Filled,
    ) -> Option<usize> {
        if self.error.is_some() || self.in_flight[class.index()] >= self.config.max_in_flight {
            return None;
        }
        let out = &mut out[..self.config.message_bytes];
        let mut packer = Packer { out, len: 0, records: 0 };
        let half = packer.out.len() / 2;
        if class == Class::Bus {
            self.pack_go_away(&mut packer);
            self.pack_grants(&mut packer, half);
        }
        self.pack_resets(class, &mut packer, half);
        while packer.room() >= TURN_ROOM
            && let Some(stream) = self.schedule.pop_turn(class)
        {
            self.pack_turn(stream, &mut packer, now, &mut fill);
        }
        let end = packer.out.len();
        self.pack_resets(class, &mut packer, end); // of streams whose sources have just failed
        if packer.len == 0 {
            return None;
        }
        self.in_flight[class.index()] += 1;
        self.stats.messages += 1;
        self.stats.records += packer.records;
        Some(packer.len)
    }

    /// Returns whether [`poll_message`](Self::poll_message) may have something to send.
    #[must_use]
    pub fn has_output(&self, class: Class) -> bool {
        let has_go_away = class == Class::Bus && self.go_away == GoAway::Requested;
        let may_send = self.in_flight[class.index()] < self.config.max_in_flight;
        self.error.is_none() && may_send && (has_go_away || self.schedule.has_work(class))
    }

    fn pack_go_away(&mut self, packer: &mut Packer<'_>) {
        if self.go_away == GoAway::Requested {
            let last = self.table.last_of_peer();
            packer.put(Control::GoAway { last });
            self.go_away = GoAway::Sent(last);
        }
    }

    /// Packs grants before the offset `end`.
    fn pack_grants(&mut self, packer: &mut Packer<'_>, end: usize) {
        while packer.len + CONTROL_BYTES <= end
            && let Some(stream) = self.schedule.pop_grant()
        {
            let Some(it) = self.table.get_mut(stream) else { continue };
            let (bytes, answers_move) = it.receiving.take_grant();
            if bytes > 0 || answers_move {
                packer.put(Control::Grant { stream, bytes, answers_move });
            }
        }
    }

    /// Packs resets before the offset `end`.
    fn pack_resets(&mut self, class: Class, packer: &mut Packer<'_>, end: usize) {
        while packer.len + CONTROL_BYTES <= end
            && let Some((stream, cause)) = self.schedule.pop_reset(class)
        {
            packer.put(Control::Reset { stream, cause });
        }
    }

    /// Gives a stream its turn.
    fn pack_turn(
        &mut self,
        stream: StreamId,
        packer: &mut Packer<'_>,
        now: Instant,
        fill: &mut impl FnMut(StreamId, &mut [u8]) -> Filled,
    ) {
        let Some(it) = self.table.get_mut(stream) else { return };
        let sending = &mut it.sending;
        sending.is_queued = false;
        if let Some(route) = sending.open.take() {
            packer.put(Control::Open { stream, route });
        }
        if !sending.may_send() {
            return;
        }
        let begin = packer.len + HEAD_BYTES;
        // Leaves room for the head of a DATA record, and for a FIN after its bytes.
        let room = (packer.room() - 2 * HEAD_BYTES)
            .min(self.config.turn_bytes as usize)
            .min(sending.credit as usize);
        match fill(stream, &mut packer.out[begin..begin + room]) {
            Filled::Bytes { len, is_more } => {
                assert!(len <= room, "{len} bytes were filled in, but there was room for {room}");
                sending.is_ready = is_more && len > 0;
                if len > 0 {
                    let length = len as u32; // at most `turn_bytes`
                    let next_class = sending.send(stream.class(), now, length);
                    let head = DataHead { stream, length, next_class }.encode();
                    packer.out[packer.len..begin].copy_from_slice(&head);
                    packer.len = begin + len;
                    packer.records += 1;
                    self.stats.bytes_sent += u64::from(length);
                    self.stats.class_changes += u64::from(next_class.is_some());
                }
                self.queue_turn(stream);
            }
            Filled::End => {
                sending.is_ready = false;
                sending.state = HalfState::Finished;
                packer.put(Control::Fin { stream });
                self.finish(stream);
            }
            Filled::Failed(cause) => self.reset(stream, cause),
        }
    }
}
