//! Clients that are blocked in the engine (in BLPOP and the like) and have sent more commands after
//! the blocking one.
//!
//! When another client unblocks such a client, the engine runs the further commands at the end of
//! its event-loop iteration (`processUnblockedClients` in `beforeSleep`), after everything that it
//! has read from the other client. No engine guarantees that. If the other client's commands arrive
//! in two writes, those of the blocked client run between them, also at the own ports of Redis 7.0,
//! Valkey 8.0 and Valkey 9.1. Through the module they may run in between even after one write.
//!
//! So while a client is blocked with more commands, the others send one command at a time. For
//! clients that are blocked without more commands nothing changes: they are served right after the
//! command that unblocks them.

use super::session::{Part, Setup, push};

/// Commands that may block.
const WAITING: &[&str] = &["BLPOP", "BRPOPLPUSH", "BLMOVE", "BZPOPMIN", "BLMPOP", "XREAD", "WAIT"];
/// The length of the longest of these names with its line end.
const LONGEST: usize = "BRPOPLPUSH\r\n".len();
/// A write of fewer bytes than this may consist of inline commands.
const TYPED: usize = 300;

/// Whether a client is blocked in the engine.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) enum Wait {
    #[default]
    No,
    Alone,
    /// The client has sent more after the blocking command, or may have.
    WithMore,
}

/// The bytes that a client has sent since it connected, without client ids.
#[derive(Clone, Default)]
pub(crate) struct SentInput {
    pub(crate) bytes: Vec<u8>,
    /// How many of the bytes have had their replies compared.
    pub(crate) compared: usize,
    pub(crate) wait: Wait,
    /// The client has sent a command that may block.
    pub(crate) may_wait: bool,
    /// How many of the bytes were completely served.
    served: usize,
}

impl SentInput {
    pub(crate) fn push(&mut self, setup: &Setup, parts: &[Part]) {
        let from = self.bytes.len().saturating_sub(LONGEST);
        for part in parts {
            if let Part::Raw(raw) = part {
                self.bytes.extend_from_slice(raw);
            }
        }
        self.may_wait |= waiting(setup, &self.bytes[from..]).is_some();
    }

    /// Notes whether the client is blocked, when the engine has served everything else.
    pub(crate) fn update_wait(&mut self, setup: &Setup, is_waiting: bool) {
        self.wait = match is_waiting {
            false => Wait::No,
            true if waiting(setup, &self.bytes[self.served..]) == Some(true) => Wait::Alone,
            true => Wait::WithMore,
        };
        if !is_waiting {
            self.served = self.bytes.len();
        }
    }
}

/// Returns whether the first command that may block is the last command; `None` if there is none.
fn waiting(setup: &Setup, sent: &[u8]) -> Option<bool> {
    let names = WAITING.iter().map(|name| setup.typed(name).as_bytes()).collect::<Vec<_>>();
    let lines: Vec<_> = sent.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii_end).collect();
    let is_name = |line: &&[u8]| names.iter().any(|name| name.eq_ignore_ascii_case(line));
    let at = lines.iter().position(is_name)?;
    let head = at.checked_sub(2).and_then(|head| std::str::from_utf8(lines[head]).ok());
    let words: Option<usize> = head.and_then(|head| head.strip_prefix('*')?.parse().ok());
    // Each further word has two lines, and after the last line end there is an empty line.
    let after = words.map(|words| 2 * words.saturating_sub(1) + 1);
    Some(after == Some(lines[at + 1..].len()) && lines.ends_with(&[b""]))
}

/// Returns whether CLIENT LIST shows the client with this address as blocked.
pub(crate) fn is_waiting(client_list: &[u8], address: &str) -> bool {
    let list = String::from_utf8_lossy(client_list);
    let address = format!("addr={address}");
    let mut lines = list.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let flags = |fields: &[&str]| {
        fields.iter().find_map(|field| Some(field.strip_prefix("flags=")?.contains('b')))
    };
    lines
        .find(|fields| fields.contains(&&*address))
        .is_some_and(|fields| flags(&fields) == Some(true))
}

/// Splits bytes before every command. Further splits do no harm.
pub(crate) fn one_by_one(parts: &[Part]) -> Vec<Vec<Part>> {
    let mut pieces = vec![Vec::new()];
    for part in parts {
        let Part::Raw(raw) = part else {
            pieces.last_mut().expect("a piece").push(part.clone());
            continue;
        };
        let is_typed = raw.len() < TYPED && !raw.starts_with(b"*") && !raw.starts_with(b"$");
        let mut from = 0;
        for to in 0..raw.len() {
            let is_line = to == 0 || raw[to - 1] == b'\n';
            if is_line && (raw[to] == b'*' || (is_typed && to > 0)) {
                push(pieces.last_mut().expect("a piece"), &raw[from..to]);
                pieces.push(Vec::new());
                from = to;
            }
        }
        push(pieces.last_mut().expect("a piece"), &raw[from..]);
    }
    pieces.retain(|piece| piece.iter().any(|part| *part != Part::Raw(Vec::new())));
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAITS: &[u8] = b"*3\r\n$4\r\ntake\r\n$4\r\nlist\r\n$1\r\n0\r\n";
    const PING: &[u8] = b"*1\r\n$4\r\nPING\r\n";

    fn wait(pieces: &[&[u8]]) -> Wait {
        let setup = Setup { renames: vec![("BLPOP", "take")], ..Setup::default() };
        let mut sent = SentInput::default();
        sent.push(&setup, &[Part::Raw(PING.to_vec())]);
        assert!(!sent.may_wait);
        sent.update_wait(&setup, false);
        pieces.iter().for_each(|piece| sent.push(&setup, &[Part::Raw(piece.to_vec())]));
        assert!(sent.may_wait);
        sent.update_wait(&setup, true);
        sent.wait
    }

    #[test]
    fn a_client_waits_alone_if_its_last_command_blocks() {
        assert_eq!(wait(&[WAITS]), Wait::Alone);
        assert_eq!(wait(&[&WAITS[..9], &WAITS[9..]]), Wait::Alone);
        assert_eq!(wait(&[PING, WAITS]), Wait::Alone);
        assert_eq!(wait(&[WAITS, PING]), Wait::WithMore);
        assert_eq!(wait(&[WAITS, WAITS]), Wait::WithMore);
        assert_eq!(wait(&[WAITS, b"PING\r\n"]), Wait::WithMore);
        assert_eq!(wait(&[WAITS, b"*1"]), Wait::WithMore);
    }

    #[test]
    fn recognises_blocked_clients_by_their_flag() {
        let list = b"$99\r\nid=3 addr=127.0.0.1:50 laddr=127.0.0.1:5 flags=b db=0\nid=4 addr=127.0.0.1:5 flags=N\n\r\n";
        assert!(is_waiting(list, "127.0.0.1:50"));
        assert!(!is_waiting(list, "127.0.0.1:5"));
        assert!(!is_waiting(list, "127.0.0.1:6"));
    }

    #[test]
    fn splits_a_write_into_commands() {
        let raw = |bytes: &[u8]| Part::Raw(bytes.to_vec());
        let parts = [raw(&[WAITS, PING, b"*2\r\n$3\r\nGET\r\n"].concat()), Part::Id(1), raw(PING)];
        let get = vec![raw(b"*2\r\n$3\r\nGET\r\n"), Part::Id(1), raw(b"")];
        assert_eq!(one_by_one(&parts), [vec![raw(WAITS)], vec![raw(PING)], get, vec![raw(PING)]]);
        assert_eq!(one_by_one(&[raw(b"PING\r\nGET a\n")]), [[raw(b"PING\r\n")], [raw(b"GET a\n")]]);
    }
}
