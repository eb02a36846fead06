//! `cargo xtask instructions`: counts the instructions per message, and compares them with the
//! recorded figures.
//!
//! Runs `crates/ferrite-fabric/benches/instructions.rs` under callgrind, with gungraun, and reads
//! callgrind's own output. Subtracts the instructions inside the fake provider. Callgrind records
//! the inclusive cost of every call, so the calls to the fake's entry points give this number
//! exactly. Also subtracts calls whose number depends on the time.
//!
//! The command fails if a figure rose by more than [`RISE_MAX_PERCENT`]. `--record` writes the new
//! figures. Commit them with the change that explains them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, bail, ensure};
use clap::Args;

const RECORDED: &str = "crates/ferrite-fabric/benches/instructions.json";
const OUT: &str = "target/instructions";

/// Number of messages in one run of a benchmark; the same as `MESSAGES` there.
const MESSAGES: u64 = 1000;
const RISE_MAX_PERCENT: f64 = 5.0;

/// Functions of the fake provider that a link calls while it is open.
const PROVIDER: &[&str] = &[
    "ferrite_verbs::fake::execution::post_send",
    "ferrite_verbs::fake::completion::poll_cq",
    "ferrite_verbs::fake::completion::req_notify_cq",
    "ferrite_verbs::fake::receive::post_srq_recv",
];
/// Functions whose number of calls depends on the time that passes.
const TIME_DEPENDENT: &[&str] = &["ferrite_fabric::fabric::poller::Poller::look"];

#[derive(Args)]
pub(crate) struct Options {
    /// Write the figures of this run to the committed file
    #[arg(long)]
    record: bool,
}

pub(crate) fn run(root: &Path, options: &Options) -> anyhow::Result<ExitCode> {
    check_tools(root)?;
    let measured = measure(root)?;
    let file = root.join(RECORDED);
    if options.record {
        let figures: BTreeMap<_, _> =
            measured.iter().map(|(name, counts)| (name, counts.own_per_message())).collect();
        fs::write(&file, serde_json::to_string_pretty(&figures)? + "\n")?;
    }
    let recorded = fs::read_to_string(&file).with_context(|| format!("cannot read {RECORDED}"))?;
    let recorded: BTreeMap<String, u64> =
        serde_json::from_str(&recorded).with_context(|| format!("cannot read {RECORDED}"))?;
    let (table, passed) = compare(&measured, &recorded);
    print!("{table}");
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn check_tools(root: &Path) -> anyhow::Result<()> {
    let version_of = |program: &str| {
        let output = Command::new(program).arg("--version").output().ok()?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    ensure!(
        version_of("valgrind").is_some(),
        "valgrind is not installed: apt-get install valgrind libc6-dbg"
    );
    let wanted = locked_version(&fs::read_to_string(root.join("Cargo.lock"))?, "gungraun")?;
    let found = version_of("gungraun-runner").unwrap_or_default();
    ensure!(
        found.split_whitespace().any(|word| word == wanted),
        "gungraun-runner {wanted} is not installed: \
         cargo install --locked --version {wanted} gungraun-runner"
    );
    Ok(())
}

fn locked_version(lock: &str, package: &str) -> anyhow::Result<String> {
    let name = format!("name = \"{package}\"");
    let mut lines = lock.lines().skip_while(|line| *line != name);
    let version =
        lines.nth(1).and_then(|line| line.strip_prefix("version = \"")?.strip_suffix('"'));
    Ok(version.with_context(|| format!("{package} is not in Cargo.lock"))?.to_owned())
}

/// Builds and runs the benchmarks. Returns the counts of each benchmark.
fn measure(root: &Path) -> anyhow::Result<BTreeMap<String, Counts>> {
    let out = root.join(OUT);
    if out.exists() {
        fs::remove_dir_all(&out).with_context(|| format!("cannot remove {}", out.display()))?;
    }
    let bench = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .current_dir(root)
        .args([
            "bench",
            "--quiet",
            "--locked",
            "--package",
            "ferrite-fabric",
            "--bench",
            "instructions",
        ])
        .env("GUNGRAUN_HOME", &out)
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .output()?;
    if !bench.status.success() {
        let (out, err) =
            (String::from_utf8_lossy(&bench.stdout), String::from_utf8_lossy(&bench.stderr));
        bail!("the benchmarks failed:\n{out}{err}");
    }
    // PACKAGE/BENCH/GROUP/BENCHMARK.ID/callgrind.BENCHMARK.ID.out
    let group = out.join("ferrite-fabric/instructions/messages");
    let mut measured = BTreeMap::new();
    for folder in
        fs::read_dir(&group).with_context(|| format!("no results in {}", group.display()))?
    {
        let folder = folder?;
        let name = folder.file_name().to_string_lossy().into_owned();
        let file = folder.path().join(format!("callgrind.{name}.out"));
        let profile =
            fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let counts = counts(&profile).with_context(|| format!("in {}", file.display()))?;
        measured.insert(name.split('.').next().unwrap_or(&name).to_owned(), counts);
    }
    ensure!(!measured.is_empty(), "no results in {}", group.display());
    Ok(measured)
}

/// Instructions of a whole run: all, in the fake provider, and in functions that depend on time.
#[derive(Debug, PartialEq, Clone, Copy)]
struct Counts {
    all: u64,
    provider: u64,
    time_dependent: u64,
}

impl Counts {
    /// Returns the fabric's own instructions per message.
    fn own_per_message(&self) -> u64 {
        per_message(self.all.saturating_sub(self.provider + self.time_dependent))
    }
}

fn per_message(instructions: u64) -> u64 {
    (instructions + MESSAGES / 2) / MESSAGES
}

/// Reads the total, and the cost of calls to the functions above, from a profile of callgrind.
///
/// Callgrind's manual describes the format. Names are not compressed. A call has three lines. The
/// last line has the caller's line number and the cost.
fn counts(profile: &str) -> anyhow::Result<Counts> {
    let all =
        profile.lines().find_map(|line| line.strip_prefix("summary: ")).context("no summary")?;
    let mut counts = Counts { all: all.trim().parse()?, provider: 0, time_dependent: 0 };
    let mut lines = profile.lines();
    while let Some(line) = lines.next() {
        let Some(function) = line.strip_prefix("cfn=") else { continue };
        let sum = if PROVIDER.contains(&function) {
            &mut counts.provider
        } else if TIME_DEPENDENT.contains(&function) {
            &mut counts.time_dependent
        } else {
            continue;
        };
        let cost =
            lines.nth(1).and_then(|line| line.split(' ').nth(1)).context("a call has no cost")?;
        *sum += cost.parse::<u64>()?;
    }
    // Every benchmark posts. If a function was renamed, the fake's instructions would count as the
    // fabric's.
    ensure!(
        profile.lines().any(|line| line.strip_prefix("cfn=") == Some(PROVIDER[0])),
        "no call to {}: does PROVIDER have the current names of the fake's functions?",
        PROVIDER[0]
    );
    Ok(counts)
}

/// Returns the table, and whether the check has passed: the same benchmarks are measured and
/// recorded, and no figure rose too far.
fn compare(
    measured: &BTreeMap<String, Counts>,
    recorded: &BTreeMap<String, u64>,
) -> (String, bool) {
    let (mut passed, mut improved) = (true, false);
    let mut table = format!(
        "{:<18} {:>8} {:>9} {:>8}  {:>8}\n",
        "one message", "ours", "recorded", "change", "the fake"
    );
    for (name, counts) in measured {
        let own = counts.own_per_message();
        let (known, change, verdict) = match recorded.get(name) {
            None => {
                passed = false;
                ("-".into(), "-".into(), "  NOT RECORDED")
            }
            Some(known) => {
                let percent = (own as f64 / *known as f64 - 1.0) * 100.0;
                let is_worse = percent > RISE_MAX_PERCENT;
                passed &= !is_worse;
                improved |= percent < -RISE_MAX_PERCENT;
                (
                    known.to_string(),
                    format!("{percent:+.1} %"),
                    if is_worse { "  TOO MANY" } else { "" },
                )
            }
        };
        let fake = per_message(counts.provider);
        table += &format!("{name:<18} {own:>8} {known:>9} {change:>8}  {fake:>8}{verdict}\n");
    }
    for name in recorded.keys().filter(|name| !measured.contains_key(*name)) {
        passed = false;
        table += &format!("{name:<18} is recorded but was not measured\n");
    }
    if !passed || improved {
        table += "`cargo xtask instructions --record` records these figures.\n";
    }
    (table, passed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROFILE: &str = "\
events: Ir\n\
summary: 5003000\n\
fn=ferrite_verbs::qp::QueuePair::post_send\n\
7 100\n\
cfi=execution.rs\n\
cfn=ferrite_verbs::fake::execution::post_send\n\
calls=1000 434 \n\
293 2000000\n\
294 5\n\
fn=ferrite_fabric::fabric::poller::Poller::pass\n\
cfn=ferrite_fabric::fabric::poller::Poller::look\n\
calls=3 183 \n\
71 3000\n\
cfn=ferrite_verbs::cq::CompletionQueue::poll\n\
calls=3 183 \n\
72 4000\n";

    fn recorded(own: u64) -> BTreeMap<String, u64> {
        BTreeMap::from([("post".to_owned(), own)])
    }

    fn measured() -> BTreeMap<String, Counts> {
        BTreeMap::from([("post".to_owned(), counts(PROFILE).expect("a profile"))])
    }

    #[test]
    fn subtracts_the_provider_and_time_dependent_functions() {
        let counts = counts(PROFILE).expect("a profile");
        assert_eq!(counts, Counts { all: 5_003_000, provider: 2_000_000, time_dependent: 3000 });
        assert_eq!(counts.own_per_message(), 3000);
    }

    #[test]
    fn rejects_a_profile_without_the_provider() {
        assert!(counts("summary: 1000\nfn=main\n1 1000\n").is_err());
        assert!(counts(&PROFILE.replace("execution", "another")).is_err());
        assert!(counts("fn=main\n1 1000\n").is_err());
    }

    #[test]
    fn fails_above_five_percent_more() {
        assert!(compare(&measured(), &recorded(2860)).1, "+4.9 %");
        let (table, passed) = compare(&measured(), &recorded(2850));
        assert!(!passed && table.contains("TOO MANY"), "+5.3 %: {table}");
        assert!(compare(&measured(), &recorded(9000)).1, "fewer instructions pass");
    }

    #[test]
    fn fails_if_a_figure_is_only_measured_or_only_recorded() {
        assert!(!compare(&measured(), &BTreeMap::new()).1);
        assert!(!compare(&BTreeMap::new(), &recorded(1)).1);
    }

    #[test]
    fn reads_versions_from_the_lock_file() {
        let lock = "[[package]]\nname = \"gungraun\"\nversion = \"0.20.0\"\nsource = \"x\"\n";
        assert_eq!(locked_version(lock, "gungraun").expect("a version"), "0.20.0");
        assert!(locked_version(lock, "gun").is_err());
    }
}
