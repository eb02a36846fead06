//! Reads and checks `ferrite.toml`. Missing keys have their defaults.
//!
//! `keys.rs` has the table of keys, `value.rs` reads single values. Errors name the line and the
//! key.

mod keys;
mod value;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ferrite_fabric::Rdma;
use toml::de::{DeTable, DeValue};

use keys::{Key, Use};
use value::Value;

/// Directives that `[engine]` may not have, and what to do instead.
const RESERVED: [(&str, &str); 11] = [
    ("bind", "set bind in [network] instead"),
    ("port", "set port in [network] instead"),
    ("unixsocket", "set unix_socket in [server] instead"),
    ("dir", "set data_dir in [server] instead"),
    ("include", "set engine_config in [server] instead"),
    ("cluster-enabled", "set enabled in [cluster] instead"),
    ("daemonize", "remove it: ferrite supervises the engine, which must stay in the foreground"),
    ("supervised", "remove it: ferrite supervises the engine and notifies systemd"),
    ("logfile", "remove it: ferrite passes the engine's log on to stderr"),
    ("pidfile", "remove it: `ferrite server --json` prints the engine's process id"),
    ("ferrite", "set the module's settings in [network] and [network.rdma] instead"),
];

/// A file that the user named, or that ferrite finds by itself.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) enum Choice {
    #[default]
    Auto,
    Path(PathBuf),
}

/// What to do when the engine fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Restart {
    No,
    OnFailure,
}

/// The settings of `ferrite server`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Config {
    pub(super) engine: Choice,
    pub(super) module: Choice,
    pub(super) engine_config: Option<PathBuf>,
    pub(super) data_dir: Option<PathBuf>,
    pub(super) runtime_dir: Option<PathBuf>,
    pub(super) unix_socket: Option<PathBuf>,
    pub(super) restart: Restart,
    pub(super) restart_delay: Duration,
    pub(super) restart_limit: u32,
    pub(super) startup_timeout: Duration,
    pub(super) shutdown_timeout: Duration,
    pub(super) bind: Vec<String>,
    pub(super) port: Option<u16>,
    /// The module's address. `None`: the addresses on which the engine listens.
    pub(super) rdma_listen: Option<IpAddr>,
    pub(super) rdma_port: u16,
    pub(super) allow_clear_text: Option<bool>,
    pub(super) rdma_devices: Vec<String>,
    pub(super) max_connections: Option<u32>,
    pub(super) busy_poll_us: Option<u32>,
    pub(super) slice_us: Option<u32>,
    pub(super) call_path: Option<bool>,
    pub(super) poller_thread: Option<bool>,
    pub(super) shared_windows: Option<bool>,
    pub(super) rx_size: Option<u32>,
    pub(super) rx_size_max: Option<u32>,
    pub(super) is_cluster: bool,
    /// Lines of the engine's own configuration: name and rest of the line.
    pub(super) directives: Vec<(String, String)>,
    /// Keys in the file that have no effect, each with its line and the reason.
    pub(super) without_effect: Vec<String>,
    // Three keys for one policy; `rdma()` combines them.
    rdma_enabled: Option<bool>,
    rdma: Option<Rdma>,
    rdma_fallback: Option<Rdma>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            engine: Choice::Auto,
            module: Choice::Auto,
            engine_config: None,
            data_dir: None,
            runtime_dir: None,
            unix_socket: None,
            restart: Restart::No,
            restart_delay: Duration::from_secs(1),
            restart_limit: 5,
            startup_timeout: Duration::from_secs(60),
            // Saving a large dataset takes minutes; a kill during that time loses data.
            shutdown_timeout: Duration::from_secs(300),
            bind: Vec::new(),
            port: None,
            rdma_listen: None,
            rdma_port: keys::RDMA_PORT,
            allow_clear_text: None,
            rdma_devices: Vec::new(),
            max_connections: None,
            busy_poll_us: None,
            slice_us: None,
            call_path: None,
            poller_thread: None,
            shared_windows: None,
            rx_size: None,
            rx_size_max: None,
            is_cluster: false,
            directives: Vec::new(),
            without_effect: Vec::new(),
            rdma_enabled: None,
            rdma: None,
            rdma_fallback: None,
        }
    }
}

impl Config {
    pub(super) fn read(file: &Path) -> Result<Self, String> {
        let name = file.display();
        let text = std::fs::read_to_string(file).map_err(|error| format!("{name}: {error}"))?;
        Self::parse(&text).map_err(|why| format!("{name}:{why}"))
    }

    /// Parses the text of a file. An error starts with its line number.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let line_of = |offset: usize| 1 + text[..offset].matches('\n').count();
        let table = DeTable::parse(text).map_err(|error| {
            let line = error.span().map_or(1, |span| line_of(span.start));
            format!("{line}: {}", error.message().replace('\n', " "))
        })?;
        let mut config = Self::default();
        config.take("", table.get_ref(), &line_of)?;
        config.check_rdma_policy().map_err(|why| format!(" {why}"))?;
        Ok(config)
    }

    /// Reads a section and its subsections.
    fn take(
        &mut self,
        section: &str,
        table: &DeTable<'_>,
        line_of: &dyn Fn(usize) -> usize,
    ) -> Result<(), String> {
        for (key, value) in table {
            let (name, line) = (key.get_ref().as_ref(), line_of(key.span().start));
            let at_key = |why: String| format!("{line}: {}: {why}", keys::full_name(section, name));
            let below = keys::full_name(section, name);
            match value.get_ref() {
                DeValue::Table(table) if keys::is_section(&below) => {
                    self.take(&below, table, line_of)?;
                }
                value if section == "engine" => {
                    self.add_directive(name, &Value(value)).map_err(at_key)?;
                }
                value => match Key::find(section, name).map(|key| &key.use_) {
                    Some(Use::Set(set)) => set(self, &Value(value)).map_err(at_key)?,
                    Some(Use::Ignored(why)) => {
                        self.without_effect.push(at_key(ignored_because(why)));
                    }
                    Some(Use::IgnoredIf(check, why)) => {
                        check(&Value(value)).map_err(at_key)?;
                        self.without_effect.push(at_key(ignored_because(why)));
                    }
                    None => return Err(at_key(keys::unknown_key(section, name))),
                },
            }
        }
        Ok(())
    }

    /// Adds a directive for the engine; a list adds several lines with the same name.
    fn add_directive(&mut self, name: &str, value: &Value<'_>) -> Result<(), String> {
        let plain = name.to_ascii_lowercase();
        let first = plain.split('.').next().unwrap_or_default();
        if let Some((_, remedy)) = RESERVED.iter().find(|(taken, _)| first == *taken) {
            return Err((*remedy).into());
        }
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        {
            return Err("not a valid name of an engine directive".into());
        }
        for line in value.lines()? {
            self.directives.push((name.into(), line));
        }
        Ok(())
    }

    /// Returns whether clients may, must or must not use RDMA.
    pub(super) fn rdma(&self) -> Rdma {
        match self.rdma_enabled {
            Some(false) => Rdma::Forbid,
            _ => self.rdma.or(self.rdma_fallback).unwrap_or(Rdma::Prefer),
        }
    }

    /// Fails if the three keys for the RDMA policy contradict each other.
    fn check_rdma_policy(&self) -> Result<(), String> {
        let fallback_name = |rdma: Rdma| match rdma {
            Rdma::Require => "none",
            _ => "tcp",
        };
        match (self.rdma_enabled, self.rdma, self.rdma_fallback) {
            (_, Some(rdma), Some(fallback)) if rdma != fallback => Err(format!(
                "server.rdma = \"{rdma}\" and network.rdma_fallback = \"{}\" contradict each \
                 other; remove one",
                fallback_name(fallback)
            )),
            (Some(enabled), Some(rdma), _) if enabled == (rdma == Rdma::Forbid) => Err(format!(
                "network.rdma_enabled = {enabled} and server.rdma = \"{rdma}\" contradict each \
                 other; remove one"
            )),
            _ => Ok(()),
        }
    }

    /// Returns the engine's password, for ferrite's own queries, if the file has one that needs no
    /// quoting.
    pub(super) fn password(&self) -> Option<&str> {
        let (_, value) =
            self.directives.iter().rfind(|(name, _)| name.eq_ignore_ascii_case("requirepass"))?;
        let needs_quotes = |c: char| c.is_whitespace() || "\"'\\".contains(c);
        let is_plain = !value.is_empty() && !value.contains(needs_quotes);
        is_plain.then_some(value)
    }
}

fn ignored_because(why: &str) -> String {
    format!("has no effect: {why}")
}

#[cfg(test)]
mod tests;
