//! What the commands are that clients type, as the engine says: which may be called, and which
//! change their connection.
//!
//! A client types a name; `rename-command` decides which command that is. So the engine is asked
//! about each name (COMMAND INFO), and the answer names the command's identity, its flags and
//! categories.
//!
//! A command that is called has no client. So these are the ones whose answer depends on the data,
//! the arguments and the user's rights alone: they are in a category of data, a script may run
//! them, they do not block, and they are not dangerous (that category has FLUSHALL, KEYS, MIGRATE,
//! SORT, …: slow, or rare). Modules' commands may do anything with their client and are not among
//! them. Names that were unknown at load (renamed commands, modules loaded later) are asked for
//! when a client first types them.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use ferrite_proto::SessionCommand;
use ferrite_proto::resp::Value;
use ferrite_session::{Callable, CommandKind};

/// The longest name, that of a subcommand apart.
pub(crate) const NAME_MAX: usize = 32;
/// Names that are asked for at once.
const ASKED_MAX: usize = 31;

const DATA: [&[u8]; 10] = [
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
/// In no such category, and as free of the client.
const ALSO: [&[u8]; 4] = [b"PING", b"ECHO", b"TIME", b"PUBLISH"];
const NEVER: [&[u8]; 5] = [b"noscript", b"blocking", b"admin", b"no_auth", b"module"];
/// What they find expired goes to replicas and the append-only file key by key, and would go as one
/// transaction.
const TOUCH_ALL: [&[u8]; 2] = [b"SCAN", b"RANDOMKEY"];
const WAITED_FOR: [&[u8]; 4] = [b"@list", b"@sortedset", b"@stream", b"@geo"];
const GIVE_NAMES: [&[u8]; 6] = [b"RENAME", b"RENAMENX", b"COPY", b"MOVE", b"RESTORE", b"SORT"];
const DANGEROUS: &[u8] = b"@dangerous";
const WRITES: [&[u8]; 2] = [b"write", b"may_replicate"];

#[derive(Debug, Clone, PartialEq, Eq)]
enum Rule {
    Is(CommandKind),
    /// By its subcommand, which is in the table as `NAME|SUB` under this identity.
    BySubcommand(Box<[u8]>),
}

/// What commands are, by the names that clients type, in capitals. Subcommands are under the
/// identity of their command.
#[derive(Debug, Default)]
pub(crate) struct Router {
    rules: HashMap<Box<[u8]>, Rule, BuildHasherDefault<NameHasher>>,
}

impl Router {
    /// Asks the engine by `COMMAND` and `COMMAND INFO`. The whole table has the original names of
    /// commands, so each is asked for by name: what is renamed or disabled is not known by that
    /// name.
    pub(crate) fn new(ask: impl Fn(&[&[u8]]) -> Option<Vec<u8>>) -> Result<Self, String> {
        let table = ask(&[]).ok_or("it does not tell its commands (is COMMAND renamed?)")?;
        let Ok(Value::Array(commands)) = Value::parse(&table) else {
            return Err("its COMMAND table is no list".into());
        };
        let mut router = Self::default();
        let names: Vec<_> =
            commands.iter().filter_map(|command| text(words(Some(command)).first()?)).collect();
        for names in names.chunks(ASKED_MAX) {
            let question: Vec<_> =
                [&b"INFO"[..]].into_iter().chain(names.iter().copied()).collect();
            let reply = ask(&question).ok_or("it does not tell about its commands")?;
            let Ok(Value::Array(entries)) = Value::parse(&reply) else {
                return Err("its answer to COMMAND INFO is no list".into());
            };
            for (name, entry) in names.iter().zip(&entries) {
                router.learn(name, entry);
            }
        }
        if router.len() == 0 {
            return Err("its COMMAND table has nothing that may be called".into());
        }
        Ok(router)
    }

    /// Looks up a command by the name that a client has typed, and by its first argument. A name
    /// that is not known is asked for by `ask`, with `COMMAND INFO`.
    pub(crate) fn look_up(
        &mut self,
        name: &[u8],
        first_arg: Option<&[u8]>,
        ask: impl FnOnce(&[u8]) -> Option<Vec<u8>>,
    ) -> CommandKind {
        let mut folded = [0; NAME_MAX];
        // Without an answer it could be anything, and so it can if it is too long to be kept.
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
            None => CommandKind::Plain, // the engine does not know it
        }
    }

    fn subcommand(&self, identity: &[u8], first_arg: Option<&[u8]>) -> CommandKind {
        let mut folded = [0; 2 * NAME_MAX + 1];
        let Some(place) = folded.get_mut(..identity.len()) else { return CommandKind::Plain };
        place.copy_from_slice(identity);
        folded[identity.len()] = b'|';
        let from = identity.len() + 1;
        let end =
            first_arg.and_then(|first_arg| Some(from + fold(first_arg, &mut folded[from..])?));
        match end.and_then(|end| self.rules.get(&folded[..end])) {
            Some(Rule::Is(kind)) => *kind,
            _ => CommandKind::Plain,
        }
    }

    /// How many commands and subcommands may be called.
    pub(crate) fn len(&self) -> usize {
        let is_callable = |rule: &&Rule| matches!(rule, Rule::Is(CommandKind::Callable(_)));
        self.rules.values().filter(is_callable).count()
    }

    /// Learns what the engine says about the command of this name, as a client types it.
    fn learn(&mut self, typed: &[u8], entry: &Value<'_>) {
        let fields = words(Some(entry));
        let Some(identity) = fields.first().and_then(text) else { return };
        let (typed, identity) = (typed.to_ascii_uppercase(), identity.to_ascii_uppercase());
        if typed.len().max(identity.len()) > 2 * NAME_MAX {
            return;
        }
        let subcommands = words(fields.get(9));
        if !subcommands.is_empty() {
            for subcommand in subcommands {
                if let Some(name) = words(Some(subcommand)).first().and_then(text) {
                    self.learn(name, subcommand);
                }
            }
            self.rules.insert(typed.into(), Rule::BySubcommand(identity.into()));
            return;
        }
        let (flags, categories) = (words(fields.get(2)), words(fields.get(6)));
        let arity = match fields.get(1) {
            Some(Value::Integer(arity)) => *arity,
            _ => return,
        };
        let kind = match (
            callable(&identity, arity, flags, categories),
            session_command(&identity, flags, categories),
        ) {
            (_, Some(command)) => CommandKind::Session(command),
            (Some(callable), None) => CommandKind::Callable(callable),
            (None, None) => CommandKind::Plain,
        };
        self.rules.insert(typed.into(), Rule::Is(kind));
    }
}

fn has(list: &[Value<'_>], wanted: &[&[u8]]) -> bool {
    list.iter().filter_map(text).any(|it| wanted.contains(&it))
}

fn session_command(
    identity: &[u8],
    flags: &[Value<'_>],
    categories: &[Value<'_>],
) -> Option<SessionCommand> {
    // A module's command may give its client another user.
    let is_module = has(flags, &[b"module"]);
    SessionCommand::of(identity, has(categories, &[b"@connection"]))
        .or(is_module.then_some(SessionCommand::ChangesState))
}

fn callable(
    name: &[u8],
    arity: i64,
    flags: &[Value<'_>],
    categories: &[Value<'_>],
) -> Option<Callable> {
    let is_data = has(categories, &DATA) || ALSO.contains(&name);
    let never = has(flags, &NEVER) || has(categories, &[DANGEROUS]) || TOUCH_ALL.contains(&name);
    let may = is_data && !never;
    let arity = i32::try_from(arity).ok()?;
    let is_subcommand = name.contains(&b'|');
    let writes = has(flags, &WRITES);
    // Clients wait for lists, sorted sets and streams, which these write or give another name.
    let unblocks = writes && (has(categories, &WAITED_FOR) || GIVE_NAMES.contains(&name));
    may.then(|| Callable { arity, is_subcommand, writes, unblocks, reads_string: name == b"GET" })
}

fn words<'a, 'b>(list: Option<&'b Value<'a>>) -> &'b [Value<'a>] {
    match list {
        Some(Value::Array(words) | Value::Set(words)) => words,
        _ => &[],
    }
}

fn text<'a>(value: &Value<'a>) -> Option<&'a [u8]> {
    match value {
        Value::Simple(text) | Value::Bulk(text) => Some(text),
        _ => None,
    }
}

/// In capitals, without what divides a name from its subcommand: its length. `None` if it cannot be
/// a name.
fn fold(name: &[u8], into: &mut [u8]) -> Option<usize> {
    for (to, from) in into.get_mut(..name.len())?.iter_mut().zip(name) {
        if matches!(from, b'|' | 0) {
            return None;
        }
        *to = from.to_ascii_uppercase();
    }
    Some(name.len())
}

/// FNV-1a. Names come from anybody, but what they are compared with comes from the engine.
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

    /// Of the slice: two names of one hash and other lengths are told apart by comparison.
    fn write_usize(&mut self, _: usize) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row of the table as Redis 7.0 writes it; `subcommands` are such rows.
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

    /// An engine with these commands; of those in `renamed`, the first name is disabled and the
    /// second is what clients type.
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
            let callable =
                Callable { arity: 2, writes, is_subcommand, unblocks: false, reads_string };
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
            // They may be what a command was renamed to.
            ("OBJECT|ENCODING", None, SessionCommand::PinsToProxy),
            ("GET\0", None, SessionCommand::PinsToProxy),
            (long.as_str(), None, SessionCommand::PinsToProxy),
        ] {
            let found = engine.look_up(&mut router, name, sub);
            assert_eq!(found, CommandKind::Session(command), "{name} {sub:?}");
        }
    }

    /// S2: a command is what the engine says it is, not what it is called.
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
                "{gone}: unknown to the engine"
            );
        }
    }

    #[test]
    fn pins_names_that_the_engine_does_not_tell_about() {
        let (_, mut router) = engine(&[]);
        let pins = CommandKind::Session(SessionCommand::PinsToProxy);
        assert_eq!(router.look_up(b"xget", None, |_| None), pins);
        assert_eq!(router.look_up(b"xget", None, |_| Some(b"-ERR no\r\n".to_vec())), pins);
        assert!(
            matches!(router.look_up(b"get", None, |_| None), CommandKind::Callable(_)),
            "known"
        );
    }

    #[test]
    fn a_table_that_is_none_is_refused() {
        for reply in ["", "+OK\r\n", "*0\r\n", "*1\r\n$3\r\nget\r\n", "*1\r\n*1\r\n:1\r\n"] {
            Router::new(|_| Some(reply.as_bytes().to_vec())).expect_err(reply);
        }
        Router::new(|_| None).expect_err("COMMAND is renamed");
    }
}
