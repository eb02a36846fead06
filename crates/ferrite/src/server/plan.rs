//! The engine's program, and the configuration that it reads from its standard input.
//!
//! The configuration is not written to a file, so there is no second file with a password. CONFIG
//! REWRITE reports that there is no file, instead of writing to a file that the next start does not
//! read.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use ferrite_fabric::Rdma;

use super::config::Config;
use super::{ServerError, find, include, secret};

/// The longest path of a Unix socket, in bytes (`sun_path` without the NUL at its end).
const SOCKET_NAME_MAX: usize = 107;

/// The start of a private directory's name; the process id follows.
pub(super) const PRIVATE_DIR: &str = "ferrite-server-";

/// The engine, its module and its configuration.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) engine: PathBuf,
    /// `None` if RDMA is forbidden: the engine runs without the module.
    pub(super) module: Option<PathBuf>,
    pub(super) socket: PathBuf,
    /// A directory for the socket, which ferrite creates and removes. `None` if the settings or
    /// systemd say where the socket belongs.
    pub(super) runtime_dir: Option<PathBuf>,
    /// The user's configuration file of the engine. It comes first, so that `lines` override it.
    engine_config: Option<PathBuf>,
    lines: Vec<Line>,
}

#[derive(Debug)]
struct Line {
    name: String,
    rest: String,
}

impl Plan {
    pub(super) fn new(config: &Config) -> Result<Self, ServerError> {
        let path = std::env::var_os("PATH");
        let engine =
            find::engine(&config.engine, path.as_deref()).map_err(ServerError::cannot_start)?;
        if config.rdma() == Rdma::Forbid && config.has_admin_port() {
            return Err(ServerError::config(
                "observability.admin_listen: the module serves the admin port, but `rdma forbid` \
                 starts the engine without the module; remove one of the two settings",
            ));
        }
        let own = std::env::current_exe().unwrap_or_else(|_| "/".into());
        let module = match config.rdma() {
            Rdma::Forbid => None,
            _ => Some(find::module(&config.module, &own).map_err(ServerError::cannot_start)?),
        };
        let runtime_dir = runtime_dir(config);
        let socket = match (&config.unix_socket, &runtime_dir) {
            (Some(socket), _) => absolute(socket),
            (None, Some(directory)) => directory.path().join("engine.sock"),
            (None, None) => unreachable!("runtime_dir is set unless unix_socket is"),
        };
        if socket.as_os_str().len() > SOCKET_NAME_MAX {
            let (name, max) = (socket.display(), SOCKET_NAME_MAX);
            return Err(ServerError::config(format!(
                "the path of the Unix socket is longer than {max} bytes: {name}; set a shorter \
                 server.unix_socket"
            )));
        }
        let lines = lines(config, &socket, module.as_deref());
        let runtime_dir = runtime_dir.and_then(RuntimeDir::into_private);
        let engine_config = config.engine_config.as_deref().map(absolute);
        Ok(Self { engine, module, socket, runtime_dir, engine_config, lines })
    }

    /// Adapts the configuration to settings that SIGHUP has changed, for the next start of the
    /// engine.
    pub(super) fn follow(&mut self, config: &Config) {
        self.lines = lines(config, &self.socket, self.module.as_deref());
    }

    /// Returns the engine's configuration. Reads `engine_config`, which may hold any bytes.
    pub(super) fn text(&self) -> Vec<u8> {
        let mut text = Vec::new();
        if let Some(file) = &self.engine_config {
            include::expand(&(include_line(file) + "\n"), file, &mut text);
        }
        for Line { name, rest } in &self.lines {
            let _ = writeln!(text, "{name} {rest}");
        }
        text
    }

    /// Returns the lines of the configuration without passwords. An `include` line stands for the
    /// user's file.
    pub(super) fn redacted_lines(&self) -> Vec<String> {
        let include = self.engine_config.iter().map(|file| include_line(file));
        let own = self.lines.iter().map(|Line { name, rest }| secret::redact(name, rest));
        include.chain(own).collect()
    }
}

fn lines(config: &Config, socket: &Path, module: Option<&Path>) -> Vec<Line> {
    let mut lines = Vec::new();
    let mut add = |name: &str, rest: String| lines.push(Line { name: name.into(), rest });
    add("daemonize", "no".into());
    add("supervised", "no".into());
    add("logfile", quoted(""));
    add("pidfile", quoted(""));
    add("unixsocket", quoted(&socket.to_string_lossy()));
    if config.unix_socket.is_none() {
        add("unixsocketperm", "700".into());
    }
    if let Some(directory) = &config.data_dir {
        add("dir", quoted(&absolute(directory).to_string_lossy()));
    }
    if let Some(port) = config.port {
        add("port", port.to_string());
    }
    if !config.bind.is_empty() {
        add("bind", config.bind.join(" "));
    }
    if config.is_cluster {
        add("cluster-enabled", "yes".into());
    }
    for (name, rest) in &config.directives {
        add(name, rest.clone());
    }
    if let Some(module) = module {
        let arguments =
            [quoted(&module.to_string_lossy())].into_iter().chain(module_arguments(config, socket));
        add("loadmodule", arguments.collect::<Vec<_>>().join(" "));
    }
    lines
}

fn module_arguments(config: &Config, socket: &Path) -> Vec<String> {
    // Without rdma-bind the module listens where the engine does.
    let bind = config.rdma_listen.join(",");
    let mut arguments = Vec::new();
    if !bind.is_empty() {
        arguments.push(("rdma-bind", bind));
    }
    arguments.extend([
        ("rdma-port", config.rdma_port.to_string()),
        ("rdma", config.rdma().to_string()),
        // Without this argument, the module asks CONFIG for the socket, which fails if CONFIG is
        // renamed.
        ("engine", quoted(&format!("unix:{}", socket.display()))),
    ]);
    // An empty value must still be a word of the line.
    let word = |value: String| if value.is_empty() { quoted("") } else { value };
    arguments.extend(config.for_module().map(|(name, value)| (name, word(value))));
    arguments.into_iter().flat_map(|(name, value)| [name.to_owned(), value]).collect()
}

/// Quotes a word for the engine's configuration.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

fn include_line(file: &Path) -> String {
    format!("include {}", quoted(&file.to_string_lossy()))
}

/// Makes a path absolute: the engine may change its working directory before it opens the file.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// The directory of the socket, unless the settings name the socket itself.
enum RuntimeDir {
    /// Set in the settings or by systemd.
    Existing(PathBuf),
    /// Created by ferrite.
    Private(PathBuf),
}

impl RuntimeDir {
    fn path(&self) -> &Path {
        match self {
            Self::Existing(path) | Self::Private(path) => path,
        }
    }

    fn into_private(self) -> Option<PathBuf> {
        match self {
            Self::Existing(_) => None,
            Self::Private(path) => Some(path),
        }
    }
}

fn runtime_dir(config: &Config) -> Option<RuntimeDir> {
    if config.unix_socket.is_some() {
        return None;
    }
    if let Some(named) = &config.runtime_dir {
        return Some(RuntimeDir::Existing(absolute(named)));
    }
    // The first entry of systemd's RuntimeDirectory=.
    let given = std::env::var_os("RUNTIME_DIRECTORY").filter(|given| !given.is_empty());
    if let Some(given) = given.and_then(|given| std::env::split_paths(&given).next()) {
        return Some(RuntimeDir::Existing(given));
    }
    let base = std::env::var_os("XDG_RUNTIME_DIR").filter(|base| Path::new(base).is_dir());
    let base = base.map_or_else(std::env::temp_dir, PathBuf::from);
    Some(RuntimeDir::Private(base.join(format!("{PRIVATE_DIR}{}", std::process::id()))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config_of(file: &str) -> Vec<String> {
        let config = Config::parse(file).expect("a valid file");
        let lines = lines(&config, Path::new("/run/s\"x.sock"), Some(Path::new("/lib/a b.so")));
        lines.into_iter().map(|line| format!("{} {}", line.name, line.rest)).collect()
    }

    #[test]
    fn generates_the_engines_configuration() {
        let lines = config_of(
            "[server]\ndata_dir = \"/data\"\n\
             rdma = \"require\"\n[network]\nport = 0\nbind = [\"[::1]\", \"-[fe80::1%lo]\"]\n\
             rdma_listen = \"[::1], [fe80::1%lo], cache\"\nallow_clear_text = true\nrdma_device = [\"a\", \"b\", \"a\"]\n[network.rdma]\n\
             max_connections = 5\nrx_size = \"64kb\"\ncall_path = true\npoller_thread = false\n\
             [cluster]\nenabled = true\n[engine]\nsave = \"\"",
        );
        assert_eq!(
            lines,
            [
                "daemonize no",
                "supervised no",
                "logfile \"\"",
                "pidfile \"\"",
                "unixsocket \"/run/s\\\"x.sock\"",
                "unixsocketperm 700",
                "dir \"/data\"",
                "port 0",
                "bind ::1 -fe80::1%lo",
                "cluster-enabled yes",
                "save \"\"",
                "loadmodule \"/lib/a b.so\" rdma-bind ::1,fe80::1%lo,cache rdma-port 6380 \
                 rdma require engine \"unix:/run/s\\\"x.sock\" allow-clear-text yes rdma-device a,b \
                 max-clients 5 rx-size 64kb call-path yes poller-thread no",
            ]
        );
    }

    #[test]
    fn admin_port_goes_to_the_module_and_is_refused_without_it() {
        let admin = "[observability]\nadmin_listen = \"127.0.0.1:9121\"\n";
        let lines = config_of(admin);
        assert!(lines.last().is_some_and(|line| line.ends_with(" admin-listen 127.0.0.1:9121")));
        let file = format!("[server]\nengine = \"/bin/true\"\nrdma = \"forbid\"\n{admin}");
        let config = Config::parse(&file).expect("a valid file");
        let error = Plan::new(&config).expect_err("an admin port without the module");
        assert!(error.to_string().contains("without the module"), "{error}");
    }

    #[test]
    fn redacted_lines_hide_secrets() {
        let lines = vec![Line { name: "RequirePass".into(), rest: "secret".into() }];
        let plan = Plan {
            engine: "/e".into(),
            module: None,
            socket: "/s".into(),
            runtime_dir: None,
            engine_config: Some("/nowhere.conf".into()),
            lines,
        };
        assert_eq!(plan.redacted_lines(), ["include \"/nowhere.conf\"", "RequirePass …"]);
        assert_eq!(plan.text(), b"include \"/nowhere.conf\"\nRequirePass secret\n");
    }
}
