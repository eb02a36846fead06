//! The orderly close of a link. The side that closes sends everything in its queue, then `Fin`. The
//! other side sends everything in its queue, then `FinAck`. Both sides may close at the same time.

use crate::wire::Control;

/// The closing frames that were sent and received so far.
#[derive(Debug, Default)]
pub(crate) struct Closing {
    is_requested: bool,
    /// Whether [`Closing::take_request`] has not reported the request yet.
    is_new: bool,
    fin_sent: bool,
    fin_ack_sent: bool,
    peer_fin: bool,
}

impl Closing {
    /// Requests the close. The link accepts nothing new from now on, and delivers queued messages
    /// first.
    pub(crate) fn request(&mut self) {
        self.is_new |= !self.is_requested;
        self.is_requested = true;
    }

    pub(crate) fn is_requested(&self) -> bool {
        self.is_requested
    }

    /// Returns whether closing was requested since the last call.
    pub(crate) fn take_request(&mut self) -> bool {
        std::mem::take(&mut self.is_new)
    }

    /// Returns the next closing frame. The caller must have sent everything that precedes it.
    pub(crate) fn next_closing_frame(&mut self) -> Option<Control> {
        if self.is_requested && !self.fin_sent {
            self.fin_sent = true;
            Some(Control::Fin)
        } else if self.peer_fin && !self.fin_ack_sent {
            self.fin_ack_sent = true;
            Some(Control::FinAck)
        } else {
            None
        }
    }

    /// Forgets the closing frames that were sent on a lost path. They are sent again on the next
    /// path.
    pub(crate) fn say_again(&mut self) {
        (self.fin_sent, self.fin_ack_sent) = (false, false);
    }

    pub(crate) fn fin_sent(&self) -> bool {
        self.fin_sent
    }

    /// Returns whether the peer's `Fin` was answered.
    pub(crate) fn fin_ack_sent(&self) -> bool {
        self.fin_ack_sent
    }

    pub(crate) fn on_peer_fin(&mut self) {
        self.peer_fin = true;
    }

    /// Returns whether the peer has sent `Fin`, after which it sends no more data.
    pub(crate) fn peer_has_closed(&self) -> bool {
        self.peer_fin
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returns_each_closing_frame_once_on_a_path() {
        let mut closing = Closing::default();
        assert_eq!(closing.next_closing_frame(), None);
        closing.request();
        closing.request();
        assert!(closing.take_request() && !closing.take_request());
        closing.on_peer_fin();
        assert_eq!(closing.next_closing_frame(), Some(Control::Fin));
        assert_eq!(closing.next_closing_frame(), Some(Control::FinAck));
        assert_eq!(closing.next_closing_frame(), None);
        closing.say_again();
        assert!(!closing.fin_sent() && !closing.fin_ack_sent() && closing.peer_has_closed());
        assert_eq!(closing.next_closing_frame(), Some(Control::Fin));
    }
}
