//! The flags of a command that the table of settings defines. Combines them with the environment
//! and a file into values.

use std::fmt;
use std::marker::PhantomData;
use std::path::Path;

use clap::error::Error;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use ferrite_config::time::Unit;
use ferrite_config::{Alias, Kind, Origin, Program, Setting, Values, environment, file};

/// A command that has settings.
pub(crate) trait HasSettings {
    const PROGRAM: Program;
}

/// `ferrite gateway`
pub(crate) struct GatewayProgram;
/// `ferrite relay`
pub(crate) struct RelayProgram;
/// `ferrite agent`
pub(crate) struct AgentProgram;

impl HasSettings for GatewayProgram {
    const PROGRAM: Program = Program::Gateway;
}

impl HasSettings for RelayProgram {
    const PROGRAM: Program = Program::Relay;
}

impl HasSettings for AgentProgram {
    const PROGRAM: Program = Program::Agent;
}

/// Settings that are wrong: in a file, in the environment or in flags. The message may have several
/// lines.
#[derive(Debug)]
pub(crate) struct WrongSettings(pub(crate) String);

impl fmt::Display for WrongSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongSettings {}

/// The flags that were given.
pub(crate) struct Flags<P> {
    given: Vec<(&'static Setting, Option<&'static Alias>, String)>,
    program: PhantomData<P>,
}

impl<P: HasSettings> Flags<P> {
    /// Returns the values of all settings: the defaults, then the file, the environment, the flags.
    pub(crate) fn values(&self, file: Option<&Path>) -> anyhow::Result<Values> {
        let mut values = read(P::PROGRAM, file)?;
        for (setting, alias, text) in &self.given {
            let set = values.set_text(setting, *alias, text, Origin::Flag);
            let name = alias.map_or(setting.name, |alias| alias.name);
            set.map_err(|why| WrongSettings(format!("--{name} {text}: {why}")))?;
        }
        check(&values)?;
        Ok(values)
    }
}

/// Reads the text of a configuration file.
pub(crate) fn read_file(path: &Path) -> Result<String, WrongSettings> {
    std::fs::read_to_string(path)
        .map_err(|error| WrongSettings(format!("cannot read {}: {error}", path.display())))
}

/// Reads a file and the environment.
pub(crate) fn read(program: Program, path: Option<&Path>) -> anyhow::Result<Values> {
    let mut values = match path {
        None => Values::new(program),
        Some(path) => {
            let text = read_file(path)?;
            let wrong = |problems: Vec<_>| list(&path.display().to_string(), &problems);
            file::read(program, &text).map_err(|problems| WrongSettings(wrong(problems)))?.values
        }
    };
    read_environment(&mut values)?;
    Ok(values)
}

/// Applies the settings that environment variables give.
pub(crate) fn read_environment(values: &mut Values) -> anyhow::Result<()> {
    let variable = |name: &str| std::env::var(name).ok();
    Ok(values.set_from_environment(variable).map_err(WrongSettings)?)
}

/// Warns of environment variables whose names are nearly those of settings.
pub(crate) fn warn_of_unknown_variables() {
    let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        Some((name.into_string().ok()?, value.to_string_lossy().into_owned()))
    };
    for warning in environment::warnings(std::env::vars_os().filter_map(text)) {
        match crate::log::is_installed() {
            true => tracing::warn!("{warning}"),
            false => eprintln!("ferrite: {warning}"),
        }
    }
}

/// Checks that the values do not contradict each other.
pub(crate) fn check(values: &Values) -> anyhow::Result<()> {
    let Err(wrong) = values.check() else { return Ok(()) };
    let wrong: Vec<_> =
        wrong.iter().map(|(setting, why)| format!("{}: {why}", setting.name)).collect();
    Err(WrongSettings(wrong.join("\n")).into())
}

/// Formats the errors of a file, one on each line.
pub(crate) fn list(name: &str, problems: &[file::Problem]) -> String {
    let lines: Vec<_> = problems.iter().map(|problem| format!("{name}:{problem}")).collect();
    lines.join("\n")
}

impl<P: HasSettings> FromArgMatches for Flags<P> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let mut given = Vec::new();
        let mut take = |id: &'static str, setting, alias| {
            if matches.value_source(id) == Some(ValueSource::CommandLine)
                && let Some(texts) = matches.get_many::<String>(id)
            {
                // Only the flags of lists may be given several times.
                let texts: Vec<_> = texts.map(String::as_str).collect();
                given.push((setting, alias, texts.join(",")));
            }
        };
        for setting in P::PROGRAM.settings() {
            take(setting.name, setting, None);
            for alias in setting.aliases {
                take(alias.name, setting, Some(alias));
            }
        }
        Ok(Self { given, program: PhantomData })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl<P: HasSettings> Args for Flags<P> {
    fn augment_args(command: Command) -> Command {
        P::PROGRAM.settings().fold(command, |command, setting| {
            let command = command.arg(flag(setting, P::PROGRAM));
            setting.aliases.iter().fold(command, |command, alias| {
                let check = move |text: &str| alias.parse(setting, text).map(|_| text.to_owned());
                let arg = Arg::new(alias.name).long(alias.name).hide(true);
                command.arg(arg.value_parser(check).allow_hyphen_values(true))
            })
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// Returns the flag of a setting, with its unit, range and default.
fn flag(setting: &'static Setting, program: Program) -> Arg {
    let meaning = setting.meaning;
    let first = meaning.split_inclusive(". ").next().unwrap_or_default();
    let first = first.trim_end().trim_end_matches('.');
    let range = match (setting.kind, setting.kind.range()) {
        (Kind::Choice(choices), _) => format!("; one of {}", choices.join(", ")),
        (_, range) if range.is_empty() => range,
        (_, range) => format!(", {range}"),
    };
    let default = match setting.default_in(program) {
        "" => String::new(),
        default => format!(" (default {default}{range})"),
    };
    let unit = match setting.kind {
        Kind::Switch => "YES_OR_NO",
        Kind::Number { .. } => "NUMBER",
        Kind::Size { .. } => "SIZE",
        Kind::Time { bare: Some(Unit::Microseconds), .. } => "MICROSECONDS",
        Kind::Time { bare: Some(Unit::Milliseconds), .. } => "MILLISECONDS",
        Kind::Time { bare: Some(Unit::Seconds), .. } => "SECONDS",
        Kind::Time { bare: None, .. } => "TIME",
        Kind::Choice(_) => "CHOICE",
        Kind::Text(_) => "ADDRESS",
        Kind::List(_) => "NAMES",
    };
    let check = move |text: &str| setting.parse(text).map(|_| text.to_owned());
    let action = match setting.kind {
        Kind::List(_) => ArgAction::Append,
        _ => ArgAction::Set,
    };
    Arg::new(setting.name)
        .long(setting.name)
        .action(action)
        .value_name(unit)
        .help(format!("{first}{default}"))
        .long_help(format!("{meaning}{default}"))
        .value_parser(check)
        .allow_hyphen_values(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use ferrite_config::table;

    #[derive(Parser)]
    struct Gateway {
        #[command(flatten)]
        flags: Flags<GatewayProgram>,
    }

    fn values(words: &[&str]) -> Result<Values, String> {
        let words = std::iter::once("gateway").chain(words.iter().copied());
        let parsed = Gateway::try_parse_from(words).map_err(|error| error.to_string())?;
        parsed.flags.values(None).map_err(|error| error.to_string())
    }

    /// Returns a value that the setting accepts, usually not the default.
    fn other_value(setting: &Setting) -> String {
        match setting.kind {
            Kind::Switch if setting.default == "yes" => "no".into(),
            Kind::Switch => "yes".into(),
            Kind::Number { min, max } => {
                let other = if setting.default == max.to_string() { min } else { max };
                other.to_string()
            }
            Kind::Size { min, .. } => min.to_string(),
            Kind::Time { max, .. } => ferrite_config::time::format(max),
            Kind::Choice(choices) => (*choices.last().expect("choices")).into(),
            Kind::Text(_) => "192.0.2.1:7000".into(),
            Kind::List(_) => "a,b".into(),
        }
    }

    #[test]
    fn every_setting_and_every_alias_has_a_flag() {
        let command = Flags::<GatewayProgram>::augment_args(Command::new("gateway"));
        for setting in Program::Gateway.settings() {
            let names = setting.aliases.iter().map(|alias| alias.name).chain([setting.name]);
            for name in names {
                let found = command.get_arguments().any(|arg| arg.get_long() == Some(name));
                assert!(found, "--{name}");
            }
            let text = other_value(setting);
            let flag = format!("--{}", setting.name);
            let matches = Gateway::try_parse_from(["gateway", &flag, &text]);
            let given =
                matches.unwrap_or_else(|error| panic!("{flag} {text}: {error}")).flags.given;
            assert!(std::ptr::eq(given[0].0, setting) && given[0].2 == text, "{flag}");
        }
    }

    #[test]
    fn flags_override_the_default_and_have_units() {
        let values =
            values(&["--rx-size", "1mb", "--rdma_sq_size", "64", "--rdma-gid-index", "-1"]);
        let values = values.expect("valid flags");
        assert_eq!(values.size::<u32>(&table::RX_SIZE), 1 << 20);
        assert_eq!(values.number::<u32>(&table::SEND_QUEUE_DEPTH), 64);
        assert_eq!(values.entry(&table::RX_SIZE).origin, Origin::Flag);
    }

    #[test]
    fn flag_of_a_list_may_be_given_several_times() {
        let values = values(&["--rdma-device", "a,b", "--rdma-device", "c"]).expect("valid flags");
        assert_eq!(values.list(&table::RDMA_DEVICE), ["a", "b", "c"]);
        assert!(self::values(&["--engine", "a:1", "--engine", "b:1"]).is_err());
    }

    #[test]
    fn wrong_flags_say_what_is_expected() {
        for (words, expected) in [
            (&["--rx-size", "3mb"][..], "expected a size from 4kb to 2mb"),
            (&["--rdma", "maybe"], "expected prefer or require or forbid"),
            (&["--send-queue-depth", "64", "--rdma_sq_size", "32"], "contradicts 64"),
            (&["--rdma", "require", "--rdma-fallback", "tcp"], "contradict each other"),
            (&["--pin-memory", "no"], "always pinned"),
        ] {
            let error = values(words).expect_err("an error");
            assert!(error.contains(expected), "{words:?}: {error}");
        }
    }
}
