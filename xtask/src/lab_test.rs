//! `cargo xtask lab-test [FILTER]`: runs the tests that need an RDMA device, in one boot of the
//! lab.
//!
//! These tests are integration tests called `lab_*` (`crates/*/tests/lab_*.rs`).
//! `.config/nextest.toml` excludes them from a plain test run. They are built on this machine and
//! run in the guest, which sees this machine's files at the same paths. Two metadata files allow
//! nextest to run in the guest without cargo. Any cause that keeps the tests from running is a
//! failure, never a skip.

use std::ffi::OsString;
use std::fs;
use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context as _, bail, ensure};
use clap::{Args, ValueEnum};
use serde_json::Value;

const TARGET: &str = "X86_64_UNKNOWN_LINUX_GNU";
/// Arguments of `cargo build` for the programs that tests of other packages start.
const PROGRAMS: [&str; 5] = ["--workspace", "--exclude", "xtask", "--bins", "--examples"];

#[derive(Args)]
pub(crate) struct Options {
    /// Run only tests whose `crate::binary::test` name contains this
    filter: Option<String>,
    /// Run only tests that also match this nextest expression, such as `not binary(=lab_parity)`
    #[arg(short = 'E', long)]
    expression: Option<String>,
    /// The guest's kernel
    #[arg(short, long, value_enum, default_value_t = Kernel::Uml)]
    kernel: Kernel,
    /// Number of hosts, each with a device (rxe1 on 10.0.0.1, …)
    #[arg(long, default_value_t = 2)]
    hosts: u8,
    /// Number of CPUs of the guest
    #[arg(long, default_value_t = 2)]
    cpus: u8,
    /// Memory of the guest, such as 6G [default: the lab's, 2G]
    #[arg(long)]
    memory: Option<String>,
    /// Seconds that the guest may take in all [default: 900, emulated 2400; for interop 1800,
    /// emulated 5400]
    #[arg(long)]
    timeout: Option<u32>,
    /// Command that starts every test in the guest (split at spaces)
    #[arg(long)]
    runner: Option<String>,
    /// Further arguments for `nextest run`
    #[arg(last = true)]
    extra: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Kernel {
    /// User-Mode Linux 7.x, for daily use
    Uml,
    /// Debian's kernel, emulated
    Stock,
    /// A 7.x Debian kernel, emulated
    Newer,
}

impl Kernel {
    fn name(self) -> &'static str {
        match self {
            Self::Uml => "uml",
            Self::Stock => "stock",
            Self::Newer => "newer",
        }
    }
}

/// The tests to run.
pub(crate) enum Suite {
    /// Tests that need only a device.
    Own,
    /// Tests that also need Valkey's programs, which are in this directory.
    Interop { valkey: PathBuf },
}

impl Suite {
    /// Returns the nextest profile, and the default time limit in seconds.
    fn profile_and_timeout(&self, kernel: Kernel) -> (&'static str, u32) {
        match (self, kernel) {
            (Self::Own, Kernel::Uml) => ("lab", 900),
            (Self::Own, Kernel::Stock | Kernel::Newer) => ("lab-stock", 2400),
            (Self::Interop { .. }, Kernel::Uml) => ("interop", 1800),
            (Self::Interop { .. }, Kernel::Stock | Kernel::Newer) => ("interop-stock", 5400),
        }
    }

    /// Returns the tests that cargo builds. Cargo builds the whole workspace, so that all suites
    /// have the same features and share the build.
    fn targets(&self) -> &'static [&'static str] {
        match self {
            Self::Own => &["--workspace", "--test", "lab_*"],
            // Cargo builds the module together with the module's own tests.
            Self::Interop { .. } => {
                &["--workspace", "--test", "lab_interop", "--test", "lab_module"]
            }
        }
    }

    /// Returns environment variables for the tests.
    fn variables(&self) -> Vec<String> {
        match self {
            // Arguments of the module, and the engines (`lab_parity`, `lab_module`).
            Self::Own => ["FERRITE_MODULE_ARGS", "FERRITE_ENGINES"]
                .iter()
                .filter_map(|name| Some(format!("{name}={}", std::env::var(name).ok()?)))
                .collect(),
            Self::Interop { valkey } => vec![format!("FERRITE_VALKEY={}", valkey.display())],
        }
    }
}

pub(crate) fn run(root: &Path, options: &Options, suite: &Suite) -> anyhow::Result<ExitCode> {
    // A directory for each run, so that two runs at once do not interfere.
    let out =
        root.join("target/lab").join(format!("{}-{}", options.kernel.name(), std::process::id()));
    fs::create_dir_all(&out).with_context(|| format!("cannot create {}", out.display()))?;
    let console = out.join("console.log");
    let result = run_in(root, &out, &console, options, suite);
    let passed = matches!(result, Ok(code) if code == ExitCode::SUCCESS);
    if passed || !console.exists() {
        fs::remove_dir_all(&out)?;
    } else {
        eprintln!("lab-test: the guest's kernel log is kept in {}", console.display());
    }
    result
}

fn run_in(
    root: &Path,
    out: &Path,
    console: &Path,
    options: &Options,
    suite: &Suite,
) -> anyhow::Result<ExitCode> {
    let (profile, default_timeout_s) = suite.profile_and_timeout(options.kernel);
    let binaries = out.join("binaries.json");
    let metadata = out.join("cargo.json");
    build(root, &binaries, &metadata, suite)?;

    let mut quarantine = OsString::from("quarantine:");
    quarantine.push(root.join(".config/quarantine.toml"));
    let nextest = |subcommand| {
        let mut arguments: Vec<OsString> =
            ["cargo-nextest", "nextest", subcommand].map(Into::into).into();
        arguments.extend(["--profile", profile, "--binaries-metadata"].map(Into::into));
        arguments.extend([
            binaries.clone().into(),
            "--cargo-metadata".into(),
            metadata.clone().into(),
        ]);
        arguments.extend(["--tool-config-file".into(), quarantine.clone()]);
        arguments
    };
    let mut list = nextest("list");
    if let Some(expression) = &options.expression {
        list.extend(["-E".into(), expression.into()]);
    }
    let list = list_tests(root, &list)?;
    let selection = select(&list, options.filter.as_deref().unwrap_or_default())?;
    match &options.filter {
        Some(filter) if selection.count == 0 => bail!("no lab test has {filter:?} in its name"),
        None if selection.count == 0 && options.expression.is_some() => {
            bail!("no lab test matches the expression")
        }
        None if selection.count == 0 => bail!("there are no lab tests (crates/*/tests/lab_*.rs)"),
        _ => eprintln!("lab-test: {} tests on {}", selection.count, options.kernel.name()),
    }
    if matches!(suite, Suite::Own) {
        eprintln!(
            "lab-test: skipping tests that need Valkey (lab_interop): run `cargo xtask interop`"
        );
    }

    let timeout_s = options.timeout.unwrap_or(default_timeout_s);
    let colour = if std::io::stderr().is_terminal() { "always" } else { "never" };
    // This is cargo's own variable, so that a test that runs itself again can use it, too.
    let runner =
        options.runner.iter().map(|runner| format!("CARGO_TARGET_{TARGET}_RUNNER={runner}"));
    let status = Command::new(root.join("lab/lab"))
        .current_dir(root)
        .args(["run", "-k", options.kernel.name()])
        .args(["-n", &options.hosts.to_string(), "-c", &options.cpus.to_string()])
        .args(options.memory.iter().flat_map(|memory| ["-m", memory]))
        .args(["-t", &timeout_s.to_string(), "-e", "RUST_BACKTRACE=1"])
        // Endurance tests do less on an emulated kernel.
        .args(["-e", &format!("FERRITE_LAB_KERNEL={}", options.kernel.name())])
        .args(runner.chain(suite.variables()).flat_map(|variable| ["-e".to_owned(), variable]))
        .arg("-l")
        .arg(console)
        .arg("--")
        .args(nextest("run"))
        .args(["--color", colour, "-E", &selection.expression])
        .args(&options.extra)
        .status()
        .context("cannot start lab/lab")?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}

/// Builds the tests and the programs that they start. Writes nextest's metadata files.
fn build(root: &Path, binaries: &Path, metadata: &Path, suite: &Suite) -> anyhow::Result<()> {
    let programs =
        cargo(root).args(["build", "--quiet", "--all-features"]).args(PROGRAMS).status()?;
    ensure!(programs.success(), "cannot build the programs that the tests start");
    // The same nextest, found in PATH, must write and read the list.
    let list = Command::new("cargo-nextest")
        .current_dir(root)
        .args(["nextest", "list", "--all-features"])
        .args(suite.targets())
        .args(["--list-type", "binaries-only", "--message-format", "json"])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start cargo-nextest: `cargo install --locked cargo-nextest`")?;
    ensure!(list.status.success(), "cannot build the lab tests");
    fs::write(binaries, list.stdout)?;
    let described = cargo(root).args(["metadata", "--format-version", "1"]).output()?;
    ensure!(described.status.success(), "cargo metadata failed");
    fs::write(metadata, described.stdout)?;
    Ok(())
}

/// Lists the tests with nextest on this machine, before the guest boots.
fn list_tests(root: &Path, list: &[OsString]) -> anyhow::Result<Value> {
    let [program, arguments @ ..] = list else { bail!("the command is empty") };
    let list = Command::new(program)
        .current_dir(root)
        .args(arguments)
        .args(["--message-format", "json"])
        .stderr(Stdio::inherit())
        .output()?;
    ensure!(list.status.success(), "nextest cannot list the tests");
    Ok(serde_json::from_slice(&list.stdout)?)
}

fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root).stderr(Stdio::inherit());
    command
}

/// The tests to run, as a nextest expression.
#[derive(Debug, PartialEq)]
struct Selection {
    count: usize,
    expression: String,
}

/// Selects the tests with `part` in their `crate::binary::test` name.
///
/// The expression names each test: nextest rejects an expression that matches no binary at all,
/// and a mere `binary_id(~part)` may match none.
fn select(list: &Value, part: &str) -> anyhow::Result<Selection> {
    let suites = list["rust-suites"].as_object().context("nextest's list has no suites")?;
    let mut count = 0;
    let mut chosen = Vec::new();
    for (binary, suite) in suites {
        let cases = suite["testcases"].as_object().context("a suite has no test cases")?;
        // Tests that the profile excludes are not lab tests.
        let matches = |case: &Value| case["filter-match"]["status"] == "matches";
        let tests: Vec<_> = cases
            .iter()
            .filter(|(test, case)| matches(case) && format!("{binary}::{test}").contains(part))
            .map(|(test, _)| format!("test(={test})"))
            .collect();
        if !tests.is_empty() {
            count += tests.len();
            chosen.push(format!("(binary_id(={binary}) & ({}))", tests.join(" | ")));
        }
    }
    Ok(Selection { count, expression: chosen.join(" | ") })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn list() -> Value {
        let matches = json!({"filter-match": {"status": "matches"}});
        let left_out = json!({"filter-match": {"status": "mismatch", "reason": "default-filter"}});
        json!({"rust-suites": {
            "ferrite-verbs::lab_cq": {"testcases": {"event::wakes": matches, "overrun": matches}},
            "ferrite-verbs::lab_qp": {"testcases": {"overrun": matches, "slow": left_out}},
        }})
    }

    fn selected(part: &str) -> (usize, String) {
        let selection = select(&list(), part).expect("a well-formed list");
        (selection.count, selection.expression)
    }

    #[test]
    fn without_filter_selects_all_tests_of_the_profile() {
        assert_eq!(selected("").0, 3);
        assert!(!selected("").1.contains("slow"));
    }

    #[test]
    fn filter_matches_binary_and_test_name() {
        assert_eq!(selected("verbs").0, 3);
        assert_eq!(selected("overrun").0, 2);
        let spanning = "(binary_id(=ferrite-verbs::lab_cq) & (test(=event::wakes)))";
        assert_eq!(selected("cq::event"), (1, spanning.into()));
    }

    #[test]
    fn selects_nothing_if_nothing_matches() {
        assert_eq!(selected("nope"), (0, String::new()));
    }

    #[test]
    fn rejects_another_format() {
        assert!(select(&json!({"suites": {}}), "").is_err());
    }
}
