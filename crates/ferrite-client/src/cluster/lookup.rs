//! Finds the node for a command: redis-rs routes a lookup in place of the command, and the node
//! answers with its own number. No lookup reaches a server.
//!
//! A lookup is a pipeline, because redis-rs sends a pipeline to exactly one node. All its words are
//! in the name of its first command, so redis-rs finds no key there.

use ferrite_proto::cluster::Redirect;
use redis::{Arg, Cmd};

use super::reply::text_of;

const NAME: &str = "FERRITE-LOOKUP";

/// A request for a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Lookup {
    /// The node that serves the slot, as far as redis-rs knows.
    Known,
    /// The same, after redis-rs has asked for the slots. The number makes redis-rs ask only once.
    Refresh(u64),
    /// The node that a redirect names.
    Redirected(Redirect),
}

impl Lookup {
    /// Returns the command that asks for the node.
    pub(super) fn command(&self) -> Cmd {
        redis::cmd(&match self {
            Self::Known => NAME.to_owned(),
            Self::Refresh(number) => format!("{NAME} REFRESH {number}"),
            Self::Redirected(redirect) => format!("{NAME} {}", text_of(redirect)),
        })
    }

    /// Reads the command of a lookup.
    pub(super) fn read(command: &Cmd) -> Option<Self> {
        let Some(Arg::Simple(name)) = command.args_iter().next() else { return None };
        let text = std::str::from_utf8(name).ok()?.strip_prefix(NAME)?;
        Some(match text.trim_start() {
            "" => Self::Known,
            text => match text.strip_prefix("REFRESH ") {
                Some(number) => Self::Refresh(number.parse().ok()?),
                None => Self::Redirected(Redirect::parse(text.as_bytes())?),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn survives_the_way_through_redis_rs() {
        let redirect = |host: &str, is_ask| {
            Lookup::Redirected(Redirect { is_ask, slot: 9, host: Some(host.into()), port: 7 })
        };
        for lookup in [
            Lookup::Known,
            Lookup::Refresh(42),
            redirect("10.0.0.1", false),
            redirect("2001:db8::1", true),
        ] {
            assert_eq!(Lookup::read(&lookup.command()), Some(lookup.clone()), "{lookup:?}");
        }
        assert_eq!(Lookup::read(&redis::cmd("GET")), None);
    }
}
