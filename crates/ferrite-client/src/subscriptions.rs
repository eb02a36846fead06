//! The subscriptions of a connection, so that they can be restored on the next one.
//!
//! The server confirms each name of a SUBSCRIBE separately, but redis-rs expects one reply to a
//! command. It would take a second confirmation for the reply to the next command. Therefore
//! commands with several names are split into commands with one name each.

use std::collections::BTreeSet;

use redis::{Arg, Cmd, Pipeline, cmd};

/// The effect of a command on subscriptions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    Subscribe(Kind),
    Unsubscribe(Kind),
    Reset,
}

/// A kind of subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Channel,
    Pattern,
    ShardChannel,
}

/// Returns the effect of a command on subscriptions, if it has one.
pub(crate) fn effect(command: &Cmd) -> Option<Effect> {
    let Some(Arg::Simple(name)) = command.args_iter().next() else { return None };
    let effects = [
        ("SUBSCRIBE", Effect::Subscribe(Kind::Channel)),
        ("PSUBSCRIBE", Effect::Subscribe(Kind::Pattern)),
        ("SSUBSCRIBE", Effect::Subscribe(Kind::ShardChannel)),
        ("UNSUBSCRIBE", Effect::Unsubscribe(Kind::Channel)),
        ("PUNSUBSCRIBE", Effect::Unsubscribe(Kind::Pattern)),
        ("SUNSUBSCRIBE", Effect::Unsubscribe(Kind::ShardChannel)),
        ("RESET", Effect::Reset),
    ];
    let known = effects.iter().find(|(known, _)| known.as_bytes().eq_ignore_ascii_case(name));
    known.map(|(_, effect)| *effect)
}

/// The channels and patterns that a connection is subscribed to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Subscriptions {
    channels: BTreeSet<Vec<u8>>,
    patterns: BTreeSet<Vec<u8>>,
    shard_channels: BTreeSet<Vec<u8>>,
}

impl Subscriptions {
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn names(&mut self, kind: Kind) -> &mut BTreeSet<Vec<u8>> {
        match kind {
            Kind::Channel => &mut self.channels,
            Kind::Pattern => &mut self.patterns,
            Kind::ShardChannel => &mut self.shard_channels,
        }
    }

    /// Records a command that the server has carried out.
    pub(crate) fn note(&mut self, command: &Cmd) {
        match effect(command) {
            Some(Effect::Subscribe(kind)) => self.names(kind).extend(arguments(command)),
            Some(Effect::Unsubscribe(kind)) => {
                let names = self.names(kind);
                let mut ended = arguments(command).peekable();
                if ended.peek().is_none() {
                    names.clear(); // without arguments, the command ends all of this kind
                }
                ended.for_each(|name| drop(names.take(&name)));
            }
            Some(Effect::Reset) => *self = Self::default(),
            None => {}
        }
    }

    pub(crate) fn remove(&mut self, kind: Kind, name: &[u8]) {
        self.names(kind).remove(name);
    }

    /// Returns all subscriptions.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Kind, &Vec<u8>)> {
        let sets = [
            (Kind::Channel, &self.channels),
            (Kind::Pattern, &self.patterns),
            (Kind::ShardChannel, &self.shard_channels),
        ];
        sets.into_iter().flat_map(|(kind, names)| names.iter().map(move |name| (kind, name)))
    }

    /// Splits a command that the server confirms once for each name into commands with one name
    /// each. Returns `None` if the command needs no split.
    pub(crate) fn split(&self, command: &Cmd) -> Option<Pipeline> {
        let kind = match effect(command)? {
            Effect::Subscribe(kind) | Effect::Unsubscribe(kind) => kind,
            Effect::Reset => return None,
        };
        let mut names: Vec<_> = arguments(command).collect();
        if names.is_empty() {
            names =
                self.iter().filter(|(of, _)| *of == kind).map(|(_, name)| name.clone()).collect();
        }
        let Some(Arg::Simple(word)) = command.args_iter().next() else { return None };
        let mut split = Pipeline::with_capacity(names.len());
        for name in &names {
            split.cmd(&String::from_utf8_lossy(word)).arg(name);
        }
        (names.len() > 1).then_some(split)
    }
}

impl Kind {
    /// Returns the command that subscribes to a name of this kind.
    pub(crate) fn subscribe(self, name: &[u8]) -> Cmd {
        let word = match self {
            Self::Channel => "SUBSCRIBE",
            Self::Pattern => "PSUBSCRIBE",
            Self::ShardChannel => "SSUBSCRIBE",
        };
        cmd(word).arg(name).clone()
    }
}

/// Returns a command of subscriptions as several with one name each.
pub(crate) fn names(command: &Cmd) -> Vec<Cmd> {
    let Some(Arg::Simple(word)) = command.args_iter().next() else { return Vec::new() };
    let word = String::from_utf8_lossy(word);
    arguments(command).map(|name| cmd(&word).arg(name).clone()).collect()
}

fn arguments(command: &Cmd) -> impl Iterator<Item = Vec<u8>> {
    command.args_iter().skip(1).filter_map(|word| match word {
        Arg::Simple(bytes) => Some(bytes.to_vec()),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(command: &Cmd) -> String {
        let words = command.args_iter().filter_map(|word| match word {
            Arg::Simple(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
            _ => None,
        });
        words.collect::<Vec<_>>().join(" ")
    }

    fn all(subscriptions: &Subscriptions) -> Vec<String> {
        subscriptions.iter().map(|(kind, name)| words(&kind.subscribe(name))).collect()
    }

    #[test]
    fn follows_the_commands_of_subscriptions() {
        let mut subscriptions = Subscriptions::default();
        for (command, is_about_them) in [
            (cmd("GET").arg("a"), false),
            (cmd("subscribe").arg(&["a", "b", "c"]), true),
            (cmd("PSUBSCRIBE").arg("n.*"), true),
            (cmd("SSUBSCRIBE").arg("s"), true),
            (cmd("UNSUBSCRIBE").arg("b"), true),
        ] {
            assert_eq!(effect(command).is_some(), is_about_them);
            subscriptions.note(command);
        }
        let expected = ["SUBSCRIBE a", "SUBSCRIBE c", "PSUBSCRIBE n.*", "SSUBSCRIBE s"];
        assert_eq!(all(&subscriptions), expected);
        subscriptions.note(&cmd("UNSUBSCRIBE"));
        assert_eq!(all(&subscriptions), expected[2..]);
        subscriptions.remove(Kind::Pattern, b"n.*");
        assert_eq!(all(&subscriptions), expected[3..]);
        subscriptions.note(&cmd("RESET"));
        assert!(subscriptions.is_empty());
    }

    #[test]
    fn splits_commands_with_several_confirmations() {
        let mut subscriptions = Subscriptions::default();
        let split = |subscriptions: &Subscriptions, command: &Cmd| {
            let split = subscriptions.split(command)?;
            Some(split.cmd_iter().map(words).collect::<Vec<_>>())
        };
        let subscribe = cmd("SUBSCRIBE").arg(&["a", "b"]).clone();
        let expected = ["SUBSCRIBE a", "SUBSCRIBE b"].map(str::to_owned).to_vec();
        assert_eq!(split(&subscriptions, &subscribe), Some(expected));
        assert_eq!(split(&subscriptions, cmd("SUBSCRIBE").arg("a")), None);
        assert_eq!(split(&subscriptions, &cmd("UNSUBSCRIBE")), None, "one confirmation");
        assert_eq!(split(&subscriptions, cmd("MGET").arg(&["a", "b"])), None);
        subscriptions.note(&subscribe);
        let expected = ["UNSUBSCRIBE a", "UNSUBSCRIBE b"].map(str::to_owned).to_vec();
        assert_eq!(split(&subscriptions, &cmd("UNSUBSCRIBE")), Some(expected));
    }
}
