//! `ferrite top`: a live view of a module, a gateway or a relay.
//!
//! | file | part |
//! |---|---|
//! | `source.rs` | where the state comes from: the trait |
//! | `engine.rs` `admin.rs` | an engine with the module, and an admin port |
//! | `snapshot.rs` | the state at one moment, and rates |
//! | `app.rs` | the state of the screen, and keys |
//! | `draw.rs` `svg.rs` `once.rs` | draw the state on the screen, as an SVG, and as text or JSON |
//! | `latencies.rs` | the table of latencies |
//! | `ascii.rs` | the screen for old terminals |
//!
//! A thread reads the state, so that keys work while a program does not answer.

use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use ratatui::crossterm::event::{self, Event, KeyEventKind};

use crate::engine_client::{DEFAULT_PORT, EngineAt, EngineClient, Login, NO_TLS};
use crate::{address, seconds};

mod admin;
mod app;
mod ascii;
mod draw;
mod engine;
mod latencies;
mod once;
mod snapshot;
mod source;
mod svg;
#[cfg(test)]
mod tests;

use admin::Admin;
use app::{Action, App};
use engine::Engine;
use snapshot::Snapshot;
use source::Source;

/// How long to wait for a key before looking for a new state.
const KEY_WAIT: Duration = Duration::from_millis(50);
/// The size of a picture, in columns and rows.
const PICTURE: (u16, u16) = (132, 32);

/// Watch the sessions, memory and devices of a module, a gateway or a relay
///
/// Connects to an engine with the module, at the engine's own port. Lists, sorts and filters its
/// sessions, shows one in detail, and kills it if you confirm. With --admin, reads the admin port
/// of a gateway, a relay or a module, which has no list of sessions.
#[derive(Args)]
#[command(after_help = HELP)]
pub(crate) struct Options {
    /// The engine's address: IP (IPv6 in brackets) or name, and :PORT (default 6379)
    /// [default: 127.0.0.1]
    #[arg(value_name = "ENGINE", value_parser = parse_engine)]
    engine: Option<SocketAddr>,
    /// Other clients have this flag; here it only causes an error that says what to use instead
    #[arg(long, hide = true)]
    tls: bool,
    /// The engine's Unix socket, instead of an address
    #[arg(long, value_name = "PATH", conflicts_with = "engine")]
    unix: Option<PathBuf>,
    /// An admin port, instead of an engine: http://HOST:PORT (default port 9121)
    #[arg(long, value_name = "URL", value_parser = Admin::parse,
          conflicts_with_all = ["engine", "unix", "user", "auth"])]
    admin: Option<Admin>,
    #[command(flatten)]
    login: Login,
    /// Time between two updates, in seconds
    #[arg(long, value_name = "SECONDS", value_parser = |text: &str| seconds::parse(text, 0.1),
          default_value = "1")]
    interval: Duration,
    /// Print the state once and exit (default if stdout is not a terminal, or TERM is dumb)
    #[arg(long)]
    once: bool,
    /// Print the state once as JSON and exit
    #[arg(long)]
    pub(crate) json: bool,
    /// Write the screen to this file once (SVG) and exit
    #[arg(long, value_name = "FILE", conflicts_with_all = ["once", "json"])]
    svg: Option<PathBuf>,
}

const HELP: &str = "\
Keys: ↑ ↓ select; Enter details; k kill (asks first); s sort by the next column; r reverse; / filter
  by a part of address, user, transport, device or path; p pause; Esc back; q quit. In a small
  terminal, Tab shows the boxes that do not fit.

Examples:
  ferrite top                                        the engine on this host
  REDISCLI_AUTH=… ferrite top 10.0.0.1 --user admin  another engine, with a password
  ferrite top --admin http://10.0.0.1:9121           the admin port of a gateway or a relay
  ferrite top --json | jq '.sessions[].address'      for scripts

Rates are the difference of two readings, --interval apart. Latencies of an engine are those of its
commands (INFO latencystats); those of an admin port are of RDMA operations.

There is no TLS. For an engine with only a TLS port, use its Unix socket or the admin port.

JSON fields: format (1), address, program, status, sessions[] (null with --admin): id, client_id,
  user, address, local_address, transport, device, path, age_s, held_bytes, in_bytes, out_bytes;
  transports {}, totals {}, fallbacks {}, memory {}, latency[]: name, count, p50_us, p99_us,
  p99_9_us (or the engine's latency-tracking-info-percentiles); devices {}, totals_per_s {}, session_bytes_per_s {id: [in, out]}, devices_per_s {}.
Failures print {error: {kind, message}}.";

impl Options {
    fn source(&self) -> Box<dyn Source> {
        if let Some(admin) = &self.admin {
            return Box::new(admin.clone());
        }
        let address = match (&self.unix, self.engine) {
            (Some(path), _) => EngineAt::Unix(path.clone()),
            (None, Some(address)) => EngineAt::Tcp(address),
            (None, None) => EngineAt::Tcp(([127, 0, 0, 1], DEFAULT_PORT).into()),
        };
        Box::new(Engine::new(EngineClient::new(address, self.login.credentials())))
    }
}

/// Parses the address of an engine, with or without `redis://`.
fn parse_engine(text: &str) -> Result<SocketAddr, String> {
    match text.split_once("://") {
        None => address::parse::<DEFAULT_PORT>(text),
        Some(("redis", rest)) if !rest.contains(['@', '?']) => {
            address::parse::<DEFAULT_PORT>(rest.trim_end_matches('/'))
        }
        Some(("redis", _)) => Err("expected redis://ADDRESS:PORT; the user is --user, the \
                                   password REDISCLI_AUTH"
            .into()),
        Some(("rediss", _)) => Err(format!("{NO_TLS}, or the module's admin port (--admin)")),
        Some((scheme, _)) => Err(format!("{scheme} is not supported; expected redis")),
    }
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    anyhow::ensure!(!options.tls, "{NO_TLS}, or the module's admin port (--admin)");
    let source = options.source();
    let app = App::new(source.address());
    if options.once || options.json || options.svg.is_some() || !has_screen() {
        return run_once(options, source, app);
    }
    // Reads the state once before it takes over the screen, so that an error is printed as usual.
    let mut source = source;
    let mut app = app;
    app.update(Ok(source.poll()?));
    let watcher = Watcher::start(source, options.interval)?;
    let mut terminal = ratatui::try_init().context("cannot use the terminal")?;
    let outcome = run_screen(&mut terminal, &mut app, &watcher);
    ratatui::restore();
    outcome
}

/// Returns whether stdout is a terminal that can show text at any place of its screen.
fn has_screen() -> bool {
    let is_dumb = std::env::var("TERM").is_ok_and(|terminal| terminal == "dumb");
    std::io::stdout().is_terminal() && !is_dumb
}

/// Reads the state twice, for the rates. Then prints it, or writes it as an SVG.
fn run_once(options: &Options, mut source: Box<dyn Source>, mut app: App) -> anyhow::Result<()> {
    app.update(Ok(source.poll()?));
    std::thread::sleep(options.interval);
    app.update(Ok(source.poll()?));
    match &options.svg {
        None => once::print(&app, options.json),
        Some(file) => std::fs::write(file, svg::screen(&app, PICTURE.0, PICTURE.1)?)
            .with_context(|| format!("cannot write {}", file.display())),
    }
}

fn run_screen(
    terminal: &mut ratatui::DefaultTerminal,
    app: &mut App,
    watcher: &Watcher,
) -> anyhow::Result<()> {
    let is_ascii_only = ascii::is_ascii_only(|name| std::env::var(name).ok());
    loop {
        terminal.draw(|frame| {
            draw::draw(frame, app);
            if is_ascii_only {
                ascii::replace(frame.buffer_mut());
            }
        })?;
        if event::poll(KEY_WAIT)?
            && let Event::Key(key) = event::read()?
            && key.kind != KeyEventKind::Release
        {
            match app.press(key) {
                Action::None => {}
                Action::Quit => return Ok(()),
                Action::Kill(id) => {
                    app.message = Some(format!("killing session {id}"));
                    watcher.kill(id);
                }
            }
        }
        while let Ok(news) = watcher.news.try_recv() {
            match news {
                News::State(polled) => app.update(*polled),
                News::Killed(id, Ok(())) => app.message = Some(format!("session {id} was killed")),
                News::Killed(_, Err(error)) => app.message = Some(format!("{error:#}")),
            }
        }
    }
}

/// A message from the watcher.
enum News {
    State(Box<anyhow::Result<Snapshot>>),
    Killed(u64, anyhow::Result<()>),
}

/// A thread that reads the state at intervals and kills sessions. The thread ends when the
/// `Watcher` is dropped, which closes both channels.
struct Watcher {
    news: Receiver<News>,
    kills: Sender<u64>,
}

impl Watcher {
    fn start(mut source: Box<dyn Source>, interval: Duration) -> anyhow::Result<Self> {
        let (sender, news) = channel();
        let (kills, to_kill) = channel();
        std::thread::Builder::new().name("watcher".into()).spawn(move || {
            loop {
                match to_kill.recv_timeout(interval) {
                    Ok(id) => {
                        let killed = source.kill(id);
                        if sender.send(News::Killed(id, killed)).is_err() {
                            return;
                        }
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
                if sender.send(News::State(Box::new(source.poll()))).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { news, kills })
    }

    fn kill(&self, id: u64) {
        // Does not fail: the thread ends only when this value is dropped.
        let _ = self.kills.send(id);
    }
}
