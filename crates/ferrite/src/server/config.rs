//! `ferrite.toml`, checked: what the file says, or the defaults.
//!
//! The keys are a table (`keys.rs`); reading values with their places is `value.rs`. Whatever is
//! wrong names the key and the line.

mod keys;
mod value;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ferrite_fabric::Rdma;
use toml::de::{DeTable, DeValue};

use keys::{Key, Use};
use value::Value;

/// The engine's configuration that the file may not have, and where it is said instead.
const ELSEWHERE: [(&str, &str); 11] = [
    ("bind", "say it in [network]: bind"),
    ("port", "say it in [network]: port"),
    ("unixsocket", "say it in [server]: unix_socket"),
    ("dir", "say it in [server]: data_dir"),
    ("include", "say it in [server]: engine_config"),
    ("cluster-enabled", "say it in [cluster]: enabled"),
    ("daemonize", "ferrite supervises the engine: it stays in the foreground"),
    ("supervised", "ferrite supervises the engine, and tells systemd itself"),
    ("logfile", "the engine's lines go to stderr, with those of ferrite"),
    ("pidfile", "`ferrite server --json` says the engine's id"),
    ("ferrite", "settings of the module are in [network] and [network.rdma]"),
];

/// A file, found or to be found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) enum Choice {
    #[default]
    Auto,
    Path(PathBuf),
}

/// What happens when the engine ends by itself, and not well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Restart {
    No,
    OnFailure,
}

/// What is to be run, and how.
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
    /// Without an address: where the engine listens.
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
    /// Lines of the engine's own configuration: name, and the rest of the line.
    pub(super) directives: Vec<(String, String)>,
    /// Keys that are known and change nothing here, each with its reason.
    pub(super) without_effect: Vec<String>,
    // Three ways to say one thing: `rdma()` is what they come to.
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
            // Saving a large dataset takes minutes, and what is killed meanwhile is lost.
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

    /// What is wrong begins with its line.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let line_of = |offset: usize| 1 + text[..offset].matches('\n').count();
        let table = DeTable::parse(text).map_err(|error| {
            let line = error.span().map_or(1, |span| line_of(span.start));
            format!("{line}: {}", error.message().replace('\n', " "))
        })?;
        let mut config = Self::default();
        config.take("", table.get_ref(), &line_of)?;
        config.rdma_is_one().map_err(|why| format!(" {why}"))?;
        Ok(config)
    }

    /// One section, and those below it.
    fn take(
        &mut self,
        section: &str,
        table: &DeTable<'_>,
        line_of: &dyn Fn(usize) -> usize,
    ) -> Result<(), String> {
        for (key, value) in table {
            let (name, line) = (key.get_ref().as_ref(), line_of(key.span().start));
            let wrong = |why: String| format!("{line}: {}: {why}", keys::full_name(section, name));
            let below = keys::full_name(section, name);
            match value.get_ref() {
                DeValue::Table(table) if keys::is_section(&below) => {
                    self.take(&below, table, line_of)?
                }
                value if section == "engine" => {
                    self.add_directive(name, &Value(value)).map_err(wrong)?;
                }
                value => match Key::find(section, name).map(|key| &key.use_) {
                    Some(Use::Set(set)) => set(self, &Value(value)).map_err(wrong)?,
                    Some(Use::Idle(why)) => self.without_effect.push(wrong(idle(why))),
                    Some(Use::IdleIf(check, why)) => {
                        check(&Value(value)).map_err(wrong)?;
                        self.without_effect.push(wrong(idle(why)));
                    }
                    None => return Err(wrong(keys::unknown(section, name))),
                },
            }
        }
        Ok(())
    }

    /// A line for the engine, or several of the same name.
    fn add_directive(&mut self, name: &str, value: &Value<'_>) -> Result<(), String> {
        let plain = name.to_ascii_lowercase();
        let first = plain.split('.').next().unwrap_or_default();
        if let Some((_, remedy)) = ELSEWHERE.iter().find(|(taken, _)| first == *taken) {
            return Err((*remedy).into());
        }
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        {
            return Err("not a name of the engine's configuration".into());
        }
        for line in value.lines()? {
            self.directives.push((name.into(), line));
        }
        Ok(())
    }

    /// Whether clients may, must or must not come over RDMA.
    pub(super) fn rdma(&self) -> Rdma {
        match self.rdma_enabled {
            Some(false) => Rdma::Forbid,
            _ => self.rdma.or(self.rdma_fallback).unwrap_or(Rdma::Prefer),
        }
    }

    fn rdma_is_one(&self) -> Result<(), String> {
        let says = |rdma: Rdma| match rdma {
            Rdma::Require => "none",
            _ => "tcp",
        };
        match (self.rdma_enabled, self.rdma, self.rdma_fallback) {
            (_, Some(rdma), Some(fallback)) if rdma != fallback => Err(format!(
                "server.rdma = \"{rdma}\" and network.rdma_fallback = \"{}\" contradict each other: leave one out",
                says(fallback)
            )),
            (Some(enabled), Some(rdma), _) if enabled == (rdma == Rdma::Forbid) => Err(format!(
                "network.rdma_enabled = {enabled} and server.rdma = \"{rdma}\" contradict each other: leave one out"
            )),
            _ => Ok(()),
        }
    }

    /// A password by which the engine may be asked how it is, if the file has one that needs no
    /// quoting.
    pub(super) fn password(&self) -> Option<&str> {
        let (_, word) =
            self.directives.iter().rfind(|(name, _)| name.eq_ignore_ascii_case("requirepass"))?;
        let is_plain =
            !word.is_empty() && !word.contains(|c: char| c.is_whitespace() || "\"'\\".contains(c));
        is_plain.then_some(word)
    }
}

fn idle(why: &str) -> String {
    format!("has no effect: {why}")
}

#[cfg(test)]
mod tests;
