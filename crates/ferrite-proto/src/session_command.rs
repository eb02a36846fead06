//! Commands that change a connection's own state, by their identity.
//!
//! A server that runs some commands itself proxies the others to the engine. It must know which
//! proxied commands may change the client's state in the engine. After each of these it asks the
//! engine for the state; this module neither keeps nor guesses it.
//!
//! An identity is the engine's original name of a command, whatever name the client typed:
//! `rename-command` changes names, not identities.

/// What a proxied command means for the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionCommand {
    /// The command may change the database, a transaction or tracking. The engine reports all three
    /// if it is asked about the client by id.
    ChangesState,
    /// The command begins a transaction (MULTI). The session cannot run commands itself in a
    /// transaction.
    BeginsTransaction,
    /// The command may change the user, the authentication or the protocol version (AUTH, HELLO).
    /// The engine reports these in full only to a command that the client itself runs.
    ChangesIdentity,
    /// The command returns the connection to its initial state, without a user (RESET).
    Resets,
    /// The command asks about earlier writes of this client (WAIT, WAITAOF).
    AsksForWrites,
    /// The command changes how the engine runs the client's next command, and only that one
    /// (ASKING). The engine must get the next command from the client's connection.
    AffectsNext,
    /// From this command on, a command may have any number of replies, the connection may end, or
    /// the engine does not report the state that the command sets. The session stays on the proxy
    /// path for good.
    PinsToProxy,
}

impl SessionCommand {
    /// Classifies a command by its identity, `NAME` or `NAME|SUBCOMMAND` in capitals.
    /// `is_connection` tells whether the command is in the engine's category `@connection`. Returns
    /// `None` for a command that has exactly one reply and changes nothing that the session must
    /// know.
    #[must_use]
    pub fn of(identity: &[u8], is_connection: bool) -> Option<Self> {
        Some(match identity {
            b"SELECT" | b"EXEC" | b"DISCARD" | b"WATCH" | b"UNWATCH" | b"CLIENT|TRACKING"
            | b"CLIENT|CACHING" => Self::ChangesState,
            b"MULTI" => Self::BeginsTransaction,
            b"AUTH" | b"HELLO" => Self::ChangesIdentity,
            b"RESET" => Self::Resets,
            b"WAIT" | b"WAITAOF" => Self::AsksForWrites,
            b"ASKING" => Self::AffectsNext,
            // These commands have several replies or none, have replies without a request, or may
            // end the connection.
            b"SUBSCRIBE" | b"PSUBSCRIBE" | b"SSUBSCRIBE" | b"UNSUBSCRIBE" | b"PUNSUBSCRIBE"
            | b"SUNSUBSCRIBE" | b"MONITOR" | b"SYNC" | b"PSYNC" | b"REPLCONF" | b"QUIT"
            | b"CLIENT|KILL" | b"CLIENT|REPLY" => Self::PinsToProxy,
            b"PING"
            | b"ECHO"
            | b"CLIENT"
            | b"CLIENT|ID"
            | b"CLIENT|INFO"
            | b"CLIENT|LIST"
            | b"CLIENT|GETNAME"
            | b"CLIENT|SETNAME"
            | b"CLIENT|SETINFO"
            | b"CLIENT|GETREDIR"
            | b"CLIENT|TRACKINGINFO"
            | b"CLIENT|HELP"
            | b"CLIENT|PAUSE"
            | b"CLIENT|UNPAUSE"
            | b"CLIENT|UNBLOCK" => return None,
            // This covers NO-EVICT, NO-TOUCH, CAPA, READONLY, and commands of later engines.
            _ if is_connection || identity.starts_with(b"CLIENT|") => Self::PinsToProxy,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::SessionCommand::{self, *};

    fn of(identity: &str) -> Option<SessionCommand> {
        SessionCommand::of(identity.as_bytes(), false)
    }

    #[test]
    fn classifies_by_identity() {
        for (identity, expected) in [
            ("GET", None),
            ("CLIENT|ID", None),
            ("SELECT", Some(ChangesState)),
            ("EXEC", Some(ChangesState)),
            ("MULTI", Some(BeginsTransaction)),
            ("HELLO", Some(ChangesIdentity)),
            ("RESET", Some(Resets)),
            ("WAITAOF", Some(AsksForWrites)),
            ("ASKING", Some(AffectsNext)),
            ("UNSUBSCRIBE", Some(PinsToProxy)),
            ("CLIENT|REPLY", Some(PinsToProxy)),
            ("QUIT", Some(PinsToProxy)),
        ] {
            assert_eq!(of(identity), expected, "{identity}");
        }
    }

    #[test]
    fn pins_unknown_connection_commands() {
        assert_eq!(of("CLIENT|SOMETHING-NEW"), Some(PinsToProxy));
        assert_eq!(SessionCommand::of(b"READONLY", true), Some(PinsToProxy));
        assert_eq!(SessionCommand::of(b"SOMETHING-NEW", true), Some(PinsToProxy));
        assert_eq!(SessionCommand::of(b"ECHO", true), None);
    }
}
