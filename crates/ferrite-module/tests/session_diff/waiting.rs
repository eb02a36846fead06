//! Clients that wait in the engine, in BLPOP and the like, with more commands behind that.
//!
//! When another client ends the wait, the engine serves those further commands at the end of its
//! event-loop iteration (`processUnblockedClients` in `beforeSleep`), so after all that it has read
//! of the other client. No engine promises that: if the other client's commands come in two writes,
//! those of the waiting client run between them, at the own ports of Redis 7.0, Valkey 8.0 and
//! Valkey 9.1. Through the module they run there after one write too.
//!
//! So while a client waits with more behind it, the others send one command at a time. Nothing is
//! changed for clients that wait alone: they are served after the very command that ends their
//! wait.

use super::session::{Part, Setup, push};

/// Commands that wait for other clients.
const WAITING: &[&str] = &["BLPOP", "BRPOPLPUSH", "BLMOVE", "BZPOPMIN", "BLMPOP", "XREAD", "WAIT"];
/// The longest name of one, and what ends it.
const LONGEST: usize = "BRPOPLPUSH\r\n".len();
/// Lines typed by hand are not longer than that together.
const TYPED: usize = 300;

/// Whether a client waits in the engine.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) enum Wait {
    #[default]
    No,
    Alone,
    /// There is more behind the command that waits, or there may be.
    WithMore,
}

/// What a client has sent since it connected, but for numbers of clients.
#[derive(Clone, Default)]
pub(crate) struct Said {
    pub(crate) bytes: Vec<u8>,
    /// Up to here the replies were compared.
    pub(crate) compared: usize,
    pub(crate) wait: Wait,
    /// Whether there is a command that may have to wait.
    pub(crate) may_wait: bool,
    /// Up to here everything was served.
    served: usize,
}

impl Said {
    pub(crate) fn push(&mut self, setup: &Setup, parts: &[Part]) {
        let from = self.bytes.len().saturating_sub(LONGEST);
        for part in parts {
            if let Part::Raw(raw) = part {
                self.bytes.extend_from_slice(raw);
            }
        }
        self.may_wait |= waiting(setup, &self.bytes[from..]).is_some();
    }

    /// Takes down that everything is served but for what waits.
    pub(crate) fn rest(&mut self, setup: &Setup, is_waiting: bool) {
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

/// Whether the first command that may wait is the last of all; `None` if there is none.
fn waiting(setup: &Setup, said: &[u8]) -> Option<bool> {
    let names = WAITING.iter().map(|name| setup.typed(name).as_bytes()).collect::<Vec<_>>();
    let lines: Vec<_> = said.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii_end).collect();
    let is_name = |line: &&[u8]| names.iter().any(|name| name.eq_ignore_ascii_case(line));
    let at = lines.iter().position(is_name)?;
    let head = at.checked_sub(2).and_then(|head| std::str::from_utf8(lines[head]).ok());
    let words: Option<usize> = head.and_then(|head| head.strip_prefix('*')?.parse().ok());
    // Each further word has two lines, and what follows the last line end is empty.
    let after = words.map(|words| 2 * words.saturating_sub(1) + 1);
    Some(after == Some(lines[at + 1..].len()) && lines.ends_with(&[b""]))
}

/// Whether CLIENT LIST shows that the client with this address waits.
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

/// The same bytes, cut before every command. More cuts do no harm.
pub(crate) fn one_by_one(parts: &[Part]) -> Vec<Vec<Part>> {
    let mut pieces = vec![Vec::new()];
    for part in parts {
        let Part::Raw(raw) = part else {
            pieces.last_mut().expect("one").push(part.clone());
            continue;
        };
        let is_typed = raw.len() < TYPED && !raw.starts_with(b"*") && !raw.starts_with(b"$");
        let mut from = 0;
        for to in 0..raw.len() {
            let is_line = to == 0 || raw[to - 1] == b'\n';
            if is_line && (raw[to] == b'*' || (is_typed && to > 0)) {
                push(pieces.last_mut().expect("one"), &raw[from..to]);
                pieces.push(Vec::new());
                from = to;
            }
        }
        push(pieces.last_mut().expect("one"), &raw[from..]);
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
        let mut said = Said::default();
        said.push(&setup, &[Part::Raw(PING.to_vec())]);
        assert!(!said.may_wait);
        said.rest(&setup, false);
        pieces.iter().for_each(|piece| said.push(&setup, &[Part::Raw(piece.to_vec())]));
        assert!(said.may_wait);
        said.rest(&setup, true);
        said.wait
    }

    #[test]
    fn a_client_waits_alone_if_its_last_command_does() {
        assert_eq!(wait(&[WAITS]), Wait::Alone);
        assert_eq!(wait(&[&WAITS[..9], &WAITS[9..]]), Wait::Alone);
        assert_eq!(wait(&[PING, WAITS]), Wait::Alone);
        assert_eq!(wait(&[WAITS, PING]), Wait::WithMore);
        assert_eq!(wait(&[WAITS, WAITS]), Wait::WithMore);
        assert_eq!(wait(&[WAITS, b"PING\r\n"]), Wait::WithMore);
        assert_eq!(wait(&[WAITS, b"*1"]), Wait::WithMore);
    }

    #[test]
    fn waiting_clients_are_known_by_their_flag() {
        let list = b"$99\r\nid=3 addr=127.0.0.1:50 laddr=127.0.0.1:5 flags=b db=0\nid=4 addr=127.0.0.1:5 flags=N\n\r\n";
        assert!(is_waiting(list, "127.0.0.1:50"));
        assert!(!is_waiting(list, "127.0.0.1:5"));
        assert!(!is_waiting(list, "127.0.0.1:6"));
    }

    #[test]
    fn commands_are_sent_one_by_one() {
        let raw = |bytes: &[u8]| Part::Raw(bytes.to_vec());
        let parts = [raw(&[WAITS, PING, b"*2\r\n$3\r\nGET\r\n"].concat()), Part::Id(1), raw(PING)];
        let get = vec![raw(b"*2\r\n$3\r\nGET\r\n"), Part::Id(1), raw(b"")];
        assert_eq!(one_by_one(&parts), [vec![raw(WAITS)], vec![raw(PING)], get, vec![raw(PING)]]);
        assert_eq!(one_by_one(&[raw(b"PING\r\nGET a\n")]), [[raw(b"PING\r\n")], [raw(b"GET a\n")]]);
    }
}
