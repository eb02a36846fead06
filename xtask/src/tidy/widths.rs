//! Checks that lines have at most 100 columns, in Rust, Markdown, TOML and scripts.
//!
//! Text that cannot be wrapped does not count: a string in Rust or TOML (the columns of its
//! contents do not count), a table in Markdown, in a comment of Rust or in a script, and a line of
//! Markdown that has no second word to wrap at (a long link). Code blocks in Markdown do not count
//! either, because they show the output of programs.

use super::{Findings, is_generated, source};

const COLUMNS: usize = 100;

/// Files with wider lines, and the number of these lines. The list may only shrink.
const KNOWN: &[(&str, usize)] = &[
    ("bench/idle-links", 6),
    ("bench/module-instructions", 15),
    ("bench/verbs-ratio", 5),
    ("lab/guest-init", 2),
    ("crates/ferrite-fabric/src/link/core.rs", 1),
    ("crates/ferrite-fabric/src/mem/stats.rs", 1),
];

const THIS_FILE: &str = "xtask/src/tidy/widths.rs";
const REMEDY: &str = "wrap it at 100 columns";

pub(super) fn check(file: &str, text: &str, findings: &mut Findings) {
    check_against(KNOWN, file, text, findings);
}

fn check_against(known: &[(&str, usize)], file: &str, text: &str, findings: &mut Findings) {
    if is_generated(file) || file.ends_with("Cargo.lock") {
        return;
    }
    let wide = wide_lines(file, text);
    let allowed = known.iter().find(|(name, _)| *name == file).map_or(0, |(_, count)| *count);
    if allowed > wide.len() {
        let what = format!("KNOWN allows {allowed} wide lines in {file}, which has {}", wide.len());
        findings.fail(THIS_FILE, 1, what, "lower the number, or remove the entry");
    }
    if allowed < wide.len() {
        for (line, columns) in wide {
            findings.fail(file, line, format!("{columns} columns"), REMEDY);
        }
    }
}

/// Returns the lines that are too wide, with their width.
fn wide_lines(file: &str, text: &str) -> Vec<(usize, usize)> {
    let is_markdown = file.ends_with(".md");
    let is_rust = file.ends_with(".rs");
    let is_script = text.starts_with("#!") && !is_rust;
    if !(is_markdown || is_rust || is_script || file.ends_with(".toml") || file.ends_with(".sh")) {
        return Vec::new();
    }
    let without_strings = match () {
        () if is_rust => source::without_strings(text),
        () if file.ends_with(".toml") => text.lines().map(without_toml_strings).collect(),
        () => text.into(),
    };
    let mut in_code_block = false;
    let mut wide = Vec::new();
    for (line, content) in (1..).zip(without_strings.lines()) {
        if is_markdown && content.trim_start().starts_with("```") {
            in_code_block = !in_code_block;
        }
        let columns = content.chars().count();
        let is_exempt = (is_markdown
            && (in_code_block || is_table(content) || is_one_word(content)))
            || (is_rust && is_table(content.trim_start().trim_start_matches(['/', '!'])))
            // A line of shell may begin with a pipe, but does not end with one.
            || (is_script && is_table(content) && content.ends_with('|'));
        if columns > COLUMNS && !is_exempt {
            wide.push((line, columns));
        }
    }
    wide
}

/// Returns a line of TOML without the contents of its strings. Quotes in comments stay.
fn without_toml_strings(line: &str) -> String {
    let mut kept = String::new();
    let (mut in_string, mut in_comment) = (false, false);
    for c in line.chars() {
        in_comment |= c == '#' && !in_string;
        if c == '"' && !in_comment {
            in_string = !in_string;
        } else if !in_string {
            kept.push(c);
        }
    }
    kept + "\n"
}

fn is_table(line: &str) -> bool {
    line.trim_start().starts_with('|')
}

/// Returns whether the line has no place to wrap it. A link counts as one word.
fn is_one_word(line: &str) -> bool {
    let text = line.trim_start_matches(|c: char| " -*>#".contains(c) || c.is_ascii_digit());
    let text = text.strip_prefix('.').unwrap_or(text).trim();
    let is_link = text.starts_with('[') && text.find("](").or(text.find("]:")).is_some();
    !text.contains(' ') || (is_link && text.matches("](").count() <= 1 && ends_with_link(text))
}

fn ends_with_link(text: &str) -> bool {
    let end = text.find("](").map(|at| at + text[at..].find(')').unwrap_or(0) + 1);
    match end {
        Some(end) => !text[end..].trim().contains(' '),
        None => true, // `[name]: target`
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(file: &str, text: &str) -> Vec<String> {
        found_with(file, text, &[])
    }

    fn found_with(file: &str, text: &str, known: &[(&str, usize)]) -> Vec<String> {
        let mut findings = Findings::default();
        check_against(known, file, text, &mut findings);
        findings.violations.iter().map(|v| format!("{}: {}", v.line, v.what)).collect()
    }

    fn words(columns: usize) -> String {
        "ab ".repeat(columns / 3 + 1)[..columns - 1].to_owned() + "x"
    }

    #[test]
    fn finds_wide_lines_of_code_and_prose() {
        let text = format!("{}\n{}\n", words(100), words(101));
        for file in ["a.rs", "a.md", "a.toml", "a.sh"] {
            assert_eq!(found(file, &text), ["2: 101 columns"], "{file}");
        }
        assert_eq!(found("a.txt", &text), [""; 0]);
        assert_eq!(found("a", &format!("#!/bin/sh\n{text}")), ["3: 101 columns"]);
        assert_eq!(found("crates/ferrite-verbs/src/sys/bindings.rs", &text), [""; 0]);
    }

    #[test]
    fn counts_characters_not_bytes() {
        assert_eq!(found("a.rs", &format!("// {}", "é".repeat(97))), [""; 0]);
    }

    #[test]
    fn ignores_strings_but_not_comments() {
        assert_eq!(found("a.rs", &format!("f(\"{}\");", words(101))), [""; 0]);
        assert_eq!(found("a.rs", &format!("let s = \"\n{}\n\";", words(101))), [""; 0]);
        assert_eq!(found("a.rs", &format!("f(\"\"); // {}", words(95))).len(), 1);
        assert_eq!(found("a.toml", &format!("a = \"{}\"", words(101))), [""; 0]);
        assert_eq!(found("a.toml", &format!("a = \"#\" # \"{}\"", words(95))).len(), 1);
    }

    #[test]
    fn ignores_tables_links_and_code_blocks() {
        assert_eq!(found("a.md", &format!("| {} |", words(101))), [""; 0]);
        assert_eq!(found("a.rs", &format!("//! | {} |", words(101))), [""; 0]);
        assert_eq!(found("a", &format!("#!/bin/sh\n| {} |", words(101))), [""; 0]);
        assert_eq!(found("a", &format!("#!/bin/sh\n| {}", words(101))).len(), 1);
        assert_eq!(found("a.md", &format!("```\n{}\n```\n", words(101))), [""; 0]);
        assert_eq!(found("a.md", &format!("- [a b]({})", "x".repeat(101))), [""; 0]);
        assert_eq!(found("a.md", &format!("[a]: {}", "x".repeat(101))), [""; 0]);
        assert_eq!(found("a.md", &format!("see [a]({}) and more", "x".repeat(101))).len(), 1);
    }

    #[test]
    fn known_lines_may_only_become_fewer() {
        let text = format!("#!/bin/sh\n{}\n{}\n", words(101), words(102));
        assert_eq!(found_with("lab/x", &text, &[("lab/x", 2)]), [""; 0]);
        assert_eq!(found_with("lab/x", &text, &[("lab/x", 1)]).len(), 2);
        let what = "1: KNOWN allows 3 wide lines in lab/x, which has 2";
        assert_eq!(found_with("lab/x", &text, &[("lab/x", 3)]), [what]);
    }
}
