//! Runs sessions of many seeds, and shortens those that fail.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::generate;
use super::run::{Finding, Pair};
use super::session::{Session, Step};
use super::side::EngineSetup;

/// How long shortening a session may take.
const SHORTENING: Duration = Duration::from_secs(90);
/// How many runs try to reproduce a difference.
const TRIES: usize = 3;

/// The options of a hunt.
pub(crate) struct Hunt {
    pub(crate) program: PathBuf,
    /// The module's argument `call-path`; `None` for the module's default.
    pub(crate) call_path: Option<String>,
    pub(crate) seeds: std::ops::RangeInclusive<u64>,
    /// After this time, only the session whose engines were already started still runs.
    pub(crate) time: Option<Duration>,
    /// Continue after a finding.
    pub(crate) keep_going: bool,
    /// Print each session.
    pub(crate) show: bool,
    /// Where findings are written.
    pub(crate) folder: Option<PathBuf>,
}

/// The result of a hunt.
#[derive(Default)]
pub(crate) struct Summary {
    pub(crate) sessions: usize,
    pub(crate) steps: usize,
    /// Differences that could not be reproduced.
    pub(crate) unreproduced: usize,
    /// Seeds with reproducible differences.
    pub(crate) findings: Vec<u64>,
    /// Sessions in which only the replies were compared, because the sides served different
    /// clients.
    pub(crate) without_data: usize,
}

impl Hunt {
    pub(crate) fn run(&self) -> Summary {
        let started = Instant::now();
        let mut summary = Summary::default();
        let mut seeds = self.seeds.clone();
        let mut next = seeds.next().map(|seed| self.start(seed));
        while let Some((session, mut pair)) = next.take() {
            // The next engines start while this session runs.
            let is_time_over = self.time.is_some_and(|time| started.elapsed() > time);
            next = if is_time_over { None } else { seeds.next().map(|seed| self.start(seed)) };
            summary.sessions += 1;
            summary.steps += session.steps.len();
            let result = pair.run(&session);
            summary.without_data += usize::from(!pair.is_fully_compared());
            let Err(finding) = result else { continue };
            drop(pair);
            let after = started.elapsed();
            if self.report(&session, &finding, after) {
                summary.findings.push(session.seed);
                if !self.keep_going {
                    break;
                }
            } else {
                summary.unreproduced += 1;
            }
        }
        summary
    }

    fn start(&self, seed: u64) -> (Session, Pair) {
        let session = generate::session(seed);
        if self.show {
            eprintln!("seed {seed}: {}", session.setup);
            session.steps.iter().for_each(|step| eprintln!("{step}"));
        }
        let pair = self.pair(&session);
        (session, pair)
    }

    /// Reports a difference. Returns whether it is a finding, which means that it is reproducible.
    fn report(&self, session: &Session, finding: &Finding, after: Duration) -> bool {
        let seed = session.seed;
        let reproduced = (0..TRIES).find_map(|_| self.reproduce(session, finding));
        let Some(reproduced) = reproduced else {
            let what = format!("{:?} once, not reproduced in {TRIES} runs", finding.kind);
            eprintln!("seed {seed}: {what}: {}\n{}", finding.what, last_lines(finding, 12));
            let whole = finding.transcript.join("\n");
            self.save(seed, &format!("seed {seed}: {what}\n\n{whole}\n\n{}\n", finding.what));
            return false;
        };
        eprintln!(
            "seed {seed}: {:?} after {:.1} s, {} of {} steps: {}",
            finding.kind,
            after.as_secs_f64(),
            finding.steps,
            session.steps.len(),
            finding.what
        );
        let (session, finding) = if self.keep_going && self.folder.is_none() {
            (session.clone(), reproduced)
        } else {
            self.shorten(session, reproduced)
        };
        let text = |transcript: String| {
            format!(
                "seed {seed}: {:?} differs, {} steps\nsetup: {}\n\n{transcript}\n\n{}\n\n\
                 reproduce: cargo xtask fuzz session-diff --seed {seed}\n",
                finding.kind,
                session.steps.len(),
                session.setup,
                finding.what
            )
        };
        eprintln!("\n{}", text(last_lines(&finding, 60)));
        self.save(seed, &text(finding.transcript.join("\n")));
        true
    }

    fn save(&self, seed: u64, text: &str) {
        let Some(folder) = &self.folder else { return };
        let file = folder.join(format!("session-diff-{seed}.txt"));
        if let Err(error) =
            std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&file, text))
        {
            eprintln!("cannot write {}: {error}", file.display());
        }
    }

    fn pair(&self, session: &Session) -> Pair {
        Pair::start(
            &EngineSetup { program: self.program.clone(), call_path: self.call_path.clone() },
            session,
        )
    }

    /// Runs a session in new engines. Returns the finding if it is of the same kind.
    fn reproduce(&self, session: &Session, finding: &Finding) -> Option<Finding> {
        let found = self.pair(session).run(session).err()?;
        (found.kind == finding.kind).then_some(found)
    }

    /// Drops bursts as long as the difference remains, first many at once, then one by one.
    fn shorten(&self, session: &Session, mut finding: Finding) -> (Session, Finding) {
        let started = Instant::now();
        let mut session = session.with_steps(session.steps[..finding.steps].to_vec());
        let mut at_once = bursts(&session.steps).len().div_ceil(2);
        while at_once > 0 {
            let mut from = 0;
            while from < bursts(&session.steps).len() {
                if started.elapsed() > SHORTENING {
                    return (session, finding);
                }
                let all = bursts(&session.steps);
                let dropped = &all[from..(from + at_once).min(all.len())];
                let kept = session
                    .steps
                    .iter()
                    .filter(|step| !dropped.contains(&step.burst))
                    .cloned()
                    .collect();
                let shorter = session.with_steps(kept);
                match self.reproduce(&shorter, &finding) {
                    Some(found) => {
                        session = shorter.with_steps(shorter.steps[..found.steps].to_vec());
                        finding = found;
                    }
                    None => from += at_once,
                }
            }
            at_once /= 2;
        }
        (session, finding)
    }
}

fn last_lines(finding: &Finding, most: usize) -> String {
    let lines = &finding.transcript;
    lines[lines.len().saturating_sub(most)..].join("\n")
}

fn bursts(steps: &[Step]) -> Vec<usize> {
    let mut all: Vec<_> = steps.iter().map(|step| step.burst).collect();
    all.sort_unstable();
    all.dedup();
    all
}
