//! An engine with the module in it, and its own Unix socket to ask it by.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use redis::{FromRedisValue, RedisResult};

pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Debian's, which CI installs.
pub(crate) const REDIS: &str = "redis-server";

/// The module that was built with this test: it lies beside it. `FERRITE_MODULE` names another one.
pub(crate) fn module() -> PathBuf {
    if let Some(named) = std::env::var_os("FERRITE_MODULE") {
        return named.into();
    }
    let test = std::env::current_exe().expect("a test has a file");
    let module = test.with_file_name("libferrite_module.so");
    assert!(module.exists(), "{} is not built", module.display());
    module
}

/// Valkey's server of the lab's cache, if it is there.
pub(crate) fn valkey() -> Option<PathBuf> {
    let cache = std::env::var_os("FERRITE_LAB_CACHE").map(PathBuf::from).or_else(|| {
        let home = std::env::var_os("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")));
        home.map(|home| home.join("ferrite-lab"))
    });
    cache.map(|cache| cache.join("valkey/valkey-server")).filter(|server| server.exists())
}

/// The engines there are, and those named in FERRITE_ENGINES (paths of servers, separated by
/// colons).
#[expect(clippy::print_stderr, reason = "what is left out is said")]
pub(crate) fn engines() -> Vec<PathBuf> {
    let valkey = valkey();
    let named = std::env::var_os("FERRITE_ENGINES").unwrap_or_default();
    // "" has one
    let named = std::env::split_paths(&named).filter(|path| !path.as_os_str().is_empty());
    let engines: Vec<_> = [Some(REDIS.into()), valkey].into_iter().flatten().chain(named).collect();
    if engines.len() == 1 {
        eprintln!(
            "Redis alone: Valkey is not built here (lab/lab setup valkey), and FERRITE_ENGINES names none"
        );
    }
    engines
}

/// A port that nobody has at the moment, and that no outgoing connection of another test takes
/// before the engine does: below those that the kernel gives to them.
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

/// A directory of an engine's own.
fn directory() -> PathBuf {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let directory =
        std::env::temp_dir().join(format!("ferrite-module-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory");
    directory
}

/// Arguments of `loadmodule` for every engine of a test, to try all tests with others:
/// `FERRITE_MODULE_ARGS=call-path=no`.
fn more_arguments() -> Vec<String> {
    let given = std::env::var("FERRITE_MODULE_ARGS").unwrap_or_default();
    given.split([' ', '=']).filter(|word| !word.is_empty()).map(Into::into).collect()
}

fn by_file(program: &Path, directory: &Path) -> Child {
    let mut command = Command::new(program);
    command.arg(directory.join("engine.conf")).stdin(Stdio::null()).stdout(Stdio::null());
    command.spawn().expect("the engine starts: apt-get install redis-server")
}

/// How an engine is started.
pub(crate) struct Start<'a> {
    pub(crate) program: &'a Path,
    /// Arguments of `loadmodule`.
    pub(crate) arguments: &'a [&'a str],
    /// The engine's own, as on its command line.
    pub(crate) options: &'a [&'a str],
}

/// An engine, killed at the end.
pub(crate) struct Server {
    process: Child,
    directory: PathBuf,
}

impl Server {
    /// One that must come up.
    pub(crate) fn start(start: &Start<'_>) -> Self {
        let mut server = Self::begin(start);
        server.until_it_answers();
        server
    }

    /// The same by a configuration file, `options` being lines of it.
    pub(crate) fn start_by_file(start: &Start<'_>) -> Self {
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
        let process = by_file(start.program, &directory);
        let mut server = Self { process, directory };
        server.until_it_answers();
        server
    }

    /// One that has ended, by the file that it had.
    pub(crate) fn start_again(&mut self, program: &Path) {
        self.process = by_file(program, &self.directory);
        self.until_it_answers();
    }

    fn until_it_answers(&mut self) {
        let server = self;
        let begun = Instant::now();
        while server.connection().is_err() {
            let ended = server.process.try_wait().expect("it is ours");
            assert!(ended.is_none(), "it has ended: {}", server.log());
            assert!(begun.elapsed() < PATIENCE, "it does not listen: {}", server.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// One that must not: how it ended, and its log.
    pub(crate) fn refused(start: &Start<'_>) -> (ExitStatus, String) {
        let mut server = Self::begin(start);
        let status = server.wait();
        (status, server.log())
    }

    /// One of which nothing is known yet.
    pub(crate) fn begin(start: &Start<'_>) -> Self {
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
            .expect("the engine starts: apt-get install redis-server");
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

    /// Until the log has these words.
    pub(crate) fn until_logged(&self, words: &str) {
        self.until(words, || self.log().contains(words));
    }

    pub(crate) fn until(&self, what: &str, mut done: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !done() {
            assert!(begun.elapsed() < PATIENCE, "{what}: not in time; {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// A connection to the engine's own socket.
    pub(crate) fn connection(&self) -> RedisResult<redis::Connection> {
        redis::Client::open(format!("unix://{}", self.directory.join("engine.sock").display()))?
            .get_connection()
    }

    /// The engine's answer at its own socket.
    pub(crate) fn try_ask<T: FromRedisValue>(&self, words: &[&str]) -> RedisResult<T> {
        let mut connection = self.connection()?;
        connection.set_read_timeout(Some(PATIENCE))?;
        redis::cmd(words[0]).arg(&words[1..]).query(&mut connection)
    }

    /// The same, which must be one.
    pub(crate) fn ask<T: FromRedisValue>(&self, words: &[&str]) -> T {
        self.try_ask(words).unwrap_or_else(|error| panic!("{words:?}: {error}; {}", self.log()))
    }

    /// What the engine says when it refuses.
    pub(crate) fn refusal(&self, words: &[&str]) -> String {
        match self.try_ask::<redis::Value>(words) {
            Ok(answer) => panic!("{words:?}: {answer:?}"),
            Err(error) => error.to_string(),
        }
    }

    /// A field of INFO ferrite, without the prefix.
    pub(crate) fn info(&self, field: &str) -> String {
        let wanted = format!("ferrite_{field}:");
        // Where the transport's thread is slow, INFO has what was counted when it was asked before.
        let _: String = self.ask(&["INFO", "ferrite"]);
        let begun = Instant::now();
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let all: String = self.ask(&["INFO", "ferrite"]);
            if let Some(found) = all.lines().find_map(|line| line.strip_prefix(&wanted)) {
                return found.trim_end().into();
            }
            assert!(begun.elapsed() < PATIENCE, "no {wanted} in {all}");
        }
    }

    pub(crate) fn count(&self, field: &str) -> u64 {
        self.info(field).parse().expect("a number")
    }

    /// Asks it to end: how it did.
    pub(crate) fn shut_down(&mut self, how: &str) -> ExitStatus {
        let _ = self.try_ask::<redis::Value>(&["SHUTDOWN", how]);
        self.wait()
    }

    pub(crate) fn signal(&self, name: &str) {
        let id = self.process.id().to_string();
        let sent = Command::new("kill").args(["-s", name, &id]).status().expect("kill");
        assert!(sent.success(), "SIG{name} to {id}");
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.process.try_wait().expect("it is ours") {
                return status;
            }
            assert!(begun.elapsed() < PATIENCE, "it does not end: {}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.process.try_wait().expect("it is ours").is_some()
    }

    /// The log has no sign of a crash, and the process is there.
    pub(crate) fn assert_well(&mut self) {
        let ended = self.process.try_wait().expect("it is ours");
        let log = self.log();
        assert!(ended.is_none(), "it has ended: {log}");
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
