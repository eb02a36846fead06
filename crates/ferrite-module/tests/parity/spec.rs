//! The engine's own description of its commands: arguments from COMMAND DOCS, flags and tips from
//! COMMAND.

use std::collections::BTreeMap;
use std::time::Duration;

use ferrite_proto::resp::Value;
use ferrite_testkit::resp::{Connection, Response, encode};

/// An argument, or a group of arguments.
#[derive(Debug, Default, Clone)]
pub(crate) struct Argument {
    pub(crate) name: String,
    pub(crate) kind: String,
    pub(crate) token: Option<String>,
    pub(crate) optional: bool,
    pub(crate) multiple: bool,
    pub(crate) multiple_token: bool,
    pub(crate) parts: Vec<Self>,
}

/// A command, or a subcommand (`client|list`).
#[derive(Debug, Default, Clone)]
pub(crate) struct Spec {
    pub(crate) name: String,
    pub(crate) group: String,
    pub(crate) arguments: Vec<Argument>,
    pub(crate) flags: Vec<String>,
    pub(crate) tips: Vec<String>,
    /// The command has subcommands.
    pub(crate) container: bool,
}

impl Spec {
    fn is(&self, flag: &str) -> bool {
        self.flags.iter().any(|has| has == flag)
    }

    pub(crate) fn has_tip(&self, tip: &str) -> bool {
        self.tips.iter().any(|has| has == tip)
    }

    /// Returns whether the command may block. Redis 7.0 does not give WAIT the flag `blocking`.
    pub(crate) fn waits(&self) -> bool {
        self.is("blocking") || self.name.starts_with("wait")
    }

    /// Returns the words of the command's name.
    pub(crate) fn words(&self) -> Vec<Vec<u8>> {
        self.name.split('|').map(|word| word.as_bytes().to_vec()).collect()
    }
}

/// Returns all commands of the engine, ordered by name.
pub(crate) fn commands(connection: &mut Connection) -> Vec<Spec> {
    let mut found = BTreeMap::new();
    read_table(connection, &["COMMAND"], &mut found);
    let docs = ask(connection, &["COMMAND", "DOCS"]);
    let Ok(Value::Array(docs)) = Value::parse(&docs) else {
        panic!("the reply to COMMAND DOCS is not an array")
    };
    for [name, entry] in docs.as_chunks().0 {
        document(&text(name), entry, &mut found);
    }
    found.into_values().collect()
}

fn ask(connection: &mut Connection, words: &[&str]) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(&words.iter().map(|word| word.as_bytes().to_vec()).collect::<Vec<_>>(), &mut bytes);
    connection.send(&bytes);
    match connection.receive(Duration::from_secs(30)) {
        Response::Reply(reply) => reply,
        other => panic!("{words:?}: no reply, but {other:?}"),
    }
}

fn read_table(connection: &mut Connection, words: &[&str], found: &mut BTreeMap<String, Spec>) {
    let reply = ask(connection, words);
    let Ok(Value::Array(entries)) = Value::parse(&reply) else {
        panic!("the reply to COMMAND is not an array")
    };
    entries.iter().for_each(|entry| read_entry(entry, found));
}

/// Reads an entry of COMMAND: name, arity, flags, first key, last key, step, ACL categories, tips,
/// key specifications, subcommands.
fn read_entry(entry: &Value<'_>, found: &mut BTreeMap<String, Spec>) {
    let fields = list(entry);
    let name = text(&fields[0]);
    let subcommands = fields.get(9).map(list).unwrap_or_default();
    subcommands.iter().for_each(|entry| read_entry(entry, found));
    let spec = found.entry(name.clone()).or_default();
    spec.flags = list(&fields[2]).iter().map(text).collect();
    spec.tips = fields.get(7).map(list).unwrap_or_default().iter().map(text).collect();
    spec.container = !subcommands.is_empty();
    spec.name = name;
}

/// Reads an entry of COMMAND DOCS.
fn document(name: &str, entry: &Value<'_>, found: &mut BTreeMap<String, Spec>) {
    for [field, value] in list(entry).as_chunks().0 {
        match text(field).as_str() {
            "subcommands" => {
                for [name, entry] in list(value).as_chunks().0 {
                    document(&text(name), entry, found);
                }
            }
            "arguments" => {
                let spec = found.get_mut(name).expect("a known command");
                spec.arguments = list(value).iter().map(argument).collect();
            }
            "group" => found.get_mut(name).expect("a known command").group = text(value),
            _ => {}
        }
    }
}

fn argument(entry: &Value<'_>) -> Argument {
    let mut argument = Argument::default();
    for [field, value] in list(entry).as_chunks().0 {
        match text(field).as_str() {
            "name" => argument.name = text(value),
            "type" => argument.kind = text(value),
            "token" => argument.token = Some(text(value)),
            "arguments" => argument.parts = list(value).iter().map(self::argument).collect(),
            "flags" => {
                let flags: Vec<_> = list(value).iter().map(text).collect();
                let is = |flag: &str| flags.iter().any(|has| has == flag);
                argument.optional = is("optional");
                argument.multiple = is("multiple");
                argument.multiple_token = is("multiple_token");
            }
            _ => {}
        }
    }
    argument
}

fn list<'a, 'v>(value: &'v Value<'a>) -> &'v [Value<'a>] {
    match value {
        Value::Array(values) | Value::Set(values) => values,
        _ => &[],
    }
}

fn text(value: &Value<'_>) -> String {
    match value {
        Value::Bulk(text) | Value::Simple(text) => String::from_utf8_lossy(text).to_lowercase(),
        other => panic!("not a string: {other:?}"),
    }
}
