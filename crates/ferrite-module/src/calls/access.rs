//! Asks the engine who a client is, and decides whether the client's commands may be called.

use ferrite_proto::resp::Value;
use ferrite_session::Access;

use super::Calls;
use crate::api::Server;
use crate::api::calls::EngineString;
use crate::api::clients::{client_flag, client_info};
use crate::clients::{ClientRecord, DEFAULT_USER};

impl Calls {
    /// Asks the engine for the current state of a client.
    pub(crate) fn refresh(&mut self, client: &ClientRecord) -> Access {
        const PROXY_ONLY: u64 = client_flag::PUBSUB
            | client_flag::BLOCKED
            | client_flag::TRACKING
            | client_flag::MULTI
            | client_flag::READONLY
            | client_flag::MONITOR;
        let Some(id) = client.id() else {
            return Access::Proxy { in_transaction: false, is_authenticated: false };
        };
        let (false, Some(info)) = (client.is_gone(), client_info(id)) else { return Access::Gone };
        let Some(user) = self.context.with_user_name(id, |name| Box::<[u8]>::from(name)) else {
            return Access::Gone;
        };
        let mut state = client.state();
        if *user != *state.user {
            // If the client had another user before, `default` proves nothing: that user may have
            // been deleted.
            state.is_default_proven &= state.user.is_empty();
            state.user = user;
        }
        state.db = info.db;
        if std::mem::take(&mut state.is_new) {
            state.is_default_proven |=
                *state.user == *DEFAULT_USER && self.default_user_is_open() == Some(true);
        }
        let is_proven = if *state.user != *DEFAULT_USER {
            true
        } else if self.shows_authenticated {
            info.flags & client_flag::AUTHENTICATED != 0
        } else {
            state.is_default_proven
        };
        if info.flags & PROXY_ONLY == 0 && is_proven && state.is_identified {
            return Access::InProcess;
        }
        let in_transaction = info.flags & client_flag::MULTI != 0;
        // While its default user needs no password, the engine requires no login. That proves
        // nothing for later, when the default user may need a password.
        let is_authenticated = is_proven || self.default_user_is_open() == Some(true);
        Access::Proxy { in_transaction, is_authenticated }
    }

    /// Returns whether only FERRITE ATTEST, which needs a login, can show that the client has
    /// authenticated. Returns false if the client may not run it.
    pub(crate) fn needs_attestation(&mut self, client: &ClientRecord) -> bool {
        let (is_default, is_proven) = {
            let state = client.state();
            (*state.user == *DEFAULT_USER, state.is_default_proven)
        };
        // An engine whose default user needs no password would run ATTEST for everybody.
        if client.id().is_none()
            || self.shows_authenticated
            || !is_default
            || is_proven
            || self.default_user_is_open() != Some(false)
        {
            return false;
        }
        let words: [&[u8]; 3] = [b"FERRITE", b"ATTEST", b""];
        let is_allowed = EngineString::of(DEFAULT_USER)
            .and_then(|user| Some(self.context.act_as(&user)?.may_call(words.into_iter())));
        is_allowed.unwrap_or(false)
    }

    /// Returns whether a client that connects now is logged in as the user `default` without a
    /// password. Returns `None` if the engine does not say, for example because ACL is renamed.
    pub(crate) fn default_user_is_open(&self) -> Option<bool> {
        self.context.ask(c"ACL", &[b"GETUSER", b"default"]).as_deref().map(is_open)
    }
}

/// Returns whether the engine shows if a client has authenticated. Valkey 9.1 is the first engine
/// that does.
pub(super) fn shows_authenticated(server: Server) -> bool {
    server.is_valkey && server.version >= 0x0009_0100
}

/// Returns whether a reply to ACL GETUSER shows a user who needs no password.
fn is_open(reply: &[u8]) -> bool {
    let Ok(Value::Array(fields)) = Value::parse(reply) else { return false };
    let Some([Value::Bulk(b"flags"), Value::Array(flags)]) = fields.first_chunk() else {
        return false;
    };
    let has = |wanted: &[u8]| {
        flags
            .iter()
            .any(|flag| matches!(flag, Value::Bulk(it) | Value::Simple(it) if *it == wanted))
    };
    has(b"on") && has(b"nopass")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Redis 7.0 and Valkey 9.1 send replies of this form.
    #[test]
    fn recognises_a_user_without_a_password() {
        let reply = |flags: &[&str]| {
            let flags = flags.iter().fold(format!("*{}\r\n", flags.len()), |list, flag| {
                format!("{list}${}\r\n{flag}\r\n", flag.len())
            });
            format!("*4\r\n$5\r\nflags\r\n{flags}$9\r\npasswords\r\n*0\r\n").into_bytes()
        };
        assert!(is_open(&reply(&["on", "nopass", "sanitize-payload"])));
        assert!(!is_open(&reply(&["off", "nopass"])));
        assert!(!is_open(&reply(&["on", "sanitize-payload"])));
        assert!(!is_open(b"*-1\r\n") && !is_open(b"") && !is_open(b"-ERR no such user\r\n"));
    }
}
