//! Tracks CLIENT REPLY, which decides whether the server replies to a command. ferrite-cli
//! therefore does not wait for a reply that never comes. redis-cli waits forever.

/// The state of the server after the last CLIENT REPLY.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Replying {
    /// The server replies to all commands.
    #[default]
    On,
    /// The server does not reply to the next command.
    SkipNext,
    /// The server does not reply to any command.
    Off,
}

impl Replying {
    /// Returns whether the server replies to a command, and the state after the command.
    pub(crate) fn after<A: AsRef<[u8]>>(self, words: &[A]) -> (bool, Self) {
        match (self, requested_state(words)) {
            (_, Some(Self::On)) => (true, Self::On),
            (Self::Off, Some(_)) | (_, Some(Self::Off)) => (false, Self::Off),
            (_, Some(Self::SkipNext)) => (false, Self::SkipNext),
            (Self::Off, None) => match words {
                [name] if name.as_ref().eq_ignore_ascii_case(b"reset") => (true, Self::On),
                _ => (false, Self::Off),
            },
            (Self::SkipNext, None) => (false, Self::On),
            (Self::On, None) => (true, Self::On),
        }
    }
}

/// Returns the state that a command asks for, if it is a valid CLIENT REPLY.
fn requested_state<A: AsRef<[u8]>>(words: &[A]) -> Option<Replying> {
    let [client, reply, mode] = words else { return None };
    let is = |word: &A, name: &str| word.as_ref().eq_ignore_ascii_case(name.as_bytes());
    if !is(client, "client") || !is(reply, "reply") {
        return None;
    }
    let modes = [("on", Replying::On), ("skip", Replying::SkipNext), ("off", Replying::Off)];
    modes.into_iter().find(|(name, _)| is(mode, name)).map(|(_, state)| state)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knows_which_commands_get_a_reply() {
        let mut replying = Replying::default();
        for (command, is_replied_to) in [
            ("PING", true),
            ("CLIENT REPLY LATER", true),
            ("client reply skip", false),
            ("PING", false),
            ("PING", true),
            ("CLIENT REPLY SKIP", false),
            ("CLIENT REPLY SKIP", false),
            ("RESET", false),
            ("PING", true),
            ("CLIENT REPLY SKIP", false),
            ("CLIENT REPLY ON", true),
            ("PING", true),
            ("CLIENT REPLY OFF", false),
            ("PING", false),
            ("CLIENT REPLY SKIP", false),
            ("CLIENT REPLY LATER", false),
            ("PING", false),
            ("CLIENT REPLY ON", true),
            ("CLIENT REPLY OFF", false),
            ("RESET", true),
            ("PING", true),
        ] {
            let words: Vec<_> = command.split(' ').collect();
            let (expects_reply, after) = replying.after(&words);
            assert_eq!(expects_reply, is_replied_to, "{command} in state {replying:?}");
            replying = after;
        }
    }
}
