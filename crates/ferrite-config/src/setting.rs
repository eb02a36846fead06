//! A setting: its names, its type, and where it applies.

use crate::kind::Kind;
use crate::value::Value;

/// A program that has settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Program {
    /// `ferrite.so`, loaded by an engine.
    Module,
    /// `ferrite gateway`
    Gateway,
    /// `ferrite server`, which passes most settings on to the module.
    Server,
    /// `ferrite relay`
    Relay,
    /// `ferrite agent`
    Agent,
}

impl Program {
    /// All programs.
    pub const ALL: [Self; 5] =
        [Self::Module, Self::Gateway, Self::Server, Self::Relay, Self::Agent];

    /// Returns the name for people, such as `gateway`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Module => "module",
            Self::Gateway => "gateway",
            Self::Server => "server",
            Self::Relay => "relay",
            Self::Agent => "agent",
        }
    }
}

/// When a new value takes effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TakesEffect {
    /// When the program starts.
    AtStart,
    /// At once. CONFIG SET (in the module) or SIGHUP (in other programs) may change the value.
    AtOnce,
    /// For clients that connect from then on. CONFIG SET (in the module) or SIGHUP (in the other
    /// programs) may change it.
    ForNewClients,
}

impl TakesEffect {
    /// Returns a description for people, such as `at start`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AtStart => "at start",
            Self::AtOnce => "at once",
            Self::ForNewClients => "for new clients",
        }
    }
}

/// Another name of a setting, as other RDMA software spells it.
#[derive(Debug, Clone, Copy)]
pub struct Alias {
    /// The name, as the other software spells it.
    pub name: &'static str,
    /// How values under this name are written.
    pub form: AliasForm,
}

/// How the value under another name is written.
#[derive(Debug, Clone, Copy)]
pub enum AliasForm {
    /// The value is written like the values of the setting itself.
    Same,
    /// The value is a number of mebibytes.
    Mebibytes,
    /// The value is one of these words, each with the value of the setting that it stands for.
    Words(&'static [(&'static str, &'static str)]),
}

/// A setting.
#[derive(Debug)]
pub struct Setting {
    /// The name as an argument of the module, in CONFIG (`ferrite.<name>`) and as a flag.
    pub name: &'static str,
    /// The key in `ferrite.toml`, with the sections. Empty if the file does not have the setting.
    pub key: &'static str,
    /// The names in other RDMA software.
    pub aliases: &'static [Alias],
    /// The type of the value.
    pub kind: Kind,
    /// The default, as text. Empty if the setting is unset by default.
    pub default: &'static str,
    /// Defaults of single programs that differ.
    pub other_defaults: &'static [(Program, &'static str)],
    /// The programs that have the setting.
    pub programs: &'static [Program],
    /// When a new value takes effect.
    pub takes_effect: TakesEffect,
    /// Whether the module registers the setting with the engine's CONFIG.
    pub in_config: bool,
    /// The memory that the setting may cost at worst. Empty if it costs none worth mentioning.
    pub memory: &'static str,
    /// What the setting does.
    pub meaning: &'static str,
}

impl Setting {
    /// Returns whether a program has this setting.
    #[must_use]
    pub fn has(&self, program: Program) -> bool {
        self.programs.contains(&program)
    }

    /// Returns the default in a program, as text; empty if there is none.
    #[must_use]
    pub fn default_in(&self, program: Program) -> &'static str {
        let other = self.other_defaults.iter().find(|(other, _)| *other == program);
        other.map_or(self.default, |(_, default)| default)
    }

    /// Returns the last part of the key in the file: the name without its section.
    #[must_use]
    pub fn short_key(&self) -> &'static str {
        self.key.rsplit('.').next().unwrap_or_default()
    }

    /// Returns the name of the environment variable, such as `FERRITE_BUSY_POLL_US`.
    #[must_use]
    pub fn variable(&self) -> String {
        format!("FERRITE_{}", self.name.replace('-', "_").to_ascii_uppercase())
    }

    /// Parses a value.
    ///
    /// # Errors
    /// Returns an error that says what was expected.
    pub fn parse(&self, text: &str) -> Result<Value, String> {
        Value::parse(&self.kind, text)
    }

    /// Describes the values that the setting may have.
    #[must_use]
    pub fn expected(&self) -> String {
        self.kind.expected()
    }
}

impl Alias {
    /// Parses a value that was given under this name.
    ///
    /// # Errors
    /// Returns an error that says what was expected.
    pub fn parse(&self, setting: &Setting, text: &str) -> Result<Value, String> {
        match self.form {
            AliasForm::Same => setting.parse(text),
            AliasForm::Mebibytes => match text.parse::<u32>() {
                Ok(number) => setting.parse(&format!("{number}mb")),
                Err(_) => Err("expected a number of mebibytes".into()),
            },
            AliasForm::Words(words) => match words.iter().find(|(word, _)| *word == text) {
                Some((_, meant)) => setting.parse(meant),
                None => {
                    let words: Vec<_> = words.iter().map(|(word, _)| *word).collect();
                    Err(format!("expected {}", words.join(" or ")))
                }
            },
        }
    }
}
