//! One engine after the other: started, watched, ended when we are told to, started again if that
//! is wanted.
//!
//! ```text
//! start ──► not ready ── answers ──► ready ── fails, restart = "on-failure" ──► waits a while ──► start
//!              │                       │
//!              └── ends: its words ────┴── SIGTERM, SIGINT: SIGTERM to it, then after a while SIGKILL ──► our end
//! ```

use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use ferrite_fabric::Rdma;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::sleep;

use super::config::{Config, Restart};
use super::ending::how;
use super::launch::Engine;
use super::notify::Notify;
use super::plan::Plan;
use super::ready::{Report, ready};
use super::{Ending, log, tell};

/// The longest wait before a restart.
const DELAY_MAX: Duration = Duration::from_secs(30);
/// An engine that ran this long was well: restarts are counted anew.
const WELL: Duration = Duration::from_secs(60);
/// For what systemd gives while the engine loads its data, each time that it says so.
const MORE_TIME: Duration = Duration::from_secs(30);
/// What an engine that has never answered is given for its end: it has nothing to save.
const SILENT: Duration = Duration::from_secs(10);
/// A line of the engine's comes by a pipe, its answer by a socket: the answer may be first.
const WORD_TRIES: u32 = 20;
const WORD_PAUSE: Duration = Duration::from_millis(50);
/// In the words of the system. Then it is not RDMA that is missing.
const IN_USE: &str = "already in use";

/// What is watched, and what it needs.
pub(super) struct Supervisor<'a> {
    pub(super) config: &'a Config,
    pub(super) plan: &'a Plan,
    pub(super) json: bool,
    pub(super) notify: Notify,
    signals: Signals,
}

/// How one life of the engine ended.
enum Life {
    /// We were told to end it.
    Asked(ExitStatus),
    /// It ended by itself, ready for so long, if it was ever.
    Itself {
        status: ExitStatus,
        was_ready: Option<Duration>,
        words: Option<String>,
        module: Option<String>,
    },
}

impl<'a> Supervisor<'a> {
    pub(super) fn new(config: &'a Config, plan: &'a Plan, json: bool) -> anyhow::Result<Self> {
        Ok(Self {
            config,
            plan,
            json,
            notify: Notify::from_environment(),
            signals: Signals::new()?,
        })
    }

    /// Until the end: how the last engine ended.
    pub(super) async fn run(mut self) -> anyhow::Result<ExitStatus> {
        let mut restarts = 0;
        loop {
            let (status, was_ready, ending) = match self.live().await? {
                Life::Asked(status) => return Ok(status),
                Life::Itself { status, .. } if status.success() => return Ok(status),
                Life::Itself { status, was_ready: None, words, module } => {
                    (status, None, self.never_ready(status, words, module))
                }
                Life::Itself { status, was_ready, words, .. } => {
                    (status, was_ready, ended(status, words))
                }
            };
            // One that has never come up will not do so the next time.
            if self.config.restart == Restart::No || (was_ready.is_none() && restarts == 0) {
                return Err(ending.into());
            }
            if was_ready.is_some_and(|time| time >= WELL) {
                restarts = 0;
            }
            if restarts >= self.config.restart_limit {
                log::warning(&format!("no more restarts: there were {restarts} in a row"));
                return Err(ending.into());
            }
            let delay = delay(self.config.restart_delay, restarts);
            restarts += 1;
            let (limit, seconds) = (self.config.restart_limit, delay.as_secs_f32());
            log::warning(&format!("{ending}; restart {restarts} of {limit} in {seconds} s"));
            self.notify.status(&format!("{ending}; restarting"));
            tell::restarting(self.json, ending.code(), restarts, delay);
            if self.signals.told_within(delay).await {
                self.notify.stopping();
                return Ok(status);
            }
        }
    }

    /// An engine did not come up: why, in its words.
    fn never_ready(
        &self,
        status: ExitStatus,
        words: Option<String>,
        module: Option<String>,
    ) -> Ending {
        let refusal = module.filter(|words| words.starts_with("not loaded: "));
        match refusal {
            Some(why) if self.config.rdma() == Rdma::Require && !why.contains(IN_USE) => {
                Ending::no_rdma(format!("RDMA is required (server.rdma), and the module is {why}"))
            }
            why => {
                let why =
                    why.map(|why| format!("the module is {why}")).or(words).unwrap_or_default();
                Ending::engine(
                    status,
                    format!("the engine has ended before it was ready, {}: {why}", how(status)),
                )
            }
        }
    }

    /// From a start to an end.
    async fn live(&mut self) -> anyhow::Result<Life> {
        let Self { config, plan, json, notify, signals } = self;
        let mut engine = match Engine::start(plan).await {
            Ok(engine) => engine,
            Err(error) => return Err(Ending::cannot_start(format!("{error:#}")).into()),
        };
        notify.status("the engine starts");
        let mut ready_since = None;
        let mut becomes_ready =
            Box::pin(ready(&plan.socket, config.password(), config.startup_timeout, || {
                notify.more_time("the engine loads its data", MORE_TIME);
            }));
        loop {
            tokio::select! {
                status = engine.wait() => {
                    let was_ready = ready_since.map(|since: Instant| since.elapsed());
                    let (words, module) = (engine.words.last(), engine.words.of_module());
                    return Ok(Life::Itself { status: status?, was_ready, words, module });
                }
                told = signals.next() => if told == Told::End {
                    notify.stopping();
                    let status = stop(&mut engine, signals, config.shutdown_timeout).await?;
                    return Ok(Life::Asked(as_asked(status)));
                },
                report = &mut becomes_ready, if ready_since.is_none() => {
                    let checked = match report {
                        Ok(report) => fit(with_words(report, &engine).await, config.rdma())
                            .map_err(|unfit| (unfit, config.shutdown_timeout)),
                        Err(silence) => Err((Ending::cannot_start(silence), SILENT)),
                    };
                    let report = match checked {
                        Ok(report) => report,
                        Err((why, patience)) => {
                            notify.stopping();
                            stop(&mut engine, signals, patience).await?;
                            return Err(why.into());
                        }
                    };
                    ready_since = Some(Instant::now());
                    log::notice(&report.sentence());
                    tell::ready(*json, plan, engine.id(), &report);
                    notify.ready(&report.sentence());
                }
            }
        }
    }
}

/// It was ready, and has failed.
fn ended(status: ExitStatus, words: Option<String>) -> Ending {
    let words = words.map(|words| format!(": {words}")).unwrap_or_default();
    Ending::engine(status, format!("the engine has ended {}{words}", how(status)))
}

/// What the engine did not tell stands in its log, if perhaps not yet.
async fn with_words(report: Report, engine: &Engine) -> Report {
    let mut tries = 0..WORD_TRIES;
    while report.status == "unknown" && engine.words.of_module().is_none() && tries.next().is_some()
    {
        sleep(WORD_PAUSE).await;
    }
    let told = engine.words.of_module().filter(|_| report.status == "unknown");
    Report { reason: report.reason.or(told), ..report }
}

/// Whether there is RDMA where there must be.
fn fit(report: Report, rdma: Rdma) -> Result<Report, Ending> {
    match (rdma, report.status.as_str()) {
        // It would not have loaded without.
        (Rdma::Require, "listening" | "unknown") | (Rdma::Prefer | Rdma::Forbid, _) => Ok(report),
        _ => Err(Ending::no_rdma(format!("RDMA is required (server.rdma): {}", report.sentence()))),
    }
}

/// Ends it in good order, or if that takes too long, or we are told again, otherwise.
async fn stop(
    engine: &mut Engine,
    signals: &mut Signals,
    patience: Duration,
) -> anyhow::Result<ExitStatus> {
    engine.terminate();
    let limit = sleep(patience);
    tokio::pin!(limit);
    loop {
        tokio::select! {
            status = engine.wait() => return status,
            told = signals.next() => if told == Told::End {
                log::warning("told again: the engine is killed, what it has not saved is lost");
                engine.kill();
            },
            () = &mut limit => break,
        }
    }
    let seconds = patience.as_secs_f32();
    log::warning(&format!(
        "the engine has not ended in {seconds} s: it is killed, what it has not saved is lost"
    ));
    engine.kill();
    engine.wait().await
}

/// An engine that was not yet one, or not yet far, dies of SIGTERM: that too is an end as we wanted
/// it.
fn as_asked(status: ExitStatus) -> ExitStatus {
    let by_ours = status.signal() == Some(rustix::process::Signal::TERM.as_raw());
    if by_ours { ExitStatus::default() } else { status }
}

/// Twice as long each time.
fn delay(first: Duration, restarts: u32) -> Duration {
    first.saturating_mul(2_u32.saturating_pow(restarts)).min(DELAY_MAX.max(first))
}

/// What we are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    End,
    Nothing,
}

/// The signals that we take.
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

    /// Cancel-safe.
    async fn next(&mut self) -> Told {
        let name = tokio::select! {
            _ = self.terminated.recv() => "SIGTERM",
            _ = self.interrupted.recv() => "SIGINT",
            _ = self.hung_up.recv() => {
                log::notice("SIGHUP: nothing is read again; CONFIG SET changes what can be changed while it runs");
                return Told::Nothing;
            }
        };
        log::notice(&format!("{name} received, shutting down"));
        Told::End
    }

    /// Whether we are told to end within this time.
    async fn told_within(&mut self, time: Duration) -> bool {
        let end = async { while self.next().await != Told::End {} };
        tokio::time::timeout(time, end).await.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restarts_wait_longer_each_time_up_to_a_limit() {
        let first = Duration::from_secs(1);
        let waits: Vec<_> = (0..7).map(|restarts| delay(first, restarts).as_secs()).collect();
        assert_eq!(waits, [1, 2, 4, 8, 16, 30, 30]);
        assert_eq!(delay(first, 4_000_000).as_secs(), 30);
        assert_eq!(
            delay(Duration::from_secs(100), 1).as_secs(),
            100,
            "what was asked for is not cut"
        );
    }
}
