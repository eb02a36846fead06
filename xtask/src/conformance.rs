//! `cargo xtask conformance`: runs the suite of link tests over every transport, and prints how
//! many tests have passed over each.
//!
//! The tests with the fake provider, TCP and TLS run on this machine. The tests with RDMA run in
//! the lab's guest. Tests of RDMA itself are counted separately, because TCP does not run them.
//! For tests that only one target has, such as faults of the fake provider, only failures count.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, ensure};

/// Name and test target of each transport.
const TRANSPORTS: [(&str, &str); 4] = [
    ("fake provider", "fake_links"),
    ("RDMA (Soft-RoCE)", "lab_links"),
    ("TCP", "tcp_links"),
    ("TCP with TLS", "tls_links"),
];
/// The suite's parts: modules of `crates/ferrite-fabric/tests/links`.
const SUITE: [&str; 9] = [
    "drivers",
    "fabrics",
    "handshake",
    "life",
    "messages",
    "one_sided",
    "pressure",
    "revocation",
    "storm",
];

#[derive(Default)]
struct Counts {
    suite: usize,
    rdma_only: usize,
    failed: usize,
}

pub(crate) fn run(root: &Path) -> anyhow::Result<ExitCode> {
    let mut counts = BTreeMap::new();
    let here =
        ["nextest", "run", "--package", "ferrite-fabric", "--all-features", "--no-fail-fast"];
    let targets = ["--test", "fake_links", "--test", "tcp_links", "--test", "tls_links"];
    count(root, &[&here[..], &targets].concat(), &mut counts)?;
    count(root, &["xtask", "lab-test", "ferrite-fabric::lab_links"], &mut counts)?;
    println!("\n{:<18}{:>7}{:>12}{:>8}", "transport", "suite", "RDMA only", "failed");
    let mut passed = true;
    for (name, target) in TRANSPORTS {
        let Counts { suite, rdma_only, failed } = counts.remove(target).unwrap_or_default();
        println!("{name:<18}{suite:>7}{rdma_only:>12}{failed:>8}");
        passed &= failed == 0 && suite > 0;
    }
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs cargo, prints its output, and counts the results by target.
fn count(
    root: &Path,
    arguments: &[&str],
    counts: &mut BTreeMap<String, Counts>,
) -> anyhow::Result<()> {
    let (reader, writer) = std::io::pipe()?;
    let mut cargo = Command::new("cargo");
    cargo
        .args(arguments)
        .current_dir(root)
        .env("NEXTEST_STATUS_LEVEL", "pass")
        .env("CARGO_TERM_COLOR", "never");
    let mut running =
        cargo.stdout(writer.try_clone()?).stderr(writer).spawn().context("cannot start cargo")?;
    drop(cargo); // closes our copies of the writing end, so that reading ends with cargo
    let mut any = false;
    for line in BufReader::new(reader).lines() {
        let line = line?;
        println!("{line}");
        if let Some((target, kind, passed)) = result_of(&line) {
            any = true;
            let count = counts.entry(target.to_owned()).or_default();
            match (kind, passed) {
                (_, false) => count.failed += 1,
                (Kind::Suite, true) => count.suite += 1,
                (Kind::RdmaOnly, true) => count.rdma_only += 1,
                (Kind::Other, true) => {}
            }
        }
    }
    running.wait()?;
    ensure!(any, "no tests ran");
    Ok(())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Suite,
    RdmaOnly,
    Other,
}

/// Parses a line such as `PASS [   0.010s] (1/5) ferrite-fabric::tcp_links life::dropping_closes`.
fn result_of(line: &str) -> Option<(&str, Kind, bool)> {
    let line = line.trim_start();
    // A pass at the second try counts as a pass. A failed first try and the final FLAKY are no
    // results.
    let passed = line.starts_with("PASS [") || line.starts_with("TRY 2 PASS [");
    let failed = line.starts_with("FAIL [")
        || line.starts_with("TIMEOUT [")
        || line.starts_with("TRY 2 FAIL [");
    let after = line.split_once(") ferrite-fabric::")?.1;
    let (target, test) = after.split_once(' ')?;
    let module = test.split("::").next()?;
    let kind = match module {
        "rdma" => Kind::RdmaOnly,
        module if SUITE.contains(&module) => Kind::Suite,
        _ => Kind::Other,
    };
    (passed || failed).then_some((target, kind, passed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knows_every_module_of_the_suite() {
        let suite = include_str!("../../crates/ferrite-fabric/tests/links.rs");
        let (_, suite) = suite.split_once("(over any transport: $run:path)").expect("the suite");
        let mut modules: Vec<_> = suite
            .split("run_suite!(@ $run, ")
            .skip(1)
            .map(|rest| rest.split_once(':').expect("the name of a module").0)
            .collect();
        modules.sort_unstable();
        assert_eq!(modules, SUITE);
    }

    #[test]
    fn parses_results_of_all_kinds() {
        let line = "        PASS [   0.010s] (1/5) ferrite-fabric::tcp_links life::dropping_closes";
        assert_eq!(result_of(line), Some(("tcp_links", Kind::Suite, true)));
        let line =
            "  TRY 2 PASS [   0.010s] ( 1/5) ferrite-fabric::lab_links rdma::raw::writes_beside";
        assert_eq!(result_of(line), Some(("lab_links", Kind::RdmaOnly, true)));
        let line = "        FAIL [   0.010s] (1/5) ferrite-fabric::fake_links faults::cq_error";
        assert_eq!(result_of(line), Some(("fake_links", Kind::Other, false)));
        for other in [
            "  TRY 1 FAIL [ 1s] (1/5) ferrite-fabric::lab_links life::x",
            "     Summary [ 1s] 5 tests run",
            "",
        ] {
            assert_eq!(result_of(other), None, "{other}");
        }
    }
}
