//! `ferrite config`: shows settings with their origins, checks files, and prints the schema and the
//! reference page.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::{Args, Subcommand, ValueEnum};
use ferrite_config::{
    Origin, Program, Values, exit_code, file, find, nearest, reference, schema, table,
};
use serde_json::{Value, json};

use crate::{output, settings};

/// Show every setting with its value and its origin, or check a file
///
/// A value comes from the default, the file, the environment (FERRITE_NAME) or a flag; a later one
/// takes precedence.
#[derive(Args)]
#[command(after_help = HELP, args_conflicts_with_subcommands = true)]
pub(crate) struct Options {
    #[command(subcommand)]
    action: Option<Action>,
    /// The program whose settings to show
    #[arg(long, value_name = "PROGRAM", value_enum, default_value_t = Of::Server)]
    program: Of,
    /// The configuration file (ferrite.toml) to read
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Flags of the program, or arguments of the module: a name, its value, the next name, …
    #[arg(last = true, value_name = "FLAGS")]
    flags: Vec<String>,
}

const HELP: &str = "\
Examples:
  ferrite config                                         what `ferrite server` uses by default
  ferrite config --program gateway --config ferrite.toml -- --busy-poll-us 50
  ferrite config check /etc/ferrite.toml                 all errors of a file
  ferrite config schema > ferrite.schema.json            for editors

JSON: {program, settings[{name, key, value, origin, line?, variable, default, expected,
  takes_effect, memory, meaning}]}.
  check: {file, problems[{line, key, message}]}; exit code 2 if there are problems.";

#[derive(Subcommand)]
enum Action {
    /// Check a file and print all its errors
    Check {
        /// The file
        file: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Print the JSON schema of ferrite.toml
    Schema,
    /// Print the tables of the reference page, or write them into FILE
    Reference {
        /// A page with two marker lines, between which the tables are written
        file: Option<PathBuf>,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum Of {
    Module,
    Gateway,
    Server,
    Relay,
    Agent,
}

impl From<Of> for Program {
    fn from(of: Of) -> Self {
        match of {
            Of::Module => Self::Module,
            Of::Gateway => Self::Gateway,
            Of::Server => Self::Server,
            Of::Relay => Self::Relay,
            Of::Agent => Self::Agent,
        }
    }
}

impl Options {
    /// Returns whether to print failures as JSON.
    pub(crate) fn json(&self) -> bool {
        self.json || matches!(self.action, Some(Action::Check { json: true, .. }))
    }
}

pub(crate) fn run(options: &Options) -> anyhow::Result<ExitCode> {
    match &options.action {
        None => show(options)?,
        Some(Action::Check { file, json }) => return check(file, *json),
        Some(Action::Schema) => output::print_json(&schema::schema())?,
        Some(Action::Reference { file: None }) => output::write(&reference::markdown())?,
        Some(Action::Reference { file: Some(file) }) => {
            let name = file.display();
            let page = std::fs::read_to_string(file).with_context(|| name.to_string())?;
            let Some(new) = reference::replace_in(&page) else {
                bail!(
                    "{name} needs the line {:?} and below it {:?}",
                    reference::BEGIN,
                    reference::END
                );
            };
            std::fs::write(file, new).with_context(|| name.to_string())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn show(options: &Options) -> anyhow::Result<()> {
    let mut values = settings::read(options.program.into(), options.config.as_deref())?;
    settings::warn_of_unknown_variables();
    set_flags(&mut values, &options.flags)?;
    settings::check(&values)?;
    if options.json {
        let settings: Vec<_> = values.iter().map(|(setting, _)| entry(&values, setting)).collect();
        let all = json!({"program": values.program().name(), "settings": settings});
        output::print_json(&all)?;
    } else {
        output::write(&text(&values, options.config.as_deref()))?;
    }
    Ok(())
}

/// Sets the settings in `words`, which alternate between names and values. Names may start with
/// `--`.
fn set_flags(values: &mut Values, words: &[String]) -> anyhow::Result<()> {
    for pair in words.chunks(2) {
        let name = pair[0].trim_start_matches("--");
        let [_, text] = pair else { bail!("{name} has no value") };
        if let Some(instead) = table::refused(name) {
            bail!("{name}: {instead}");
        }
        let program = values.program();
        let Some((setting, alias)) = find(program, name) else {
            let known = program.settings().map(|setting| setting.name);
            match nearest(name, known) {
                Some(near) => bail!("unknown setting {name}; the nearest known one is {near}"),
                None => bail!("unknown setting {name}"),
            }
        };
        let set = values.set_text(setting, alias, text, Origin::Flag);
        set.map_err(|why| anyhow::anyhow!("{name} {text}: {why}"))?;
    }
    Ok(())
}

fn entry(values: &Values, setting: &ferrite_config::Setting) -> Value {
    let current = values.entry(setting);
    let mut entry = json!({
        "name": setting.name,
        "key": setting.key,
        "value": current.value.as_ref().map(ToString::to_string),
        "origin": current.origin.name(),
        "variable": setting.variable(),
        "default": setting.default_in(values.program()),
        "expected": setting.expected(),
        "takes_effect": setting.takes_effect.name(),
        "memory": setting.memory,
        "meaning": setting.meaning,
    });
    if let Origin::File { line } = current.origin {
        entry["line"] = json!(line);
    }
    entry
}

/// Returns a line for each setting: name, value, origin.
fn text(values: &Values, file: Option<&Path>) -> String {
    let file = file.map(|file| file.display().to_string()).unwrap_or_default();
    let lines = values.iter().map(|(setting, entry)| {
        let value = match entry.value.as_ref().map(ToString::to_string) {
            None => "unset".into(),
            Some(value) if value.is_empty() => "(empty)".into(),
            Some(value) => value,
        };
        let origin = match &entry.origin {
            Origin::File { line } => format!("{file}:{line}"),
            Origin::Environment => setting.variable(),
            other => other.name().into(),
        };
        (setting.name, value, origin)
    });
    let lines: Vec<_> = lines.collect();
    let width = |of: fn(&(&str, String, String)) -> usize| lines.iter().map(of).max().unwrap_or(0);
    let (name, value) = (width(|line| line.0.len()), width(|line| line.1.len()));
    let lines = lines.iter().map(|(n, v, origin)| format!("{n:name$}  {v:value$}  {origin}\n"));
    lines.collect()
}

fn check(path: &Path, json: bool) -> anyhow::Result<ExitCode> {
    let name = path.display().to_string();
    let text = settings::read_file(path)?;
    let problems = file::read_unit(&text, |_| Ok(())).err().unwrap_or_default();
    if json {
        let list: Vec<_> = problems
            .iter()
            .map(|problem| {
                json!({"line": problem.line, "key": problem.key, "message": problem.message})
            })
            .collect();
        output::print_json(&json!({"file": name, "problems": list}))?;
    } else if problems.is_empty() {
        output::write(&format!("{name}: valid\n"))?;
    } else {
        output::write(&format!("{}\n", settings::list(&name, &problems)))?;
    }
    Ok(ExitCode::from(match problems.is_empty() {
        true => exit_code::SUCCESS,
        false => exit_code::USAGE,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shows_every_setting_with_its_origin() {
        for program in Program::ALL {
            let mut values = Values::new(program);
            let words = ["--send-queue-depth", "64", "rdma_cqe_poll_once", "8", "rdma-device", ""];
            let words = words.map(String::from);
            set_flags(&mut values, &words).expect("valid");
            let shown = text(&values, None);
            assert_eq!(shown.lines().count(), program.settings().count());
            let line = |name: &str| {
                let found = shown.lines().find(|line| line.starts_with(name)).expect(name);
                found.split_whitespace().map(String::from).collect::<Vec<_>>()
            };
            assert_eq!(line("send-queue-depth"), ["send-queue-depth", "64", "flag"]);
            assert_eq!(line("poll-batch"), ["poll-batch", "8", "flag"]);
            assert_eq!(line("cq-size"), ["cq-size", "16384", "default"]);
            assert_eq!(line("rdma-device "), ["rdma-device", "(empty)", "flag"]);
        }
    }

    #[test]
    fn wrong_flags_are_explained() {
        let wrong = |words: &[&str]| {
            let words: Vec<_> = words.iter().copied().map(String::from).collect();
            let mut values = Values::new(Program::Module);
            set_flags(&mut values, &words).expect_err("wrong").to_string()
        };
        assert_eq!(
            wrong(&["rdma-prot", "1"]),
            "unknown setting rdma-prot; the nearest known one is rdma-port"
        );
        assert!(wrong(&["rdma_max_sge", "0"]).contains("recv_buffer_size"));
        assert_eq!(wrong(&["cq-size"]), "cq-size has no value");
    }
}
