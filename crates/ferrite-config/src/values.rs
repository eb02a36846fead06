//! The values of all settings of a program, each with its origin.

use std::fmt;
use std::time::Duration;

use crate::setting::{Alias, Program, Setting};
use crate::table;
use crate::value::Value;

/// Where a value comes from. A later one takes precedence over an earlier one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The table.
    Default,
    /// `ferrite.toml`, at this line.
    File {
        /// Counted from 1.
        line: usize,
    },
    /// The environment variable [`Setting::variable`].
    Environment,
    /// A flag, or an argument of the module.
    Flag,
}

impl Origin {
    fn rank(&self) -> u8 {
        match self {
            Self::Default => 0,
            Self::File { .. } => 1,
            Self::Environment => 2,
            Self::Flag => 3,
        }
    }

    /// Returns the kind of origin in one word.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::File { .. } => "file",
            Self::Environment => "environment",
            Self::Flag => "flag",
        }
    }
}

/// A setting with its current value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// `None` if the setting is unset.
    pub value: Option<Value>,
    /// Where the value comes from.
    pub origin: Origin,
}

/// Two values for one setting, from the same origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contradiction {
    /// The earlier value.
    pub before: String,
    /// Where it comes from.
    pub origin: Origin,
}

impl fmt::Display for Contradiction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "contradicts {}", self.before)?;
        match self.origin {
            Origin::File { line } => write!(f, " in line {line}; remove one"),
            _ => f.write_str(", which was given earlier; remove one"),
        }
    }
}

/// Whether links may use RDMA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// RDMA where it works, else TCP.
    Prefer,
    /// RDMA or nothing.
    Require,
    /// TCP only.
    Forbid,
}

impl Policy {
    /// Returns the word for it, as in the setting `rdma`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefer => "prefer",
            Self::Require => "require",
            Self::Forbid => "forbid",
        }
    }
}

/// The values of all settings of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Values {
    program: Program,
    /// Indexed like the table. Those of other programs are unset.
    entries: Vec<Entry>,
}

impl Values {
    /// Returns the defaults.
    #[must_use]
    pub fn new(program: Program) -> Self {
        let entries = table::all().map(|setting| {
            let default = Some(setting.default_in(program)).filter(|text| !text.is_empty());
            let default = default.filter(|_| setting.has(program));
            // A test holds that every default parses.
            let value = default.and_then(|text| setting.parse(text).ok());
            Entry { value, origin: Origin::Default }
        });
        Self { program, entries: entries.collect() }
    }

    /// Returns the program whose values these are.
    #[must_use]
    pub fn program(&self) -> Program {
        self.program
    }

    /// Returns the value of a setting with its origin.
    #[must_use]
    pub fn entry(&self, setting: &Setting) -> &Entry {
        &self.entries[index(setting)]
    }

    /// Returns all settings of the program with their values.
    pub fn iter(&self) -> impl Iterator<Item = (&'static Setting, &Entry)> {
        let all = table::all().zip(&self.entries);
        all.filter(|(setting, _)| setting.has(self.program))
    }

    /// Sets a value, unless a later origin has set it.
    ///
    /// # Errors
    /// The same origin has set another value.
    pub fn set(
        &mut self,
        setting: &Setting,
        value: Value,
        origin: Origin,
    ) -> Result<(), Contradiction> {
        let entry = &mut self.entries[index(setting)];
        match (origin.rank().cmp(&entry.origin.rank()), &entry.value) {
            (std::cmp::Ordering::Less, _) => {}
            (std::cmp::Ordering::Equal, Some(before)) if *before != value => {
                let (before, origin) = (before.to_string(), entry.origin.clone());
                return Err(Contradiction { before, origin });
            }
            _ => *entry = Entry { value: Some(value), origin },
        }
        Ok(())
    }

    /// Replaces a value, whatever its origin: for CONFIG SET.
    ///
    /// # Errors
    /// The value is outside of the setting's limits; the text says what was expected.
    pub fn replace(&mut self, setting: &Setting, value: Value) -> Result<(), String> {
        value.check(&setting.kind)?;
        self.entries[index(setting)] = Entry { value: Some(value), origin: Origin::Flag };
        Ok(())
    }

    /// Parses a value and sets it.
    ///
    /// # Errors
    /// The text says what was expected.
    pub fn set_text(
        &mut self,
        setting: &Setting,
        alias: Option<&Alias>,
        text: &str,
        origin: Origin,
    ) -> Result<(), String> {
        let value = match alias {
            Some(alias) => alias.parse(setting, text)?,
            None => setting.parse(text)?,
        };
        self.set(setting, value, origin).map_err(|contradiction| contradiction.to_string())
    }

    /// Sets what the environment has. `variable` returns the value of an environment variable.
    ///
    /// # Errors
    /// The text names the variable and says what was expected.
    pub fn set_from_environment(
        &mut self,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<(), String> {
        for setting in self.program.settings() {
            let name = setting.variable();
            let Some(text) = variable(&name) else { continue };
            let set = self.set_text(setting, None, &text, Origin::Environment);
            set.map_err(|why| format!("environment variable {name}={text:?}: {why}"))?;
        }
        Ok(())
    }

    /// Returns whether the setting has a value that is not the default.
    #[must_use]
    pub fn is_given(&self, setting: &Setting) -> bool {
        self.entry(setting).origin != Origin::Default
    }

    /// Returns a switch; an unset one is off.
    #[must_use]
    pub fn switch(&self, setting: &Setting) -> bool {
        matches!(self.entry(setting).value, Some(Value::Switch(true)))
    }

    /// Returns a number in the caller's type; 0 if it is unset. The table's range must fit the
    /// type.
    #[must_use]
    pub fn number<T: TryFrom<i64> + Default>(&self, setting: &Setting) -> T {
        match self.entry(setting).value {
            Some(Value::Number(number)) => T::try_from(number).unwrap_or_default(),
            _ => T::default(),
        }
    }

    /// Returns a size in bytes; 0 if it is unset. The table's range must fit the type.
    #[must_use]
    pub fn size<T: TryFrom<u64> + Default>(&self, setting: &Setting) -> T {
        match self.entry(setting).value {
            Some(Value::Size(bytes)) => T::try_from(bytes).unwrap_or_default(),
            _ => T::default(),
        }
    }

    /// Returns a duration; zero if it is unset.
    #[must_use]
    pub fn time(&self, setting: &Setting) -> Duration {
        match self.entry(setting).value {
            Some(Value::Time(time)) => time,
            _ => Duration::ZERO,
        }
    }

    /// Returns a text or the word of a choice; `None` if it is unset.
    #[must_use]
    pub fn text(&self, setting: &Setting) -> Option<&str> {
        match &self.entry(setting).value {
            Some(Value::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// Returns the words of a list; none if it is unset.
    #[must_use]
    pub fn list(&self, setting: &Setting) -> &[String] {
        match &self.entry(setting).value {
            Some(Value::List(words)) => words,
            _ => &[],
        }
    }

    /// Returns whether links may, must or must not use RDMA. Three settings say so: `rdma`,
    /// `rdma_enabled` and `rdma_fallback`. Those of the latest origin count: a flag overrides all
    /// three in the file.
    ///
    /// # Errors
    /// They contradict each other; the text says how.
    pub fn policy(&self) -> Result<Policy, String> {
        let rank = |setting| self.entry(setting).origin.rank();
        let all = [&table::RDMA, &table::RDMA_ENABLED, &table::RDMA_FALLBACK];
        let latest = all.map(rank).into_iter().max();
        let counts = |setting| self.is_given(setting) && Some(rank(setting)) == latest;
        let given = |setting| counts(setting).then(|| self.text(setting)).flatten();
        let named = match given(&table::RDMA) {
            Some("require") => Some(Policy::Require),
            Some("forbid") => Some(Policy::Forbid),
            Some(_) => Some(Policy::Prefer),
            None => None,
        };
        let fallback = match given(&table::RDMA_FALLBACK) {
            Some("none") => Some(Policy::Require),
            Some(_) => Some(Policy::Prefer),
            None => None,
        };
        let enabled = counts(&table::RDMA_ENABLED).then(|| self.switch(&table::RDMA_ENABLED));
        match (enabled, named, fallback) {
            (_, Some(named), Some(fallback)) if named != fallback => Err(format!(
                "rdma = {:?} and rdma_fallback = {:?} contradict each other; remove one",
                named.name(),
                self.text(&table::RDMA_FALLBACK).unwrap_or_default()
            )),
            (Some(enabled), Some(named), _) if enabled == (named == Policy::Forbid) => {
                Err(format!(
                    "rdma_enabled = {enabled} and rdma = {:?} contradict each other; remove one",
                    named.name()
                ))
            }
            (Some(false), _, Some(Policy::Require)) => Err(
                "rdma_enabled = false and rdma_fallback = \"none\" contradict each other; remove \
                     one"
                .into(),
            ),
            (Some(false), ..) => Ok(Policy::Forbid),
            (_, named, fallback) => Ok(named.or(fallback).unwrap_or(Policy::Prefer)),
        }
    }

    /// Makes `rdma` say what the three settings say together, and the other two unset.
    ///
    /// # Errors
    /// They contradict each other.
    pub fn settle_policy(&mut self) -> Result<(), String> {
        let policy = self.policy()?;
        let value = Some(Value::Text(policy.name().into()));
        let given = [&table::RDMA, &table::RDMA_ENABLED, &table::RDMA_FALLBACK];
        let is_given = given.iter().any(|setting| self.is_given(setting));
        let origin = if is_given { Origin::Flag } else { Origin::Default };
        self.entries[index(&table::RDMA)] = Entry { value, origin };
        for setting in [&table::RDMA_ENABLED, &table::RDMA_FALLBACK] {
            self.entries[index(setting)] = Entry { value: None, origin: Origin::Default };
        }
        Ok(())
    }

    /// Checks what no single setting can: values that contradict each other.
    ///
    /// # Errors
    /// All of them, each with the setting that should change.
    pub fn check(&self) -> Result<(), Vec<(&'static Setting, String)>> {
        let mut wrong = Vec::new();
        if let Err(why) = self.policy() {
            wrong.push((&table::RDMA, why));
        }
        let listens_on_a_name = self.program == Program::Server
            && self.text(&table::LISTEN).is_some_and(|text| table::ip_and_port(text).is_none());
        if listens_on_a_name {
            let why = "expected one IP address of this host, with an optional port: \
                       \"192.0.2.1\" or \"[::]:6380\"";
            wrong.push((&table::LISTEN, why.into()));
        }
        if table::PIN_MEMORY.has(self.program) && !self.switch(&table::PIN_MEMORY) {
            let why = "memory that a device accesses is always pinned; to register none, forbid \
                       RDMA (rdma_enabled = false)";
            wrong.push((&table::PIN_MEMORY, why.into()));
        }
        if table::MEMORY_POOL_MAX.has(self.program) {
            wrong.extend(self.check_memory());
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong) }
    }

    fn check_memory(&self) -> Vec<(&'static Setting, String)> {
        let format = crate::size::format;
        let [initial, max, reserve, buffer] = [
            &table::MEMORY_POOL_INITIAL,
            &table::MEMORY_POOL_MAX,
            &table::RECEIVE_RESERVE,
            &table::RECV_BUFFER_SIZE,
        ]
        .map(|setting| self.size::<u64>(setting));
        let mut wrong = Vec::new();
        if initial > max {
            let why = format!("must not exceed memory-pool-max, which is {}", format(max));
            wrong.push((&table::MEMORY_POOL_INITIAL, why));
        }
        if reserve.saturating_add(table::CHUNK) > max {
            let why = format!(
                "must be at least {} below memory-pool-max, which is {}: sends need the rest",
                format(table::CHUNK),
                format(max)
            );
            wrong.push((&table::RECEIVE_RESERVE, why));
        }
        let buffers: u64 = self.number(&table::RECV_BUFFER_POOL_SIZE);
        let block = table::BLOCKS.into_iter().find(|block| *block >= buffer).unwrap_or(buffer);
        if buffers.saturating_mul(block) > reserve {
            let why = format!(
                "{buffers} buffers of {} (in blocks of {}) exceed receive-reserve, which is {}; raise it or lower \
                 recv-buffer-size",
                format(buffer),
                format(block),
                format(reserve)
            );
            wrong.push((&table::RECV_BUFFER_POOL_SIZE, why));
        }
        wrong
    }
}

fn index(setting: &Setting) -> usize {
    let same = |known: &'static Setting| std::ptr::eq(known, setting);
    table::all().position(same).expect("a setting of the table")
}

#[cfg(test)]
mod tests;
