//! The order of a benchmark: its tests, and the turns of the transports in each test.
//!
//! A comparison alternates between its transports, and reverses their order every second time. A
//! change of the machine's speed then affects all transports alike.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use ferrite_fabric::Rdma;

use super::command::Requests;
use super::dial::Dialer;
use super::interrupt::Interrupt;
use super::key_space::KeySpace;
use super::load::{self, Turn};
use super::plot::Line;
use super::run::Run;
use super::{Options, Progress, cpu};

/// The result of one test over one transport.
pub(super) struct Series {
    pub(super) test: String,
    pub(super) run: Run,
    /// CPU time of the server's process in microseconds, warm-up included.
    pub(super) server_cpu_us: Option<f64>,
    pub(super) is_complete: bool,
}

/// The results of all tests, and the failure that ended them early.
#[derive(Default)]
pub(super) struct Measured {
    pub(super) series: Vec<Series>,
    pub(super) failure: Option<anyhow::Error>,
}

impl Measured {
    /// Takes the failure if there are no results.
    pub(super) fn failure_without_results(&mut self) -> Option<anyhow::Error> {
        if self.series.is_empty() { self.failure.take() } else { None }
    }

    /// Returns a line of the plot for each test and transport. In a comparison, the lines of a
    /// transport form a group.
    pub(super) fn lines(&self) -> Vec<Line> {
        let transport = |series: &Series| {
            series.run.transport_info.as_ref().map_or("", |info| &info.transport).to_owned()
        };
        let is_comparison =
            self.series.iter().any(|one| transport(one) != transport(&self.series[0]));
        let line = |series: &Series| {
            let group = is_comparison.then(|| transport(series));
            Line::new(&series.test, group.as_deref(), &series.run.latency)
        };
        self.series.iter().map(line).collect()
    }
}

/// Returns the time that a benchmark takes, in milliseconds, without writing and removing the keys.
pub(super) fn length(options: &Options) -> u64 {
    let series = options.requests().len() * options.policies().len();
    let turns = if options.compare.is_empty() { 1 } else { options.turns };
    let each = options.seconds + options.warmup * turns;
    u64::try_from(each.as_millis()).unwrap_or(u64::MAX).saturating_mul(series as u64)
}

/// Runs the tests in their order until one fails. Calls `save` after each of them.
///
/// # Errors
/// Fails if a transport of a comparison is missing, if the keys cannot be written, or if the CPU
/// time of the server cannot be read. Other failures are in the result.
pub(super) fn run(
    options: &Options,
    key_space: &Arc<KeySpace>,
    interrupt: &Interrupt,
    progress: &Progress,
    mut save: impl FnMut(&Measured) -> anyhow::Result<()>,
) -> anyhow::Result<Measured> {
    let policies = options.policies();
    check_transports(options, &policies)?;
    let tests = options.requests();
    if tests.iter().any(|requests| requests.needs_keys()) {
        let all = options.keys;
        load::fill(options, policies[0], key_space, interrupt, |keys| {
            progress.step(format!("writing keys: {keys} of {all}"));
        })
        .context("cannot write the keys that the test reads")?;
    }
    let mut bench =
        Bench { options, key_space, interrupt, progress, done: Duration::ZERO, failure: None };
    let mut measured = Measured::default();
    for requests in &tests {
        measured.series.extend(bench.run_test(requests, &policies)?);
        measured.failure = bench.failure.take();
        if let Err(error) = save(&measured) {
            measured.failure.get_or_insert(error);
        }
        if measured.failure.is_some() {
            break;
        }
    }
    Ok(measured)
}

/// Opens a connection over each transport of a comparison, so that a missing transport is noticed
/// before any other is measured.
fn check_transports(options: &Options, policies: &[Rdma]) -> anyhow::Result<()> {
    if policies.len() < 2 {
        return Ok(()); // a single transport needs no check: its test fails at once
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        for policy in policies {
            Dialer::new(options, *policy)?.connect().await.context("cannot connect")?;
        }
        Ok(())
    })
}

/// The state of a benchmark.
struct Bench<'a> {
    options: &'a Options,
    key_space: &'a Arc<KeySpace>,
    interrupt: &'a Interrupt,
    progress: &'a Progress,
    /// The time of all turns so far.
    done: Duration,
    failure: Option<anyhow::Error>,
}

impl Bench<'_> {
    /// Measures one test over all transports. Returns what was measured, also after a failure.
    fn run_test(
        &mut self,
        requests: &Arc<Requests>,
        policies: &[Rdma],
    ) -> anyhow::Result<Vec<Series>> {
        let new = |_: &Rdma| {
            let (test, run) = (requests.name(), Run::new()?);
            Ok(Series { test, run, server_cpu_us: None, is_complete: true })
        };
        let mut all = policies.iter().map(new).collect::<anyhow::Result<Vec<_>>>()?;
        let turns = if policies.len() > 1 { self.options.turns } else { 1 };
        'turns: for turn in 0..turns {
            let mut order: Vec<usize> = (0..policies.len()).collect();
            if turn % 2 == 1 {
                order.reverse();
            }
            for index in order {
                let of_turn = if turns > 1 {
                    format!(", turn {} of {turns}", turn + 1)
                } else {
                    String::new()
                };
                let label = format!("{}{of_turn}", requests.name());
                let (rdma, measured) = (policies[index], self.options.seconds / turns);
                self.failure = self.run_turn(&mut all[index], requests, rdma, measured, &label)?;
                if self.failure.is_some() {
                    break 'turns;
                }
            }
        }
        if self.failure.is_some() {
            all.iter_mut().for_each(|series| series.is_complete = false);
            all.retain(|series| series.run.requests > 0);
        }
        Ok(all)
    }

    /// Measures one test over one transport for one turn. Returns the failure that ended the turn
    /// early.
    fn run_turn(
        &mut self,
        series: &mut Series,
        requests: &Arc<Requests>,
        rdma: Rdma,
        measured: Duration,
        label: &str,
    ) -> anyhow::Result<Option<anyhow::Error>> {
        let Self { options, key_space, interrupt, progress, .. } = *self;
        let over = match rdma {
            _ if options.compare.is_empty() => "",
            Rdma::Forbid => " over TCP",
            _ => " over RDMA",
        };
        progress.step(format!("{label}{over}"));
        let done = self.done;
        let on_tick = |elapsed: Duration, requests: u64| {
            let elapsed = elapsed.min(options.warmup + measured);
            #[expect(clippy::cast_precision_loss, reason = "fewer than 2^53 requests")]
            let rate = requests as f64 / elapsed.as_secs_f64().max(1e-3);
            progress.set_position(u64::try_from((done + elapsed).as_millis()).unwrap_or(0));
            progress.step(format!("{label}{over}: {rate:.0} requests/s"));
        };
        let on_tick: &(dyn Fn(Duration, u64) + Sync) = &on_tick;
        let before = options.server_pid.map(cpu::used).transpose()?;
        let on_tick = progress.is_shown().then_some(on_tick);
        let turn = Turn { options, rdma, requests, measured, key_space, interrupt, on_tick };
        let (run, failure) = turn.run()?;
        // After a failure, the server's process may be gone.
        series.server_cpu_us = match (before, options.server_pid, &failure) {
            (Some(before), Some(pid), None) => {
                Some(series.server_cpu_us.unwrap_or(0.0) + cpu::used(pid)? - before)
            }
            _ => None,
        };
        series.run.add_next(&run);
        self.done += options.warmup + measured;
        Ok(failure)
    }
}
