//! The slot of a command, by its first key or by all its keys.
//!
//! redis-rs does not export how it finds the slot of a command. Commands with a slot, alone or in a
//! pipeline, go to the node of the slot. redis-rs routes the others: those without a key, those
//! with keys of several slots, and those of [`ROUTED_BY_REDIS_RS`]. The first argument of a command
//! that this file does not name is taken for its key, as is right for most commands.

use redis::cluster_routing::{Route, SlotAddr};
use redis::{Arg, Cmd};

/// Commands without a key, and commands whose keys only redis-rs finds. Their first argument is not
/// taken for a key.
const ROUTED_BY_REDIS_RS: [&[u8]; 47] = [
    b"ACL",
    b"ASKING",
    b"AUTH",
    b"BGREWRITEAOF",
    b"BGSAVE",
    b"CLIENT",
    b"CLUSTER",
    b"COMMAND",
    b"CONFIG",
    b"DBSIZE",
    b"DEBUG",
    b"ECHO",
    b"FAILOVER",
    b"FERRITE",
    b"FLUSHALL",
    b"FLUSHDB",
    b"FUNCTION",
    b"HELLO",
    b"INFO",
    b"JSON.DEBUG",
    b"JSON.MGET",
    b"JSON.MSET",
    b"KEYS",
    b"LASTSAVE",
    b"LATENCY",
    b"LOLWUT",
    b"MEMORY",
    b"MIGRATE",
    b"MODULE",
    b"MONITOR",
    b"PING",
    b"PUBSUB",
    b"RANDOMKEY",
    b"READONLY",
    b"READWRITE",
    b"REPLICAOF",
    b"ROLE",
    b"SAVE",
    b"SCAN",
    b"SCRIPT",
    b"SHUTDOWN",
    b"SLAVEOF",
    b"SLOWLOG",
    b"TIME",
    b"UNWATCH",
    b"WAIT",
    b"WAITAOF",
];
/// Commands whose second argument is the first key.
const SECOND: [&[u8]; 5] = [b"BITOP", b"OBJECT", b"PFDEBUG", b"XGROUP", b"XINFO"];
/// Commands whose first argument is the number of keys. The keys follow it.
const COUNT_FIRST: [&[u8]; 7] =
    [b"LMPOP", b"SINTERCARD", b"ZDIFF", b"ZINTER", b"ZINTERCARD", b"ZMPOP", b"ZUNION"];
/// Commands whose second argument is the number of keys. The keys follow it.
const COUNT_SECOND: [&[u8]; 8] =
    [b"BLMPOP", b"BZMPOP", b"EVAL", b"EVALSHA", b"EVALSHA_RO", b"EVAL_RO", b"FCALL", b"FCALL_RO"];
/// Commands whose keys follow the word STREAMS.
const STREAMS: [&[u8]; 2] = [b"XREAD", b"XREADGROUP"];
/// Commands that redis-rs splits if their keys belong to several slots.
const ALL_KEYS: [&[u8]; 6] = [b"MGET", b"DEL", b"EXISTS", b"UNLINK", b"TOUCH", b"WATCH"];

/// Returns the slot of a command. Returns `None` if redis-rs must route the command: it has no key,
/// keys of several slots, or keys that are not found here.
pub(super) fn slot_of(command: &Cmd) -> Option<Route> {
    let name = word(command, 0)?.to_ascii_uppercase();
    let is_in = |names: &[&[u8]]| names.contains(&name.as_slice());
    let slot =
        |index: usize| word(command, index).map(|key| Route::with_key(key, SlotAddr::Master));
    let has_keys = |index: usize| {
        let count = word(command, index).and_then(|count| std::str::from_utf8(count).ok());
        count.is_some_and(|count| count.parse::<u64>().is_ok_and(|count| count > 0))
    };
    let common = |step: usize| {
        let first = slot(1)?;
        let mut others = (1 + step..).step_by(step).map_while(slot);
        others.all(|other| other == first).then_some(first)
    };
    match () {
        () if is_in(&ROUTED_BY_REDIS_RS) => None,
        () if is_in(&SECOND) => slot(2),
        () if is_in(&COUNT_FIRST) => slot(2).filter(|_| has_keys(1)),
        () if is_in(&COUNT_SECOND) => slot(3).filter(|_| has_keys(2)),
        () if is_in(&STREAMS) => {
            let at = command.args_iter().position(|word| is_streams(&word));
            slot(at? + 1)
        }
        () if is_in(&ALL_KEYS) => common(1),
        () if name == b"MSET" => common(2),
        () => slot(1),
    }
}

/// Returns whether a command is this word alone, in the same letters.
pub(super) fn is_word(command: &Cmd, word: &str) -> bool {
    self::word(command, 0) == Some(word.as_bytes()) && command.args_iter().len() == 1
}

/// Returns whether a command has these words at its beginning.
pub(super) fn begins_with(command: &Cmd, words: &[&str]) -> bool {
    words.iter().enumerate().all(|(index, expected)| {
        word(command, index).is_some_and(|word| word.eq_ignore_ascii_case(expected.as_bytes()))
    })
}

fn is_streams(word: &Arg<&[u8]>) -> bool {
    matches!(word, Arg::Simple(word) if word.eq_ignore_ascii_case(b"STREAMS"))
}

fn word(command: &Cmd, index: usize) -> Option<&[u8]> {
    match command.args_iter().nth(index)? {
        Arg::Simple(word) => Some(word),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Option<Route> {
        let mut words = text.split(' ');
        let mut command = redis::cmd(words.next().expect("a name"));
        for word in words {
            command.arg(word);
        }
        slot_of(&command)
    }

    #[test]
    fn finds_the_slot_of_the_keys() {
        let key = Route::with_key("key", SlotAddr::Master);
        for command in [
            "GET key",
            "set key value",
            "MGET key {key}2",
            "MSET key 1 {key}2 other",
            "DEL key",
            "EVAL script 1 key",
            "ZUNION 2 key other",
            "OBJECT ENCODING key",
            "XADD key * field value",
            "XREAD COUNT 1 streams key 0",
        ] {
            assert_eq!(of(command), Some(key), "{command}");
        }
    }

    #[test]
    fn knows_no_slot_without_a_common_key() {
        for command in [
            "PING",
            "INFO server",
            "CLUSTER SLOTS",
            "MGET key other",
            "MSET key 1 other 2",
            "EVAL script 0 key",
            "ZUNION x key",
            "SCAN 0",
            "XREAD COUNT 1 key",
            "GET",
        ] {
            assert_eq!(of(command), None, "{command}");
        }
    }

    #[test]
    fn recognises_commands_by_their_words() {
        let slots = redis::cmd("cluster").arg("SLOTS").clone();
        assert!(begins_with(&slots, &["CLUSTER", "SLOTS"]));
        assert!(!begins_with(&redis::cmd("CLUSTER"), &["CLUSTER", "SLOTS"]));
        assert!(is_word(&redis::cmd("PING"), "PING") && !is_word(&redis::cmd("ping"), "PING"));
        assert!(!is_word(redis::cmd("PING").arg("text"), "PING"));
    }
}
