//! `cargo xtask tidy`: checks the project's rules that the compiler does not check.
//!
//! The rules are about layers (`layers.rs`), import cycles (`cycles.rs`), names (`words.rs`), the
//! width of lines (`widths.rs`), links in Markdown (`links.rs`), messages that the documentation
//! quotes (`quotes.rs`), files included by path (`paths.rs`), retries of tests (`retries.rs`), the
//! places of `unsafe` and the visibility of the bindings (with `source.rs`), the name, first line
//! and size of files, paths of one machine, and the lints of crates. Every violation is one line,
//! `file:line: what: remedy`. The lists in these files are the rules. Review a change to a list as
//! a decision.

mod cycles;
mod imports;
mod layers;
mod links;
mod paths;
pub(crate) mod quotes;
mod retries;
pub(crate) mod source;
mod widths;
mod words;

use std::fmt;
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, ensure};

/// Where `unsafe` is allowed: a file, or a directory with everything below it.
const UNSAFE_ALLOWED: &[&str] = &[
    "crates/ferrite-verbs/src/",
    "crates/ferrite-fabric/src/mem/",
    "crates/ferrite-fabric/src/device/slots.rs",
    "crates/ferrite-fabric/src/device/slots/receives.rs",
    "crates/ferrite-fabric/src/fabric/watch.rs",
    "crates/ferrite-fabric/src/link/tcp/info.rs",
    "crates/ferrite-module/src/api.rs",
    "crates/ferrite-module/src/api/",
    "crates/ferrite-module/src/entry.rs",
    "crates/ferrite-python/src/buffer.rs",
];

/// Generated files: exempt from most rules, such as those for size, first line and width.
const GENERATED: &[&str] = &["crates/ferrite-verbs/src/sys/"];

const VERBS: &str = "crates/ferrite-verbs/src/";
const LINES_WARN: usize = 500;
const LINES_FAIL: usize = 700;

/// Directories of a user's own files. The names are concatenated, because this file must obey the
/// rule.
const MACHINE_DIRS: [&str; 3] =
    [concat!("/", "work/"), concat!("/", "root/"), concat!("/", "home/")];

/// A violation of one rule.
#[derive(Debug, PartialEq)]
struct Violation {
    file: String,
    line: usize,
    what: String,
    remedy: &'static str,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, line, what, remedy } = self;
        write!(f, "{file}:{line}: {what}: {remedy}")
    }
}

/// The findings of a check. Violations fail the check, warnings do not.
#[derive(Default)]
struct Findings {
    violations: Vec<Violation>,
    warnings: Vec<Violation>,
}

impl Findings {
    fn fail(&mut self, file: &str, line: usize, what: impl Into<String>, remedy: &'static str) {
        self.violations.push(Violation { file: file.into(), line, what: what.into(), remedy });
    }
}

pub(crate) fn run(root: &Path) -> anyhow::Result<ExitCode> {
    let mut findings = Findings::default();
    layers::check(&cargo_metadata(root)?, &mut findings)?;
    let files = files(root)?;
    retries::check(root, &files, &mut findings)?;
    quotes::check(root, &files, &mut findings);
    let mut crates = cycles::Crates::default();
    let mut pages = links::Pages::default();
    for file in &files {
        words::check_name(file, &mut findings);
        // A deleted file may still be listed, and a binary file has no text.
        if let Ok(text) = fs::read_to_string(root.join(file)) {
            check_file(file, &text, &mut findings);
            crates.add(file, &text);
            pages.add(file, &text);
        }
    }
    crates.check(&mut findings);
    pages.check(&files, &mut findings);

    for warning in &findings.warnings {
        println!("warning: {warning}");
    }
    for violation in &findings.violations {
        println!("{violation}");
    }
    match findings.violations.len() {
        0 => {
            println!("tidy: {} files, no violations", files.len());
            Ok(ExitCode::SUCCESS)
        }
        n => {
            println!("tidy: {} files, violations: {n}", files.len());
            Ok(ExitCode::FAILURE)
        }
    }
}

fn cargo_metadata(root: &Path) -> anyhow::Result<serde_json::Value> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .current_dir(root)
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .output()?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Returns all files that git does not ignore, relative to the root.
pub(crate) fn files(root: &Path) -> anyhow::Result<Vec<String>> {
    let output = Command::new("git")
        .current_dir(root)
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .output()
        .context("cannot start git")?;
    ensure!(output.status.success(), "git ls-files: {}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8(output.stdout).context("a file name is not UTF-8")?;
    Ok(names.split_terminator('\0').map(Into::into).collect())
}

fn check_file(file: &str, text: &str, findings: &mut Findings) {
    check_machine_paths(file, text, findings);
    words::check(file, text, findings);
    widths::check(file, text, findings);
    if file.starts_with("crates/") && file.ends_with("/Cargo.toml") && !inherits_lints(text) {
        let remedy = "add `[lints]` with `workspace = true`";
        findings.fail(file, 1, "the crate does not inherit the workspace's lints", remedy);
    }
    if !file.ends_with(".rs") {
        return;
    }
    let code = source::code_only(text);
    let words = source::words(&code);
    if !within(file, UNSAFE_ALLOWED) {
        for (line, _) in words.iter().filter(|(_, word)| *word == "unsafe") {
            let remedy =
                "move it into one of the allowed places (UNSAFE_ALLOWED in xtask/src/tidy.rs)";
            findings.fail(file, *line, "`unsafe` outside the allowed places", remedy);
        }
    }
    if file.starts_with(VERBS) && !is_generated(file) {
        for line in source::exports_of(&code, "sys") {
            let remedy = "keep `sys` private to ferrite-verbs, and export wrappers";
            findings.fail(file, line, "the bindings are exported", remedy);
        }
    }
    paths::check(file, &code, findings);
    check_shape(file, text, findings);
}

/// Checks name, first line and size of a source file.
fn check_shape(file: &str, text: &str, findings: &mut Findings) {
    match file.rsplit('/').next() {
        Some("mod.rs") => {
            findings.fail(file, 1, "named mod.rs", "name it after its module: `foo.rs` + `foo/`");
        }
        Some("utils.rs") => findings.fail(file, 1, "named utils.rs", "name it for what it does"),
        _ => {}
    }
    if is_generated(file) {
        return;
    }
    if !text.starts_with("//!") {
        let remedy = "start with `//!`: what it is, why it is separate, its invariants";
        findings.fail(file, 1, "the file has no module documentation", remedy);
    }
    let is_test = file.contains("/tests/") || file.ends_with("/tests.rs");
    let lines = source::lines_before_tests(text);
    if is_test || lines <= LINES_WARN {
        return;
    }
    let long = Violation {
        file: file.into(),
        line: lines,
        what: format!("{lines} lines before the tests"),
        remedy: "split it: one main type per file, about 500 lines",
    };
    if lines > LINES_FAIL {
        findings.violations.push(long);
    } else {
        findings.warnings.push(long);
    }
}

/// Finds absolute paths in a user's own directories.
fn check_machine_paths(file: &str, text: &str, findings: &mut Findings) {
    for (line, content) in (1..).zip(text.lines()) {
        for dir in MACHINE_DIRS {
            let starts_path = |at: usize| {
                let before = content[..at].chars().next_back();
                before.is_none_or(|c| !c.is_alphanumeric() && !"._-~*})".contains(c))
            };
            if content.match_indices(dir).any(|(at, _)| starts_path(at)) {
                let remedy = "use a path relative to the checkout or an environment variable";
                findings.fail(file, line, format!("{dir} is a path on one machine only"), remedy);
            }
        }
    }
}

fn inherits_lints(manifest: &str) -> bool {
    let mut lines = manifest.lines().map(str::trim);
    lines.any(|line| line == "[lints]") && lines.next() == Some("workspace = true")
}

/// Returns whether a program wrote the file.
pub(crate) fn is_generated(file: &str) -> bool {
    within(file, GENERATED)
}

fn within(file: &str, places: &[&str]) -> bool {
    places.iter().any(|place| file == *place || (place.ends_with('/') && file.starts_with(place)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the violations of one file, as `line: what`.
    fn found(file: &str, text: &str) -> Vec<String> {
        let mut findings = Findings::default();
        check_file(file, text, &mut findings);
        findings.violations.iter().map(|v| format!("{}: {}", v.line, v.what)).collect()
    }

    #[test]
    fn allows_unsafe_only_in_listed_places() {
        let text = "//! A file.\nfn f() {\n    unsafe { g() }\n}\n";
        assert_eq!(
            found("crates/ferrite-proto/src/window.rs", text),
            ["3: `unsafe` outside the allowed places"]
        );
        assert_eq!(found("crates/ferrite-verbs/tests/lab_x.rs", text).len(), 1);
        assert_eq!(found("crates/ferrite-fabric/src/fabric/slots.rs.rs", text).len(), 1);
        assert_eq!(found("crates/ferrite-verbs/src/table.rs", text), [""; 0]);
        assert_eq!(found("crates/ferrite-fabric/src/device/slots.rs", text), [""; 0]);
    }

    #[test]
    fn ignores_unsafe_in_comments_and_strings() {
        let text = "//! unsafe\n#![forbid(unsafe_code)]\nconst S: &str = \"unsafe\"; // unsafe\n";
        assert_eq!(found("crates/ferrite-proto/src/lib.rs", text), [""; 0]);
    }

    #[test]
    fn bindings_stay_inside_verbs() {
        let what = "2: the bindings are exported";
        assert_eq!(found("crates/ferrite-verbs/src/lib.rs", "//! V.\npub mod sys;\n"), [what]);
        assert_eq!(
            found("crates/ferrite-verbs/src/lib.rs", "//! V.\npub use crate::sys::ibv_wc;\n"),
            [what]
        );
        assert_eq!(
            found("crates/ferrite-verbs/src/lib.rs", "//! V.\npub(crate) mod sys;\n"),
            [""; 0]
        );
    }

    #[test]
    fn checks_module_documentation_and_file_names() {
        assert_eq!(
            found("crates/a/src/lib.rs", "fn f() {}\n"),
            ["1: the file has no module documentation"]
        );
        assert_eq!(found("crates/ferrite-verbs/src/sys/verbs.rs", "fn f() {}\n"), [""; 0]);
        assert_eq!(found("crates/a/src/b/mod.rs", "//! B.\n"), ["1: named mod.rs"]);
        assert_eq!(found("crates/a/src/utils.rs", "//! U.\n"), ["1: named utils.rs"]);
    }

    #[test]
    fn counts_lines_before_the_tests() {
        let body = "fn f() {}\n".repeat(699);
        let file = "crates/a/src/lib.rs";
        assert_eq!(found(file, &format!("//! A.\n{body}")), [""; 0]);
        assert_eq!(found(file, &format!("//! A.\n{body}\n")), ["701: 701 lines before the tests"]);
        assert_eq!(found("crates/a/tests/lab_a.rs", &format!("//! A.\n{body}\n")), [""; 0]);
        let with_tests = format!("//! A.\n{body}#[cfg(test)]\nmod tests {{\n{body}}}\n");
        assert_eq!(found(file, &with_tests), [""; 0]);
    }

    #[test]
    fn warns_above_500_lines() {
        let mut findings = Findings::default();
        check_file("crates/a/src/lib.rs", &format!("//! A.\n{}", "\n".repeat(500)), &mut findings);
        assert_eq!((findings.violations.len(), findings.warnings.len()), (0, 1));
    }

    #[test]
    fn finds_machine_paths_in_any_text() {
        let path = format!("see {}x", MACHINE_DIRS[0]);
        assert_eq!(found("docs/a.md", &path).len(), 1);
        assert_eq!(found("docs/a.md", &format!("see crates{}", MACHINE_DIRS[0])), [""; 0]);
    }

    #[test]
    fn crates_must_inherit_the_workspace_lints() {
        let what = "1: the crate does not inherit the workspace's lints";
        assert_eq!(found("crates/a/Cargo.toml", "[package]\nname = \"a\"\n"), [what]);
        assert_eq!(found("crates/a/Cargo.toml", "[package]\n[lints]\nworkspace = true\n"), [""; 0]);
    }

    #[test]
    fn formats_a_violation_as_file_line_what_remedy() {
        let violation = Violation { file: "a.rs".into(), line: 3, what: "w".into(), remedy: "r" };
        assert_eq!(violation.to_string(), "a.rs:3: w: r");
    }
}
