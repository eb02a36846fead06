//! Starts Redis and Valkey for tests, with and without the module.

mod programs;

use std::ffi::OsString;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

pub use programs::{REDIS, engines, module, valkey};

use crate::directory::TempDir;
use crate::process::{self, exit_within};
use crate::resp::Client;
use crate::wait::{TIMEOUT, until_or};

/// The options with which an engine is started. The engine has a Unix socket, a log file and a
/// directory of its own. By default it has no TCP port and no persistence.
#[derive(Debug, Clone, Copy)]
pub struct Start<'a> {
    /// The engine's program.
    pub program: &'a Path,
    /// The engine's own options, as on its command line. They take precedence over the defaults.
    pub options: &'a [&'a str],
    /// The arguments of `loadmodule`. `None` starts the engine without the module.
    pub module: Option<&'a [&'a str]>,
}

impl<'a> Start<'a> {
    /// Returns the options of Debian's Redis without the module.
    #[must_use]
    pub fn redis(options: &'a [&'a str]) -> Self {
        Self { program: Path::new(REDIS), options, module: None }
    }

    /// Returns the command line.
    fn arguments(&self, directory: &Path) -> Vec<OsString> {
        let defaults = ["--port", "0", "--save", "", "--appendonly", "no"];
        let mut words: Vec<OsString> = defaults.map(Into::into).into();
        words.extend(["--enable-module-command", "local"].map(Into::into));
        for (option, file) in [("--dir", ""), ("--unixsocket", SOCKET), ("--logfile", LOG)] {
            words.extend([option.into(), directory.join(file).into()]);
        }
        words.extend(self.options.iter().map(Into::into));
        if let Some(arguments) = self.module {
            words.extend(["--loadmodule".into(), module().into()]);
            words.extend(more_arguments().into_iter().map(Into::into));
            words.extend(arguments.iter().map(Into::into));
        }
        words
    }

    /// Returns the lines of a configuration file. Each element of `options` is a whole line here.
    fn lines(&self, directory: &Path) -> String {
        let mut lines = vec![
            format!("dir {}", directory.display()),
            format!("unixsocket {}", directory.join(SOCKET).display()),
            format!("logfile {}", directory.join(LOG).display()),
        ];
        if let Some(arguments) = self.module {
            let arguments = arguments.join(" ");
            let more = more_arguments().join(" ");
            lines.push(format!("loadmodule {} {arguments} {more}", module().display()));
        }
        lines.extend(self.options.iter().map(|line| (*line).to_owned()));
        lines.join("\n")
    }
}

const SOCKET: &str = "engine.sock";
const LOG: &str = "log";

/// Returns additional arguments of `loadmodule` for every engine. They allow running all tests with
/// other settings: `FERRITE_MODULE_ARGS=call-path=no`.
fn more_arguments() -> Vec<String> {
    let given = std::env::var("FERRITE_MODULE_ARGS").unwrap_or_default();
    given.split([' ', '=']).filter(|word| !word.is_empty()).map(Into::into).collect()
}

/// An engine. Drop kills it and removes its directory.
#[derive(Debug)]
pub struct Engine {
    process: Child,
    program: PathBuf,
    arguments: Vec<OsString>,
    directory: TempDir,
}

impl Engine {
    /// Starts an engine and waits until it answers.
    #[must_use]
    pub fn start(start: &Start<'_>) -> Self {
        let mut engine = Self::spawn(start);
        engine.wait_until_it_answers();
        engine
    }

    /// Starts Debian's Redis without the module and with these options, and waits until it answers.
    #[must_use]
    pub fn redis(options: &[&str]) -> Self {
        Self::start(&Start::redis(options))
    }

    /// Starts an engine whose options are in a configuration file, not on its command line, and
    /// waits until it answers. Each option is a line of the file. The defaults of [`Start`] for TCP
    /// and persistence do not apply.
    #[must_use]
    pub fn start_from_file(start: &Start<'_>) -> Self {
        let directory = TempDir::new("engine");
        let file = directory.file("engine.conf", start.lines(directory.path()));
        let mut engine = Self::run(start.program, vec![file.into()], directory);
        engine.wait_until_it_answers();
        engine
    }

    /// Starts an engine without waiting until it answers.
    #[must_use]
    pub fn spawn(start: &Start<'_>) -> Self {
        let directory = TempDir::new("engine");
        Self::run(start.program, start.arguments(directory.path()), directory)
    }

    /// Starts an engine that must exit by itself. Returns its exit status and its log.
    #[must_use]
    pub fn run_until_exit(start: &Start<'_>) -> (ExitStatus, String) {
        let mut engine = Self::spawn(start);
        let status = engine.wait();
        (status, engine.log())
    }

    fn run(program: &Path, arguments: Vec<OsString>, directory: TempDir) -> Self {
        let process = launch(program, &arguments);
        Self { process, program: program.into(), arguments, directory }
    }

    /// Kills the engine, if it still runs. Its directory stays for [`Engine::restart`].
    pub fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// Starts the engine again, with the same options and in the same directory, and waits until it
    /// answers. Kills the engine first if it still runs.
    pub fn restart(&mut self) {
        self.kill();
        self.process = launch(&self.program, &self.arguments);
        self.wait_until_it_answers();
    }

    /// Waits until the engine's event loop runs, that is, until the engine replies. The reply may
    /// be an error, because the engine needs a password or loads its data. A connection is not
    /// enough, because the engine listens before it loads its modules.
    fn wait_until_it_answers(&mut self) {
        let socket = self.socket();
        let log = self.directory.join(LOG);
        let log = || std::fs::read_to_string(&log).unwrap_or_default();
        let process = &mut self.process;
        let answers = || {
            let exited = process.try_wait().expect("a child process");
            assert!(exited.is_none(), "the engine has exited: {}", log());
            replies_to_ping(&socket)
        };
        until_or(TIMEOUT, "a reply of the engine", answers, log);
    }

    /// Returns the engine's directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Returns the path of the engine's Unix socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.directory.join(SOCKET)
    }

    /// Returns the process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Returns the engine's log.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.directory.join(LOG)).unwrap_or_default()
    }

    /// Waits until the log contains this text.
    #[track_caller]
    pub fn wait_for_log(&self, words: &str) {
        self.wait_until(words, || self.log().contains(words));
    }

    /// Waits until a condition holds. `what` describes the condition. The message of a failure
    /// contains the log.
    #[track_caller]
    pub fn wait_until(&self, what: &str, condition: impl FnMut() -> bool) {
        until_or(TIMEOUT, what, condition, || self.log());
    }

    /// Connects a client to the engine's own socket.
    #[must_use]
    pub fn client(&self) -> Client {
        Client::to_socket(&self.socket())
    }

    /// Sends the signal with this name, which is given without "SIG".
    pub fn signal(&self, name: &str) {
        process::signal(name, self.process.id());
    }

    /// Waits until the engine exits.
    ///
    /// # Panics
    /// If the engine still runs after [`TIMEOUT`].
    pub fn wait(&mut self) -> ExitStatus {
        let status = exit_within(&mut self.process, TIMEOUT);
        status.unwrap_or_else(|| panic!("the engine does not exit: {}", self.log()))
    }

    /// Returns whether the engine has exited.
    pub fn has_exited(&mut self) -> bool {
        self.process.try_wait().expect("a child process").is_some()
    }

    /// Asserts that the engine runs and that its log has no sign of a crash.
    #[track_caller]
    pub fn assert_healthy(&mut self) {
        let has_exited = self.has_exited();
        let log = self.log();
        assert!(!has_exited, "the engine has exited: {log}");
        for sign in ["BUG REPORT", "a bug: panic", "crashed by signal", "ASSERTION FAILED"] {
            assert!(!log.contains(sign), "{log}");
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.kill();
    }
}

fn launch(program: &Path, arguments: &[OsString]) -> Child {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null());
    command.spawn().unwrap_or_else(|error| {
        panic!(
            "cannot start {}: {error}; for Redis: apt-get install redis-server",
            program.display()
        )
    })
}

/// Returns whether an engine replies on this socket.
fn replies_to_ping(socket: &Path) -> bool {
    let Ok(mut stream) = UnixStream::connect(socket) else { return false };
    // The timeout is short, because the caller checks between two attempts whether the process
    // still runs.
    let _ = stream.set_read_timeout(Some(Duration::from_secs(1)));
    let mut reply = String::new();
    stream.write_all(b"PING\r\n").is_ok()
        && BufReader::new(stream).read_line(&mut reply).is_ok()
        && !reply.is_empty()
}

/// Commands with typed replies.
#[cfg(feature = "redis")]
mod commands {
    use std::process::ExitStatus;
    use std::time::Duration;

    use redis::{FromRedisValue, RedisResult};

    use super::Engine;
    use crate::wait::TIMEOUT;

    impl Engine {
        /// Opens a connection to the engine's own socket.
        ///
        /// # Errors
        /// The engine does not accept the connection.
        pub fn connection(&self) -> RedisResult<redis::Connection> {
            redis::Client::open(format!("unix://{}", self.socket().display()))?.get_connection()
        }

        /// Runs a command over the engine's own socket.
        ///
        /// # Errors
        /// The engine does not accept the connection, does not reply within [`TIMEOUT`], or replies
        /// with an error or with a reply of another type.
        pub fn try_ask<T: FromRedisValue>(&self, words: &[&str]) -> RedisResult<T> {
            let mut connection = self.connection()?;
            connection.set_read_timeout(Some(TIMEOUT))?;
            redis::cmd(words[0]).arg(&words[1..]).query(&mut connection)
        }

        /// Runs a command over the engine's own socket.
        ///
        /// # Panics
        /// If the command fails.
        #[track_caller]
        pub fn ask<T: FromRedisValue>(&self, words: &[&str]) -> T {
            self.try_ask(words).unwrap_or_else(|error| panic!("{words:?}: {error}; {}", self.log()))
        }

        /// Runs a command that the engine must reject, and returns the error.
        ///
        /// # Panics
        /// If the engine does not reject the command.
        #[track_caller]
        #[must_use]
        pub fn refusal(&self, words: &[&str]) -> String {
            match self.try_ask::<redis::Value>(words) {
                Ok(reply) => panic!("{words:?} was not refused: {reply:?}"),
                Err(error) => error.to_string(),
            }
        }

        /// Returns the value of the field of INFO ferrite with this name, which is given without
        /// the prefix "ferrite_". Waits until there is such a field.
        #[track_caller]
        #[must_use]
        pub fn info(&self, field: &str) -> String {
            let wanted = format!("ferrite_{field}:");
            // While the transport thread is busy, INFO shows the previous counters. Therefore this
            // asks twice, and gives the thread a moment in between.
            let _: String = self.ask(&["INFO", "ferrite"]);
            let mut found = None;
            self.wait_until(&wanted, || {
                std::thread::sleep(Duration::from_millis(100));
                let all: String = self.ask(&["INFO", "ferrite"]);
                let value = all.lines().find_map(|line| line.strip_prefix(&wanted));
                found = value.map(|value| value.trim_end().to_owned());
                found.is_some()
            });
            found.expect("the condition sets it")
        }

        /// Returns a number in INFO ferrite.
        ///
        /// # Panics
        /// If the field is not a number.
        #[track_caller]
        #[must_use]
        pub fn count(&self, field: &str) -> u64 {
            self.info(field).parse().expect("a number")
        }

        /// Runs SHUTDOWN and returns the exit status.
        pub fn shut_down(&mut self, how: &str) -> ExitStatus {
            let _ = self.try_ask::<redis::Value>(&["SHUTDOWN", how]);
            self.wait()
        }
    }
}
