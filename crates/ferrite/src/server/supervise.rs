//! Supervises the engine: starts it, watches it, stops it on a signal, and restarts it if the
//! configuration says so.
//!
//! ```text
//! start ──► starting ── answers ──► ready ── fails, restart = "on-failure" ──► delay ──► start
//!              │                      │
//!              ├─ exits ──► error     ├─ exits ──► exit code, or error
//!              └──────────────────────┴─ SIGTERM, SIGINT ──► stop the engine ──► exit
//! ```
//!
//! If the settings ask for an agent, it starts before the first engine and ends after the last one.
//! If it fails, the engine is stopped, and ferrite exits with an error.
//!
//! A restarted engine that exits before it is ready is restarted again, up to `restart_limit`. An
//! engine that does not answer in time is stopped, and ferrite exits with an error.

use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use ferrite_fabric::Rdma;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::sleep;

use super::agent::AgentThread;
use super::config::{Config, Restart};
use super::error::{cause_of_exit, describe_exit};
use super::launch::Engine;
use super::notify::Notify;
use super::plan::Plan;
use super::ready::{Report, wait_until_ready};
use super::reload::reload;
use super::{ServerError, Sources, events};

/// The longest delay before a restart.
const DELAY_MAX: Duration = Duration::from_secs(30);
/// The count of restarts starts again at 0 if the engine was ready for at least this long before it
/// ended.
const STABLE_AFTER: Duration = Duration::from_secs(60);
/// The start-up time that ferrite asks systemd for, each time the engine reports that it is
/// loading.
const LOADING_EXTENSION: Duration = Duration::from_secs(30);
/// How long an engine that never answered may take to stop. It has nothing to save.
const UNANSWERED_STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// How often, and at which interval, to look for the module's log line. The engine's reply arrives
/// through a socket, possibly before the log line, which arrives through a pipe.
const LOG_TRIES: u32 = 20;
const LOG_PAUSE: Duration = Duration::from_millis(50);
/// Part of the system's error text for an address in use. This failure does not mean that RDMA is
/// unavailable.
const IN_USE: &str = "already in use";

/// Runs one engine after another.
pub(super) struct Supervisor<'a> {
    /// The current settings, which SIGHUP can change.
    pub(super) config: Config,
    sources: Sources<'a>,
    plan: Plan,
    pub(super) json: bool,
    pub(super) notify: Notify,
    signals: Signals,
    /// Whether an engine has been ready.
    was_ready: bool,
    agent: Option<AgentThread>,
}

/// How one run of the engine ended.
enum RunEnd {
    /// Ferrite stopped the engine after a signal.
    Stopped(ExitStatus),
    /// The engine ended by itself.
    Exited {
        status: ExitStatus,
        /// How long the engine was ready; `None` if it never was.
        was_ready: Option<Duration>,
        /// The last messages of the engine and of the module.
        engine_message: Option<String>,
        module_message: Option<String>,
    },
}

impl<'a> Supervisor<'a> {
    pub(super) fn new(
        config: Config,
        sources: Sources<'a>,
        plan: Plan,
        json: bool,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            config,
            sources,
            plan,
            json,
            notify: Notify::from_environment(),
            signals: Signals::new()?,
            was_ready: false,
            agent: None,
        })
    }

    /// Runs the engine, and restarts it as configured. Returns the exit status of the last run, or
    /// an error if that run failed. Returns `None` if a signal came before the first run. Before it
    /// returns an error, prints the `ended` event if the engine was ready in any run.
    pub(super) async fn run(mut self) -> anyhow::Result<Option<ExitStatus>> {
        if let Some(setup) = self.config.agent_setup(&self.plan.socket) {
            self.notify.status("starting the agent");
            self.agent = tokio::select! {
                started = AgentThread::start(setup) => Some(started?),
                () = self.signals.stop_requested() => {
                    self.notify.stopping();
                    return Ok(None);
                }
            };
        }
        let ended = self.run_all().await;
        self.end_agent(ended.as_ref().is_ok_and(ExitStatus::success)).await;
        let error = ended.as_ref().err().and_then(|error| error.downcast_ref::<ServerError>());
        if let Some(error) = error.filter(|_| self.was_ready) {
            events::ended(self.json, error.code());
        }
        ended.map(Some)
    }

    /// Ends the agent, if there is one. Lets its connections end first if the engine has ended in
    /// good order. After a failure, the next start is more urgent than the connections of others.
    async fn end_agent(&mut self, is_orderly: bool) {
        let Some(mut agent) = self.agent.take() else { return };
        match is_orderly {
            true => {
                self.notify.status("the engine has ended; the connections of the agent may end");
                agent.drain();
            }
            false => agent.end(),
        }
        loop {
            tokio::select! {
                () = agent.ended() => return,
                action = self.signals.next() => if action == SignalAction::Stop {
                    agent.end();
                },
            }
        }
    }

    async fn run_all(&mut self) -> anyhow::Result<ExitStatus> {
        let mut restarts = 0;
        loop {
            let (status, was_ready, error) = match self.run_once().await? {
                RunEnd::Stopped(status) => return Ok(status),
                RunEnd::Exited { status, was_ready: Some(_), .. } if status.success() => {
                    return Ok(status);
                }
                RunEnd::Exited { status, was_ready: None, engine_message, module_message } => {
                    (status, None, self.start_error(status, engine_message, module_message))
                }
                RunEnd::Exited { status, was_ready, engine_message, .. } => {
                    (status, was_ready, exit_error(status, engine_message))
                }
            };
            // If the first start fails, another one would fail the same way.
            if self.config.restart == Restart::No || (was_ready.is_none() && restarts == 0) {
                return Err(error.into());
            }
            if was_ready.is_some_and(|time| time >= STABLE_AFTER) {
                restarts = 0;
            }
            if restarts >= self.config.restart_limit {
                tracing::warn!("giving up after {restarts} restarts in a row");
                return Err(error.into());
            }
            let delay = delay(self.config.restart_delay, restarts);
            restarts += 1;
            let (limit, seconds) = (self.config.restart_limit, delay.as_secs_f32());
            tracing::warn!("{error}; restart {restarts} of {limit} in {seconds} s");
            self.notify.status(&format!("{error}; restarting"));
            events::restarting(self.json, error.code(), restarts, delay);
            tokio::select! {
                () = sleep(delay) => {}
                () = self.signals.stop_requested() => {
                    self.notify.stopping();
                    return Ok(status);
                }
                error = agent_failed(&mut self.agent) => {
                    self.agent = None;
                    self.notify.stopping();
                    return Err(error.into());
                }
            }
        }
    }

    /// Explains why an engine ended before it was ready, with the engine's own message or the
    /// module's.
    fn start_error(
        &self,
        status: ExitStatus,
        engine_message: Option<String>,
        module_message: Option<String>,
    ) -> ServerError {
        let refusal = module_message.filter(|message| message.starts_with("not loaded: "));
        match refusal {
            Some(why) if self.config.rdma() == Rdma::Require && !why.contains(IN_USE) => {
                ServerError::no_rdma(format!(
                    "RDMA is required (server.rdma), and the module is {why}"
                ))
            }
            why => {
                let why = why
                    .map(|why| format!("the module is {why}"))
                    .or(cause_of_exit(status, engine_message))
                    .unwrap_or_else(|| "no cause reported".into());
                let end = describe_exit(status);
                ServerError::engine(status, format!("the engine {end} before it was ready: {why}"))
            }
        }
    }

    /// Runs one engine from its start to its end.
    async fn run_once(&mut self) -> anyhow::Result<RunEnd> {
        self.plan.follow(&self.config);
        let Self { config, sources, plan, json, notify, signals, was_ready, agent } = self;
        let password = config.password().map(str::to_owned);
        let mut engine = match Engine::start(plan).await {
            Ok(engine) => engine,
            Err(error) => return Err(ServerError::cannot_start(format!("{error:#}")).into()),
        };
        notify.status("starting the engine");
        let mut ready_since = None;
        let mut becomes_ready = Box::pin(wait_until_ready(
            &plan.socket,
            password.as_deref(),
            config.startup_timeout,
            |loading| {
                let sentence = loading.sentence();
                notify.extend_startup(&sentence, LOADING_EXTENSION);
                crate::log::show_status(&sentence);
            },
        ));
        loop {
            tokio::select! {
                status = engine.wait() => {
                    return Ok(RunEnd::Exited {
                        status: status?,
                        was_ready: ready_since.map(|since: Instant| since.elapsed()),
                        engine_message: engine.log.last(),
                        module_message: engine.log.last_of_module(),
                    });
                }
                action = signals.next() => match action {
                    SignalAction::Stop => {
                        notify.stopping();
                        let status = stop(&mut engine, signals, config.shutdown_timeout).await?;
                        return Ok(RunEnd::Stopped(success_if_terminated(status)));
                    }
                    SignalAction::Reload => {
                        if let Some(read) = reload(config, *sources, &plan.socket).await {
                            *config = read;
                            if let (Some(agent), Some(values)) = (&*agent, &config.agent) {
                                agent.reconfigure(values);
                            }
                        }
                    }
                },
                error = agent_failed(agent) => {
                    tracing::error!("{error}; stopping the engine");
                    *agent = None;
                    notify.stopping();
                    stop(&mut engine, signals, config.shutdown_timeout).await?;
                    return Err(error.into());
                }
                report = &mut becomes_ready, if ready_since.is_none() => {
                    let checked = match report {
                        Ok(report) => {
                            check_rdma(with_logged_reason(report, &engine).await, config.rdma())
                                .map_err(|error| (error, config.shutdown_timeout))
                        }
                        Err(error) => {
                            Err((ServerError::cannot_start(error), UNANSWERED_STOP_TIMEOUT))
                        }
                    };
                    let report = match checked {
                        Ok(report) => report,
                        Err((error, timeout)) => {
                            notify.stopping();
                            stop(&mut engine, signals, timeout).await?;
                            return Err(error.into());
                        }
                    };
                    ready_since = Some(Instant::now());
                    *was_ready = true;
                    tracing::info!("{}", report.sentence());
                    events::ready(*json, plan, engine.id(), &report);
                    notify.ready(&report.sentence());
                }
            }
        }
    }
}

/// Waits until the agent fails; for ever if there is none.
async fn agent_failed(agent: &mut Option<AgentThread>) -> ServerError {
    match agent {
        Some(agent) => agent.failed().await,
        None => std::future::pending().await,
    }
}

/// Explains the end of an engine that was ready and then failed.
fn exit_error(status: ExitStatus, message: Option<String>) -> ServerError {
    let message = cause_of_exit(status, message);
    let message = message.map(|message| format!(": {message}")).unwrap_or_default();
    ServerError::engine(status, format!("the engine {}{message}", describe_exit(status)))
}

/// If the engine did not report the module's state, waits for the module's log line and adds it as
/// the reason.
async fn with_logged_reason(report: Report, engine: &Engine) -> Report {
    let mut tries = 0..LOG_TRIES;
    while report.status == "unknown"
        && engine.log.last_of_module().is_none()
        && tries.next().is_some()
    {
        sleep(LOG_PAUSE).await;
    }
    let logged = engine.log.last_of_module().filter(|_| report.status == "unknown");
    Report { reason: report.reason.or(logged), ..report }
}

/// Fails if RDMA is required and the module does not listen over RDMA.
fn check_rdma(report: Report, rdma: Rdma) -> Result<Report, ServerError> {
    match (rdma, report.status.as_str()) {
        // An unknown state is fine: if RDMA is required and unavailable, the module does not load.
        (Rdma::Require, "listening" | "unknown") | (Rdma::Prefer | Rdma::Forbid, _) => Ok(report),
        _ => Err(ServerError::no_rdma(format!(
            "RDMA is required (server.rdma): {}",
            report.module_state()
        ))),
    }
}

/// Terminates the engine. Kills it after `timeout`, or at a second signal.
async fn stop(
    engine: &mut Engine,
    signals: &mut Signals,
    timeout: Duration,
) -> anyhow::Result<ExitStatus> {
    engine.terminate();
    let limit = sleep(timeout);
    tokio::pin!(limit);
    loop {
        tokio::select! {
            status = engine.wait() => return status,
            action = signals.next() => if action == SignalAction::Stop {
                tracing::warn!("second signal received, killing the engine; unsaved data is lost");
                engine.kill();
            },
            () = &mut limit => break,
        }
    }
    let seconds = timeout.as_secs_f32();
    tracing::warn!("the engine did not stop within {seconds} s, killing it; unsaved data is lost");
    engine.kill();
    engine.wait().await
}

/// Turns death by SIGTERM into success. The engine dies of our SIGTERM if it has not installed its
/// handler yet.
fn success_if_terminated(status: ExitStatus) -> ExitStatus {
    let is_terminated = status.signal() == Some(rustix::process::Signal::TERM.as_raw());
    if is_terminated { ExitStatus::default() } else { status }
}

/// Returns the delay before a restart: twice as long each time, up to a limit.
fn delay(first: Duration, restarts: u32) -> Duration {
    first.saturating_mul(2_u32.saturating_pow(restarts)).min(DELAY_MAX.max(first))
}

/// What a signal asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SignalAction {
    Stop,
    Reload,
}

/// Receives the signals that ferrite handles.
struct Signals {
    terminated: Signal,
    interrupted: Signal,
    hung_up: Signal,
}

impl Signals {
    fn new() -> anyhow::Result<Self> {
        Ok(Self {
            terminated: signal(SignalKind::terminate())?,
            interrupted: signal(SignalKind::interrupt())?,
            hung_up: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for the next signal. Cancel-safe.
    async fn next(&mut self) -> SignalAction {
        let Self { terminated, interrupted, hung_up } = self;
        tokio::select! {
            () = stop_of(terminated, interrupted) => SignalAction::Stop,
            _ = hung_up.recv() => SignalAction::Reload,
        }
    }

    /// Waits until a signal asks ferrite to stop. Leaves SIGHUP for later. Cancel-safe.
    async fn stop_requested(&mut self) {
        stop_of(&mut self.terminated, &mut self.interrupted).await;
    }
}

async fn stop_of(terminated: &mut Signal, interrupted: &mut Signal) {
    let name = tokio::select! {
        _ = terminated.recv() => "SIGTERM",
        _ = interrupted.recv() => "SIGINT",
    };
    tracing::info!("{name} received, shutting down");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restart_delay_doubles_up_to_a_limit() {
        let first = Duration::from_secs(1);
        let delays: Vec<_> = (0..7).map(|restarts| delay(first, restarts).as_secs()).collect();
        assert_eq!(delays, [1, 2, 4, 8, 16, 30, 30]);
        assert_eq!(delay(first, 4_000_000).as_secs(), 30);
        assert_eq!(
            delay(Duration::from_secs(100), 1).as_secs(),
            100,
            "a configured delay is not shortened"
        );
    }
}
