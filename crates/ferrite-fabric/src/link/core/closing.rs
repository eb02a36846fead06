//! How a link closes in good order: both sides deliver what they have, say `Fin`, and answer the
//! other's with `FinAck`.

use crate::wire::Control;

/// What was said of the end so far.
#[derive(Debug, Default)]
pub(crate) struct Closing {
    is_requested: bool,
    /// The driver has not been told of the request.
    is_new: bool,
    fin_sent: bool,
    fin_ack_sent: bool,
    peer_fin: bool,
}

impl Closing {
    /// Takes nothing new from here on; what was queued is delivered first.
    pub(crate) fn request(&mut self) {
        self.is_new |= !self.is_requested;
        self.is_requested = true;
    }

    pub(crate) fn is_requested(&self) -> bool {
        self.is_requested
    }

    /// Returns whether closing was requested since this was last asked.
    pub(crate) fn take_request(&mut self) -> bool {
        std::mem::take(&mut self.is_new)
    }

    /// Returns what is to be said next, if everything before it has gone.
    pub(crate) fn next_farewell(&mut self) -> Option<Control> {
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

    /// Forgets what was said on a path that is lost: it is said again on the next.
    pub(crate) fn say_again(&mut self) {
        (self.fin_sent, self.fin_ack_sent) = (false, false);
    }

    pub(crate) fn fin_sent(&self) -> bool {
        self.fin_sent
    }

    /// Returns whether the peer was told that its farewell has come.
    pub(crate) fn fin_ack_sent(&self) -> bool {
        self.fin_ack_sent
    }

    pub(crate) fn on_peer_fin(&mut self) {
        self.peer_fin = true;
    }

    /// Returns whether the peer has sent its last frame.
    pub(crate) fn peer_has_closed(&self) -> bool {
        self.peer_fin
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_each_farewell_once_on_a_path() {
        let mut closing = Closing::default();
        assert_eq!(closing.next_farewell(), None);
        closing.request();
        closing.request();
        assert!(closing.take_request() && !closing.take_request());
        closing.on_peer_fin();
        assert_eq!(closing.next_farewell(), Some(Control::Fin));
        assert_eq!(closing.next_farewell(), Some(Control::FinAck));
        assert_eq!(closing.next_farewell(), None);
        closing.say_again();
        assert!(!closing.fin_sent() && !closing.fin_ack_sent() && closing.peer_has_closed());
        assert_eq!(closing.next_farewell(), Some(Control::Fin));
    }
}
