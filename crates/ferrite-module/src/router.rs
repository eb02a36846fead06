//! Classifies the commands that clients send, by the engine's own command table: which ones may be
//! called in-process, and which ones change the state of their connection.
//!
//! `rename-command` can give any name to any command. So the router asks the engine about each name
//! (COMMAND INFO). The reply has the command's original name, its flags and its ACL categories.
//!
//! A command that is called in-process has no client connection. So only commands whose reply does
//! not depend on their client may be called:
//!
//! - They are in an ACL category of commands on data, or are PING, ECHO, TIME or PUBLISH.
//! - Scripts may run them.
//! - They have none of the flags `blocking`, `admin` and `no_auth`.
//! - They are not in the category @dangerous, whose commands are slow or rare (FLUSHALL, KEYS,
//!   MIGRATE, SORT and others).
//! - They are not commands of modules, which may do anything with their client.
//! - They are not SCAN, CLUSTERSCAN or RANDOMKEY, which may delete any expired key.
//!
//! Names that were unknown at load, for example of modules that were loaded later, are looked up
//! when a client sends them.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use ferrite_proto::SessionCommand;
use ferrite_proto::resp::Value;
use ferrite_session::{Callable, CommandKind};

/// The longest name of a command that can be called, without its subcommand. A session that sends a
/// longer name is pinned to proxy.
pub(crate) const NAME_MAX: usize = 32;
/// The most names in one COMMAND INFO.
const NAMES_PER_QUERY: usize = 31;

/// The ACL categories of commands on data.
const DATA_CATEGORIES: [&[u8]; 10] = [
    b"@keyspace",
    b"@string",
    b"@hash",
    b"@list",
    b"@set",
    b"@sortedset",
    b"@stream",
    b"@bitmap",
    b"@hyperloglog",
    b"@geo",
];
/// Commands that are in none of these categories, but whose replies do not depend on their client.
const ALSO_CALLABLE: [&[u8]; 4] = [b"PING", b"ECHO", b"TIME", b"PUBLISH"];
/// Flags of commands that are never called.
const NEVER_FLAGS: [&[u8]; 5] = [b"noscript", b"blocking", b"admin", b"no_auth", b"module"];
/// Commands that are never called because they may delete any expired key. The engine replicates
/// these deletions key by key; during a call it would replicate them as one transaction.
const EXPIRE_ANY_KEY: [&[u8]; 3] = [b"SCAN", b"RANDOMKEY", b"CLUSTERSCAN"];
/// The ACL categories of data types that clients can be blocked on.
const BLOCKING_CATEGORIES: [&[u8]; 4] = [b"@list", b"@sortedset", b"@stream", b"@geo"];
/// Commands that may create a key of any type.
const CREATE_ANY_TYPE: [&[u8]; 6] = [b"RENAME", b"RENAMENX", b"COPY", b"MOVE", b"RESTORE", b"SORT"];
const DANGEROUS: &[u8] = b"@dangerous";
const WRITE_FLAGS: [&[u8]; 2] = [b"write", b"may_replicate"];

#[derive(Debug, Clone, PartialEq, Eq)]
enum Rule {
    Is(CommandKind),
    /// The kind depends on the subcommand, which is in the table as `NAME|SUB`. The field is NAME,
    /// the command's original name.
    BySubcommand(Box<[u8]>),
}

/// The kinds of commands by the names that clients send, in upper case. Subcommands are stored
/// under the original name of their command.
#[derive(Debug, Default)]
pub(crate) struct Router {
    rules: HashMap<Box<[u8]>, Rule, BuildHasherDefault<NameHasher>>,
}

impl Router {
    /// Reads the engine's command table. `ask` runs COMMAND with these arguments.
    ///
    /// COMMAND returns the original names. Each of them is then looked up by COMMAND INFO, which
    /// does not know a name whose command was renamed or disabled.
    ///
    /// # Errors
    /// Returns an error if the engine does not give a usable table.
    pub(crate) fn new(ask: impl Fn(&[&[u8]]) -> Option<Vec<u8>>) -> Result<Self, String> {
        let table = ask(&[]).ok_or("the engine refused COMMAND (is it renamed?)")?;
        let Ok(Value::Array(commands)) = Value::parse(&table) else {
            return Err("the engine's reply to COMMAND is not an array".into());
        };
        let mut router = Self::default();
        let names: Vec<_> =
            commands.iter().filter_map(|command| text(elements(Some(command)).first()?)).collect();
        for names in names.chunks(NAMES_PER_QUERY) {
            let query: Vec<_> = [&b"INFO"[..]].into_iter().chain(names.iter().copied()).collect();
            let reply = ask(&query).ok_or("the engine refused COMMAND INFO")?;
            let Ok(Value::Array(entries)) = Value::parse(&reply) else {
                return Err("the engine's reply to COMMAND INFO is not an array".into());
            };
            for (name, entry) in names.iter().zip(&entries) {
                router.learn(name, entry);
            }
        }
        if router.len() == 0 {
            return Err("the engine's command table has no command that can run in-process".into());
        }
        Ok(router)
    }

    /// Looks up a command by the name that a client has sent, and by its first argument. `ask` runs
    /// COMMAND INFO for a name that is not known yet.
    pub(crate) fn look_up(
        &mut self,
        name: &[u8],
        first_arg: Option<&[u8]>,
        ask: impl FnOnce(&[u8]) -> Option<Vec<u8>>,
    ) -> CommandKind {
        let mut folded = [0; NAME_MAX];
        // If the engine does not reply, or the name cannot be in the table, it may be any command.
        let unknown = CommandKind::Session(SessionCommand::PinsToProxy);
        let Some(end) = fold(name, &mut folded) else { return unknown };
        if !self.rules.contains_key(&folded[..end]) {
            let Some(reply) = ask(name) else { return unknown };
            match Value::parse(&reply) {
                Ok(Value::Array(entries)) if entries.len() == 1 => self.learn(name, &entries[0]),
                _ => return unknown,
            }
        }
        match self.rules.get(&folded[..end]) {
            Some(Rule::Is(kind)) => *kind,
            Some(Rule::BySubcommand(identity)) => self.subcommand(identity, first_arg),
            None => CommandKind::Plain, // the engine has no such command
        }
    }

    fn subcommand(&self, identity: &[u8], first_arg: Option<&[u8]>) -> CommandKind {
        let mut folded = [0; 2 * NAME_MAX + 1];
        let Some(prefix) = folded.get_mut(..identity.len()) else { return CommandKind::Plain };
        prefix.copy_from_slice(identity);
        folded[identity.len()] = b'|';
        let from = identity.len() + 1;
        let end =
            first_arg.and_then(|first_arg| Some(from + fold(first_arg, &mut folded[from..])?));
        match end.and_then(|end| self.rules.get(&folded[..end])) {
            Some(Rule::Is(kind)) => *kind,
            _ => CommandKind::Plain,
        }
    }

    /// Returns how many commands and subcommands may be called.
    pub(crate) fn len(&self) -> usize {
        let is_callable = |rule: &&Rule| matches!(rule, Rule::Is(CommandKind::Callable(_)));
        self.rules.values().filter(is_callable).count()
    }

    /// Adds the engine's entry for the command that clients know by the name `typed`.
    fn learn(&mut self, typed: &[u8], entry: &Value<'_>) {
        let fields = elements(Some(entry));
        let Some(identity) = fields.first().and_then(text) else { return };
        let (typed, identity) = (typed.to_ascii_uppercase(), identity.to_ascii_uppercase());
        if typed.len().max(identity.len()) > 2 * NAME_MAX {
            return;
        }
        let subcommands = elements(fields.get(9));
        if !subcommands.is_empty() {
            for subcommand in subcommands {
                if let Some(name) = elements(Some(subcommand)).first().and_then(text) {
                    self.learn(name, subcommand);
                }
            }
            self.rules.insert(typed.into(), Rule::BySubcommand(identity.into()));
            return;
        }
        let (flags, categories) = (elements(fields.get(2)), elements(fields.get(6)));
        let has_several_keys = fields.get(3) != fields.get(4) || has(flags, &[b"movablekeys"]);
        let arity = match fields.get(1) {
            Some(Value::Integer(arity)) => *arity,
            _ => return,
        };
        let callable = callable(&identity, arity, flags, categories, has_several_keys);
        let kind = match (callable, session_command(&identity, flags, categories)) {
            (_, Some(command)) => CommandKind::Session(command),
            (Some(callable), None) => CommandKind::Callable(callable),
            (None, None) => CommandKind::Plain,
        };
        self.rules.insert(typed.into(), Rule::Is(kind));
    }
}

/// Returns whether a list has one of these words.
fn has(list: &[Value<'_>], wanted: &[&[u8]]) -> bool {
    list.iter().filter_map(text).any(|it| wanted.contains(&it))
}

fn session_command(
    identity: &[u8],
    flags: &[Value<'_>],
    categories: &[Value<'_>],
) -> Option<SessionCommand> {
    // A module's command may change the user of its client.
    let is_module = has(flags, &[b"module"]);
    SessionCommand::of(identity, has(categories, &[b"@connection"]))
        .or(is_module.then_some(SessionCommand::ChangesState))
}

fn callable(
    name: &[u8],
    arity: i64,
    flags: &[Value<'_>],
    categories: &[Value<'_>],
    has_several_keys: bool,
) -> Option<Callable> {
    let is_data = has(categories, &DATA_CATEGORIES) || ALSO_CALLABLE.contains(&name);
    let is_excluded =
        has(flags, &NEVER_FLAGS) || has(categories, &[DANGEROUS]) || EXPIRE_ANY_KEY.contains(&name);
    let is_callable = is_data && !is_excluded;
    let arity = i32::try_from(arity).ok()?;
    let is_subcommand = name.contains(&b'|');
    let writes = has(flags, &WRITE_FLAGS);
    // These commands may create a list, a sorted set or a stream that a client is blocked on.
    let unblocks =
        writes && (has(categories, &BLOCKING_CATEGORIES) || CREATE_ANY_TYPE.contains(&name));
    let reads_string = name == b"GET";
    is_callable.then_some(Callable {
        arity,
        is_subcommand,
        writes,
        unblocks,
        reads_string,
        has_several_keys,
        reports_disk_errors: name == b"PING",
    })
}

fn elements<'a, 'b>(list: Option<&'b Value<'a>>) -> &'b [Value<'a>] {
    match list {
        Some(Value::Array(elements) | Value::Set(elements)) => elements,
        _ => &[],
    }
}

fn text<'a>(value: &Value<'a>) -> Option<&'a [u8]> {
    match value {
        Value::Simple(text) | Value::Bulk(text) => Some(text),
        _ => None,
    }
}

/// Writes a name in upper case and returns its length. Returns `None` if it cannot be a name: it is
/// too long, or has a zero byte or `|`, which separates a subcommand.
fn fold(name: &[u8], into: &mut [u8]) -> Option<usize> {
    for (to, from) in into.get_mut(..name.len())?.iter_mut().zip(name) {
        if matches!(from, b'|' | 0) {
            return None;
        }
        *to = from.to_ascii_uppercase();
    }
    Some(name.len())
}

/// The hash function FNV-1a. A hash without a secret is safe: clients can choose the names that are
/// looked up, but the table has only names that the engine knows.
struct NameHasher(u64);

impl Default for NameHasher {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Hasher for NameHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    /// Ignores the length of the slice. Names with equal hashes are compared anyway.
    fn write_usize(&mut self, _: usize) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a row of the command table as Redis 7.0 sends it. `subcommands` are also rows.
    fn row(name: &str, flags: &[&str], categories: &[&str], subcommands: &[String]) -> String {
        let list = |words: &[&str]| {
            words
                .iter()
                .fold(format!("*{}\r\n", words.len()), |list, word| format!("{list}+{word}\r\n"))
        };
        let nothing = "*0\r\n";
        format!(
            "*10\r\n${}\r\n{name}\r\n:2\r\n{}:1\r\n:1\r\n:1\r\n{}{nothing}{nothing}*{}\r\n{}",
            name.len(),
            list(flags),
            list(categories),
            subcommands.len(),
            subcommands.concat()
        )
    }

    /// An engine with these commands. In each pair of `renamed`, the first name is disabled and the
    /// second replaces it.
    struct Engine {
        rows: Vec<(String, String)>,
        renamed: Vec<(&'static str, &'static str)>,
    }

    impl Engine {
        /// Answers COMMAND and COMMAND INFO.
        fn answer(&self, words: &[&[u8]]) -> Vec<u8> {
            let [_, names @ ..] = words else {
                let rows: String = self.rows.iter().map(|(_, row)| row.as_str()).collect();
                return format!("*{}\r\n{rows}", self.rows.len()).into_bytes();
            };
            let entry = |name: &&[u8]| {
                let typed = String::from_utf8_lossy(name).to_lowercase();
                let by_new =
                    self.renamed.iter().find(|(_, new)| *new == typed).map(|(old, _)| *old);
                let is_disabled =
                    by_new.is_none() && self.renamed.iter().any(|(old, _)| *old == typed);
                let identity = by_new.unwrap_or(&typed);
                let row = self.rows.iter().find(|(name, _)| name == identity && !is_disabled);
                row.map_or("*-1\r\n".to_owned(), |(_, row)| row.clone())
            };
            let entries: String = names.iter().map(entry).collect();
            format!("*{}\r\n{entries}", names.len()).into_bytes()
        }

        fn look_up(&self, router: &mut Router, name: &str, first: Option<&str>) -> CommandKind {
            router.look_up(name.as_bytes(), first.map(str::as_bytes), |name| {
                Some(self.answer(&[b"INFO", name]))
            })
        }
    }

    fn engine(renamed: &[(&'static str, &'static str)]) -> (Engine, Router) {
        let object = [
            row("object|encoding", &["readonly"], &["@keyspace", "@read", "@slow"], &[]),
            row("object|shout", &["readonly", "noscript"], &["@keyspace"], &[]),
        ];
        let connection = ["@connection", "@slow"];
        let client = [
            row("client|id", &["noscript", "loading"], &connection, &[]),
            row("client|reply", &["noscript", "loading"], &connection, &[]),
        ];
        let rows = [
            row("get", &["readonly", "fast"], &["@read", "@string", "@fast"], &[]),
            row("set", &["write", "denyoom"], &["@write", "@string", "@slow"], &[]),
            row("pfcount", &["readonly", "may_replicate"], &["@read", "@hyperloglog"], &[]),
            row("blpop", &["write", "noscript", "blocking"], &["@list", "@blocking"], &[]),
            row("xread", &["readonly", "blocking", "movablekeys"], &["@stream", "@blocking"], &[]),
            row("flushall", &["write"], &["@keyspace", "@write", "@dangerous"], &[]),
            row("json.get", &["readonly", "module"], &["@read", "@string"], &[]),
            row("scan", &["readonly"], &["@keyspace", "@read", "@slow"], &[]),
            row("select", &["loading", "fast"], &["@fast", "@connection"], &[]),
            row("auth", &["noscript", "no_auth"], &["@fast", "@connection"], &[]),
            row("readonly", &["loading", "fast"], &["@fast", "@connection"], &[]),
            row("subscribe", &["pubsub", "noscript"], &["@pubsub", "@slow"], &[]),
            row("ping", &["fast"], &["@fast", "@connection"], &[]),
            row("object", &[], &["@slow"], &object),
            row("client", &[], &["@slow"], &client),
        ];
        let name = |row: &String| row.split("\r\n").nth(2).expect("a name").to_owned();
        let rows = rows.into_iter().map(|row| (name(&row), row)).collect();
        let engine = Engine { rows, renamed: renamed.to_vec() };
        let router = Router::new(|words| Some(engine.answer(words))).expect("a table");
        (engine, router)
    }

    #[test]
    fn data_commands_may_be_called() {
        let (engine, mut router) = engine(&[]);
        for (name, sub, writes) in [
            ("GET", None, false),
            ("gEt", Some("key"), false),
            ("set", Some("key"), true),
            ("pfcount", None, true),
            ("PING", None, false),
            ("object", Some("Encoding"), false),
        ] {
            let reads_string = name.eq_ignore_ascii_case("get");
            let is_subcommand = name == "object";
            let callable = Callable {
                arity: 2,
                writes,
                is_subcommand,
                unblocks: false,
                reads_string,
                has_several_keys: false,
                reports_disk_errors: name == "PING",
            };
            assert!(callable.takes(2) && !callable.takes(1) && !callable.takes(3));
            let found = engine.look_up(&mut router, name, sub);
            assert_eq!(found, CommandKind::Callable(callable), "{name} {sub:?}");
        }
    }

    #[test]
    fn proxies_all_others() {
        let long = "G".repeat(2 * NAME_MAX + 2);
        let (engine, mut router) = engine(&[]);
        for (name, sub) in [
            ("BLPOP", None),
            ("XREAD", None),
            ("FLUSHALL", None),
            ("SCAN", Some("0")),
            ("CLIENT", Some("ID")),
            ("OBJECT", Some("SHOUT")),
            ("OBJECT", None),
            ("OBJECT", Some(long.as_str())),
            ("OBJECT", Some("ENCODING|X")),
            ("GETS", None),
            ("GE", None),
            ("", None),
        ] {
            let found = engine.look_up(&mut router, name, sub);
            assert_eq!(found, CommandKind::Plain, "{name} {sub:?}");
        }
        for (name, sub, command) in [
            ("JSON.GET", None, SessionCommand::ChangesState),
            ("SELECT", Some("1"), SessionCommand::ChangesState),
            ("Auth", Some("x"), SessionCommand::ChangesIdentity),
            ("READONLY", None, SessionCommand::PinsToProxy),
            ("subscribe", Some("c"), SessionCommand::PinsToProxy),
            ("client", Some("reply"), SessionCommand::PinsToProxy),
            // A command may have been renamed to one of these.
            ("OBJECT|ENCODING", None, SessionCommand::PinsToProxy),
            ("GET\0", None, SessionCommand::PinsToProxy),
            (long.as_str(), None, SessionCommand::PinsToProxy),
        ] {
            let found = engine.look_up(&mut router, name, sub);
            assert_eq!(found, CommandKind::Session(command), "{name} {sub:?}");
        }
    }

    /// A command's kind depends on its original name, not on the name that clients send.
    #[test]
    fn knows_renamed_commands_by_their_identity() {
        let renamed = [
            ("subscribe", "sub2"),
            ("client", "xclient"),
            ("auth", "get"),
            ("get", "xget"),
            ("set", ""),
        ];
        let (engine, mut router) = engine(&renamed);
        let pins = CommandKind::Session(SessionCommand::PinsToProxy);
        let mut look_up = |name, first| engine.look_up(&mut router, name, first);
        assert_eq!(look_up("SUB2", Some("c")), pins);
        assert_eq!(look_up("xclient", Some("REPLY")), pins);
        assert_eq!(
            look_up("GET", Some("pw")),
            CommandKind::Session(SessionCommand::ChangesIdentity)
        );
        assert!(matches!(look_up("XGET", Some("k")), CommandKind::Callable(it) if it.reads_string));
        for gone in ["SUBSCRIBE", "CLIENT", "AUTH", "SET"] {
            assert_eq!(
                look_up(gone, Some("REPLY")),
                CommandKind::Plain,
                "{gone} is unknown to the engine"
            );
        }
    }

    #[test]
    fn pins_unknown_names_without_a_reply() {
        let (_, mut router) = engine(&[]);
        let pins = CommandKind::Session(SessionCommand::PinsToProxy);
        assert_eq!(router.look_up(b"xget", None, |_| None), pins);
        assert_eq!(router.look_up(b"xget", None, |_| Some(b"-ERR no\r\n".to_vec())), pins);
        assert!(
            matches!(router.look_up(b"get", None, |_| None), CommandKind::Callable(_)),
            "a known name is not asked for"
        );
    }

    #[test]
    fn refuses_an_invalid_table() {
        for reply in ["", "+OK\r\n", "*0\r\n", "*1\r\n$3\r\nget\r\n", "*1\r\n*1\r\n:1\r\n"] {
            Router::new(|_| Some(reply.as_bytes().to_vec())).expect_err(reply);
        }
        Router::new(|_| None).expect_err("COMMAND is renamed");
    }
}
