//! `cargo xtask fuzz [TARGET] [--seconds N | --runs N]`: any bytes into every decoder of what peers
//! send. With `--runs` the inputs are the same each time, so that a gate fails for what a change
//! has changed. The target `session-diff` is another kind of fuzzing, and runs only if it is named:
//! `session_diff.rs`.
//!
//! Builds the targets of `fuzz/` with the pinned compiler and libFuzzer, and runs them one by one:
//! neither a nightly compiler nor cargo-fuzz is needed. What has to be told to LLVM for that is
//! what cargo-fuzz tells it when no sanitizer is wanted: our decoders have no `unsafe`, so there is
//! nothing for one to find.
//!
//! ```text
//!   fuzz/corpus/TARGET           committed: where every run starts, and what `cargo test` replays
//!   target/fuzz/corpus/TARGET    what earlier runs here found interesting
//!   fuzz/artifacts/TARGET        findings: tried first by the next run, until they are fixed or removed
//! ```

mod session_diff;

use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode, Output, Stdio};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use serde_json::Value;

/// Counters at every edge, and the operands of comparisons, by which the fuzzer finds magic
/// numbers.
const INSTRUMENTED: &[&str] = &[
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
];

/// An input that takes longer is a finding.
const INPUT_TIMEOUT_S: u32 = 10;
/// So is one that takes more memory.
const MEMORY_MB: u32 = 1024;

/// How long each target runs by default.
const SECONDS: u32 = 10;

#[derive(Args)]
pub(crate) struct Options {
    /// Run this target alone; `session-diff` compares sessions at an engine and through the module.
    target: Option<String>,
    /// How long each target runs [default: 10]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: Option<u32>,
    /// Try this many inputs of each target, the same each time, instead of as many as the time
    /// allows
    #[arg(long, conflicts_with = "seconds", value_parser = clap::value_parser!(u32).range(1..))]
    runs: Option<u32>,
    #[command(flatten)]
    session_diff: session_diff::SessionOptions,
}

/// When a target has run enough.
#[derive(Clone, Copy)]
enum Extent {
    Seconds(u32),
    Runs(u32),
}

impl Options {
    fn extent(&self) -> Extent {
        self.runs.map_or(Extent::Seconds(self.seconds.unwrap_or(SECONDS)), Extent::Runs)
    }
}

pub(crate) fn run(root: &Path, options: &Options) -> anyhow::Result<ExitCode> {
    if options.target.as_deref() == Some(session_diff::NAME) {
        return session_diff::run(root, &options.session_diff, options.seconds);
    }
    ensure!(!options.session_diff.any(), "this option is for the target {}", session_diff::NAME);
    let metadata = cargo(root).args(["metadata", "--no-deps", "--format-version", "1"]).output()?;
    ensure!(metadata.status.success(), "fuzz/Cargo.toml cannot be read");
    let mut targets = targets(&serde_json::from_slice(&metadata.stdout)?)?;
    if let Some(wanted) = &options.target {
        let known = targets.join(", ");
        let name = session_diff::NAME;
        ensure!(
            targets.contains(wanted),
            "there is no target {wanted}; there are: {known}, {name}"
        );
        targets = vec![wanted.clone()];
    }
    let host = host()?;
    build(root, &host, options.target.as_deref())?;

    let width = targets.iter().map(String::len).max().unwrap_or_default();
    let mut all_clean = true;
    for target in &targets {
        let program = root.join("target/fuzz").join(&host).join("release").join(target);
        let output = fuzz(root, &program, target, options.extent())?;
        let said = String::from_utf8_lossy(&output.stderr);
        let outcome = outcome(output.status.success(), &said);
        println!("{target:width$}  {}", line(root, &outcome));
        if outcome.result != Ending::Clean {
            all_clean = false;
            eprintln!("{}", end_of(&said));
        }
    }
    Ok(if all_clean { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Cargo in the fuzz targets' own workspace.
fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root.join("fuzz")).stderr(Stdio::inherit());
    command
}

/// The binaries of the fuzz crate.
fn targets(metadata: &Value) -> anyhow::Result<Vec<String>> {
    let targets =
        metadata["packages"][0]["targets"].as_array().context("the fuzz crate has no targets")?;
    let is_binary = |target: &&Value| target["kind"][0] == "bin";
    let names = targets.iter().filter(is_binary).filter_map(|target| target["name"].as_str());
    Ok(names.map(Into::into).collect())
}

/// Flags for a named target do not apply to build scripts, which could not be linked with them.
fn host() -> anyhow::Result<String> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let version = Command::new(rustc).arg("-vV").output().context("cannot start rustc")?;
    let version = String::from_utf8(version.stdout)?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc does not say for which host it is")?.into())
}

fn build(root: &Path, host: &str, target: Option<&str>) -> anyhow::Result<()> {
    let chosen = target.map_or(vec!["--bins"], |target| vec!["--bin", target]);
    let status = cargo(root)
        .args(["build", "--quiet", "--locked", "--release", "--target", host, "--target-dir"])
        .arg(root.join("target/fuzz"))
        .args(chosen)
        // goes before all other settings of flags
        .env("CARGO_ENCODED_RUSTFLAGS", INSTRUMENTED.join("\x1F"))
        .status()?;
    ensure!(
        status.success(),
        "the fuzz targets do not build (libFuzzer needs a C++ compiler: g++)"
    );
    Ok(())
}

fn fuzz(root: &Path, program: &Path, target: &str, extent: Extent) -> anyhow::Result<Output> {
    let (found, extent) = match extent {
        Extent::Seconds(seconds) => {
            ("target/fuzz/corpus", vec![format!("-max_total_time={seconds}")])
        }
        // Where it starts and what it tries is the same each time.
        Extent::Runs(runs) => ("target/fuzz/runs", vec![format!("-runs={runs}"), "-seed=1".into()]),
    };
    let found = root.join(found).join(target);
    if extent.len() > 1 && found.exists() {
        fs::remove_dir_all(&found).with_context(|| format!("cannot remove {}", found.display()))?;
    }
    let seeds = root.join("fuzz/corpus").join(target);
    let artifacts = root.join("fuzz/artifacts").join(target);
    for folder in [&found, &artifacts] {
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
    }
    if !seeds.is_dir() {
        bail!("{target} has no corpus: put an input or two into fuzz/corpus/{target}");
    }
    Command::new(program)
        .args(extent)
        .arg(format!("-timeout={INPUT_TIMEOUT_S}"))
        .arg(format!("-rss_limit_mb={MEMORY_MB}"))
        .arg("-print_final_stats=1")
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .args([found, seeds, artifacts]) // new inputs go to the first
        .output()
        .with_context(|| format!("cannot start {}", program.display()))
}

/// What one run came to.
#[derive(Debug, PartialEq)]
struct Outcome {
    runs: u64,
    /// Edges of the program that were reached.
    edges: u64,
    result: Ending,
}

#[derive(Debug, PartialEq)]
enum Ending {
    Clean,
    /// The input is in this file.
    Found(String),
    /// The fuzzer failed, not the target.
    Broken,
}

/// Reads what libFuzzer says at its end.
fn outcome(success: bool, said: &str) -> Outcome {
    let number = |text: &str| text.split_whitespace().next().and_then(|word| word.parse().ok());
    let after =
        |label: &str| said.rsplit_once(label).and_then(|(_, rest)| number(rest)).unwrap_or(0);
    let written =
        said.rsplit_once("Test unit written to ").and_then(|(_, rest)| rest.lines().next());
    let result = match written {
        _ if success => Ending::Clean, // a slow input is written too, and is no failure
        Some(file) => Ending::Found(file.into()),
        None => Ending::Broken,
    };
    Outcome { runs: after("stat::number_of_executed_units:"), edges: after(" cov: "), result }
}

fn line(root: &Path, outcome: &Outcome) -> String {
    let Outcome { runs, edges, result } = outcome;
    let result = match result {
        Ending::Clean => "no finding".into(),
        Ending::Found(file) => {
            let file = Path::new(file);
            format!("FOUND {}", file.strip_prefix(root).unwrap_or(file).display())
        }
        Ending::Broken => "FAILED".into(),
    };
    format!("{runs:>10} runs  {edges:>5} edges  {result}")
}

/// The part that says why: the panic, or whatever came last.
fn end_of(said: &str) -> &str {
    const BYTES: usize = 4000;
    let from = said.find("\nthread '").unwrap_or(0);
    let end = &said[from..];
    &end[end.ceil_char_boundary(end.len().saturating_sub(BYTES))..]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const CLEAN: &str = "#8\tpulse  cov: 40 ft: 50\n#99\tDONE   cov: 57 ft: 98 corp: 20/900b\n\
        Done 99 runs in 11 second(s)\nstat::number_of_executed_units: 99\nstat::peak_rss_mb: 40\n";
    const CRASH: &str = "#2\tINITED cov: 4 ft: 5\n\nthread '<unnamed>' panicked at src/lib.rs:9:5:\nno\n\
        stat::number_of_executed_units: 3\nTest unit written to /src/fuzz/artifacts/hello/crash-1\nBase64: AA==\n";

    #[test]
    fn targets_are_the_binaries() {
        let kinds = [("ferrite_fuzz", "lib"), ("hello", "bin"), ("grant", "bin")];
        let targets_json: Vec<_> =
            kinds.iter().map(|(name, kind)| json!({"name": name, "kind": [kind]})).collect();
        let metadata = json!({"packages": [{"targets": targets_json}]});
        assert_eq!(targets(&metadata).expect("well-formed"), ["hello", "grant"]);
        assert!(targets(&json!({"packages": []})).is_err());
    }

    #[test]
    fn a_clean_run() {
        let outcome = outcome(true, CLEAN);
        assert_eq!(outcome, Outcome { runs: 99, edges: 57, result: Ending::Clean });
        assert_eq!(line(Path::new("/src"), &outcome), "        99 runs     57 edges  no finding");
    }

    #[test]
    fn a_finding_names_its_file() {
        let outcome = outcome(false, CRASH);
        assert_eq!((outcome.runs, outcome.edges), (3, 4));
        assert!(line(Path::new("/src"), &outcome).ends_with("FOUND fuzz/artifacts/hello/crash-1"));
        assert!(end_of(CRASH).starts_with("\nthread"));
    }

    #[test]
    fn a_fuzzer_that_does_not_start_is_a_failure() {
        assert_eq!(
            outcome(false, "no such file"),
            Outcome { runs: 0, edges: 0, result: Ending::Broken }
        );
        assert_eq!(end_of("no such file"), "no such file");
    }
}
