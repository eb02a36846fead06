//! Reads `ferrite.toml`: all values with their lines, and all errors, not only the first.

mod directives;
mod toml_text;

use std::fmt;

use toml::de::{DeTable, DeValue};

use crate::nearest::{distance, nearest_within};
use crate::setting::{Alias, Program, Setting};
use crate::table;
use crate::unit::{self, Unit};
use crate::values::{Origin, Values};

/// Sections that also accept the names that other RDMA software uses.
const ALIAS_SECTIONS: [&str; 2] = ["network", "network.rdma"];

/// The message of the parser for a key that the section already has.
const DUPLICATE: &str = "duplicate key";

/// A file that was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// The values of the program that reads the file. Keys of other programs are only checked.
    pub values: Values,
    /// Lines of the engine's own configuration, from `[engine]`: name and rest of the line.
    pub directives: Vec<(String, String)>,
}

/// An error in a file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The number of the line, counted from 1. Zero if the error concerns no single line.
    pub line: usize,
    /// The key with its sections. Empty if the text is not valid TOML.
    pub key: String,
    /// What is wrong, and what to do.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { line, key, message } = self;
        if *line > 0 {
            write!(f, "{line}: ")?;
        }
        if key.is_empty() { f.write_str(message) } else { write!(f, "{key}: {message}") }
    }
}

/// The settings of `ferrite server`, which may run an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitFile {
    /// What the server reads.
    pub server: File,
    /// The values of its agent, if it runs one.
    pub agent: Option<Values>,
}

/// Reads the text of a file for a program. Settings that the file does not have keep their
/// defaults.
///
/// # Errors
/// Returns all errors, in the order of their lines. Whether values fit together is checked only if
/// there is no other error.
pub fn read(program: Program, text: &str) -> Result<File, Vec<Problem>> {
    let file = parse(program, text)?;
    let wrong = file.values.check().err().unwrap_or_default();
    match problems_of(&[&file.values], wrong) {
        problems if problems.is_empty() => Ok(file),
        problems => Err(problems),
    }
}

/// Reads the text of a file for `ferrite server` and for the agent that it may run. `complete` adds
/// to the values of both what the environment and the flags say.
///
/// # Errors
/// Returns all errors, as [`read`] does.
pub fn read_unit(
    text: &str,
    complete: impl Fn(&mut Values) -> Result<(), String>,
) -> Result<UnitFile, Vec<Problem>> {
    let read = |program| {
        let mut file = parse(program, text)?;
        let wrong = |message| vec![Problem { line: 0, key: String::new(), message }];
        complete(&mut file.values).map_err(wrong).map(|()| file)
    };
    let server = read(Program::Server)?;
    let mut wrong = server.values.check().err().unwrap_or_default();
    let agent = match unit::has_agent(&server.values) {
        true => Some(read(Program::Agent)?.values),
        false => None,
    };
    if let Some(agent) = &agent {
        let both = Unit { server: &server.values, agent, directives: &server.directives };
        wrong.extend(agent.check().err().unwrap_or_default());
        wrong.extend(both.check().err().unwrap_or_default());
    }
    let values: Vec<_> = std::iter::once(&server.values).chain(&agent).collect();
    match problems_of(&values, wrong) {
        problems if problems.is_empty() => Ok(UnitFile { server, agent }),
        problems => Err(problems),
    }
}

/// Adds the lines of the settings to what is wrong with them.
fn problems_of(values: &[&Values], wrong: Vec<(&'static Setting, String)>) -> Vec<Problem> {
    let problem = |(setting, message): (&'static Setting, String)| {
        let owner = values.iter().find(|values| setting.has(values.program()));
        let line = match owner.map(|values| &values.entry(setting).origin) {
            Some(Origin::File { line }) => *line,
            _ => 0,
        };
        Problem { line, key: setting.key.into(), message }
    };
    let mut problems: Vec<_> = wrong.into_iter().map(problem).collect();
    problems.sort();
    problems.dedup();
    problems
}

/// Reads the text of a file. Does not check whether values fit together.
fn parse(program: Program, text: &str) -> Result<File, Vec<Problem>> {
    let mut reader = Reader {
        text,
        file: File { values: Values::new(program), directives: Vec::new() },
        problems: Vec::new(),
    };
    let (table, errors) = DeTable::parse_recoverable(text);
    for error in &errors {
        let line = error.span().map_or(1, |span| reader.line(span.start));
        let at = error.span().and_then(|span| text.get(span));
        let message = syntax_error(error.message(), at);
        reader.problems.push(Problem { line, key: String::new(), message });
    }
    reader.take("", table.get_ref());
    let Reader { file, mut problems, .. } = reader;
    // A value that is not valid TOML would be reported twice: as a syntax error, and as a value of
    // the wrong type. Only the syntax error is kept.
    let broken = problems.iter().filter(|problem| problem.key.is_empty());
    let broken: Vec<_> = broken.map(|problem| problem.line).collect();
    problems.retain(|problem| problem.key.is_empty() || !broken.contains(&problem.line));
    problems.sort();
    problems.dedup();
    if problems.is_empty() { Ok(file) } else { Err(problems) }
}

struct Reader<'a> {
    text: &'a str,
    file: File,
    problems: Vec<Problem>,
}

impl Reader<'_> {
    /// Reads a section and its subsections.
    fn take(&mut self, section: &str, table: &DeTable<'_>) {
        // The keys are read in the file's order. If two keys give one setting different values, the
        // error names the later one.
        let mut entries: Vec<_> = table.iter().collect();
        entries.sort_by_key(|(key, _)| key.span().start);
        for (key, value) in entries {
            let line = self.line(key.span().start);
            let full = full_name(section, key.get_ref());
            let result = match value.get_ref() {
                DeValue::Table(table) if is_section(&full) => {
                    self.take(&full, table);
                    Ok(())
                }
                value if section == "engine" => {
                    directives::lines(key.get_ref(), value).map(|lines| {
                        let name = key.get_ref().as_ref();
                        let lines = lines.into_iter().map(|line| (name.to_owned(), line));
                        self.file.directives.extend(lines);
                    })
                }
                value => self.set(section, &full, value, line),
            };
            if let Err(message) = result {
                self.problems.push(Problem { line, key: full, message });
            }
        }
    }

    fn set(
        &mut self,
        section: &str,
        full: &str,
        value: &DeValue<'_>,
        line: usize,
    ) -> Result<(), String> {
        let name = full.rsplit('.').next().unwrap_or_default();
        if let Some(instead) = table::refused(full)
            .or_else(|| ALIAS_SECTIONS.contains(&section).then(|| table::refused(name)).flatten())
        {
            return Err(instead.into());
        }
        let (setting, alias) = find(section, full).ok_or_else(|| unknown_key(full))?;
        let text = toml_text::of(&setting.kind, alias, value)?;
        let value = match alias {
            Some(alias) => alias.parse(setting, &text),
            None => setting.parse(&text),
        };
        let value = value.map_err(|why| toml_text::expected(&setting.kind, alias, why, setting))?;
        if !setting.has(self.file.values.program()) {
            return Ok(()); // only checked: this program does not use it
        }
        let set = self.file.values.set(setting, value, Origin::File { line });
        set.map_err(|contradiction| contradiction.to_string())
    }

    fn line(&self, offset: usize) -> usize {
        1 + self.text[..offset.min(self.text.len())].matches('\n').count()
    }
}

/// Returns the name of a key with its section, such as `network.rdma.busy_poll_us`.
fn full_name(section: &str, name: &str) -> String {
    if section.is_empty() { name.into() } else { format!("{section}.{name}") }
}

/// Returns the keys of all settings that the file may have.
fn keys() -> impl Iterator<Item = &'static str> {
    table::all().map(|setting| setting.key).filter(|key| !key.is_empty())
}

fn is_section(name: &str) -> bool {
    let refused = table::REFUSED.iter().map(|(key, _)| *key);
    name == "engine"
        || keys()
            .chain(refused)
            .any(|key| key.rsplit_once('.').is_some_and(|(section, _)| section == name))
}

fn find(section: &str, full: &str) -> Option<(&'static Setting, Option<&'static Alias>)> {
    if let Some(setting) = table::all().find(|setting| setting.key == full) {
        return Some((setting, None));
    }
    let name = full.rsplit('.').next().filter(|_| ALIAS_SECTIONS.contains(&section))?;
    // brpc has all its names in one place, so `rdma_port` may stand in [network.rdma].
    let beside = format!("network.{name}");
    let is_beside = |setting: &&Setting| name.starts_with("rdma_") && setting.key == beside;
    if let Some(setting) = table::all().find(is_beside) {
        return Some((setting, None));
    }
    table::all().find_map(|setting| {
        let alias = setting.aliases.iter().find(|alias| alias.name == name)?;
        Some((setting, Some(alias)))
    })
}

/// Returns the text for a syntax error. `at` is the part of the file that is wrong. It may be a
/// value, such as a password without quotes. So the text names it only if it is a key.
fn syntax_error(message: &str, at: Option<&str>) -> String {
    match at {
        Some(key) if message.starts_with(DUPLICATE) && is_key(key) => format!("{DUPLICATE} {key}"),
        _ if message.starts_with("string values must be quoted") => {
            "expected a value: strings need quotes".into()
        }
        _ => message.replace('\n', " "),
    }
}

/// Returns whether a text may be a key, so that a syntax error can name it.
fn is_key(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.\"".contains(c))
}

/// Returns the error for an unknown key. It suggests the key that was probably meant.
fn unknown_key(full: &str) -> String {
    let name = full.rsplit('.').next().unwrap_or_default();
    let section = full.rsplit_once('.').map_or("", |(section, _)| section);
    // The likeliest mistakes: the name of the flag, hyphens, and the wrong section.
    let plain = name.replace('-', "_").to_ascii_lowercase();
    let is_meant = |setting: &&Setting| {
        let flag = setting.name.replace('-', "_");
        [setting.short_key(), flag.as_str()].contains(&plain.as_str())
    };
    let all = || table::all().filter(|setting| !setting.key.is_empty());
    let in_section = |setting: &&Setting| {
        setting.key.rsplit_once('.').is_some_and(|(known, _)| known == section)
    };
    let meant = all().filter(is_meant).find(in_section).or_else(|| all().find(is_meant));
    if let Some(setting) = meant {
        return format!("unknown key; write {}", setting.key);
    }
    let most = 1 + plain.len() / 4;
    let near = |of: &dyn Fn(&&Setting) -> bool| {
        let near = all().filter(of).map(|setting| {
            let flag = setting.name.replace('-', "_");
            (distance(setting.short_key(), &plain).min(distance(&flag, &plain)), setting.key)
        });
        // The start of a name counts as one change: `busy_poll` for `busy_poll_us`.
        let near = near.map(|(changes, key)| {
            let short = key.rsplit('.').next().unwrap_or_default();
            let starts = plain.len() > 3 && short.starts_with(&plain);
            (if starts { 1 } else { changes }, key)
        });
        near.filter(|(changes, _)| *changes <= most).min().map(|(_, key)| key)
    };
    let sections = keys().filter_map(|key| key.rsplit_once('.').map(|(section, _)| section));
    let sections = sections.chain(["engine"]);
    let found =
        near(&in_section).or_else(|| nearest_within(full, sections, 2)).or_else(|| near(&|_| true));
    match found {
        Some(nearest) => format!("unknown key; the nearest known one is {nearest}"),
        None => "unknown key; `ferrite config --json` lists all keys".into(),
    }
}

#[cfg(test)]
mod tests;
