//! `cargo xtask fuzz [TARGET] [--seconds N | --runs N]`: fuzzes every decoder of data from peers.
//!
//! With `--runs` the inputs are the same each time, so that CI fails only because of a change. The
//! target `session-diff` is a different kind of fuzzing and runs only on request: see
//! `session_diff.rs`.
//!
//! Builds the targets of `fuzz/` with the pinned compiler and libFuzzer, and runs them one by one.
//! This needs neither a nightly compiler nor cargo-fuzz. The LLVM flags are those of cargo-fuzz
//! without a sanitizer: the decoders have no `unsafe`, so a sanitizer would find nothing.
//!
//! ```text
//!   fuzz/corpus/TARGET           committed: every run starts from it, and `cargo test` replays it
//!   target/fuzz/corpus/TARGET    inputs that earlier runs on this machine found interesting
//!   target/fuzz/runs/TARGET      the inputs of `--runs`, written again by each run
//!   fuzz/artifacts/TARGET        findings: the next run tries them first, until they are removed
//! ```

mod inputs;
mod session_diff;

use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode, Output, Stdio};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use serde_json::Value;

/// Instruments every edge and the operands of comparisons. The fuzzer learns magic numbers from
/// these operands.
const INSTRUMENTED: &[&str] = &[
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
];

/// Time limit of one input, in seconds. An input that takes longer is a finding.
const INPUT_TIMEOUT_S: u32 = 10;
/// Memory limit of a target, in MB. An input that needs more memory is a finding.
const MEMORY_MB: u32 = 1024;

/// How long each target runs by default.
const SECONDS: u32 = 10;

#[derive(Args)]
pub(crate) struct Options {
    /// Run only this target; `session-diff` runs sessions directly and through the module, and
    /// compares the results
    target: Option<String>,
    /// Seconds for each target [default: 10]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: Option<u32>,
    /// Number of inputs for each target, instead of a time; they are the same in each run
    #[arg(long, conflicts_with = "seconds", value_parser = clap::value_parser!(u32).range(1..))]
    runs: Option<u32>,
    #[command(flatten)]
    session_diff: session_diff::SessionOptions,
}

/// How long a target runs: for a time, or for a number of inputs.
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
    ensure!(
        !options.session_diff.any(),
        "options of session-diff were given: name the target {}, too, or remove them",
        session_diff::NAME
    );
    let metadata = cargo(root).args(["metadata", "--no-deps", "--format-version", "1"]).output()?;
    ensure!(metadata.status.success(), "cannot read fuzz/Cargo.toml");
    let mut targets = targets(&serde_json::from_slice(&metadata.stdout)?)?;
    if let Some(wanted) = &options.target {
        let known = targets.join(", ");
        let name = session_diff::NAME;
        ensure!(
            targets.contains(wanted),
            "unknown target {wanted}; expected one of: {known}, {name}"
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
        let stderr = String::from_utf8_lossy(&output.stderr);
        let outcome = outcome(output.status.success(), &stderr);
        println!("{target:width$}  {}", line(root, &outcome));
        if outcome.result != FuzzResult::Clean {
            all_clean = false;
            eprintln!("{}", failure_excerpt(&stderr));
        }
    }
    Ok(if all_clean { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Returns a cargo command in the workspace of the fuzz targets.
fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root.join("fuzz")).stderr(Stdio::inherit());
    command
}

/// Returns the names of the fuzz crate's binaries.
fn targets(metadata: &Value) -> anyhow::Result<Vec<String>> {
    let targets =
        metadata["packages"][0]["targets"].as_array().context("the fuzz crate has no targets")?;
    let is_binary = |target: &&Value| target["kind"][0] == "bin";
    let names = targets.iter().filter(is_binary).filter_map(|target| target["name"].as_str());
    Ok(names.map(Into::into).collect())
}

/// Returns the host's target triple, for `--target`. With that option, cargo does not apply the
/// flags to build scripts, which could not be linked with them.
fn host() -> anyhow::Result<String> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let version = Command::new(rustc).arg("-vV").output().context("cannot start rustc")?;
    let version = String::from_utf8(version.stdout)?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc -vV does not print its host")?.into())
}

fn build(root: &Path, host: &str, target: Option<&str>) -> anyhow::Result<()> {
    let chosen = target.map_or(vec!["--bins"], |target| vec!["--bin", target]);
    let status = cargo(root)
        .args(["build", "--quiet", "--locked", "--release", "--target", host, "--target-dir"])
        .arg(root.join("target/fuzz"))
        .args(chosen)
        // Overrides all other compiler flags.
        .env("CARGO_ENCODED_RUSTFLAGS", INSTRUMENTED.join("\x1F"))
        .status()?;
    ensure!(
        status.success(),
        "cannot build the fuzz targets (libFuzzer needs a C++ compiler: g++)"
    );
    Ok(())
}

fn fuzz(root: &Path, program: &Path, target: &str, extent: Extent) -> anyhow::Result<Output> {
    let seeds = root.join("fuzz/corpus").join(target);
    if !seeds.is_dir() {
        bail!("{target} has no corpus: add an input or two to fuzz/corpus/{target}");
    }
    let (found, extent) = match extent {
        Extent::Seconds(seconds) => ("target/fuzz/corpus", format!("-max_total_time={seconds}")),
        Extent::Runs(runs) => {
            inputs::write(&root.join("target/fuzz/runs").join(target), &seeds, runs)?;
            ("target/fuzz/runs", "-runs=0".into()) // runs the inputs in the folders, and ends
        }
    };
    let found = root.join(found).join(target);
    let artifacts = root.join("fuzz/artifacts").join(target);
    for folder in [&found, &artifacts] {
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
    }
    Command::new(program)
        .arg(extent)
        .arg(format!("-timeout={INPUT_TIMEOUT_S}"))
        .arg(format!("-rss_limit_mb={MEMORY_MB}"))
        .arg("-print_final_stats=1")
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .args([found, seeds, artifacts]) // libFuzzer writes new inputs to the first folder
        .output()
        .with_context(|| format!("cannot start {}", program.display()))
}

/// The outcome of one run.
#[derive(Debug, PartialEq)]
struct Outcome {
    runs: u64,
    /// Number of edges that were reached.
    edges: u64,
    result: FuzzResult,
}

#[derive(Debug, PartialEq)]
enum FuzzResult {
    Clean,
    /// A finding. The input is in this file.
    Found(String),
    /// The fuzzer failed, not the target.
    Broken,
}

/// Parses the final output of libFuzzer.
fn outcome(success: bool, output: &str) -> Outcome {
    let number = |text: &str| text.split_whitespace().next().and_then(|word| word.parse().ok());
    let after =
        |label: &str| output.rsplit_once(label).and_then(|(_, rest)| number(rest)).unwrap_or(0);
    let written =
        output.rsplit_once("Test unit written to ").and_then(|(_, rest)| rest.lines().next());
    let result = match written {
        _ if success => FuzzResult::Clean, // a slow input is written too, but is no failure
        Some(file) => FuzzResult::Found(file.into()),
        None => FuzzResult::Broken,
    };
    Outcome { runs: after("stat::number_of_executed_units:"), edges: after(" cov: "), result }
}

fn line(root: &Path, outcome: &Outcome) -> String {
    let Outcome { runs, edges, result } = outcome;
    let result = match result {
        FuzzResult::Clean => "no finding".into(),
        FuzzResult::Found(file) => {
            let file = Path::new(file);
            format!("FOUND {}", file.strip_prefix(root).unwrap_or(file).display())
        }
        FuzzResult::Broken => "FAILED".into(),
    };
    format!("{runs:>10} runs  {edges:>5} edges  {result}")
}

/// Returns the part of the output that shows the cause: the panic, or the last lines.
fn failure_excerpt(output: &str) -> &str {
    const BYTES: usize = 4000;
    let from = output.find("\nthread '").unwrap_or(0);
    let end = &output[from..];
    &end[end.ceil_char_boundary(end.len().saturating_sub(BYTES))..]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const CLEAN: &str = "#8\tpulse  cov: 40 ft: 50\n#99\tDONE   cov: 57 ft: 98 corp: 20/900b\n\
        Done 99 runs in 11 second(s)\nstat::number_of_executed_units: 99\nstat::peak_rss_mb: 40\n";
    const CRASH: &str = "#2\tINITED cov: 4 ft: 5\n\nthread '<unnamed>' panicked at \
        src/lib.rs:9:5:\nno\nstat::number_of_executed_units: 3\n\
        Test unit written to /src/fuzz/artifacts/hello/crash-1\nBase64: AA==\n";

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
    fn parses_a_clean_run() {
        let outcome = outcome(true, CLEAN);
        assert_eq!(outcome, Outcome { runs: 99, edges: 57, result: FuzzResult::Clean });
        assert_eq!(line(Path::new("/src"), &outcome), "        99 runs     57 edges  no finding");
    }

    #[test]
    fn finding_names_its_file() {
        let outcome = outcome(false, CRASH);
        assert_eq!((outcome.runs, outcome.edges), (3, 4));
        assert!(line(Path::new("/src"), &outcome).ends_with("FOUND fuzz/artifacts/hello/crash-1"));
        assert!(failure_excerpt(CRASH).starts_with("\nthread"));
    }

    #[test]
    fn fuzzer_that_does_not_start_is_a_failure() {
        assert_eq!(
            outcome(false, "no such file"),
            Outcome { runs: 0, edges: 0, result: FuzzResult::Broken }
        );
        assert_eq!(failure_excerpt("no such file"), "no such file");
    }
}
