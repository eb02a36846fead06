//! Checks which tests may be retried: only tests of the lab, and tests in the quarantine.
//!
//! `.config/quarantine.toml` is a configuration file of nextest, which accepts any filter and any
//! number. This check requires one form: a cause, one existing test, and one or two retries. There
//! may be at most ten entries.

use std::fs;
use std::path::Path;

use anyhow::Context as _;

use super::{Findings, source};

const NEXTEST: &str = ".config/nextest.toml";
const QUARANTINE: &str = ".config/quarantine.toml";
const MAX_ENTRIES: usize = 10;
const FORM: &str = "write it as the comment in .config/quarantine.toml shows";

/// One quarantined test.
#[derive(Debug, PartialEq)]
struct Entry<'a> {
    line: usize,
    package: &'a str,
    /// `None` for unit tests.
    target: Option<&'a str>,
    test: &'a str,
}

pub(super) fn check(root: &Path, files: &[String], findings: &mut Findings) -> anyhow::Result<()> {
    let read = |file: &str| {
        fs::read_to_string(root.join(file)).with_context(|| format!("cannot read {file}"))
    };
    check_retries(&read(NEXTEST)?, findings);
    let text = read(QUARANTINE)?;
    for entry in entries(&text, findings) {
        let exists = files.iter().filter(|file| may_contain(file, &entry)).any(|file| {
            let text = read(file).unwrap_or_default();
            let name = entry.test.rsplit("::").next().unwrap_or(entry.test);
            source::words(&source::code_only(&text)).iter().any(|(_, word)| *word == name)
        });
        if !exists {
            let what = format!("no test {} in {}", entry.test, entry.package);
            findings.fail(QUARANTINE, entry.line, what, "remove or correct the entry");
        }
    }
    Ok(())
}

/// Returns whether the entry's test can be in this file.
fn may_contain(file: &str, entry: &Entry<'_>) -> bool {
    let Some(rest) = file.strip_prefix(entry.package) else {
        let package =
            file.strip_prefix("crates/").and_then(|rest| rest.strip_prefix(entry.package));
        return package
            .is_some_and(|rest| rest.starts_with(folder(entry)) && file.ends_with(".rs"));
    };
    rest.starts_with(folder(entry)) && file.ends_with(".rs") // such as xtask, not in crates/
}

/// Returns the folder of the entry's test. Targets share modules, so any file in this folder may
/// contain the test.
fn folder(entry: &Entry<'_>) -> &'static str {
    if entry.target.is_some() { "/tests/" } else { "/src/" }
}

/// Checks that nextest's own configuration allows retries only for lab tests.
fn check_retries(text: &str, findings: &mut Findings) {
    let mut section = "";
    for (line, content) in (1..).zip(text.lines()) {
        if content.starts_with('[') {
            section = content.split(']').next().unwrap_or_default();
        }
        let Some(value) = value_of(content, "retries") else { continue };
        let value = value.split('#').next().unwrap_or_default().trim();
        if value != "0" && (section, value) != ("[profile.lab", "1") {
            let what = format!("retries = {value} in {section}]");
            findings.fail(
                NEXTEST,
                line,
                what,
                "fix the test, or list it in .config/quarantine.toml",
            );
        }
    }
}

fn entries<'a>(text: &'a str, findings: &mut Findings) -> Vec<Entry<'a>> {
    let lines: Vec<_> = (1..).zip(text.lines()).collect();
    let mut entries = Vec::new();
    for block in lines.split(|(_, content)| content.is_empty()) {
        let Some(&(line, _)) = block.iter().find(|line| is_setting(line)) else { continue };
        match entry(block) {
            Some(entry) => entries.push(entry),
            None => findings.fail(QUARANTINE, line, "not a quarantined test with its cause", FORM),
        }
    }
    if entries.len() > MAX_ENTRIES {
        let what = format!("{} quarantined tests, at most {MAX_ENTRIES}", entries.len());
        findings.fail(QUARANTINE, 1, what, "fix some of them");
    }
    entries
}

/// Parses an entry: a cause of one or more lines, then the three lines of the override.
fn entry<'a>(block: &[(usize, &'a str)]) -> Option<Entry<'a>> {
    let (cause, settings) = block.split_at(block.iter().position(is_setting)?);
    let (_, cause) = cause.first()?;
    if cause.strip_prefix("# cause:")?.trim().is_empty() {
        return None;
    }
    let &[(line, "[[profile.default.overrides]]"), (_, filter), (_, "retries = 1" | "retries = 2")] =
        settings
    else {
        return None;
    };
    let filter = value_of(filter, "filter")?.strip_prefix("'binary_id(=")?.strip_suffix(")'")?;
    let (binary, test) = filter.split_once(") and test(=")?;
    let (package, target) =
        binary.split_once("::").map_or((binary, None), |(package, target)| (package, Some(target)));
    let is_plain = |name: &str| name.chars().all(|c| c.is_alphanumeric() || "_-:".contains(c));
    (is_plain(binary) && is_plain(test)).then_some(Entry { line, package, target, test })
}

fn is_setting((_, content): &(usize, &str)) -> bool {
    !content.starts_with('#')
}

fn value_of<'a>(content: &'a str, key: &str) -> Option<&'a str> {
    Some(content.trim_start().strip_prefix(key)?.trim_start().strip_prefix('=')?.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "# Flaky tests.\n#\n# cause: in a comment\n\n";

    fn found(check: impl FnOnce(&mut Findings)) -> Vec<String> {
        let mut findings = Findings::default();
        check(&mut findings);
        findings.violations.iter().map(|v| format!("{}: {}", v.line, v.what)).collect()
    }

    fn quarantined(cause: &str, filter: &str, retries: &str) -> String {
        format!(
            "{cause}\n[[profile.default.overrides]]\nfilter = '{filter}'\nretries = {retries}\n\n"
        )
    }

    #[test]
    fn accepts_an_entry_with_cause_and_test() {
        let text = quarantined(
            "# cause: a\n# b",
            "binary_id(=ferrite-module::host_module) and test(=a::b)",
            "1",
        );
        let text = format!("{HEAD}{text}");
        let mut findings = Findings::default();
        let entries = entries(&text, &mut findings);
        let expected =
            Entry { line: 7, package: "ferrite-module", target: Some("host_module"), test: "a::b" };
        assert_eq!((entries, findings.violations), (vec![expected], vec![]));
    }

    #[test]
    fn rejects_entries_in_another_form() {
        let filter = "binary_id(=ferrite::host) and test(=a)";
        for (cause, filter, retries) in [
            ("# because", filter, "1"),
            ("# cause:", filter, "1"),
            ("# cause: a", "binary_id(=ferrite::host)", "1"),
            ("# cause: a", "binary_id(=ferrite::host) and test(/a/)", "1"),
            ("# cause: a", "binary_id(=ferrite::host) and test(=a) or all()", "1"),
            ("# cause: a", filter, "9"),
        ] {
            let text = quarantined(cause, filter, retries);
            assert_eq!(found(|f| drop(entries(&text, f))).len(), 1, "{text}");
        }
        assert_eq!(found(|f| drop(entries("[profile.default]\nretries = 2\n", f))).len(), 1);
    }

    #[test]
    fn rejects_an_eleventh_entry() {
        let one = quarantined("# cause: a", "binary_id(=ferrite::host) and test(=a)", "2");
        assert_eq!(found(|f| drop(entries(&one.repeat(10), f))), [""; 0]);
        let what = "1: 11 quarantined tests, at most 10";
        assert_eq!(found(|f| drop(entries(&one.repeat(11), f))), [what]);
    }

    #[test]
    fn searches_a_test_in_the_folder_of_its_target() {
        let mut entry = Entry { line: 1, package: "ferrite", target: Some("host"), test: "a" };
        assert!(may_contain("crates/ferrite/tests/host.rs", &entry));
        assert!(!may_contain("crates/ferrite-cli/tests/host.rs", &entry));
        assert!(!may_contain("crates/ferrite/src/main.rs", &entry));
        entry.target = None;
        assert!(may_contain("crates/ferrite/src/main.rs", &entry));
        entry.package = "xtask";
        assert!(may_contain("xtask/src/main.rs", &entry));
    }

    #[test]
    fn allows_retries_for_lab_tests_only() {
        let lab = "[profile.lab]\nretries = 1 # why\n[[profile.lab.overrides]]\nretries = 0\n";
        assert_eq!(found(|f| check_retries(lab, f)), [""; 0]);
        let default = "[profile.default]\nretries = 1\n[profile.lab]\nretries = 2\n";
        let expected = ["2: retries = 1 in [profile.default]", "4: retries = 2 in [profile.lab]"];
        assert_eq!(found(|f| check_retries(default, f)), expected);
        let table = "[[profile.default.overrides]]\nretries = { backoff = \"fixed\", count = 3 }\n";
        assert_eq!(found(|f| check_retries(table, f)).len(), 1);
    }
}
