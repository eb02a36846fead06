//! Generates what a session begins with: renamed commands, users, the number of clients.

use ferrite_testkit::Random;

use crate::commands::{chance, pick};
use crate::session::Setup;

/// Commands that may be renamed, with their new names.
const RENAMES: &[(&str, &str)] = &[
    ("SUBSCRIBE", "sub2"),
    ("UNSUBSCRIBE", "unsub2"),
    ("PSUBSCRIBE", "psub2"),
    ("AUTH", "login"),
    ("SELECT", "usedb"),
    ("MULTI", "begin"),
    ("EXEC", "commit"),
    ("DISCARD", "rollback"),
    ("WATCH", "guard"),
    ("UNWATCH", "unguard"),
    ("CLIENT", "conn"),
    ("HELLO", "hi"),
    ("RESET", "restart"),
    ("QUIT", "bye"),
    ("GET", "fetch"),
    ("SET", "store"),
    ("EVAL", "lua"),
    ("BLPOP", "take"),
    ("WAIT", "sync2"),
    ("SWAPDB", "swap2"),
    ("CONFIG", "conf"),
    ("COMMAND", "commands"),
];
/// Commands that may be disabled. A flooding client does not need them. The observer needs MULTI
/// and EXEC only for `Stop::RecreateUser`, which stops nobody without them.
const DISABLED: &[&str] = &[
    "SUBSCRIBE",
    "MULTI",
    "EXEC",
    "WATCH",
    "HELLO",
    "RESET",
    "QUIT",
    "EVAL",
    "APPEND",
    "SWAPDB",
    "COMMAND",
];

/// Definitions of the user `default`.
const DEFAULT_USERS: &[&str] = &[
    "user default on nopass ~* &* +@all",
    "user default on nopass ~* &* +@all",
    "user default on nopass ~public:* &* +@all -@admin -@dangerous",
    "user default on nopass ~public:* resetchannels +@all -@admin -@dangerous -incr",
    "user default on >pw ~* &* +@all",
    "user default off nopass ~* &* +@all",
];
const USERS: &[&str] = &[
    "user admin on >right ~* &* +@all",
    "user low on >p ~low:* ~shared &ch* +@all -@admin -@dangerous",
    "user reader on >r %R~* &* +@read +@connection +@transaction +@pubsub -@dangerous",
];

pub(super) fn setup(random: &mut Random) -> Setup {
    let mut renames = Vec::new();
    if chance(random, 40) {
        for _ in 0..=random.below(3) {
            let (name, typed) = pick(random, RENAMES);
            renames.push((name, typed));
        }
    }
    if chance(random, 10) {
        renames.push((pick(random, DISABLED), ""));
    }
    renames.sort_unstable();
    renames.dedup_by_key(|(name, _)| *name);
    let default = pick(random, DEFAULT_USERS);
    let users = [default].iter().chain(USERS).map(|line| (*line).to_owned()).collect();
    Setup { renames, users, clients: 2 + random.below(4) as usize }
}
