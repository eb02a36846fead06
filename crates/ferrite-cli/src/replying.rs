//! CLIENT REPLY: which commands the server replies to, so that nobody waits for what does not come.
//! redis-cli waits, for ever.

/// What the server was told last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Replying {
    #[default]
    On,
    /// Not to the next command.
    SkipNext,
    Off,
}

impl Replying {
    /// Whether a command is replied to, and what holds after it.
    pub(crate) fn after<A: AsRef<[u8]>>(self, words: &[A]) -> (bool, Self) {
        match (self, asked_for(words)) {
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

/// What a CLIENT REPLY asks for that makes sense.
fn asked_for<A: AsRef<[u8]>>(words: &[A]) -> Option<Replying> {
    let [client, reply, mode] = words else { return None };
    let is = |word: &A, name: &str| word.as_ref().eq_ignore_ascii_case(name.as_bytes());
    if !is(client, "client") || !is(reply, "reply") {
        return None;
    }
    let modes = [("on", Replying::On), ("skip", Replying::SkipNext), ("off", Replying::Off)];
    modes.into_iter().find(|(name, _)| is(mode, name)).map(|(_, asked)| asked)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_replied_to() {
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
            let (is, after) = replying.after(&words);
            assert_eq!(is, is_replied_to, "{command} when {replying:?}");
            replying = after;
        }
    }
}
