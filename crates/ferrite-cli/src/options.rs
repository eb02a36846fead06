//! The command line: redis-cli's options, and options for RDMA. They are checked once, and become
//! [`Settings`] and a [`Mode`].

use std::ffi::OsString;
use std::io::{IsTerminal as _, Read as _};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, anyhow, ensure};
use clap::{ArgAction, Parser, ValueEnum};
use ferrite_fabric::Rdma;
use ferrite_proto::resp::unquote;

use crate::format::{Format, Style};
use crate::settings::{Address, Mode, Protocol, Scan, Settings};
use crate::{output, uri};

/// Command line client for Redis and Valkey, over RDMA where available
///
/// Has redis-cli's options and output. Runs commands from its arguments, from stdin, or at a prompt
/// with history, completion and hints. Connects over RDMA (to a Ferrite module or gateway, or to
/// Valkey's own listener), over TCP or to a Unix socket.
#[derive(Parser)]
#[command(
    name = "ferrite-cli",
    max_term_width = 100,
    disable_help_flag = true,
    disable_version_flag = true,
    args_override_self = true,
    override_usage = "ferrite-cli [OPTIONS] [COMMAND [ARGUMENT]...]",
    after_help = HELP
)]
pub(crate) struct Options {
    /// Command and its arguments; without one, commands are read from the prompt or from stdin
    #[arg(value_name = "COMMAND", trailing_var_arg = true, hide = true)]
    command: Vec<OsString>,

    /// Server host name or address
    #[arg(short = 'h', value_name = "HOST", default_value = "127.0.0.1", help_heading = "Server")]
    host: String,
    /// Server port
    #[arg(short = 'p', value_name = "PORT", default_value_t = 6379, help_heading = "Server")]
    port: u16,
    /// Unix socket of the server, instead of host and port
    #[arg(short = 's', value_name = "PATH", conflicts_with_all = ["rdma", "local"], help_heading = "Server")]
    socket: Option<PathBuf>,
    // No doc comment: rustdoc would take the brackets for links.
    #[arg(short = 'u', value_name = "URI", help = URI_HELP, help_heading = "Server")]
    uri: Option<uri::Uri>,
    /// Password; safer in the environment variable REDISCLI_AUTH, where other users cannot see it
    #[arg(short = 'a', long = "pass", value_name = "PASSWORD", help_heading = "Server")]
    password: Option<String>,
    /// User to log in as, with the password
    #[arg(long, value_name = "USER", help_heading = "Server")]
    user: Option<String>,
    /// Do not warn about a password on the command line
    #[arg(long, help_heading = "Server")]
    no_auth_warning: bool,
    /// Database number [default: 0]
    #[arg(short = 'n', value_name = "NUMBER", help_heading = "Server")]
    database: Option<u32>,
    /// Use RESP2 (default, except with --json and --quoted-json)
    #[arg(short = '2', conflicts_with = "resp3", help_heading = "Server")]
    resp2: bool,
    /// Use RESP3
    #[arg(short = '3', help_heading = "Server")]
    resp3: bool,
    /// Time limit for connecting, in seconds: for RDMA, then again for TCP
    #[arg(short = 't', value_name = "SECONDS", value_parser = seconds, default_value = "5", help_heading = "Server")]
    timeout: Duration,

    /// Whether to use RDMA: prefer, require or forbid [default: prefer]
    #[arg(long, value_name = "POLICY", help_heading = "RDMA")]
    rdma: Option<Rdma>,
    /// Local address to connect from; over RDMA it selects the device
    #[arg(long, value_name = "ADDRESS", help_heading = "RDMA")]
    local: Option<IpAddr>,
    /// Print the transport of the connection on stderr (always done at the prompt)
    #[arg(long, help_heading = "RDMA")]
    verbose: bool,

    /// Print replies as raw bytes (default if stdout is not a terminal)
    #[arg(long, overrides_with_all = ["no_raw", "csv", "json", "quoted_json"], help_heading = "Output")]
    raw: bool,
    /// Print replies formatted for people (default at a terminal)
    #[arg(long, overrides_with_all = ["raw", "csv", "json", "quoted_json"], help_heading = "Output")]
    no_raw: bool,
    /// Print replies as comma-separated values
    #[arg(long, overrides_with_all = ["raw", "no_raw", "json", "quoted_json"], help_heading = "Output")]
    csv: bool,
    /// Print each reply as one line of JSON, an error as {"error": …}; uses RESP3 unless -2
    #[arg(long, overrides_with_all = ["raw", "no_raw", "csv", "quoted_json"], help_heading = "Output")]
    json: bool,
    /// Like --json, but escape strings as --no-raw does, for values that are not text
    #[arg(long, overrides_with_all = ["raw", "no_raw", "csv", "json"], help_heading = "Output")]
    quoted_json: bool,
    /// Delimiter between the elements of a raw reply [default: newline]
    #[arg(short = 'd', value_name = "TEXT", allow_hyphen_values = true, help_heading = "Output")]
    element_delimiter: Option<OsString>,
    /// Delimiter after a raw reply [default: newline]
    #[arg(short = 'D', value_name = "TEXT", allow_hyphen_values = true, help_heading = "Output")]
    reply_delimiter: Option<OsString>,
    /// Print push messages of RESP3 [default: yes at a terminal, else no]
    #[arg(long, value_name = "YES_OR_NO", value_enum, help_heading = "Output")]
    show_pushes: Option<YesNo>,
    /// Fail on replies with more than BYTES bytes or BYTES/64 values; 0 for no limit
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 30, help_heading = "Output")]
    max_reply_bytes: u64,

    /// Read the last argument from stdin
    #[arg(short = 'x', conflicts_with = "stdin_tag", help_heading = "Commands")]
    stdin_last: bool,
    /// Replace the argument TAG with the contents of stdin
    #[arg(short = 'X', value_name = "TAG", help_heading = "Commands")]
    stdin_tag: Option<OsString>,
    /// Interpret quotes and escapes in arguments, as at the prompt
    #[arg(long, help_heading = "Commands")]
    quoted_input: bool,
    /// Run the command COUNT times; forever if negative
    #[arg(
        short = 'r',
        value_name = "COUNT",
        default_value_t = 1,
        allow_hyphen_values = true,
        help_heading = "Commands"
    )]
    repeat: i64,
    /// Seconds between runs, lines of --stat or SCAN calls; duration of --latency
    #[arg(short = 'i', value_name = "SECONDS", value_parser = seconds, help_heading = "Commands")]
    interval: Option<Duration>,
    /// Exit with code 1 if a reply is an error
    #[arg(short = 'e', help_heading = "Commands")]
    fail_on_error: bool,
    /// Run a Lua script; the arguments are its keys, a single comma, and its other arguments
    #[arg(long, value_name = "FILE", help_heading = "Commands")]
    eval: Option<PathBuf>,

    /// Send stdin to the server (commands in RESP, or one per line) and count the replies
    #[arg(long, group = "mode", help_heading = "Modes")]
    pipe: bool,
    /// With --pipe: give up after this time without a reply; 0 for no limit
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 30,
        requires = "pipe",
        help_heading = "Modes"
    )]
    pipe_timeout: u64,
    /// Print server statistics every second (-i changes the interval)
    #[arg(long, group = "mode", help_heading = "Modes")]
    stat: bool,
    /// Measure the latency of PING in milliseconds: until interrupted, or for one second (-i) if
    /// stdout is not a terminal
    #[arg(long, group = "mode", help_heading = "Modes")]
    latency: bool,
    /// Like --latency, but start anew every 15 seconds (-i)
    #[arg(long, group = "mode", help_heading = "Modes")]
    latency_history: bool,
    /// List all keys, one per line
    #[arg(long, group = "mode", help_heading = "Modes")]
    scan: bool,
    /// Find the largest key of each type, by number of elements
    #[arg(long, group = "mode", help_heading = "Modes")]
    bigkeys: bool,
    /// Find the largest key of each type, by memory
    #[arg(long, group = "mode", help_heading = "Modes")]
    memkeys: bool,
    /// With --memkeys: number of elements to sample in a key; 0 for all
    #[arg(long, value_name = "COUNT", requires = "memkeys", help_heading = "Modes")]
    memkeys_samples: Option<u64>,
    /// With --scan, --bigkeys and --memkeys: only keys that match PATTERN
    #[arg(long, value_name = "PATTERN", allow_hyphen_values = true, help_heading = "Modes")]
    pattern: Option<OsString>,
    /// With --scan, --bigkeys and --memkeys: keys per SCAN call
    #[arg(long, value_name = "COUNT", help_heading = "Modes")]
    count: Option<u64>,

    /// Print this help
    #[arg(long, action = ArgAction::HelpShort, help_heading = "Other")]
    help: Option<bool>,
    /// Print the version
    #[arg(short = 'v', long, help_heading = "Other")]
    version: bool,
}

const URI_HELP: &str = "Server as a URI: redis://[[USER:]PASSWORD@]HOST[:PORT][/DATABASE]";

const HELP: &str = "\
Examples:
  ferrite-cli -h 10.0.0.1 -p 6380                          open a prompt
  ferrite-cli -h 10.0.0.1 -p 6380 --rdma require GET key   use RDMA, or fail with the reason
  ferrite-cli --json HGETALL key | jq .field               print a hash as a JSON object
  ferrite-cli --pipe < commands                            send many commands at once
  ferrite-cli -x SET key < file                            store a file

If RDMA is preferred but unavailable, ferrite-cli uses TCP, which is not encrypted, and reports the
reason on stderr:
  - always at the prompt, with --rdma prefer and with --verbose
  - otherwise if stderr is a terminal or a password is sent, except for servers on this host
Use --rdma require in scripts that must not send a password over TCP.

On a terminal, control characters from the server are printed as \\x1b. Files and pipes get the
original bytes.

JSON output is always valid: an error is {\"error\": text}, inf and nan are strings, and bytes that
are not UTF-8 become U+0080 to U+00FF (--quoted-json loses no information).

At the prompt:
  TAB                      complete a command
  help COMMAND             describe a command
  :transport               show the transport of the connection
  :set nohints             hide hints (:set hints shows them)
  connect HOST PORT        connect to another server
  5 INCR key               run a command five times
  Ctrl-C                   cancel a blocked command
  exit                     leave
The history is stored in ~/.ferritecli_history, or in the file named by FERRITECLI_HISTFILE, without
commands that contain passwords.

Exit codes: 0 success, even if a reply is an error (see -e); 1 failure; 2 wrong usage; 69 RDMA is
required, but this host has no usable RDMA.";

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum YesNo {
    #[value(alias = "y")]
    Yes,
    #[value(alias = "n")]
    No,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let invalid = || "expected a number of seconds, such as 0.5".to_owned();
    let seconds: f64 = text.parse().map_err(|_| invalid())?;
    Duration::try_from_secs_f64(seconds).map_err(|_| invalid())
}

/// The action that the command line asks for.
pub(crate) enum Action {
    Version,
    Run(Box<Settings>, Mode),
}

impl Options {
    /// Checks the options, and returns the action that they ask for. Reads stdin and the script
    /// file if the options say so.
    pub(crate) fn into_action(self) -> anyhow::Result<Action> {
        if self.version {
            return Ok(Action::Version);
        }
        let settings = self.settings();
        let mode = self.mode()?;
        Ok(Action::Run(Box::new(settings), mode))
    }

    fn settings(&self) -> Settings {
        let is_terminal = std::io::stdout().is_terminal();
        let uri = self.uri.clone().unwrap_or_default();
        let typed = self.password.clone().or(uri.password);
        if typed.is_some() && !self.no_auth_warning {
            output::write_stderr(
                "Warning: Using a password with '-a' or '-u' option on the command line interface may not be safe.",
            );
        }
        let server = match &self.socket {
            Some(path) => Address::Unix(path.clone()),
            None => Address::Net {
                host: uri.host.unwrap_or_else(|| self.host.clone()),
                port: uri.port.unwrap_or(self.port),
            },
        };
        let mut format = Format::new(self.style(is_terminal));
        let bytes = |text: &OsString| text.clone().into_vec();
        if let Some(delimiter) = &self.element_delimiter {
            format.element_delimiter = bytes(delimiter);
        }
        if let Some(delimiter) = &self.reply_delimiter {
            format.reply_delimiter = bytes(delimiter);
        }
        Settings {
            server,
            user: self.user.clone().or(uri.user),
            password: typed.or_else(|| std::env::var("REDISCLI_AUTH").ok()),
            database: self.database.or(uri.database).unwrap_or(0),
            protocol: match (self.resp2, self.resp3) {
                (true, _) => Protocol::Resp2,
                (_, true) => Protocol::Resp3,
                _ if self.json || self.quoted_json => Protocol::Resp3IfKnown,
                _ => Protocol::Resp2,
            },
            timeout: self.timeout,
            rdma: self.rdma.unwrap_or_default(),
            is_rdma_explicit: self.rdma.is_some(),
            local: self.local.map(|ip| SocketAddr::new(ip, 0)),
            verbose: self.verbose,
            format,
            shows_pushes: self.show_pushes.map_or(is_terminal, |show| show == YesNo::Yes),
            repeat: self.repeat,
            interval: self.interval,
            fails_on_error: self.fail_on_error,
            max_reply_bytes: self.max_reply_bytes,
        }
    }

    fn style(&self, is_terminal: bool) -> Style {
        let styles = [
            (self.raw, Style::Raw),
            (self.no_raw, Style::Human),
            (self.csv, Style::Csv),
            (self.json, Style::Json),
            (self.quoted_json, Style::QuotedJson),
        ];
        let otherwise = if is_terminal { Style::Human } else { Style::Raw };
        styles.into_iter().find(|(is_chosen, _)| *is_chosen).map_or(otherwise, |(_, style)| style)
    }

    fn mode(self) -> anyhow::Result<Mode> {
        let scan = Scan { pattern: self.pattern.map(OsString::into_vec), count: self.count };
        if self.pipe {
            let reply_timeout = Some(self.pipe_timeout).filter(|seconds| *seconds > 0);
            return Ok(Mode::Pipe { reply_timeout: reply_timeout.map(Duration::from_secs) });
        }
        if self.latency || self.latency_history {
            return Ok(Mode::Latency { history: self.latency_history });
        }
        if self.stat {
            return Ok(Mode::Stat);
        }
        if self.scan {
            return Ok(Mode::Scan(scan));
        }
        if self.bigkeys {
            return Ok(Mode::BigKeys(scan));
        }
        if self.memkeys {
            return Ok(Mode::MemoryKeys(scan, self.memkeys_samples));
        }
        let mut words: Vec<_> = self.command.into_iter().map(OsString::into_vec).collect();
        if self.quoted_input {
            let plain: Result<_, _> = words.iter().map(|word| unquote(word)).collect();
            words =
                plain.map_err(|_| anyhow!("--quoted-input: each argument must be one string"))?;
        }
        if let Some(file) = self.eval {
            words = eval(&file, words)?;
        }
        if words.is_empty() {
            ensure!(!self.stdin_last && self.stdin_tag.is_none(), "-x and -X require a command");
            return Ok(Mode::Prompt);
        }
        if self.stdin_last {
            words.push(stdin()?);
        } else if let Some(tag) = self.stdin_tag {
            let tag = tag.into_vec();
            let tagged = words.iter_mut().find(|word| **word == tag);
            *tagged.with_context(|| {
                format!("-X: no argument is {}", String::from_utf8_lossy(&tag))
            })? = stdin()?;
        }
        Ok(Mode::Command(words))
    }
}

fn stdin() -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::io::stdin().lock().read_to_end(&mut bytes).context("cannot read stdin")?;
    Ok(bytes)
}

/// Turns `KEY… , ARGUMENT…` into `EVAL SCRIPT NUMBER KEY… ARGUMENT…`.
fn eval(file: &PathBuf, words: Vec<Vec<u8>>) -> anyhow::Result<Vec<Vec<u8>>> {
    let script = std::fs::read(file)
        .with_context(|| format!("cannot read the script {}", file.display()))?;
    let comma = words.iter().position(|word| word == b",");
    let keys = comma.unwrap_or(words.len());
    let mut command = vec![b"EVAL".to_vec(), script, keys.to_string().into_bytes()];
    command.extend(
        words.into_iter().enumerate().filter(|(at, _)| Some(*at) != comma).map(|(_, word)| word),
    );
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(words: &[&str]) -> (Box<Settings>, Mode) {
        let options = Options::try_parse_from([&["ferrite-cli"], words].concat());
        match options
            .unwrap_or_else(|error| panic!("{error}"))
            .into_action()
            .expect("valid options")
        {
            Action::Run(settings, mode) => (settings, mode),
            Action::Version => panic!("{words:?}"),
        }
    }

    fn command(words: &[&str]) -> Vec<Vec<u8>> {
        match run(words).1 {
            Mode::Command(words) => words,
            _ => panic!("{words:?} is not a command"),
        }
    }

    #[test]
    fn passes_options_after_the_command_to_it() {
        assert_eq!(command(&["-n", "3", "SET", "-h", "--raw"]), [b"SET", &b"-h"[..], b"--raw"]);
        assert_eq!(command(&["GET", ""]), [&b"GET"[..], b""]);
        assert_eq!(command(&["INCRBY", "k", "-1"]), [&b"INCRBY"[..], b"k", b"-1"]);
        assert!(Options::try_parse_from(["ferrite-cli", "--no-such", "GET"]).is_err());
        assert!(Options::try_parse_from(["ferrite-cli", "-2", "-3"]).is_err());
    }

    #[test]
    fn uses_the_last_style() {
        assert_eq!(run(&["--csv", "--no-raw"]).0.format.style, Style::Human);
        let (settings, _) = run(&["--raw", "--json"]);
        assert_eq!(
            (settings.format.style, settings.protocol),
            (Style::Json, Protocol::Resp3IfKnown)
        );
        assert_eq!(run(&["-2", "--json"]).0.protocol, Protocol::Resp2);
    }

    #[test]
    fn takes_server_and_login_from_a_uri() {
        let (settings, mode) = run(&["--no-auth-warning", "-u", "redis://me:p%20w@there:7000/4"]);
        assert!(matches!(mode, Mode::Prompt));
        assert_eq!(settings.server, Address::Net { host: "there".into(), port: 7000 });
        assert_eq!(
            (settings.user.as_deref(), settings.password.as_deref()),
            (Some("me"), Some("p w"))
        );
        assert_eq!(settings.database, 4);
    }

    #[test]
    fn unquotes_arguments() {
        assert_eq!(command(&["--quoted-input", "SET", r#""\x00""#]), [b"SET", &b"\0"[..]]);
    }

    #[test]
    fn defines_valid_options() {
        use clap::CommandFactory as _;
        Options::command().debug_assert();
    }
}
