//! The command line: redis-cli's options, and options for RDMA. The options are checked once, and
//! become [`Settings`] and a [`Mode`].

use std::ffi::OsString;
use std::io::{IsTerminal as _, Read as _};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, anyhow, ensure};
use clap::{ArgAction, Parser, ValueEnum};
use ferrite_config::{exit_code, number};
use ferrite_fabric::Rdma;
use ferrite_proto::resp::unquote;
use ferrite_session::{Host, ServerUrl, TlsFiles};

use crate::exit::WrongUsage;
use crate::format::{Format, Style};
use crate::output;
use crate::settings::{Address, Mode, Protocol, Scan, Settings, Tls};

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
    after_help = help()
)]
pub(crate) struct Options {
    /// Command and its arguments; without one, commands are read from the prompt or from stdin
    #[arg(value_name = "COMMAND", trailing_var_arg = true, hide = true)]
    command: Vec<OsString>,

    /// Server host name or address
    #[arg(short = 'h', value_name = "HOST", default_value = "127.0.0.1", help_heading = "Server")]
    host: String,
    /// Server port
    #[arg(short = 'p', value_name = "PORT", default_value_t = 6379, help_heading = "Server",
          value_parser = number::<u16>(0, u16::MAX))]
    port: u16,
    /// Unix socket of the server, instead of host and port
    #[arg(short = 's', value_name = "PATH", conflicts_with_all = ["rdma", "local"], help_heading = "Server")]
    socket: Option<PathBuf>,
    // No doc comment: rustdoc would take the brackets for links.
    #[arg(short = 'u', value_name = "URI", help = URI_HELP, help_heading = "Server")]
    // The URI is parsed later: clap's own message would show the whole URI, with the password.
    uri: Option<String>,
    /// Password; safer in the environment variable REDISCLI_AUTH, where other users cannot see it
    #[arg(short = 'a', long = "pass", value_name = "PASSWORD", help_heading = "Server")]
    password: Option<String>,
    /// User to log in as; ignored without a password
    #[arg(long, value_name = "USER", help_heading = "Server")]
    user: Option<String>,
    /// Do not warn about a password on the command line
    #[arg(long, help_heading = "Server")]
    no_auth_warning: bool,
    /// Database number [default: 0]
    #[arg(short = 'n', value_name = "NUMBER", help_heading = "Server",
          value_parser = number::<u32>(0, u32::MAX))]
    database: Option<u32>,
    /// Follow redirects of a cluster, over RDMA where the node has the module
    #[arg(short = 'c', help_heading = "Server")]
    cluster: bool,
    /// Use RESP2 (default, except with --json and --quoted-json)
    #[arg(short = '2', conflicts_with = "resp3", help_heading = "Server")]
    resp2: bool,
    /// Use RESP3
    #[arg(short = '3', help_heading = "Server")]
    resp3: bool,
    /// Time limit for connecting, in seconds: for RDMA, then again for TCP; RDMA has at most
    /// 1 second unless --rdma or the URI sets a policy
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

    /// Use TLS over TCP; RDMA is not encrypted and is not used
    #[arg(long, conflicts_with = "socket", help_heading = "TLS")]
    tls: bool,
    /// Name that the server's certificate must be valid for [default: the host]
    #[arg(long, value_name = "NAME", help_heading = "TLS")]
    sni: Option<String>,
    /// CA certificates to trust, in PEM [default: those of the system]
    #[arg(long, value_name = "FILE", help_heading = "TLS")]
    cacert: Option<PathBuf>,
    /// Directory of CA certificates to trust, in PEM
    #[arg(long, value_name = "DIRECTORY", help_heading = "TLS")]
    cacertdir: Option<PathBuf>,
    /// Accept any certificate of the server: anybody on the path can then read everything
    #[arg(long, help_heading = "TLS")]
    insecure: bool,
    /// Client certificate to authenticate with, in PEM
    #[arg(long, value_name = "FILE", requires = "key", help_heading = "TLS")]
    cert: Option<PathBuf>,
    /// Private key of the client certificate, in PEM
    #[arg(long, value_name = "FILE", requires = "cert", help_heading = "TLS")]
    key: Option<PathBuf>,

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
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 30, help_heading = "Output",
          value_parser = number::<u64>(0, u64::MAX))]
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
        value_parser = number::<i64>(i64::MIN, i64::MAX),
        allow_hyphen_values = true,
        help_heading = "Commands"
    )]
    repeat: i64,
    /// Seconds to wait between runs of the command, lines of --stat and SCAN calls of --scan, and
    /// after every 100 SCAN calls of --bigkeys and --memkeys; with --latency, how long to measure
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
        value_parser = number::<u64>(0, u64::MAX),
        requires = "pipe",
        help_heading = "Modes"
    )]
    pipe_timeout: u64,
    /// Print server statistics every second (-i changes the interval)
    #[arg(long, group = "mode", help_heading = "Modes")]
    stat: bool,
    /// Measure the latency of PING in milliseconds until interrupted; with raw, CSV or JSON output,
    /// for one second (-i changes the time)
    #[arg(long, group = "mode", help_heading = "Modes")]
    latency: bool,
    /// Like --latency, but start anew every 15 seconds (-i changes the interval)
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
    #[arg(long, value_name = "COUNT", requires = "memkeys", help_heading = "Modes",
          value_parser = number::<u64>(0, u64::MAX))]
    memkeys_samples: Option<u64>,
    /// With --scan, --bigkeys and --memkeys: only keys that match PATTERN
    #[arg(long, value_name = "PATTERN", allow_hyphen_values = true, help_heading = "Modes")]
    pattern: Option<OsString>,
    /// With --scan, --bigkeys and --memkeys: keys per SCAN call
    #[arg(long, value_name = "COUNT", help_heading = "Modes",
          value_parser = number::<u64>(0, u64::MAX))]
    count: Option<u64>,

    /// Print this help
    #[arg(long, action = ArgAction::HelpShort, help_heading = "Other")]
    help: Option<bool>,
    /// Print the version
    #[arg(short = 'v', long, help_heading = "Other")]
    version: bool,
}

const URI_HELP: &str = "Server as a URI: \
    redis://[[USER:]PASSWORD@]HOST[:PORT][,HOST[:PORT]]...[/DATABASE][?rdma=POLICY]; \
    rediss:// for TLS, redis+rdma:// for rdma=prefer";

const HELP: &str = "\
Examples:
  ferrite-cli -h 10.0.0.1 -p 6380                          open a prompt
  ferrite-cli -h 10.0.0.1 -p 6380 --rdma require GET key   use RDMA, or fail with the reason
  ferrite-cli -c -h 10.0.0.1 -p 6380 GET key               follow redirects in a cluster
  ferrite-cli -h db.example --tls --cacert ca.crt PING     use TLS over TCP
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
commands that contain passwords.";

fn help() -> String {
    format!("{HELP}\n\n{}", exit_code::help_of_cli())
}

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
        let settings = self.settings()?;
        let mode = self.mode()?;
        Ok(Action::Run(Box::new(settings), mode))
    }

    fn settings(&self) -> anyhow::Result<Settings> {
        let is_terminal = std::io::stdout().is_terminal();
        let uri = self.uri.as_deref().map_or_else(|| Ok(ServerUrl::default()), str::parse);
        let uri: ServerUrl = uri.map_err(|error| WrongUsage(format!("-u: {error}")))?;
        let tls = self.tls(&uri)?;
        // TLS works only over TCP, so RDMA is forbidden by default. A rediss:// URI forbids it,
        // too.
        let asked = self.rdma.or(uri.rdma);
        let rdma = asked.unwrap_or(if tls.is_some() { Rdma::Forbid } else { Rdma::default() });
        let typed = self.password.clone().or(uri.password);
        if typed.is_some() && !self.no_auth_warning {
            output::write_stderr(
                "Warning: Using a password with '-a' or '-u' option on the command line interface may not be safe.",
            );
        }
        let server = match &self.socket {
            Some(path) => Address::Unix(path.clone()),
            None if uri.hosts.is_empty() => {
                Address::Net(vec![Host { name: self.host.clone(), port: Some(self.port) }])
            }
            None => Address::Net(uri.hosts.iter().map(|host| self.with_port(host)).collect()),
        };
        let mut format = Format::new(self.style(is_terminal));
        let bytes = |text: &OsString| text.clone().into_vec();
        if let Some(delimiter) = &self.element_delimiter {
            format.element_delimiter = bytes(delimiter);
        }
        if let Some(delimiter) = &self.reply_delimiter {
            format.reply_delimiter = bytes(delimiter);
        }
        Ok(Settings {
            server,
            tls,
            user: self.user.clone().or(uri.user),
            password: typed.or_else(|| std::env::var("REDISCLI_AUTH").ok()),
            database: self.database.or(uri.database).unwrap_or(0),
            protocol: match (self.resp2, self.resp3) {
                (true, _) => Protocol::Resp2,
                (_, true) => Protocol::Resp3,
                _ if uri.protocol == Some(3) => Protocol::Resp3,
                _ if self.json || self.quoted_json => Protocol::Resp3IfKnown,
                _ => Protocol::Resp2,
            },
            timeout: self.timeout,
            rdma,
            is_rdma_explicit: asked.is_some(),
            local: self.local.map(|ip| SocketAddr::new(ip, 0)),
            verbose: self.verbose,
            format,
            shows_pushes: self.show_pushes.map_or(is_terminal, |show| show == YesNo::Yes),
            repeat: self.repeat,
            interval: self.interval,
            fails_on_error: self.fail_on_error,
            follows_redirects: self.cluster,
            max_reply_bytes: self.max_reply_bytes,
        })
    }

    fn with_port(&self, host: &Host) -> Host {
        Host { name: host.name.clone(), port: host.port.or(Some(self.port)) }
    }

    /// Returns the settings of TLS if --tls or rediss:// asks for TLS.
    fn tls(&self, uri: &ServerUrl) -> anyhow::Result<Option<Tls>> {
        let wants_tls = self.tls || uri.is_tls;
        let options = [
            ("--sni", self.sni.is_some()),
            ("--cacert", self.cacert.is_some()),
            ("--cacertdir", self.cacertdir.is_some()),
            ("--insecure", self.insecure),
            ("--cert", self.cert.is_some()),
        ];
        if let Some((name, _)) = options.iter().find(|(_, is_given)| *is_given && !wants_tls) {
            return Err(WrongUsage(format!("{name} needs --tls or a rediss:// URI")).into());
        }
        let is_rdma_required = self.rdma.or(uri.rdma) == Some(Rdma::Require);
        if wants_tls && is_rdma_required {
            let why = "TLS works only over TCP, but RDMA is required; remove the option for TLS or \
                       the one for RDMA";
            return Err(WrongUsage(why.into()).into());
        }
        Ok(wants_tls.then(|| Tls {
            name: self.sni.clone(),
            files: TlsFiles {
                ca_certificates: self.cacert.clone(),
                ca_directory: self.cacertdir.clone(),
                client: self.cert.clone().zip(self.key.clone()),
                is_insecure: self.insecure,
            },
        }))
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
            words = plain.map_err(|_| {
                anyhow!("--quoted-input: each argument must be one word or one quoted string")
            })?;
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
                format!("-X: the command has no argument {}", String::from_utf8_lossy(&tag))
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
mod tests;
