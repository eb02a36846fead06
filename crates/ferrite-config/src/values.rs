//! The values of all settings of a program, each with its origin.

mod transports;

use std::fmt;
use std::time::Duration;

use crate::address;
use crate::environment;
use crate::setting::{Alias, Program, Setting};
use crate::table;
use crate::value::Value;

pub(crate) use transports::asking_for;
pub use transports::{Transport, Transports};

/// Where a value comes from. A later variant takes precedence over an earlier one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The default in the table.
    Default,
    /// `ferrite.toml`, at this line.
    File {
        /// The number of the line, counted from 1.
        line: usize,
    },
    /// The environment variable [`Setting::variable`].
    Environment,
    /// A flag, an argument of the module, or CONFIG SET.
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
    /// Where the earlier value comes from.
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
    /// RDMA only.
    Require,
    /// TCP only.
    Forbid,
}

impl Policy {
    /// Returns the word for the policy in the setting `rdma`.
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
    /// Indexed like the table. Settings that the program does not have are unset.
    entries: Vec<Entry>,
}

impl Values {
    /// Returns the defaults.
    #[must_use]
    pub fn new(program: Program) -> Self {
        let entries = table::all().map(|setting| {
            let default = Some(setting.default_in(program)).filter(|text| !text.is_empty());
            let default = default.filter(|_| setting.has(program));
            // A test checks that every default parses.
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

    /// Sets a value, unless an origin of higher precedence has set it.
    ///
    /// # Errors
    /// Returns an error if the same origin has set another value.
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

    /// Replaces a value, whatever its origin: for the module's arguments and CONFIG SET.
    ///
    /// # Errors
    /// Returns an error that says what was expected, if the value is outside of the setting's
    /// limits.
    pub fn replace(&mut self, setting: &Setting, value: Value) -> Result<(), String> {
        value.check(&setting.kind)?;
        self.entries[index(setting)] = Entry { value: Some(value), origin: Origin::Flag };
        Ok(())
    }

    /// Parses a value and sets it, as [`Values::set`] does.
    ///
    /// # Errors
    /// Returns an error that says what was expected, if the text is no value of this setting. If
    /// the same origin has set another value before, returns an error that names that value.
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

    /// Sets the values that environment variables have. `variable` returns the value of a variable.
    /// Variables that Kubernetes sets for a Service are ignored.
    ///
    /// # Errors
    /// Returns an error that names the variable and says what was expected.
    pub fn set_from_environment(
        &mut self,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<(), String> {
        for setting in self.program.settings() {
            let name = setting.variable();
            let Some(text) = variable(&name) else { continue };
            if environment::is_of_kubernetes(&name, &text) {
                continue;
            }
            let set = self.set_text(setting, None, &text, Origin::Environment);
            set.map_err(|why| format!("environment variable {name}={text:?}: {why}"))?;
        }
        Ok(())
    }

    /// Returns whether the value was set, even if it is the same as the default.
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

    /// Returns whether links may, must or must not use RDMA. An agent must use it if replication or
    /// the cluster must.
    ///
    /// # Errors
    /// Returns an error that says how the settings contradict each other.
    pub fn policy(&self) -> Result<Policy, String> {
        let is_required = self.program == Program::Agent && Transports::of(self).require_rdma();
        let stricter = |policy| match policy {
            Policy::Prefer if is_required => Policy::Require,
            policy => policy,
        };
        self.own_policy().map(stricter)
    }

    /// Returns the policy without those of replication and the cluster. Three settings decide it:
    /// `rdma`, `rdma_enabled` and `rdma_fallback`. Only those from the origin with the highest
    /// precedence count: a flag overrides all three in the file.
    pub(crate) fn own_policy(&self) -> Result<Policy, String> {
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

    /// Sets `rdma` to the policy that the three settings give together, and unsets the other two.
    ///
    /// # Errors
    /// Returns an error if the settings contradict each other.
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

    /// Checks what the parser of a single setting cannot, such as values that contradict each
    /// other.
    ///
    /// # Errors
    /// Returns all errors, each with the setting that should change.
    pub fn check(&self) -> Result<(), Vec<(&'static Setting, String)>> {
        let mut wrong = Vec::new();
        if let Err(why) = self.policy() {
            wrong.push((&table::RDMA, why));
        }
        if self.program == Program::Agent
            && self.policy() == Ok(Policy::Require)
            && self.text(&table::DIRECT) == Some("allow")
        {
            let why = "`allow` is for connections over TCP, but `rdma require`, or a transport \
                       `rdma` of replication or the cluster, allows none; use `refuse`";
            wrong.push((&table::DIRECT, why.into()));
        }
        if table::REPLICATION_TRANSPORT.has(self.program) {
            wrong.extend(transports::check(self));
        }
        if self.program == Program::Server && self.listen_port() == Some(0) {
            let why = "the module uses one port for all addresses: give each address the same \
                       port from 1 to 65535, or no port";
            wrong.push((&table::LISTEN, why.into()));
        }
        if let Some(word) = self.list(&table::BIND).iter().find(|word| !is_bind_address(word)) {
            let why = format!(
                "{word:?} is not an address: expected IP addresses or names without ports, * or \
                 ::*; with - before an address, the engine starts even if this host lacks it"
            );
            wrong.push((&table::BIND, why));
        }
        if table::PIN_MEMORY.has(self.program) && !self.switch(&table::PIN_MEMORY) {
            let why = "memory that a device accesses is always pinned; to pin no memory, forbid \
                       RDMA (`rdma forbid`, or rdma_enabled = false in ferrite.toml)";
            wrong.push((&table::PIN_MEMORY, why.into()));
        }
        if table::MEMORY_POOL_MAX.has(self.program) {
            wrong.extend(self.check_memory());
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong) }
    }

    /// Returns the port of the addresses in `listen`, or 0 if their ports differ. Returns `None` if
    /// `listen` is unset.
    #[must_use]
    pub fn listen_port(&self) -> Option<u16> {
        let text = self.text(&table::LISTEN)?;
        let ports = address::words(text).filter_map(address::split);
        let mut ports = ports.map(|(_, port)| port.unwrap_or(table::CLIENT_PORT));
        let first = ports.next()?;
        Some(if ports.all(|port| port == first) { first } else { 0 })
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
        if self.is_given(&table::MEMORY_POOL_MAX)
            && let Some(why) = self.too_few_regions(max, reserve)
        {
            wrong.push((&table::MEMORY_POOL_MAX, why));
        }
        let buffers: u64 = self.number(&table::RECV_BUFFER_POOL_SIZE);
        let block = table::BLOCKS.into_iter().find(|block| *block >= buffer).unwrap_or(buffer);
        if buffers.saturating_mul(block) > reserve {
            let why = format!(
                "{buffers} buffers of {} (in blocks of {}) exceed receive-reserve, which is {}; raise \
                 receive-reserve or lower recv-buffer-size",
                format(buffer),
                format(block),
                format(reserve)
            );
            wrong.push((&table::RECV_BUFFER_POOL_SIZE, why));
        }
        wrong
    }
}

impl Values {
    /// Returns why the pool cannot grow to its maximum, if it has too few regions for that.
    fn too_few_regions(&self, max: u64, reserve: u64) -> Option<String> {
        let regions: u64 = self.number(&table::MEMORY_POOL_MAX_REGIONS);
        let step = self.size::<u64>(&table::MEMORY_POOL_INCREASE).next_multiple_of(table::CHUNK);
        let step = step.min(self.size(&table::MAX_MR_SIZE));
        // Half of the regions are for sends, half for receives.
        let largest = reserve.max(max.saturating_sub(reserve));
        let each = regions / 2;
        if each.saturating_mul(step) >= largest {
            return None;
        }
        let enough = 2 * largest.div_ceil(step);
        let format = crate::size::format;
        Some(format!(
            "the pool cannot grow that far: sends and receives may each have {each} regions of {}, \
             which is {}, but the larger of the two needs {}; raise memory-pool-max-regions to \
             {enough}, or raise memory-pool-increase",
            format(step),
            format(each * step),
            format(largest)
        ))
    }
}

/// Returns whether the engine's `bind` accepts a word.
fn is_bind_address(word: &str) -> bool {
    let word = word.strip_prefix('-').unwrap_or(word);
    matches!(word, "*" | "::*") || address::host(word).is_some()
}

fn index(setting: &Setting) -> usize {
    let same = |known: &'static Setting| std::ptr::eq(known, setting);
    table::all().position(same).expect("a setting of the table")
}

#[cfg(test)]
mod tests;
