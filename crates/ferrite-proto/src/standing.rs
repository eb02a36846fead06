//! What a client is to the engine as far as it decides where its commands may run: who it is, which database and protocol it is
//! at, and what holds it to a connection of its own.
//!
//! A server that answers some commands by itself and passes the others on to a connection of the client's own must know what those
//! others change. Holds begin when a command goes out and end when the engine has said so: a connection of one's own is right for
//! every command, so that holding too long costs time and nothing else.

/// Who a client is, and where.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Standing {
    /// The user that it has authenticated as; `None` before.
    pub user: Option<Box<str>>,
    /// The database that it has selected.
    pub db: u32,
    /// Whether it is answered in RESP3.
    pub resp3: bool,
    in_transaction: bool,
    watches: bool,
    /// A transaction may have changed the above.
    is_unknown: bool,
}

/// What a command that goes over the client's own connection changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Nothing; it has one reply.
    Nothing,
    /// Another database.
    Select(u32),
    /// Another user.
    Auth(Box<str>),
    /// Another protocol, perhaps another user.
    Hello {
        /// The protocol, if one was named.
        resp3: Option<bool>,
        /// The user, if one was named.
        user: Option<Box<str>>,
    },
    /// The end of a transaction.
    EndTransaction,
    /// No key is watched any more.
    Unwatch,
    /// It asks what has become of earlier writes of this client.
    Wait,
    /// From here on replies cannot be counted, or the connection has a state that only it can keep: everything goes there.
    Stay,
    /// The engine may hang up when it has answered. Everything goes to the connection: what comes after is not executed then.
    End,
}

impl Standing {
    /// Of a client that has just come: as the user whom the engine takes everybody for, if it does.
    #[must_use]
    pub fn new(is_open_to_all: bool) -> Self {
        Self { user: is_open_to_all.then(|| "default".into()), ..Self::default() }
    }

    /// Whether everything must go over the client's own connection for now.
    #[must_use]
    #[inline]
    pub fn is_held(&self) -> bool {
        self.in_transaction || self.watches || self.user.is_none() || self.is_unknown
    }

    /// Whether what goes over the client's own connection is queued there.
    #[must_use]
    pub fn is_in_transaction(&self) -> bool {
        self.in_transaction
    }

    /// Whether a command of this name may be one that changes something, or must go over the client's own connection.
    #[must_use]
    pub fn minds(name: &[u8]) -> bool {
        Self::default().take([name].into_iter()).is_some()
    }

    /// What this command changes; the holds that begin with it have begun. `None`: it is a command like any other.
    pub fn take<'a, A>(&mut self, mut args: A) -> Option<Effect>
    where
        A: ExactSizeIterator<Item = &'a [u8]>,
    {
        let mut name = [0; 16];
        let name = upper(args.next()?, &mut name)?;
        let queued = self.in_transaction;
        let effect = match name {
            b"MULTI" => {
                self.in_transaction = true;
                Effect::Nothing
            }
            b"EXEC" | b"DISCARD" if args.len() == 0 => Effect::EndTransaction,
            b"WATCH" => {
                self.watches = true;
                Effect::Nothing
            }
            b"UNWATCH" => Effect::Unwatch,
            // They would take effect with EXEC.
            b"SELECT" | b"AUTH" | b"HELLO" if queued => {
                self.is_unknown = true;
                Effect::Nothing
            }
            b"WAIT" | b"WAITAOF" if queued => Effect::Nothing, // there it does not wait
            b"WAIT" | b"WAITAOF" => Effect::Wait,
            b"SELECT" => args.next().and_then(number).map_or(Effect::Nothing, Effect::Select),
            b"AUTH" => auth(args),
            b"HELLO" => hello(args),
            b"CLIENT" => {
                let mut word = [0; 16];
                match args.next().and_then(|arg| upper(arg, &mut word)) {
                    Some(
                        b"REPLY" | b"TRACKING" | b"CACHING" | b"NO-EVICT" | b"NO-TOUCH" | b"CAPA"
                        | b"IMPORT-SOURCE",
                    ) => Effect::Stay,
                    Some(b"KILL") => Effect::End, // itself, perhaps
                    _ => Effect::Nothing,
                }
            }
            b"QUIT" => Effect::End,
            b"SUBSCRIBE" | b"PSUBSCRIBE" | b"SSUBSCRIBE" | b"UNSUBSCRIBE" | b"PUNSUBSCRIBE"
            | b"SUNSUBSCRIBE" | b"MONITOR" | b"SYNC" | b"PSYNC" | b"REPLCONF" | b"RESET" | b"ASKING"
            | b"READONLY" | b"READWRITE" => Effect::Stay,
            _ => return None,
        };
        Some(effect)
    }

    /// The engine has answered the command that has this effect.
    pub fn answered(&mut self, effect: Effect, reply: &[u8]) {
        let is_error = reply.first() == Some(&b'-');
        match effect {
            Effect::Select(db) if reply.starts_with(b"+OK") => self.db = db,
            Effect::Auth(user) if reply.starts_with(b"+OK") => self.user = Some(user),
            Effect::Hello { resp3, user } if !is_error => {
                self.resp3 = resp3.unwrap_or(self.resp3);
                self.user = user.or(self.user.take());
            }
            Effect::EndTransaction if !is_error || reply.starts_with(b"-EXECABORT") => {
                (self.in_transaction, self.watches) = (false, false);
            }
            // There was none.
            Effect::EndTransaction if reply.ends_with(b" without MULTI\r\n") => self.in_transaction = false,
            Effect::Unwatch if reply.starts_with(b"+OK") => self.watches = false,
            _ => {}
        }
    }
}

/// In capitals, if it is short enough to be a word of ours.
fn upper<'a>(word: &[u8], into: &'a mut [u8; 16]) -> Option<&'a [u8]> {
    let into = into.get_mut(..word.len())?;
    into.copy_from_slice(word);
    into.make_ascii_uppercase();
    Some(into)
}

fn number(arg: &[u8]) -> Option<u32> {
    std::str::from_utf8(arg).ok()?.parse().ok()
}

/// A name as the engine knows it. One that is no text is nobody's here: such a client stays on its own connection.
fn user(name: &[u8]) -> Option<Box<str>> {
    std::str::from_utf8(name).ok().filter(|name| !name.contains('\0')).map(Into::into)
}

fn auth<'a>(mut args: impl ExactSizeIterator<Item = &'a [u8]>) -> Effect {
    match (args.len(), args.next()) {
        (1, _) => Effect::Auth("default".into()),
        (2, Some(name)) => user(name).map_or(Effect::Stay, Effect::Auth),
        _ => Effect::Nothing,
    }
}

fn hello<'a>(mut args: impl Iterator<Item = &'a [u8]>) -> Effect {
    let resp3 = match args.next() {
        None => None,
        Some(b"3") => Some(true),
        Some(_) => Some(false), // 2, or an error
    };
    let mut named = None;
    while let Some(option) = args.next() {
        if option.eq_ignore_ascii_case(b"AUTH") {
            let Some(name) = args.next() else { break };
            named = user(name);
            if named.is_none() {
                return Effect::Stay;
            }
        }
        args.next(); // the password, or what SETNAME takes
    }
    Effect::Hello { resp3, user: named }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resp::{Command, encode_command};

    fn take(standing: &mut Standing, line: &str) -> Option<Effect> {
        let mut bytes = Vec::new();
        let words: Vec<_> = line.split(' ').collect();
        encode_command(words, &mut bytes);
        standing.take(Command::parse(&bytes).expect("a command").args())
    }

    fn pass(standing: &mut Standing, line: &str, reply: &str) {
        let effect = take(standing, line).expect("a word of sessions");
        standing.answered(effect, format!("{reply}\r\n").as_bytes());
    }

    #[test]
    fn transactions_hold_until_the_engine_has_ended_them() {
        let mut standing = Standing::new(true);
        assert_eq!(take(&mut standing, "GET k"), None);
        assert!(!standing.is_held());
        pass(&mut standing, "watch k", "+OK");
        pass(&mut standing, "multi", "+OK");
        assert_eq!(take(&mut standing, "EXEC now"), None, "an error whatever it is answered with");
        assert!(standing.is_held());
        pass(&mut standing, "EXEC", "-NOPERM no");
        assert!(standing.is_held());
        pass(&mut standing, "EXEC", "-EXECABORT Transaction discarded because of previous errors.");
        assert!(!standing.is_held());
        pass(&mut standing, "MULTI", "-NOPERM no");
        assert!(standing.is_held(), "held for nothing, but safely");
        pass(&mut standing, "EXEC", "-ERR EXEC without MULTI");
        assert!(!standing.is_held());
        pass(&mut standing, "WATCH k", "+OK");
        pass(&mut standing, "DISCARD", "-ERR DISCARD without MULTI");
        assert!(standing.is_held());
        pass(&mut standing, "UNWATCH", "+OK");
        assert!(!standing.is_held());
    }

    #[test]
    fn what_a_transaction_has_changed_is_not_known() {
        for line in ["select 3", "AUTH alice secret", "HELLO 3"] {
            let mut standing = Standing::new(true);
            pass(&mut standing, "MULTI", "+OK");
            assert_eq!(take(&mut standing, line), Some(Effect::Nothing));
            assert_eq!(take(&mut standing, "WAIT 1 0"), Some(Effect::Nothing), "it does not wait there");
            pass(&mut standing, "EXEC", "*2");
            assert!(!standing.is_in_transaction() && standing.is_held(), "{line}");
        }
    }

    #[test]
    fn who_and_where() {
        let mut standing = Standing::new(false);
        assert!(standing.is_held());
        pass(&mut standing, "AUTH secret", "-WRONGPASS no");
        assert_eq!(standing.user, None);
        pass(&mut standing, "AUTH secret", "+OK");
        assert_eq!(standing.user.as_deref(), Some("default"));
        pass(&mut standing, "AUTH alice secret", "+OK");
        assert_eq!(standing.user.as_deref(), Some("alice"));
        pass(&mut standing, "HELLO 3 SETNAME auth AUTH bob secret", "%7");
        assert_eq!((standing.user.as_deref(), standing.resp3), (Some("bob"), true));
        pass(&mut standing, "HELLO", "%7");
        assert!(standing.resp3);
        pass(&mut standing, "HELLO 4", "-NOPROTO unsupported protocol version");
        assert!(standing.resp3);
        pass(&mut standing, "HELLO 2", "*14");
        assert!(!standing.resp3);
        pass(&mut standing, "SELECT 9", "+OK");
        pass(&mut standing, "SELECT 99", "-ERR DB index is out of range");
        pass(&mut standing, "SELECT x", "-ERR value is not an integer or out of range");
        assert_eq!(standing.db, 9);
    }

    #[test]
    fn what_only_a_connection_can_keep() {
        for line in ["SUBSCRIBE c", "monitor", "CLIENT tracking ON", "client REPLY off", "RESET", "READONLY"]
        {
            assert_eq!(take(&mut Standing::new(true), line), Some(Effect::Stay), "{line}");
        }
        for line in ["quit", "CLIENT KILL ID 7"] {
            assert_eq!(take(&mut Standing::new(true), line), Some(Effect::End), "{line}");
        }
        for line in ["CLIENT ID", "CLIENT", "MULTI"] {
            assert_eq!(take(&mut Standing::new(true), line), Some(Effect::Nothing), "{line}");
        }
        for name in ["multi", "EXEC", "SELECT", "Auth", "CLIENT", "SUBSCRIBE", "WAIT"] {
            assert!(Standing::minds(name.as_bytes()), "{name}");
        }
        assert!(!Standing::minds(b"GET") && !Standing::minds(b""));
        assert_eq!(take(&mut Standing::new(true), "a-name-longer-than-any-word-of-ours x"), None);
    }
}
