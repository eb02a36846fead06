//! The command line: redis-cli's words, and those for RDMA. What is typed becomes [`Settings`] and
//! a [`Mode`] here, checked once.

use std::ffi::OsString;
use std::io::{IsTerminal as _, Read as _};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, anyhow, ensure};
use clap::{ArgAction, Parser, ValueEnum};
use ferrite_fabric::Rdma;

use crate::format::{Format, Style};
use crate::settings::{Address, Mode, Protocol, Scan, Settings};
use crate::{output, split, uri};

/// The command line of Redis and Valkey, over RDMA where there is some
///
/// What redis-cli does, with its options and its output: commands as arguments, from stdin or at a
/// prompt with history, completion and hints. Servers are reached over RDMA (a Ferrite gateway, or
/// Valkey's own listener), TCP or a Unix socket.
#[derive(Parser)]
#[command(
    name = "ferrite-cli",
    max_term_width = 100,
    disable_help_flag = true,
    disable_version_flag = true,
    override_usage = "ferrite-cli [OPTIONS] [COMMAND [ARGUMENT]...]",
    after_help = HELP
)]
pub(crate) struct Options {
    /// A command and its arguments; without one, commands come from the prompt or from stdin
    #[arg(value_name = "COMMAND", trailing_var_arg = true, hide = true)]
    command: Vec<OsString>,

    /// The server's name or address
    #[arg(short = 'h', value_name = "HOST", default_value = "127.0.0.1", help_heading = "Server")]
    host: String,
    /// Its port
    #[arg(short = 'p', value_name = "PORT", default_value_t = 6379, help_heading = "Server")]
    port: u16,
    /// Its Unix socket instead
    #[arg(short = 's', value_name = "PATH", conflicts_with_all = ["rdma", "local"], help_heading = "Server")]
    socket: Option<PathBuf>,
    // No doc comment: rustdoc would take the brackets for links.
    #[arg(short = 'u', value_name = "URI", help = URI_HELP, help_heading = "Server")]
    uri: Option<uri::Uri>,
    /// A password; better in the environment variable REDISCLI_AUTH, where others do not see it
    #[arg(short = 'a', long = "pass", value_name = "PASSWORD", help_heading = "Server")]
    password: Option<String>,
    /// Whose password it is
    #[arg(long, value_name = "USER", help_heading = "Server")]
    user: Option<String>,
    /// Do not warn of a password that others may see
    #[arg(long, help_heading = "Server")]
    no_auth_warning: bool,
    /// The database
    #[arg(short = 'n', value_name = "NUMBER", help_heading = "Server")]
    database: Option<u32>,
    /// Speak RESP2
    #[arg(short = '2', conflicts_with = "resp3", help_heading = "Server")]
    resp2: bool,
    /// Speak RESP3
    #[arg(short = '3', help_heading = "Server")]
    resp3: bool,
    /// How long connecting may take on each way: over RDMA, then over TCP
    #[arg(short = 't', value_name = "SECONDS", value_parser = seconds, default_value = "5", help_heading = "Server")]
    timeout: Duration,

    /// Whether RDMA may, must or must not carry it: prefer, require or forbid [default: prefer]
    #[arg(long, value_name = "POLICY", help_heading = "RDMA")]
    rdma: Option<Rdma>,
    /// Connect from this local address, and so over its device
    #[arg(long, value_name = "ADDRESS", help_heading = "RDMA")]
    local: Option<IpAddr>,
    /// Say on stderr what carries the connection; at the prompt that is always said
    #[arg(long, help_heading = "RDMA")]
    verbose: bool,

    /// Replies as they are: the default where stdout is no terminal
    #[arg(long, overrides_with_all = ["no_raw", "csv", "json", "quoted_json"], help_heading = "Output")]
    raw: bool,
    /// Replies for people: the default at a terminal
    #[arg(long, overrides_with_all = ["raw", "csv", "json", "quoted_json"], help_heading = "Output")]
    no_raw: bool,
    /// Replies as comma-separated values
    #[arg(long, overrides_with_all = ["raw", "no_raw", "json", "quoted_json"], help_heading = "Output")]
    csv: bool,
    /// Each reply as a line of JSON, an error as {"error": …}; RESP3 unless -2
    #[arg(long, overrides_with_all = ["raw", "no_raw", "csv", "quoted_json"], help_heading = "Output")]
    json: bool,
    /// The same, with strings quoted as for people: for values that are not text
    #[arg(long, overrides_with_all = ["raw", "no_raw", "csv", "json"], help_heading = "Output")]
    quoted_json: bool,
    /// Between the elements of a raw reply [default: a line end]
    #[arg(short = 'd', value_name = "TEXT", allow_hyphen_values = true, help_heading = "Output")]
    element_delimiter: Option<OsString>,
    /// After a raw reply [default: a line end]
    #[arg(short = 'D', value_name = "TEXT", allow_hyphen_values = true, help_heading = "Output")]
    reply_delimiter: Option<OsString>,
    /// Print what a RESP3 server says unasked: the default at a terminal
    #[arg(long, value_name = "YES_OR_NO", value_enum, help_heading = "Output")]
    show_pushes: Option<YesNo>,
    /// A larger reply, or one of more values than a 64th of this, is an error; 0 for no limit
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 30, help_heading = "Output")]
    max_reply_bytes: u64,

    /// The last argument comes from stdin
    #[arg(short = 'x', conflicts_with = "stdin_tag", help_heading = "Commands")]
    stdin_last: bool,
    /// The argument that reads TAG comes from stdin
    #[arg(short = 'X', value_name = "TAG", help_heading = "Commands")]
    stdin_tag: Option<OsString>,
    /// Arguments are quoted as at the prompt
    #[arg(long, help_heading = "Commands")]
    quoted_input: bool,
    /// Run it so many times; for ever if negative
    #[arg(
        short = 'r',
        value_name = "COUNT",
        default_value_t = 1,
        allow_hyphen_values = true,
        help_heading = "Commands"
    )]
    repeat: i64,
    /// Between two runs, samples of --latency and --stat, or scans
    #[arg(short = 'i', value_name = "SECONDS", value_parser = seconds, help_heading = "Commands")]
    interval: Option<Duration>,
    /// A reply that is an error ends it with exit code 1
    #[arg(short = 'e', help_heading = "Commands")]
    fail_on_error: bool,
    /// Run a Lua script: the arguments are its keys, a lone comma, and what it gets besides
    #[arg(long, value_name = "FILE", help_heading = "Commands")]
    eval: Option<PathBuf>,

    /// Send stdin as it is (commands in RESP, or one a line) and count the replies
    #[arg(long, group = "mode", help_heading = "Modes")]
    pipe: bool,
    /// With --pipe: give up after so long without a reply, 0 for never
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 30,
        requires = "pipe",
        help_heading = "Modes"
    )]
    pipe_timeout: u64,
    /// Print server statistics every second (-i)
    #[arg(long, group = "mode", help_heading = "Modes")]
    stat: bool,
    /// Round trips of PING in milliseconds, until interrupted; for a second (-i) where stdout is no
    /// terminal
    #[arg(long, group = "mode", help_heading = "Modes")]
    latency: bool,
    /// The same, begun anew every 15 seconds (-i)
    #[arg(long, group = "mode", help_heading = "Modes")]
    latency_history: bool,
    /// All keys, one a line
    #[arg(long, group = "mode", help_heading = "Modes")]
    scan: bool,
    /// The largest key of each type, by its elements
    #[arg(long, group = "mode", help_heading = "Modes")]
    bigkeys: bool,
    /// The largest key of each type, by its memory
    #[arg(long, group = "mode", help_heading = "Modes")]
    memkeys: bool,
    /// With --memkeys: look at so many elements of a key, 0 for all
    #[arg(long, value_name = "COUNT", requires = "memkeys", help_heading = "Modes")]
    memkeys_samples: Option<u64>,
    /// With --scan, --bigkeys and --memkeys: keys that match
    #[arg(long, value_name = "PATTERN", allow_hyphen_values = true, help_heading = "Modes")]
    pattern: Option<OsString>,
    /// The same: keys that the server looks at per call
    #[arg(long, value_name = "COUNT", help_heading = "Modes")]
    count: Option<u64>,

    /// This text
    #[arg(long, action = ArgAction::HelpShort, help_heading = "Other")]
    help: Option<bool>,
    /// The version
    #[arg(short = 'v', long, help_heading = "Other")]
    version: bool,
}

const URI_HELP: &str = "All of it in one: redis://[[USER:]PASSWORD@]HOST[:PORT][/DATABASE]";

const HELP: &str = "\
Examples:
  ferrite-cli -h 10.0.0.1 -p 6380                          a prompt
  ferrite-cli -h 10.0.0.1 -p 6380 --rdma require GET key   RDMA, or an error that says why not
  ferrite-cli --json HGETALL key | jq .field               an object
  ferrite-cli --pipe < commands                            many commands at once
  ferrite-cli SET key \"$(date)\"; ferrite-cli -x SET file < file

Where RDMA is preferred and unavailable, TCP carries the connection, without encryption. The
prompt says so on stderr, with the reason. Without a prompt, a line on stderr says so if stderr is
a terminal or a password is sent, but not for a server on this host; with --rdma prefer or
--verbose it always does. Scripts that must not send a password over TCP use --rdma require.

On a terminal, control characters that a server sends are shown as \\x1b. Files and pipes get the
bytes as they are.

JSON is valid whatever the reply: an error is {\"error\": text}, inf and nan are strings, and
bytes that are no UTF-8 become U+0080 to U+00FF (--quoted-json loses nothing).

At the prompt: TAB completes; help COMMAND; :transport says what carries the connection; :set
nohints; connect HOST PORT; 5 INCR key runs it five times; Ctrl-C ends what waits; exit. History is
in ~/.ferritecli_history, or where FERRITECLI_HISTFILE says; commands with passwords are not kept.

Exit codes: 0 success, also if a reply is an error (but for -e); 1 failure; 2 wrong usage; 69 RDMA
is required, and this host has none that is usable.";

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum YesNo {
    #[value(alias = "y")]
    Yes,
    #[value(alias = "n")]
    No,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let wrong = || "a number of seconds, such as 0.5".to_owned();
    let seconds: f64 = text.parse().map_err(|_| wrong())?;
    Duration::try_from_secs_f64(seconds).map_err(|_| wrong())
}

/// What was asked for.
pub(crate) enum Asked {
    /// The version.
    Version,
    /// To do something.
    Run(Box<Settings>, Mode),
}

impl Options {
    /// What the words mean together. Reads stdin and files where they say so.
    pub(crate) fn check(self) -> anyhow::Result<Asked> {
        if self.version {
            return Ok(Asked::Version);
        }
        let settings = self.settings();
        let mode = self.mode()?;
        Ok(Asked::Run(Box::new(settings), mode))
    }

    fn settings(&self) -> Settings {
        let is_terminal = std::io::stdout().is_terminal();
        let uri = self.uri.clone().unwrap_or_default();
        let typed = self.password.clone().or(uri.password);
        if typed.is_some() && !self.no_auth_warning {
            output::tell(
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
            is_rdma_asked_for: self.rdma.is_some(),
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
        let asked = [
            (self.raw, Style::Raw),
            (self.no_raw, Style::Human),
            (self.csv, Style::Csv),
            (self.json, Style::Json),
            (self.quoted_json, Style::QuotedJson),
        ];
        let otherwise = if is_terminal { Style::Human } else { Style::Raw };
        asked.into_iter().find(|(asked, _)| *asked).map_or(otherwise, |(_, style)| style)
    }

    fn mode(self) -> anyhow::Result<Mode> {
        let scan = Scan { pattern: self.pattern.map(OsString::into_vec), count: self.count };
        if self.pipe {
            let patience = Some(self.pipe_timeout).filter(|seconds| *seconds > 0);
            return Ok(Mode::Pipe { patience: patience.map(Duration::from_secs) });
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
            let plain: Result<_, _> = words.iter().map(|word| split::unquote(word)).collect();
            words =
                plain.map_err(|_| anyhow!("--quoted-input: a word is not one quoted string"))?;
        }
        if let Some(file) = self.eval {
            words = eval(&file, words)?;
        }
        if words.is_empty() {
            ensure!(!self.stdin_last && self.stdin_tag.is_none(), "-x and -X need a command");
            return Ok(Mode::Prompt);
        }
        if self.stdin_last {
            words.push(stdin()?);
        } else if let Some(tag) = self.stdin_tag {
            let tag = tag.into_vec();
            let tagged = words.iter_mut().find(|word| **word == tag);
            *tagged.with_context(|| {
                format!("-X: no argument reads {}", String::from_utf8_lossy(&tag))
            })? = stdin()?;
        }
        Ok(Mode::Command(words))
    }
}

fn stdin() -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::io::stdin().lock().read_to_end(&mut bytes).context("reading stdin")?;
    Ok(bytes)
}

/// `EVAL SCRIPT NUMBER KEY… ARGUMENT…` of `KEY… , ARGUMENT…`.
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
        match options.unwrap_or_else(|error| panic!("{error}")).check().expect("they fit together")
        {
            Asked::Run(settings, mode) => (settings, mode),
            Asked::Version => panic!("{words:?}"),
        }
    }

    fn command(words: &[&str]) -> Vec<Vec<u8>> {
        match run(words).1 {
            Mode::Command(words) => words,
            _ => panic!("{words:?} is a command"),
        }
    }

    #[test]
    fn what_follows_the_command_is_its_own() {
        assert_eq!(command(&["-n", "3", "SET", "-h", "--raw"]), [b"SET", &b"-h"[..], b"--raw"]);
        assert_eq!(command(&["GET", ""]), [&b"GET"[..], b""]);
        assert_eq!(command(&["INCRBY", "k", "-1"]), [&b"INCRBY"[..], b"k", b"-1"]);
        assert!(Options::try_parse_from(["ferrite-cli", "--no-such", "GET"]).is_err());
        assert!(Options::try_parse_from(["ferrite-cli", "-2", "-3"]).is_err());
    }

    #[test]
    fn the_last_style_wins() {
        assert_eq!(run(&["--csv", "--no-raw"]).0.format.style, Style::Human);
        let (settings, _) = run(&["--raw", "--json"]);
        assert_eq!(
            (settings.format.style, settings.protocol),
            (Style::Json, Protocol::Resp3IfKnown)
        );
        assert_eq!(run(&["-2", "--json"]).0.protocol, Protocol::Resp2);
    }

    #[test]
    fn a_uri_is_all_in_one() {
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
    fn quoted_words() {
        assert_eq!(command(&["--quoted-input", "SET", r#""\x00""#]), [b"SET", &b"\0"[..]]);
    }

    #[test]
    fn the_help_is_well_formed() {
        use clap::CommandFactory as _;
        Options::command().debug_assert();
    }
}
