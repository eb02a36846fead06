//! The subscriptions of a connection, so that they can be restored on the next one.

use std::collections::BTreeSet;

use redis::{Arg, Cmd, cmd};

/// The commands that change subscriptions.
const COMMANDS: [&[u8]; 7] = [
    b"SUBSCRIBE",
    b"PSUBSCRIBE",
    b"SSUBSCRIBE",
    b"UNSUBSCRIBE",
    b"PUNSUBSCRIBE",
    b"SUNSUBSCRIBE",
    b"RESET",
];

/// Returns whether a command changes subscriptions.
pub(crate) fn changes_subscriptions(command: &Cmd) -> bool {
    let Some(Arg::Simple(name)) = command.args_iter().next() else { return false };
    COMMANDS.iter().any(|known| known.eq_ignore_ascii_case(name))
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

    /// Notes a command that the server has carried out.
    pub(crate) fn note(&mut self, command: &Cmd) {
        let mut words = command.args_iter().filter_map(|word| match word {
            Arg::Simple(bytes) => Some(bytes.to_vec()),
            _ => None,
        });
        let Some(name) = words.next() else { return };
        let (set, is_added) = match name.to_ascii_uppercase().as_slice() {
            b"SUBSCRIBE" => (&mut self.channels, true),
            b"PSUBSCRIBE" => (&mut self.patterns, true),
            b"SSUBSCRIBE" => (&mut self.shard_channels, true),
            b"UNSUBSCRIBE" => (&mut self.channels, false),
            b"PUNSUBSCRIBE" => (&mut self.patterns, false),
            b"SUNSUBSCRIBE" => (&mut self.shard_channels, false),
            b"RESET" => {
                *self = Self::default();
                return;
            }
            _ => return,
        };
        let names: Vec<_> = words.collect();
        match (is_added, names.is_empty()) {
            (true, _) => set.extend(names),
            (false, true) => set.clear(), // without arguments: from all
            (false, false) => set.retain(|name| !names.contains(name)),
        }
    }

    /// Returns the commands that subscribe a new connection.
    pub(crate) fn commands(&self) -> impl Iterator<Item = Cmd> {
        let Self { channels, patterns, shard_channels } = self;
        let sets =
            [("SUBSCRIBE", channels), ("PSUBSCRIBE", patterns), ("SSUBSCRIBE", shard_channels)];
        sets.into_iter().filter(|(_, set)| !set.is_empty()).map(|(name, set)| {
            let mut command = cmd(name);
            for channel in set {
                command.arg(channel);
            }
            command
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(subscriptions: &Subscriptions) -> Vec<String> {
        let words = |command: &Cmd| {
            let words = command.args_iter().filter_map(|word| match word {
                Arg::Simple(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
                _ => None,
            });
            words.collect::<Vec<_>>().join(" ")
        };
        subscriptions.commands().map(|command| words(&command)).collect()
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
            assert_eq!(changes_subscriptions(command), is_about_them);
            subscriptions.note(command);
        }
        let all = ["SUBSCRIBE a c", "PSUBSCRIBE n.*", "SSUBSCRIBE s"];
        assert_eq!(packed(&subscriptions), all);
        subscriptions.note(&cmd("UNSUBSCRIBE"));
        assert_eq!(packed(&subscriptions), all[1..]);
        subscriptions.note(&cmd("RESET"));
        assert!(subscriptions.is_empty());
    }
}
