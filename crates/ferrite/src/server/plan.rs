//! What is run: the engine's program, and the configuration that it reads from its standard input.
//!
//! Standard input and not a file: nothing secret lies about, and CONFIG REWRITE says that there is
//! no file instead of writing to one that the next start does not read.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use ferrite_fabric::Rdma;

use super::config::Config;
use super::{Ending, find, secret};

/// What a Unix socket's name may have at most, with its end.
const SOCKET_NAME_MAX: usize = 107;

/// What is run.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) engine: PathBuf,
    /// None if RDMA is forbidden: the engine is left as it is.
    pub(super) module: Option<PathBuf>,
    pub(super) socket: PathBuf,
    /// The directory to be made for the socket and taken away again, if it is ours.
    pub(super) runtime_dir: Option<PathBuf>,
    lines: Vec<Line>,
}

#[derive(Debug)]
struct Line {
    name: String,
    rest: String,
}

impl Plan {
    pub(super) fn new(config: &Config) -> Result<Self, Ending> {
        let path = std::env::var_os("PATH");
        let engine = find::engine(&config.engine, path.as_deref()).map_err(Ending::cannot_start)?;
        let own = std::env::current_exe().unwrap_or_else(|_| "/".into());
        let module = match config.rdma() {
            Rdma::Forbid => None,
            _ => Some(find::module(&config.module, &own).map_err(Ending::cannot_start)?),
        };
        let runtime_dir = runtime_dir(config);
        let socket = match (&config.unix_socket, &runtime_dir) {
            (Some(socket), _) => absolute(socket),
            (None, Some(directory)) => directory.path().join("engine.sock"),
            (None, None) => unreachable!("without a socket there is a directory"),
        };
        if socket.as_os_str().len() > SOCKET_NAME_MAX {
            let (name, most) = (socket.display(), SOCKET_NAME_MAX);
            return Err(Ending::config(format!(
                "the name of the Unix socket is longer than {most} bytes: {name}; name a shorter one: server.unix_socket"
            )));
        }
        let lines = lines(config, &socket, module.as_deref());
        let runtime_dir = runtime_dir.and_then(RuntimeDir::ours);
        Ok(Self { engine, module, socket, runtime_dir, lines })
    }

    /// The engine's configuration.
    pub(super) fn text(&self) -> String {
        self.lines.iter().fold(String::new(), |mut text, Line { name, rest }| {
            let _ = writeln!(text, "{name} {rest}");
            text
        })
    }

    /// The same for people to see: without passwords.
    pub(super) fn shown(&self) -> Vec<String> {
        self.lines.iter().map(|Line { name, rest }| secret::shown(name, rest)).collect()
    }
}

fn lines(config: &Config, socket: &Path, module: Option<&Path>) -> Vec<Line> {
    let mut lines = Vec::new();
    let mut add = |name: &str, rest: String| lines.push(Line { name: name.into(), rest });
    // First, so that what follows has the last word.
    if let Some(file) = &config.engine_config {
        add("include", quoted(&absolute(file).to_string_lossy()));
    }
    add("daemonize", "no".into());
    add("supervised", "no".into());
    add("logfile", quoted(""));
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
        let words =
            [quoted(&module.to_string_lossy())].into_iter().chain(module_arguments(config, socket));
        add("loadmodule", words.collect::<Vec<_>>().join(" "));
    }
    lines
}

fn module_arguments(config: &Config, socket: &Path) -> Vec<String> {
    // Without an address: where the engine listens.
    let bind = config.rdma_listen.map(|ip| ("rdma-bind", ip.to_string()));
    let mut words: Vec<_> = bind.into_iter().collect();
    words.extend([
        ("rdma-port", config.rdma_port.to_string()),
        ("rdma", config.rdma().to_string()),
        // Found by itself too, but not where CONFIG was renamed.
        ("engine", quoted(&format!("unix:{}", socket.display()))),
    ]);
    if !config.rdma_devices.is_empty() {
        words.push(("rdma-device", config.rdma_devices.join(",")));
    }
    let numbers = [
        ("max-clients", config.max_connections),
        ("busy-poll-us", config.busy_poll_us),
        ("slice-us", config.slice_us),
        ("rx-size", config.rx_size),
        ("rx-size-max", config.rx_size_max),
    ];
    words
        .extend(numbers.into_iter().filter_map(|(name, number)| Some((name, number?.to_string()))));
    let switches = [
        ("call-path", config.call_path),
        ("poller-thread", config.poller_thread),
        ("rdma-shared-windows", config.shared_windows),
        ("allow-clear-text", config.allow_clear_text),
    ];
    for (name, is_on) in switches {
        if let Some(is_on) = is_on {
            words.push((name, if is_on { "yes" } else { "no" }.into()));
        }
    }
    words.into_iter().flat_map(|(name, value)| [name.to_owned(), value]).collect()
}

/// As the engine reads words in quotes.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

/// The engine changes its directory before it opens some of these.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Where the socket is, if nobody has said.
enum RuntimeDir {
    /// Given to us: by the file, or by systemd.
    Given(PathBuf),
    /// To be made.
    Ours(PathBuf),
}

impl RuntimeDir {
    fn path(&self) -> &Path {
        match self {
            Self::Given(path) | Self::Ours(path) => path,
        }
    }

    fn ours(self) -> Option<PathBuf> {
        match self {
            Self::Given(_) => None,
            Self::Ours(path) => Some(path),
        }
    }
}

fn runtime_dir(config: &Config) -> Option<RuntimeDir> {
    if config.unix_socket.is_some() {
        return None;
    }
    if let Some(named) = &config.runtime_dir {
        return Some(RuntimeDir::Given(absolute(named)));
    }
    // systemd's RuntimeDirectory=; of several, the first.
    let given = std::env::var_os("RUNTIME_DIRECTORY").filter(|given| !given.is_empty());
    if let Some(given) = given.and_then(|given| std::env::split_paths(&given).next()) {
        return Some(RuntimeDir::Given(given));
    }
    let base = std::env::var_os("XDG_RUNTIME_DIR").filter(|base| Path::new(base).is_dir());
    let base = base.map_or_else(std::env::temp_dir, PathBuf::from);
    Some(RuntimeDir::Ours(base.join(format!("ferrite-server-{}", std::process::id()))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config_of(file: &str) -> Vec<String> {
        let config = Config::parse(file).expect("right");
        let lines = lines(&config, Path::new("/run/s\"x.sock"), Some(Path::new("/lib/a b.so")));
        lines.into_iter().map(|line| format!("{} {}", line.name, line.rest)).collect()
    }

    #[test]
    fn the_engines_configuration() {
        let lines = config_of(
            "[server]\nengine_config = \"/etc/r.conf\"\ndata_dir = \"/data\"\nrdma = \"require\"\n[network]\nport = 0\nbind = \"::1\"\n\
             rdma_listen = \"::1\"\nallow_clear_text = true\nrdma_device = [\"a\", \"b\"]\n[network.rdma]\n\
             max_connections = 5\nrx_size = \"64K\"\ncall_path = true\npoller_thread = false\n[cluster]\nenabled = true\n[engine]\nsave = \"\"",
        );
        assert_eq!(
            lines,
            [
                "include \"/etc/r.conf\"",
                "daemonize no",
                "supervised no",
                "logfile \"\"",
                "unixsocket \"/run/s\\\"x.sock\"",
                "unixsocketperm 700",
                "dir \"/data\"",
                "port 0",
                "bind ::1",
                "cluster-enabled yes",
                "save \"\"",
                "loadmodule \"/lib/a b.so\" rdma-bind ::1 rdma-port 6380 rdma require engine \"unix:/run/s\\\"x.sock\" \
                 rdma-device a,b max-clients 5 rx-size 65536 call-path yes poller-thread no allow-clear-text yes",
            ]
        );
    }

    #[test]
    fn secrets_are_not_shown() {
        let lines = vec![Line { name: "RequirePass".into(), rest: "secret".into() }];
        let plan = Plan {
            engine: "/e".into(),
            module: None,
            socket: "/s".into(),
            runtime_dir: None,
            lines,
        };
        assert_eq!(
            (plan.shown(), plan.text().as_str()),
            (vec!["RequirePass …".into()], "RequirePass secret\n")
        );
    }
}
