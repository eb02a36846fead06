//! Starts an engine with the module, and sends it commands over its own Unix socket.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use redis::{FromRedisValue, RedisResult};

pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

/// Debian's Redis, which CI installs.
pub(crate) const REDIS: &str = "redis-server";

/// Returns the path of the module: the one that was built with this test, or the one that
/// `FERRITE_MODULE` names.
pub(crate) fn module() -> PathBuf {
    if let Some(named) = std::env::var_os("FERRITE_MODULE") {
        return named.into();
    }
    let test = std::env::current_exe().expect("the path of this test");
    let module = test.with_file_name("libferrite_module.so");
    assert!(module.exists(), "{} is not built", module.display());
    module
}

/// Returns the path of the Valkey server in the lab's cache; `None` if it is not built.
pub(crate) fn valkey() -> Option<PathBuf> {
    let cache = std::env::var_os("FERRITE_LAB_CACHE").map(PathBuf::from).or_else(|| {
        let home = std::env::var_os("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")));
        home.map(|home| home.join("ferrite-lab"))
    });
    cache.map(|cache| cache.join("valkey/valkey-server")).filter(|server| server.exists())
}

/// Returns the available engines, and those in FERRITE_ENGINES (paths of servers, separated by
/// colons).
#[expect(clippy::print_stderr, reason = "tells which engines are left out")]
pub(crate) fn engines() -> Vec<PathBuf> {
    let valkey = valkey();
    let named = std::env::var_os("FERRITE_ENGINES").unwrap_or_default();
    // An empty variable is split into one empty path.
    let named = std::env::split_paths(&named).filter(|path| !path.as_os_str().is_empty());
    let engines: Vec<_> = [Some(REDIS.into()), valkey].into_iter().flatten().chain(named).collect();
    if engines.len() == 1 {
        eprintln!(
            "testing Redis only: Valkey is not built (run lab/lab setup valkey), and \
             FERRITE_ENGINES names no engine"
        );
    }
    engines
}

/// Returns a port that is free at the moment. It is below the kernel's range of ephemeral ports, so
/// that no outgoing connection of another test takes it before the engine does.
pub(crate) fn free_port() -> String {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    loop {
        let number = std::process::id() as usize * 31 + NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 10_000 + (number % 20_000) as u16; // fits
        if std::net::TcpListener::bind(("0.0.0.0", port)).is_ok() {
            return port.to_string();
        }
    }
}

/// Creates a directory for one engine.
fn directory() -> PathBuf {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let directory =
        std::env::temp_dir().join(format!("ferrite-module-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory");
    directory
}

/// Returns additional arguments of `loadmodule` for every engine, to run all tests with other
/// settings: `FERRITE_MODULE_ARGS=call-path=no`.
fn more_arguments() -> Vec<String> {
    let given = std::env::var("FERRITE_MODULE_ARGS").unwrap_or_default();
    given.split([' ', '=']).filter(|word| !word.is_empty()).map(Into::into).collect()
}

fn spawn_from_file(program: &Path, directory: &Path) -> Child {
    let mut command = Command::new(program);
    command.arg(directory.join("engine.conf")).stdin(Stdio::null()).stdout(Stdio::null());
    command.spawn().expect("cannot start the engine; run apt-get install redis-server")
}

/// How an engine is started.
pub(crate) struct Start<'a> {
    pub(crate) program: &'a Path,
    /// Arguments of `loadmodule`.
    pub(crate) arguments: &'a [&'a str],
    /// The engine's own options, as on its command line.
    pub(crate) options: &'a [&'a str],
}

/// An engine, which is killed when it is dropped.
pub(crate) struct Server {
    process: Child,
    directory: PathBuf,
}

impl Server {
    /// Starts an engine and waits until it accepts connections.
    pub(crate) fn start(start: &Start<'_>) -> Self {
        let mut server = Self::spawn(start);
        server.wait_until_it_answers();
        server
    }

    /// Starts an engine from a configuration file with the lines `options`, and waits until it
    /// accepts connections.
    pub(crate) fn start_from_file(start: &Start<'_>) -> Self {
        let directory = directory();
        let lines = [
            &format!("dir {}", directory.display()),
            &format!("unixsocket {}", directory.join("engine.sock").display()),
            &format!("logfile {}", directory.join("log").display()),
            &format!(
                "loadmodule {} {} {}",
                module().display(),
                start.arguments.join(" "),
                more_arguments().join(" ")
            ),
            &start.options.join("\n"),
        ];
        std::fs::write(directory.join("engine.conf"), lines.map(String::as_str).join("\n"))
            .expect("a file");
        let process = spawn_from_file(start.program, &directory);
        let mut server = Self { process, directory };
        server.wait_until_it_answers();
        server
    }

    /// Starts an engine that has exited again, from the same configuration file.
    pub(crate) fn restart(&mut self, program: &Path) {
        self.process = spawn_from_file(program, &self.directory);
        self.wait_until_it_answers();
    }

    fn wait_until_it_answers(&mut self) {
        let server = self;
        let started = Instant::now();
        while server.connection().is_err() {
            let exited = server.process.try_wait().expect("a child process");
            assert!(exited.is_none(), "the engine has exited: {}", server.log());
            assert!(started.elapsed() < TIMEOUT, "the engine does not listen: {}", server.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Starts an engine that must exit by itself. Returns its exit status and its log.
    pub(crate) fn run_until_exit(start: &Start<'_>) -> (ExitStatus, String) {
        let mut server = Self::spawn(start);
        let status = server.wait();
        (status, server.log())
    }

    /// Starts an engine without waiting for it.
    pub(crate) fn spawn(start: &Start<'_>) -> Self {
        let directory = directory();
        let process = Command::new(start.program)
            .args(["--save", "", "--appendonly", "no", "--enable-module-command", "local", "--dir"])
            .arg(&directory)
            .arg("--unixsocket")
            .arg(directory.join("engine.sock"))
            .arg("--logfile")
            .arg(directory.join("log"))
            .args(start.options)
            .arg("--loadmodule")
            .arg(module())
            .args(more_arguments())
            .args(start.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("cannot start the engine; run apt-get install redis-server");
        Self { process, directory }
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.directory.join("log")).unwrap_or_default()
    }

    /// Waits until the log contains this text.
    pub(crate) fn wait_for_log(&self, words: &str) {
        self.wait_until(words, || self.log().contains(words));
    }

    /// Waits until a condition holds. `what` describes it.
    pub(crate) fn wait_until(&self, what: &str, mut done: impl FnMut() -> bool) {
        let started = Instant::now();
        while !done() {
            assert!(started.elapsed() < TIMEOUT, "timeout waiting for: {what}; {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Opens a connection to the engine's own socket.
    pub(crate) fn connection(&self) -> RedisResult<redis::Connection> {
        redis::Client::open(format!("unix://{}", self.directory.join("engine.sock").display()))?
            .get_connection()
    }

    /// Runs a command over the engine's own socket.
    pub(crate) fn try_ask<T: FromRedisValue>(&self, words: &[&str]) -> RedisResult<T> {
        let mut connection = self.connection()?;
        connection.set_read_timeout(Some(TIMEOUT))?;
        redis::cmd(words[0]).arg(&words[1..]).query(&mut connection)
    }

    /// Runs a command over the engine's own socket. Panics if that fails.
    pub(crate) fn ask<T: FromRedisValue>(&self, words: &[&str]) -> T {
        self.try_ask(words).unwrap_or_else(|error| panic!("{words:?}: {error}; {}", self.log()))
    }

    /// Runs a command that the engine must refuse, and returns the error.
    pub(crate) fn refusal(&self, words: &[&str]) -> String {
        match self.try_ask::<redis::Value>(words) {
            Ok(reply) => panic!("{words:?} was not refused: {reply:?}"),
            Err(error) => error.to_string(),
        }
    }

    /// Returns a field of INFO ferrite, by its name without the prefix.
    pub(crate) fn info(&self, field: &str) -> String {
        let wanted = format!("ferrite_{field}:");
        // While the transport thread is busy, INFO shows the previous counters. So this asks twice.
        let _: String = self.ask(&["INFO", "ferrite"]);
        let started = Instant::now();
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let all: String = self.ask(&["INFO", "ferrite"]);
            if let Some(found) = all.lines().find_map(|line| line.strip_prefix(&wanted)) {
                return found.trim_end().into();
            }
            assert!(started.elapsed() < TIMEOUT, "no {wanted} in {all}");
        }
    }

    /// Returns a number in INFO ferrite.
    pub(crate) fn count(&self, field: &str) -> u64 {
        self.info(field).parse().expect("a number")
    }

    /// Runs SHUTDOWN and returns the exit status.
    pub(crate) fn shut_down(&mut self, how: &str) -> ExitStatus {
        let _ = self.try_ask::<redis::Value>(&["SHUTDOWN", how]);
        self.wait()
    }

    pub(crate) fn signal(&self, name: &str) {
        let id = self.process.id().to_string();
        let sent = Command::new("kill").args(["-s", name, &id]).status().expect("kill");
        assert!(sent.success(), "cannot send SIG{name} to {id}");
    }

    /// Waits until the engine exits.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let started = Instant::now();
        loop {
            if let Some(status) = self.process.try_wait().expect("a child process") {
                return status;
            }
            assert!(started.elapsed() < TIMEOUT, "the engine does not exit: {}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.process.try_wait().expect("a child process").is_some()
    }

    /// Asserts that the engine runs and that its log has no sign of a crash.
    pub(crate) fn assert_healthy(&mut self) {
        let exited = self.process.try_wait().expect("a child process");
        let log = self.log();
        assert!(exited.is_none(), "the engine has exited: {log}");
        for sign in ["BUG REPORT", "a bug: panic", "crashed by signal", "ASSERTION FAILED"] {
            assert!(!log.contains(sign), "{log}");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}
