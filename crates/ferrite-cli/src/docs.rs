//! The server's documentation of its commands (`COMMAND DOCS`, Redis 7 and Valkey), for help,
//! completion and hints. An older server returns only the names (`COMMAND`), so there are no hints.

use std::fmt::Write as _;

use ferrite_proto::resp::{Value, split_line};

use crate::server::Server;
use crate::terminal::escape_text;

/// All commands, sorted by name.
#[derive(Debug, Default)]
pub(crate) struct Docs {
    commands: Vec<Command>,
}

/// A command, or a subcommand.
#[derive(Debug, Default)]
struct Command {
    /// The name in upper case, such as `CONFIG GET`.
    name: String,
    /// The parameters, such as `key value [NX|XX] [GET]`.
    parameters: String,
    summary: String,
    since: String,
    group: String,
}

/// The output of `help` without a command. The first lines are redis-cli's.
const HELP: &str = "\
To get help about commands type:
      \"help @<group>\" to get a list of commands in <group>
      \"help <command>\" for help on <command>
      \"help <tab>\" to get a list of possible help topics
      \"quit\" to exit

Commands of the prompt itself:
      \":transport\" to show the transport and, after a fallback to TCP, the reason
      \":set hints\" and \":set nohints\" to show and hide hints
      \"connect <host> <port>\" to connect to another server
";

impl Docs {
    /// Requests the documentation from the server. Returns empty documentation if the server has
    /// none.
    pub(crate) async fn fetch(server: &mut Server) -> Self {
        for (words, read) in [
            (&["COMMAND", "DOCS"][..], Self::from_docs as fn(&Value<'_>) -> Option<Self>),
            (&["COMMAND"], Self::from_names),
        ] {
            let Ok(frame) = server.request(words).await else { return Self::default() };
            if let Some(docs) = frame.value().ok().as_ref().and_then(read) {
                return docs;
            }
        }
        Self::default()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.commands.is_empty()
    }

    /// Parses the reply to `COMMAND DOCS`: a map from names to documentation.
    fn from_docs(reply: &Value<'_>) -> Option<Self> {
        let mut commands = Vec::new();
        for (name, about) in pairs(reply)? {
            add_command(&text(name)?.to_uppercase(), about, &mut commands);
        }
        Some(Self::sorted(commands))
    }

    /// Parses the reply to `COMMAND`: lists that begin with a name.
    fn from_names(reply: &Value<'_>) -> Option<Self> {
        let Value::Array(entries) = reply else { return None };
        let named = entries.iter().filter_map(|entry| match entry {
            Value::Array(facts) => text(facts.first()?),
            _ => None,
        });
        let commands =
            named.map(|name| Command { name: name.to_uppercase(), ..Command::default() });
        Some(Self::sorted(commands.collect()))
    }

    fn sorted(mut commands: Vec<Command>) -> Self {
        commands.sort_by(|one, other| one.name.cmp(&other.name));
        Self { commands }
    }

    /// Returns the possible completions of a line, and the position from which they replace it.
    pub(crate) fn completions(&self, line: &str) -> (usize, Vec<String>) {
        let is_help = line.get(..5).is_some_and(|word| word.eq_ignore_ascii_case("help "));
        let start = if is_help { line.len() - line[5..].trim_start().len() } else { 0 };
        let prefix = line.get(start..).unwrap_or_default().to_uppercase();
        let mut found: Vec<_> = self
            .commands
            .iter()
            .filter(|command| command.name.starts_with(&prefix))
            .map(|command| command.name.clone())
            .collect();
        if is_help {
            let mut groups: Vec<_> =
                self.commands.iter().map(|command| format!("@{}", command.group)).collect();
            groups.sort();
            groups.dedup();
            found.extend(
                groups
                    .into_iter()
                    .filter(|group| group.len() > 1 && group.to_uppercase().starts_with(&prefix)),
            );
        }
        (start, found)
    }

    /// Returns the parameters that were not typed yet.
    pub(crate) fn hint(&self, line: &str) -> Option<String> {
        let typed = split_line(line.as_bytes()).ok()?;
        let typed: Vec<_> =
            typed.iter().map(|word| String::from_utf8_lossy(word).to_uppercase()).collect();
        let begins = |command: &&Command| {
            let mut words = command.name.split(' ');
            words.clone().count() <= typed.len()
                && words.by_ref().zip(&typed).all(|(word, typed)| word == typed)
        };
        let command = self
            .commands
            .iter()
            .filter(begins)
            .max_by_key(|command| command.name.split(' ').count())?;
        let arguments = typed.len() - command.name.split(' ').count();
        let mut rest = command.parameters.as_str();
        // As in redis-cli, typed arguments remove parameters from the hint only up to the first
        // optional parameter.
        for _ in 0..arguments {
            if rest.starts_with('[') {
                break;
            }
            rest = rest.split_once(' ').map_or("", |(_, rest)| rest);
        }
        let blank = if line.ends_with(char::is_whitespace) { "" } else { " " };
        (!rest.is_empty()).then(|| format!("{blank}{rest}"))
    }

    /// Returns the help about a command with all its subcommands, or about an `@group`. Without
    /// words, returns the general help.
    pub(crate) fn help(&self, words: &[Vec<u8>], colors: bool) -> String {
        let words: Vec<_> =
            words.iter().map(|word| String::from_utf8_lossy(word).to_uppercase()).collect();
        let Some(first) = words.first() else {
            return format!("ferrite-cli {}\n{HELP}", env!("CARGO_PKG_VERSION"));
        };
        let group = first.strip_prefix('@');
        let is_wanted = |command: &&Command| match group {
            Some(group) => command.group.to_uppercase() == group,
            None => {
                let mut own = command.name.split(' ');
                words.iter().all(|word| own.next() == Some(word.as_str()))
            }
        };
        let mut out = String::new();
        for command in self.commands.iter().filter(is_wanted) {
            command.describe(group.is_none(), colors, &mut out);
        }
        if out.is_empty() {
            let why = if self.is_empty() {
                "the server has returned no help about its commands"
            } else {
                "no such command or group"
            };
            return format!("{why}\n");
        }
        out.push('\n');
        out
    }
}

impl Command {
    fn describe(&self, with_group: bool, colors: bool, out: &mut String) {
        let paint = |code: &str, text: &str| match colors {
            true => format!("\x1b[{code}m{text}\x1b[0m"),
            false => text.to_owned(),
        };
        let _ = writeln!(out, "\n  {} {}", paint("1", &self.name), paint("90", &self.parameters));
        let facts = [("summary", &self.summary), ("since", &self.since), ("group", &self.group)];
        for (name, fact) in facts {
            if !fact.is_empty() && (with_group || name != "group") {
                let _ = writeln!(out, "  {} {fact}", paint("33", &format!("{name}:")));
            }
        }
    }
}

/// Adds a command and its subcommands, whose names have the form `config|get`.
fn add_command(name: &str, about: &Value<'_>, commands: &mut Vec<Command>) {
    let mut command = Command { name: name.replace('|', " "), ..Command::default() };
    for (key, fact) in pairs(about).unwrap_or_default() {
        let fact_text = || text(fact).unwrap_or_default();
        match text(key).as_deref() {
            Some("summary") => command.summary = fact_text(),
            Some("since") => command.since = fact_text(),
            Some("group") => command.group = fact_text(),
            Some("arguments") => command.parameters = arguments(fact, " "),
            Some("subcommands") => {
                for (name, about) in pairs(fact).unwrap_or_default() {
                    add_command(&text(name).unwrap_or_default().to_uppercase(), about, commands);
                }
            }
            _ => {}
        }
    }
    commands.push(command);
}

fn arguments(list: &Value<'_>, separator: &str) -> String {
    let Value::Array(list) = list else { return String::new() };
    list.iter().map(argument).collect::<Vec<_>>().join(separator)
}

/// Formats an argument as `[TOKEN name [name ...]]`, like the Redis manual.
fn argument(about: &Value<'_>) -> String {
    let (mut name, mut kind, mut token, mut parts) =
        (String::new(), String::new(), String::new(), None);
    let (mut is_optional, mut is_multiple, mut repeats_token) = (false, false, false);
    for (key, fact) in pairs(about).unwrap_or_default() {
        let fact_text = || text(fact).unwrap_or_default();
        match text(key).as_deref() {
            Some("name") if name.is_empty() => name = fact_text(),
            Some("display_text") => name = fact_text(),
            Some("type") => kind = fact_text(),
            Some("token") => {
                token = if fact_text().is_empty() { "\"\"".into() } else { fact_text() };
            }
            Some("arguments") => parts = Some(fact),
            Some("flags") => {
                let (Value::Array(flags) | Value::Set(flags)) = fact else { continue };
                let has = |name: &str| flags.iter().any(|flag| text(flag).as_deref() == Some(name));
                (is_optional, is_multiple) = (has("optional"), has("multiple"));
                repeats_token = has("multiple_token");
            }
            _ => {}
        }
    }
    let value = match (kind.as_str(), parts) {
        ("oneof", Some(parts)) => arguments(parts, "|"),
        ("block", Some(parts)) => arguments(parts, " "),
        ("pure-token", _) => String::new(),
        _ => name,
    };
    if !token.is_empty() && kind != "pure-token" {
        token.push(' ');
    }
    let mut shown = format!("{token}{value}");
    if is_multiple {
        let token = if repeats_token { token.as_str() } else { "" };
        let _ = write!(shown, " [{token}{value} ...]");
    }
    if is_optional { format!("[{shown}]") } else { shown }
}

/// Returns the pairs of a map, which is a flat list in RESP2.
fn pairs<'a, 'b>(value: &'a Value<'b>) -> Option<Vec<(&'a Value<'b>, &'a Value<'b>)>> {
    match value {
        Value::Map(pairs) => Some(pairs.iter().map(|(key, value)| (key, value)).collect()),
        Value::Array(values) => Some(
            values.chunks_exact(2).filter_map(|pair| Some((pair.first()?, pair.get(1)?))).collect(),
        ),
        _ => None,
    }
}

fn text(value: &Value<'_>) -> Option<String> {
    match value {
        Value::Bulk(text) | Value::Simple(text) | Value::Verbatim { text, .. } => {
            // Escapes the text here, because hints and help contain our own escape sequences and
            // are not escaped again.
            Some(escape_text(&String::from_utf8_lossy(text)).replace(['\n', '\r', '\t'], " "))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the documentation of SET, and of CONFIG with one subcommand.
    fn docs() -> Docs {
        let s = Value::Simple;
        let b = |text: &'static str| Value::Bulk(text.as_bytes());
        let argument = |facts: Vec<(&'static str, Value<'static>)>| {
            Value::Map(facts.into_iter().map(|(name, fact)| (b(name), fact)).collect())
        };
        let token =
            |word| argument(vec![("name", b("x")), ("type", b("pure-token")), ("token", b(word))]);
        let set = Value::Map(vec![
            (b("summary"), b("Set it")),
            (b("group"), b("string")),
            (
                b("arguments"),
                Value::Array(vec![
                    argument(vec![("name", b("key")), ("type", b("key"))]),
                    argument(vec![
                        ("name", b("value")),
                        ("type", b("string")),
                        ("flags", Value::Set(vec![s(b"multiple")])),
                    ]),
                    argument(vec![
                        ("name", b("condition")),
                        ("type", b("oneof")),
                        ("flags", Value::Array(vec![s(b"optional")])),
                        ("arguments", Value::Array(vec![token("NX"), token("XX")])),
                    ]),
                ]),
            ),
        ]);
        let get = argument(vec![("name", b("parameter")), ("type", b("string"))]);
        // A map in RESP2 is a flat list.
        let config = Value::Array(vec![
            b("subcommands"),
            Value::Array(vec![
                b("config|get"),
                Value::Map(vec![(b("arguments"), Value::Array(vec![get]))]),
            ]),
        ]);
        Docs::from_docs(&Value::Array(vec![b("set"), set, b("config"), config]))
            .expect("valid reply")
    }

    #[test]
    fn hints_at_parameters_that_are_not_typed_yet() {
        let docs = docs();
        assert_eq!(docs.hint("set").as_deref(), Some(" key value [value ...] [NX|XX]"));
        assert_eq!(docs.hint("SET k ").as_deref(), Some("value [value ...] [NX|XX]"));
        assert_eq!(docs.hint("SET k v").as_deref(), Some(" [value ...] [NX|XX]"));
        assert_eq!(docs.hint("config get ").as_deref(), Some("parameter"));
        assert_eq!(docs.hint("config get x"), None);
        assert_eq!(docs.hint("nosuch"), None);
        assert_eq!(docs.hint("set \""), None);
    }

    #[test]
    fn completes_commands_and_groups() {
        let docs = docs();
        assert_eq!(docs.completions("co"), (0, vec!["CONFIG".into(), "CONFIG GET".into()]));
        assert_eq!(docs.completions("help s"), (5, vec!["SET".into()]));
        assert_eq!(docs.completions("help @"), (5, vec!["@string".into()]));
        assert_eq!(docs.completions("SET k"), (0, vec![]));
    }

    #[test]
    fn describes_commands_and_groups() {
        let docs = docs();
        let about = docs.help(&[b"set".to_vec()], false);
        assert_eq!(
            about,
            "\n  SET key value [value ...] [NX|XX]\n  summary: Set it\n  group: string\n\n"
        );
        assert_eq!(docs.help(&[b"config".to_vec()], false).matches("\n  CONFIG").count(), 2);
        assert!(docs.help(&[b"@string".to_vec()], true).contains("\x1b[1mSET\x1b[0m"));
        assert_eq!(docs.help(&[b"no".to_vec()], false), "no such command or group\n");
        assert!(docs.help(&[], false).contains(":transport"));
    }

    #[test]
    fn completes_names_without_docs() {
        let reply = Value::Array(vec![Value::Array(vec![Value::Bulk(b"get"), Value::Integer(2)])]);
        let docs = Docs::from_names(&reply).expect("valid reply");
        assert_eq!(docs.completions("g"), (0, vec!["GET".into()]));
        assert_eq!(docs.hint("GET "), None);
    }
}
