//! Runs sessions of many seeds, and makes the first that fails as short as it can.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::generate;
use super::run::{Finding, Pair};
use super::session::{Session, Step};
use super::side::Engine;

/// How long a session is made shorter.
const SHORTENING: Duration = Duration::from_secs(90);
/// A difference that does not come again in as many runs is reported as such.
const TRIES: usize = 3;

/// What a hunt is told.
pub(crate) struct Hunt {
    pub(crate) program: PathBuf,
    /// The module's argument of that name; without it the module's own default.
    pub(crate) call_path: Option<String>,
    pub(crate) seeds: std::ops::RangeInclusive<u64>,
    /// No new session begins after that.
    pub(crate) time: Option<Duration>,
    /// Go on after a finding.
    pub(crate) keep_going: bool,
    /// Print each session.
    pub(crate) show: bool,
    /// Where findings are written.
    pub(crate) folder: Option<PathBuf>,
}

/// What a hunt came to.
#[derive(Default)]
pub(crate) struct Score {
    pub(crate) sessions: usize,
    pub(crate) steps: usize,
    /// Differences that did not come again.
    pub(crate) once: usize,
    /// Seeds that differ again and again.
    pub(crate) findings: Vec<u64>,
}

impl Hunt {
    pub(crate) fn run(&self) -> Score {
        let begun = Instant::now();
        let mut score = Score::default();
        let mut seeds = self.seeds.clone();
        let mut next = seeds.next().map(|seed| self.begin(seed));
        while let Some((session, mut pair)) = next.take() {
            // The next engines start while this session runs.
            let is_time_over = self.time.is_some_and(|time| begun.elapsed() > time);
            next = if is_time_over { None } else { seeds.next().map(|seed| self.begin(seed)) };
            score.sessions += 1;
            score.steps += session.steps.len();
            let Err(finding) = pair.run(&session) else { continue };
            drop(pair);
            let after = begun.elapsed();
            if self.report(&session, &finding, after) {
                score.findings.push(session.seed);
                if !self.keep_going {
                    break;
                }
            } else {
                score.once += 1;
            }
        }
        score
    }

    fn begin(&self, seed: u64) -> (Session, Pair) {
        let session = generate::session(seed);
        if self.show {
            eprintln!("seed {seed}: {}", session.setup);
            session.steps.iter().for_each(|step| eprintln!("{step}"));
        }
        let pair = self.pair(&session);
        (session, pair)
    }

    /// Whether it is a finding: a difference that comes again.
    fn report(&self, session: &Session, finding: &Finding, after: Duration) -> bool {
        let seed = session.seed;
        let again = (0..TRIES).find_map(|_| self.again(session, finding));
        let Some(again) = again else {
            let what = format!("{:?} once, and not again in {TRIES} runs", finding.kind);
            eprintln!("seed {seed}: {what}: {}\n{}", finding.what, last_lines(finding, 12));
            let whole = finding.transcript.join("\n");
            self.keep(seed, &format!("seed {seed}: {what}\n\n{whole}\n\n{}\n", finding.what));
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
            (session.clone(), again)
        } else {
            self.shorten(session, again)
        };
        let text = |transcript: String| {
            format!(
                "seed {seed}: {:?} differs, shortened to {} steps\nsetup: {}\n\n{transcript}\n\n{}\n\n\
                 reproduce: cargo xtask fuzz session-diff --seed {seed}\n",
                finding.kind,
                session.steps.len(),
                session.setup,
                finding.what
            )
        };
        eprintln!("\n{}", text(last_lines(&finding, 60)));
        self.keep(seed, &text(finding.transcript.join("\n")));
        true
    }

    fn keep(&self, seed: u64, text: &str) {
        let Some(folder) = &self.folder else { return };
        let file = folder.join(format!("session-diff-{seed}.txt"));
        if let Err(error) =
            std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&file, text))
        {
            eprintln!("cannot write {}: {error}", file.display());
        }
    }

    fn pair(&self, session: &Session) -> Pair {
        Pair::begin(
            &Engine { program: self.program.clone(), call_path: self.call_path.clone() },
            session,
        )
    }

    /// The same kind of finding in new engines.
    fn again(&self, session: &Session, finding: &Finding) -> Option<Finding> {
        let found = self.pair(session).run(session).err()?;
        (found.kind == finding.kind).then_some(found)
    }

    /// Drops bursts as long as the difference stays, many at once and then one by one.
    fn shorten(&self, session: &Session, mut finding: Finding) -> (Session, Finding) {
        let begun = Instant::now();
        let mut session = session.with_steps(session.steps[..finding.steps].to_vec());
        let mut at_once = bursts(&session.steps).len().div_ceil(2);
        while at_once > 0 {
            let mut from = 0;
            while from < bursts(&session.steps).len() {
                if begun.elapsed() > SHORTENING {
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
                match self.again(&shorter, &finding) {
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
