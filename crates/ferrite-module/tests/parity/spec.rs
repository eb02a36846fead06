//! What the live engine says of its commands: COMMAND DOCS for their arguments, COMMAND for their
//! nature.

use std::collections::BTreeMap;
use std::time::Duration;

use ferrite_proto::resp::Value;

use super::wire::{Heard, Wire, encode};

/// An argument, or several.
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
    /// It has subcommands.
    pub(crate) container: bool,
}

impl Spec {
    fn is(&self, flag: &str) -> bool {
        self.flags.iter().any(|has| has == flag)
    }

    pub(crate) fn has_tip(&self, tip: &str) -> bool {
        self.tips.iter().any(|has| has == tip)
    }

    /// Answers may be late by intention. WAIT does not say so of itself.
    pub(crate) fn waits(&self) -> bool {
        self.is("blocking") || self.name.starts_with("wait")
    }

    /// What is typed for it.
    pub(crate) fn words(&self) -> Vec<Vec<u8>> {
        self.name.split('|').map(|word| word.as_bytes().to_vec()).collect()
    }
}

/// All commands of the engine, in the order of their names.
pub(crate) fn commands(wire: &mut Wire) -> Vec<Spec> {
    let mut found = BTreeMap::new();
    nature(wire, &["COMMAND"], &mut found);
    let docs = ask(wire, &["COMMAND", "DOCS"]);
    let Ok(Value::Array(docs)) = Value::parse(&docs) else { panic!("COMMAND DOCS is a list") };
    for [name, entry] in docs.as_chunks().0 {
        document(&text(name), entry, &mut found);
    }
    found.into_values().collect()
}

fn ask(wire: &mut Wire, words: &[&str]) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(&words.iter().map(|word| word.as_bytes().to_vec()).collect::<Vec<_>>(), &mut bytes);
    wire.send(&bytes);
    match wire.hear(Duration::from_secs(30)) {
        Heard::Reply(reply) => reply,
        other => panic!("{words:?}: {other:?}"),
    }
}

fn nature(wire: &mut Wire, words: &[&str], found: &mut BTreeMap<String, Spec>) {
    let reply = ask(wire, words);
    let Ok(Value::Array(entries)) = Value::parse(&reply) else { panic!("COMMAND is a list") };
    entries.iter().for_each(|entry| entry_of_nature(entry, found));
}

/// name, arity, flags, first, last, step, categories, tips, key specifications, subcommands
fn entry_of_nature(entry: &Value<'_>, found: &mut BTreeMap<String, Spec>) {
    let fields = list(entry);
    let name = text(&fields[0]);
    let subcommands = fields.get(9).map(list).unwrap_or_default();
    subcommands.iter().for_each(|entry| entry_of_nature(entry, found));
    let spec = found.entry(name.clone()).or_default();
    spec.flags = list(&fields[2]).iter().map(text).collect();
    spec.tips = fields.get(7).map(list).unwrap_or_default().iter().map(text).collect();
    spec.container = !subcommands.is_empty();
    spec.name = name;
}

fn document(name: &str, entry: &Value<'_>, found: &mut BTreeMap<String, Spec>) {
    for [field, value] in list(entry).as_chunks().0 {
        match text(field).as_str() {
            "subcommands" => {
                for [name, entry] in list(value).as_chunks().0 {
                    document(&text(name), entry, found);
                }
            }
            "arguments" => {
                let spec = found.get_mut(name).expect("what is documented is there");
                spec.arguments = list(value).iter().map(argument).collect();
            }
            "group" => {
                found.get_mut(name).expect("what is documented is there").group = text(value)
            }
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
        other => panic!("a word: {other:?}"),
    }
}
