//! The settings of `ferrite server`, from `ferrite.toml`, the environment and the flags. The table
//! in `ferrite-config` has the keys with their defaults and ranges.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ferrite_config::file::UnitFile;
use ferrite_config::{Origin, Program, Setting, Values, address, file, table, unit};
use ferrite_fabric::{Fabric, Rdma};
use ferrite_session::{EngineAddress, fabric_config, open_fabric, rdma_policy};

use super::secret::warn_if_readable;
use super::{ServerError, Sources};
use crate::{agent, settings};

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
    /// The addresses and host names on which the module listens. If empty, the module listens where
    /// the engine does.
    pub(super) rdma_listen: Vec<String>,
    pub(super) rdma_port: u16,
    pub(super) is_cluster: bool,
    /// Lines of the engine's own configuration: name and rest of the line.
    pub(super) directives: Vec<(String, String)>,
    /// All values; some of them are passed on to the module.
    values: Values,
    /// The values of the agent, if there is one.
    pub(super) agent: Option<Values>,
}

impl Config {
    /// Reads the file, if there is one, the environment and the flags. An error may have several
    /// lines, one for each problem.
    pub(super) fn load(sources: Sources<'_>) -> Result<Self, String> {
        let text = sources.file().map(settings::read_file).transpose();
        let text = text.map_err(|error| error.to_string())?;
        let complete = |values: &mut Values| {
            let is_server = values.program() == Program::Server;
            let variable = |name: &str| {
                std::env::var(name).ok().filter(|_| is_server || !unit::is_of_server_alone(name))
            };
            values.set_from_environment(variable)?;
            let program = values.program();
            for (setting, text) in sources.flags().filter(|(it, _)| it.has(program)) {
                values.set_text(setting, None, text, Origin::Flag)?;
            }
            Ok(())
        };
        let read = file::read_unit(text.as_deref().unwrap_or_default(), complete);
        let read = read.map_err(|problems| match sources.file() {
            Some(file) => settings::list(&file.display().to_string(), &problems),
            None => {
                let lines: Vec<_> = problems.iter().map(ToString::to_string).collect();
                lines.join("\n")
            }
        })?;
        Ok(Self::of(read))
    }

    /// Returns all values.
    pub(super) fn values(&self) -> &Values {
        &self.values
    }

    /// Warns if the file has passwords that all users of the host can read.
    pub(super) fn warn_of_readable_passwords(&self, file: Option<&Path>) {
        if let Some(file) = file {
            warn_if_readable(file, &self.directives);
        }
    }

    /// Returns the same configuration with other values. The directives stay.
    pub(super) fn with_values(&self, values: Values, agent: Option<Values>) -> Self {
        Self { agent, ..Self::new(values, self.directives.clone()) }
    }

    /// Returns the names of the engine's directives that differ from `other`, each once.
    pub(super) fn changed_directives(&self, other: &Self) -> Vec<String> {
        let of = |config: &Self, name: &str| -> Vec<String> {
            let same = config.directives.iter().filter(|(known, _)| known == name);
            same.map(|(_, rest)| rest.clone()).collect()
        };
        let names = self.directives.iter().chain(&other.directives).map(|(name, _)| name.clone());
        let names: std::collections::BTreeSet<_> = names.collect();
        names.into_iter().filter(|name| of(self, name) != of(other, name)).collect()
    }

    fn of(read: UnitFile) -> Self {
        let UnitFile { server, mut agent } = read;
        if let Some(agent) = &mut agent {
            // The module has the admin port of the file.
            let own = server.values.entry(&table::AGENT_ADMIN_LISTEN).value.clone();
            let set = own.map(|own| agent.replace(&table::ADMIN_LISTEN, own));
            debug_assert_eq!(set, Some(Ok(())), "both settings have the same values");
        }
        Self { agent, ..Self::new(server.values, server.directives) }
    }

    fn new(values: Values, directives: Vec<(String, String)>) -> Self {
        let path = |setting: &Setting| values.text(setting).map(PathBuf::from);
        let choice = |setting: &Setting| match values.text(setting) {
            None | Some("auto") => Choice::Auto,
            Some(path) => Choice::Path(path.into()),
        };
        let listen = address::words(values.text(&table::LISTEN).unwrap_or_default());
        let hosts = listen.filter_map(address::split).map(|(host, _)| host.to_owned());
        Self {
            engine: choice(&table::ENGINE_PROGRAM),
            module: choice(&table::MODULE_FILE),
            engine_config: path(&table::ENGINE_CONFIG),
            data_dir: path(&table::DATA_DIR),
            runtime_dir: path(&table::RUNTIME_DIR),
            unix_socket: path(&table::UNIX_SOCKET),
            restart: match values.text(&table::RESTART) {
                Some("on-failure") => Restart::OnFailure,
                _ => Restart::No,
            },
            restart_delay: values.time(&table::RESTART_DELAY),
            restart_limit: values.number(&table::RESTART_LIMIT),
            startup_timeout: values.time(&table::STARTUP_TIMEOUT),
            shutdown_timeout: values.time(&table::SHUTDOWN_TIMEOUT),
            // The engine does not accept brackets.
            bind: values.list(&table::BIND).iter().map(|at| at.replace(['[', ']'], "")).collect(),
            port: values.is_given(&table::PORT).then(|| values.number(&table::PORT)),
            rdma_listen: hosts.collect(),
            rdma_port: values.listen_port().unwrap_or(table::CLIENT_PORT),
            is_cluster: values.switch(&table::CLUSTER_ENABLED),
            directives,
            values,
            agent: None,
        }
    }

    /// Returns whether clients may, must or must not use RDMA.
    pub(super) fn rdma(&self) -> Rdma {
        rdma_policy(&self.values)
    }

    /// If RDMA is required, checks that the devices can be opened as the module will open them.
    ///
    /// # Errors
    /// Fails if RDMA is unavailable on this host, or to this user.
    pub(super) fn check_rdma(&self) -> Result<(), ServerError> {
        if self.rdma() != Rdma::Require {
            return Ok(());
        }
        let opened = open_fabric(&self.values, &fabric_config(&self.values), Fabric::system);
        opened.map(drop).map_err(|error| {
            let remedy = error.remedy().map(|remedy| format!("; to do: {remedy}"));
            let remedy = remedy.unwrap_or_default();
            ServerError::no_rdma(format!("RDMA is required (server.rdma): {error}{remedy}"))
        })
    }

    /// Returns a function that makes the setup of the agent, if there is one. The function resolves
    /// names, which may take long, and fails if the settings of the agent are wrong. `socket` is
    /// that of the engine.
    pub(super) fn agent_setup(
        &self,
        socket: &Path,
    ) -> Option<impl FnOnce() -> anyhow::Result<agent::Setup> + Send + 'static> {
        let (values, engine) = (self.agent.clone()?, EngineAddress::Unix(socket.to_owned()));
        Some(|| Ok(agent::Setup::new(values)?.beside(engine)))
    }

    /// Returns whether the settings ask for an admin port.
    pub(super) fn has_admin_port(&self) -> bool {
        self.values.text(&table::ADMIN_LISTEN).is_some_and(|text| text != "off")
    }

    /// Returns the settings that are passed on to the module: its arguments and their values.
    pub(super) fn for_module(&self) -> impl Iterator<Item = (&'static str, String)> {
        let given = self.values.iter().filter(|(setting, _)| {
            // Leaves out the RDMA policy, because several keys can set it: `plan.rs` passes the
            // resulting policy as an argument of its own.
            setting.has(Program::Module)
                && setting.in_config
                && setting.name != table::RDMA.name
                && self.values.is_given(setting)
        });
        given.filter_map(|(setting, entry)| Some((setting.name, entry.value.as_ref()?.to_string())))
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

    #[cfg(test)]
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let read = file::read_unit(text, |_| Ok(()))
            .map_err(|problems| settings::list("ferrite.toml", &problems))?;
        Ok(Self::of(read))
    }
}

impl Default for Config {
    fn default() -> Self {
        Self::new(Values::new(Program::Server), Vec::new())
    }
}

#[cfg(test)]
mod tests;
