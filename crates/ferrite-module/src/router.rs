//! Which commands may be called: what the engine itself says of them, in its COMMAND table.
//!
//! A command that is called has no client. So these are the ones whose answer depends on the data, the arguments and the user's
//! rights alone: they are in a category of data, a script may run them, they do not block, and they are not dangerous (that
//! category has FLUSHALL, KEYS, MIGRATE, SORT, …: slow, or rare). Modules' commands may do anything with their client and are not
//! among them; so nothing changes the table after the engine has read its configuration.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use ferrite_proto::Standing;
use ferrite_proto::resp::Value;
use ferrite_session::Callable;

/// The longest name, that of a subcommand apart.
pub(crate) const NAME_MAX: usize = 32;

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
/// What they find expired goes to replicas and the append-only file key by key, and would go as one transaction.
const TOUCH_ALL: [&[u8]; 2] = [b"SCAN", b"RANDOMKEY"];
const DANGEROUS: &[u8] = b"@dangerous";
const WRITES: [&[u8]; 2] = [b"write", b"may_replicate"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    Call(Callable),
    /// By its subcommand, which is in the table as `NAME|SUB`.
    BySubcommand,
}

/// The commands that may be called, by their names in capitals.
#[derive(Debug, Default)]
pub(crate) struct Router {
    rules: HashMap<Box<[u8]>, Rule, BuildHasherDefault<NameHasher>>,
}

impl Router {
    /// From the engine's reply to COMMAND.
    pub(crate) fn from_command_table(reply: &[u8]) -> Result<Self, String> {
        let reply = Value::parse(reply).map_err(|error| format!("its COMMAND table: {error}"))?;
        let Value::Array(commands) = reply else { return Err("its COMMAND table is no list".into()) };
        let mut router = Self::default();
        for command in &commands {
            router.learn(command);
        }
        if router.rules.is_empty() {
            return Err("its COMMAND table has nothing that may be called".into());
        }
        Ok(router)
    }

    /// `None`: it goes over the bridge.
    pub(crate) fn find(&self, name: &[u8], first_arg: Option<&[u8]>) -> Option<Callable> {
        let mut folded = [0; 2 * NAME_MAX + 1];
        let end = fold(name, &mut folded[..NAME_MAX])?;
        match self.rules.get(&folded[..end])? {
            Rule::Call(callable) => Some(*callable),
            Rule::BySubcommand => {
                folded[end] = b'|';
                let from = end + 1;
                let end = from + fold(first_arg?, &mut folded[from..])?;
                match self.rules.get(&folded[..end])? {
                    Rule::Call(callable) => Some(*callable),
                    Rule::BySubcommand => None,
                }
            }
        }
    }

    /// How many commands and subcommands.
    pub(crate) fn len(&self) -> usize {
        self.rules.values().filter(|rule| matches!(rule, Rule::Call(_))).count()
    }

    fn learn(&mut self, command: &Value<'_>) {
        let Value::Array(fields) = command else { return };
        let Some(name) = fields.first().and_then(text) else { return };
        let name = name.to_ascii_uppercase();
        if name.len() > 2 * NAME_MAX {
            return;
        }
        let subcommands = match fields.get(9) {
            Some(Value::Array(subcommands)) => subcommands.as_slice(),
            _ => &[],
        };
        if !subcommands.is_empty() {
            subcommands.iter().for_each(|subcommand| self.learn(subcommand));
            self.rules.insert(name.into(), Rule::BySubcommand);
        } else if let Some(Value::Integer(arity)) = fields.get(1)
            && let Some(callable) = callable(&name, *arity, words(fields.get(2)), words(fields.get(6)))
        {
            self.rules.insert(name.into(), Rule::Call(callable));
        }
    }
}

fn callable(name: &[u8], arity: i64, flags: &[Value<'_>], categories: &[Value<'_>]) -> Option<Callable> {
    let has =
        |list: &[Value<'_>], wanted: &[&[u8]]| list.iter().filter_map(text).any(|it| wanted.contains(&it));
    let is_data = has(categories, &DATA) || ALSO.contains(&name);
    let never = has(flags, &NEVER) || has(categories, &[DANGEROUS]) || TOUCH_ALL.contains(&name);
    let may = is_data && !never && !Standing::minds(name);
    let arity = i32::try_from(arity).ok()?;
    let is_subcommand = name.contains(&b'|');
    may.then(|| Callable { arity, is_subcommand, writes: has(flags, &WRITES), reads_string: name == b"GET" })
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

/// In capitals, without what divides a name from its subcommand: its length. `None` if it cannot be a name.
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
            words.iter().fold(format!("*{}\r\n", words.len()), |list, word| format!("{list}+{word}\r\n"))
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

    fn router(rows: &[String]) -> Router {
        let table = format!("*{}\r\n{}", rows.len(), rows.concat());
        Router::from_command_table(table.as_bytes()).expect("a table")
    }

    fn engine() -> Router {
        let object = [
            row("object|encoding", &["readonly"], &["@keyspace", "@read", "@slow"], &[]),
            row("object|shout", &["readonly", "noscript"], &["@keyspace"], &[]),
        ];
        let client = [row("client|id", &["noscript", "loading"], &["@connection", "@slow"], &[])];
        router(&[
            row("get", &["readonly", "fast"], &["@read", "@string", "@fast"], &[]),
            row("set", &["write", "denyoom"], &["@write", "@string", "@slow"], &[]),
            row("pfcount", &["readonly", "may_replicate"], &["@read", "@hyperloglog"], &[]),
            row("blpop", &["write", "noscript", "blocking"], &["@list", "@blocking"], &[]),
            row("xread", &["readonly", "blocking", "movablekeys"], &["@stream", "@blocking"], &[]),
            row("flushall", &["write"], &["@keyspace", "@write", "@dangerous"], &[]),
            row("json.get", &["readonly", "module"], &["@read", "@string"], &[]),
            row("scan", &["readonly"], &["@keyspace", "@read", "@slow"], &[]),
            row("select", &["loading", "fast"], &["@fast", "@connection"], &[]),
            row("ping", &["fast"], &["@fast", "@connection"], &[]),
            row("object", &[], &["@slow"], &object),
            row("client", &[], &["@slow"], &client),
        ])
    }

    #[test]
    fn data_commands_may_be_called() {
        let router = engine();
        for (name, sub, writes) in [
            ("GET", None, false),
            ("gEt", Some("key"), false),
            ("set", Some("key"), true),
            ("pfcount", None, true),
            ("PING", None, false),
            ("object", Some("Encoding"), false),
        ] {
            let found = router.find(name.as_bytes(), sub.map(str::as_bytes));
            let reads_string = name.eq_ignore_ascii_case("get");
            assert_eq!(
                found,
                Some(Callable { arity: 2, writes, is_subcommand: name == "object", reads_string }),
                "{name} {sub:?}"
            );
            assert!(found.is_some_and(|it| it.takes(2) && !it.takes(1) && !it.takes(3)));
        }
    }

    #[test]
    fn all_others_go_over_the_bridge() {
        let long = "G".repeat(2 * NAME_MAX + 2);
        let router = engine();
        for (name, sub) in [
            ("BLPOP", None),
            ("XREAD", None),
            ("FLUSHALL", None),
            ("SCAN", Some("0")),
            ("JSON.GET", None),
            ("SELECT", Some("1")),
            ("CLIENT", Some("ID")),
            ("OBJECT", Some("SHOUT")),
            ("OBJECT", None),
            ("OBJECT", Some(long.as_str())),
            ("OBJECT|ENCODING", None),
            ("OBJECT", Some("ENCODING|X")),
            ("GET\0", None),
            ("GETS", None),
            ("GE", None),
            ("", None),
            (long.as_str(), None),
        ] {
            assert_eq!(router.find(name.as_bytes(), sub.map(str::as_bytes)), None, "{name} {sub:?}");
        }
    }

    #[test]
    fn a_table_that_is_none_is_refused() {
        for reply in ["", "+OK\r\n", "*0\r\n", "*1\r\n$3\r\nget\r\n", "*1\r\n*1\r\n:1\r\n"] {
            Router::from_command_table(reply.as_bytes()).expect_err(reply);
        }
    }
}
