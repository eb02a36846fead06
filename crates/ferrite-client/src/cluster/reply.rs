//! What an error reply of a node means for the command: another node serves it, or this node cannot
//! serve it at present.
//!
//! Replies come from servers, which are not trusted: a redirect is followed only to a valid host.

use ferrite_proto::cluster::Redirect;
use ferrite_session::Host;
use redis::{ServerError, ServerErrorKind, Value};

/// Why a node has not served a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Unserved {
    /// Another node serves it. The redirect has a host.
    Redirected(Redirect),
    /// Some of the command's keys have moved to another node.
    TryAgain,
    /// The node cannot serve the command at present, or is no primary any more.
    NotNow,
}

/// Returns why the node `asked` has not served a command. Returns `None` if it has served the
/// command, or if the reply is an error that another attempt does not change.
pub(super) fn unserved(reply: &Value, asked: &Host) -> Option<Unserved> {
    let Value::ServerError(error) = reply else { return None };
    match error.kind()? {
        ServerErrorKind::Moved | ServerErrorKind::Ask => {
            redirect_of(error, asked).map(Unserved::Redirected)
        }
        ServerErrorKind::TryAgain => Some(Unserved::TryAgain),
        ServerErrorKind::ClusterDown
        | ServerErrorKind::MasterDown
        | ServerErrorKind::BusyLoading
        | ServerErrorKind::ReadOnly => Some(Unserved::NotNow),
        _ => None,
    }
}

/// Replaces a redirect by one that redis-rs can follow. A redirect without a host gets the host
/// that has sent it. An invalid redirect becomes an error that redis-rs does not follow.
pub(super) fn checked(reply: Value, asked: &Host) -> Value {
    let redirect = match &reply {
        Value::ServerError(error)
            if matches!(error.kind(), Some(ServerErrorKind::Moved | ServerErrorKind::Ask)) =>
        {
            redirect_of(error, asked)
        }
        _ => return reply,
    };
    match redirect {
        Some(redirect) => error_reply(&text_of(&redirect)),
        None => error_reply("ERR the node has sent a redirect without a valid address"),
    }
}

/// Returns a redirect as the text of an error reply. The redirect has a host.
pub(super) fn text_of(redirect: &Redirect) -> String {
    let Redirect { is_ask, slot, host, port } = redirect;
    let name = if *is_ask { "ASK" } else { "MOVED" };
    format!("{name} {slot} {}:{port}", host.as_deref().unwrap_or_default())
}

/// Returns the error reply with this text.
pub(super) fn error_reply(text: &str) -> Value {
    let line: String = text.chars().map(|it| if it.is_control() { ' ' } else { it }).collect();
    redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).unwrap_or(Value::Nil)
}

/// Returns an error of a server as the text of its reply.
pub(super) fn error_text(error: &ServerError) -> String {
    format!("{} {}", error.code(), error.details().unwrap_or_default())
}

/// Reads a redirect. An empty host stands for the host that has sent it.
fn redirect_of(error: &ServerError, asked: &Host) -> Option<Redirect> {
    let mut redirect = Redirect::parse(error_text(error).as_bytes())?;
    redirect.host.get_or_insert_with(|| asked.name.clone());
    Some(redirect)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked() -> Host {
        Host { name: "10.0.0.9".into(), port: Some(7) }
    }

    fn redirect(is_ask: bool, host: &str, port: u16) -> Option<Unserved> {
        let host = Some(host.to_owned());
        Some(Unserved::Redirected(Redirect { is_ask, slot: 12, host, port }))
    }

    #[test]
    fn tells_why_a_command_was_not_served() {
        for (text, expected) in [
            ("MOVED 12 10.0.0.1:6379", redirect(false, "10.0.0.1", 6379)),
            ("ASK 12 db.example:1", redirect(true, "db.example", 1)),
            ("MOVED 12 :6381", redirect(false, "10.0.0.9", 6381)),
            ("MOVED 12 a\u{1b}b:1", None),
            ("TRYAGAIN Multiple keys", Some(Unserved::TryAgain)),
            ("CLUSTERDOWN Hash slot not served", Some(Unserved::NotNow)),
            ("READONLY You can't write", Some(Unserved::NotNow)),
            ("WRONGTYPE Operation", None),
        ] {
            let reply = redis::parse_redis_value(format!("-{text}\r\n").as_bytes()).expect("RESP");
            assert_eq!(unserved(&reply, &asked()), expected, "{text}");
        }
        assert_eq!(unserved(&Value::Okay, &asked()), None);
    }

    /// Redirects reach redis-rs with a host, or not at all.
    #[test]
    fn completes_redirects() {
        for (text, expected) in [
            ("MOVED 12 :6381", "MOVED 12 10.0.0.9:6381"),
            ("ASK 12 2001:db8::1:7", "ASK 12 2001:db8::1:7"),
            ("MOVED 12 a b:1", "ERR the node has sent a redirect without a valid address"),
            ("WRONGTYPE text", "WRONGTYPE text"),
        ] {
            let reply = redis::parse_redis_value(format!("-{text}\r\n").as_bytes()).expect("RESP");
            assert_eq!(checked(reply, &asked()), error_reply(expected), "{text}");
        }
        assert_eq!(checked(Value::Nil, &asked()), Value::Nil);
    }
}
