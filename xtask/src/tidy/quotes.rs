//! Checks that the documentation quotes messages as the programs print them, so that a reader who
//! searches for a message finds its page.
//!
//! Three kinds of text in README.md, SECURITY.md and docs/ count as quotes:
//! - a code span with an ellipsis, `cannot listen on …`;
//! - a code span in a table column whose heading contains the word "message" or "line";
//! - a fenced block with the info string `text,output`, except its lines that start with `$ `.
//!
//! An ellipsis, a word with a digit, `<name>` and text in double quotes stand for values, and end a
//! fragment. Each fragment of three or more words must be in one string literal of the crates,
//! where a `{…}` may stand for one word. If the program composes a fragment from several literals,
//! each clause of the fragment must be in one literal. Tests are not searched, because they may
//! contain text that no program prints.

use std::fs;
use std::path::Path;

use super::{Findings, source};

const MIN_WORDS: usize = 3;
const OUTPUT: &str = "text,output";
const REMEDY: &str = "quote what the program prints, with … for values";

/// A quote in a document, with its line.
type Quote = (usize, String);

/// The words of a string literal. `None` is a word with a placeholder.
type Literal = Vec<Option<String>>;

pub(super) fn check(root: &Path, files: &[String], findings: &mut Findings) {
    let texts = |wanted: fn(&str) -> bool| {
        let files = files.iter().filter(move |file| wanted(file));
        files.filter_map(|file| Some((file, fs::read_to_string(root.join(file)).ok()?)))
    };
    let mut literals = Vec::new();
    for (_, text) in texts(is_program) {
        let lines = text.split_inclusive('\n').take(source::lines_before_tests(&text));
        let strings = source::string_values(&lines.collect::<String>());
        literals.extend(strings.iter().map(|string| words_of(string)));
    }
    literals.retain(|literal| literal.len() >= MIN_WORDS);
    for (file, text) in texts(is_documentation) {
        check_text(file, &text, &literals, findings);
    }
}

pub(crate) fn is_program(file: &str) -> bool {
    let is_test = file.contains("/tests/") || file.ends_with("/tests.rs");
    file.starts_with("crates/") && file.contains("/src/") && file.ends_with(".rs") && !is_test
}

fn is_documentation(file: &str) -> bool {
    matches!(file, "README.md" | "SECURITY.md")
        || (file.starts_with("docs/") && file.ends_with(".md"))
}

fn check_text(file: &str, text: &str, literals: &[Literal], findings: &mut Findings) {
    for (line, quote) in quotes(text) {
        for fragment in fragments(&quote) {
            if !is_printed(&fragment, literals) {
                let what = format!("no program prints \"{}\"", fragment.join(" "));
                findings.fail(file, line, what, REMEDY);
            }
        }
    }
}

/// Returns the words of a literal's value.
fn words_of(string: &str) -> Literal {
    const PLACEHOLDER: char = '\0';
    let mut text = String::new();
    let mut in_placeholder = false;
    for c in string.replace("{{", "").replace("}}", "").chars() {
        match c {
            '{' => {
                in_placeholder = true;
                text.push(PLACEHOLDER);
            }
            '}' => in_placeholder = false,
            _ if in_placeholder => {}
            _ => text.push(c),
        }
    }
    let words = text.split_whitespace();
    words.map(|word| (!word.contains(PLACEHOLDER)).then(|| word.into())).collect()
}

/// Returns whether a literal contains the fragment, or literals contain each of its clauses.
fn is_printed(fragment: &[&str], literals: &[Literal]) -> bool {
    let printed = |words: &[&str]| {
        words.len() < MIN_WORDS || literals.iter().any(|literal| contains(literal, words))
    };
    printed(fragment) || {
        let clauses = clauses(fragment);
        clauses.len() > 1 && clauses.into_iter().all(printed)
    }
}

/// Returns whether the literal contains the words. At least `MIN_WORDS` words must not match a
/// placeholder.
fn contains(literal: &Literal, words: &[&str]) -> bool {
    literal.windows(words.len()).any(|window| {
        let mut own = 0;
        let mut pairs = window.iter().zip(words);
        let matches = pairs.all(|(ours, word)| match ours {
            Some(ours) => {
                own += 1;
                trim(ours) == trim(word)
            }
            None => true,
        });
        matches && own >= MIN_WORDS
    })
}

fn trim(word: &str) -> &str {
    word.trim_matches(|c: char| ".,;:-()[]\"'`".contains(c))
}

/// Splits a fragment where programs join messages: after `:`, `;` and `)`, and before `(`.
fn clauses<'a, 'b>(fragment: &'b [&'a str]) -> Vec<&'b [&'a str]> {
    let mut clauses = Vec::new();
    let mut start = 0;
    for (at, word) in fragment.iter().enumerate() {
        if word.starts_with('(') && at > start {
            clauses.push(&fragment[start..at]);
            start = at;
        }
        if word.ends_with([':', ';', ')']) || word.ends_with("),") {
            clauses.push(&fragment[start..=at]);
            start = at + 1;
        }
    }
    clauses.push(&fragment[start..]);
    clauses
}

/// Splits a quote at its values. Returns the parts that are long enough to be checked.
fn fragments(quote: &str) -> Vec<Vec<&str>> {
    // Text in double quotes is every second part.
    let plain = quote.split('"').step_by(2);
    let words = plain.flat_map(|part| part.split_whitespace().chain(["…"])).collect::<Vec<_>>();
    let is_value =
        |word: &&str| word.contains(['…', '<', '>']) || word.contains(|c: char| c.is_ascii_digit());
    let parts = words.split(is_value).map(|part| {
        let is_sign = |word: &&&str| !word.contains(char::is_alphabetic);
        let part = part.iter().skip_while(is_sign).copied().collect::<Vec<_>>();
        let signs = part.iter().rev().take_while(is_sign).count();
        part[..part.len() - signs].to_vec()
    });
    parts.filter(|part| part.len() >= MIN_WORDS).collect()
}

/// Returns the quotes of a Markdown text.
fn quotes(text: &str) -> Vec<Quote> {
    let mut quotes = Vec::new();
    let mut prose = String::new(); // the text without blocks and tables, with the same lines
    let mut fence: Option<bool> = None; // inside a fenced block: whether it is output
    let mut message_columns = Vec::new(); // columns with messages, in the table around this line
    let lines = text.lines().collect::<Vec<_>>();
    for (at, &content) in lines.iter().enumerate() {
        if let Some(info) = content.trim_start().strip_prefix("```") {
            fence = if fence.is_some() { None } else { Some(info == OUTPUT) };
        } else if let Some(is_output) = fence {
            if is_output && !content.starts_with("$ ") {
                quotes.push((at + 1, content.into()));
            }
        } else if content.starts_with('|') {
            let cells = cells(content);
            if lines.get(at + 1).is_some_and(|next| next.starts_with("|---")) {
                message_columns = cells.iter().map(|heading| names_messages(heading)).collect();
            }
            for (column, cell) in cells.iter().enumerate() {
                let all = message_columns.get(column) == Some(&true);
                quotes.extend(spans(cell, all).map(|(_, span)| (at + 1, span)));
            }
        } else {
            prose.push_str(content);
        }
        prose.push('\n');
    }
    quotes.extend(spans(&prose, false));
    quotes.sort();
    quotes
}

fn names_messages(heading: &str) -> bool {
    heading.split(|c: char| !c.is_alphabetic()).any(|word| matches!(word, "message" | "line"))
}

/// Returns the cells of a table's row. `\|` does not end a cell.
fn cells(row: &str) -> Vec<String> {
    let row = row.trim().trim_matches('|').replace("\\|", "\0");
    row.split('|').map(|cell| cell.replace('\0', "|")).collect()
}

/// Returns the code spans of a text: all of them, or only those with an ellipsis.
fn spans(text: &str, all: bool) -> impl Iterator<Item = Quote> {
    let mut line = 1;
    let parts = text.split('`').enumerate().filter_map(move |(at, part)| {
        let here = line;
        line += part.matches('\n').count();
        (at % 2 == 1).then(|| (here, part.to_owned()))
    });
    parts.filter(move |(_, span)| all || span.contains('…'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROGRAM: &str = r#"
        // a comment says nothing
        bail!("cannot listen on {address}: {error}; choose another \
               port, or stop the program");
        format!("argument {name} has no value");
        format!("links use TCP although RDMA is wanted: {n}");
        const DENIED: &str = "The Ferrite {name} is in protected mode";
        write!(f, "{a} {b} {c} {d}");
    "#;

    /// Returns the fragments of a document that no literal of `PROGRAM` has, with their lines.
    fn unknown(text: &str) -> Vec<String> {
        let literals =
            source::string_values(PROGRAM).iter().map(|s| words_of(s)).collect::<Vec<_>>();
        let mut findings = Findings::default();
        check_text("docs/a.md", text, &literals, &mut findings);
        let what = |what: &str| what.replace("no program prints ", "");
        findings.violations.iter().map(|v| format!("{}: {}", v.line, what(&v.what))).collect()
    }

    #[test]
    fn tests_are_not_programs() {
        assert!(is_program("crates/a/src/b.rs"));
        assert!(!is_program("crates/a/src/b/tests.rs"));
        assert!(!is_program("crates/a/tests/b.rs"));
    }

    #[test]
    fn finds_a_message_in_prose_across_lines() {
        assert_eq!(unknown("The log has `cannot listen\non …`, and ends."), [""; 0]);
        assert_eq!(
            unknown("A `b c`.\n\nThe log has `cannot listen\nat all: …`."),
            ["3: \"cannot listen at all:\""]
        );
    }

    #[test]
    fn ignores_code_without_an_ellipsis_outside_of_marked_places() {
        assert_eq!(
            unknown("Run `apt install this program`.\n\n```text\nno such words\n```\n"),
            [""; 0]
        );
        assert_eq!(unknown("| command |\n|---|\n| `apt install this` |\n"), [""; 0]);
    }

    #[test]
    fn checks_columns_of_messages_only() {
        let table = "| log line | fix |\n|---|---|\n| `no such words` | `or in here` |\n";
        assert_eq!(unknown(table), ["3: \"no such words\""]);
        let next = format!("{table}\n| name |\n|---|\n| `not a message` |\n");
        assert_eq!(unknown(&next), ["3: \"no such words\""]);
    }

    #[test]
    fn checks_output_but_not_its_commands() {
        let block = "```text,output\n$ run the program\nno such words\nlinks use TCP\n```\n";
        assert_eq!(unknown(block), ["3: \"no such words\""]);
    }

    #[test]
    fn joins_continued_literals() {
        assert_eq!(unknown("`…; choose another port, or stop the program`"), [""; 0]);
    }

    #[test]
    fn comments_are_not_messages() {
        assert_eq!(unknown("`a comment says nothing …`").len(), 1);
    }

    #[test]
    fn a_placeholder_stands_for_one_word() {
        assert_eq!(unknown("`argument rdma-port has no value …`"), [""; 0]);
        assert_eq!(unknown("`argument of the module has no value …`").len(), 1);
        assert_eq!(unknown("`DENIED The Ferrite gateway is in protected mode, …`").len(), 1);
        assert_eq!(unknown("`DENIED: The Ferrite gateway is in protected mode, …`"), [""; 0]);
        assert_eq!(unknown("`one two three four …`").len(), 1, "no word is the literal's own");
    }

    #[test]
    fn values_end_a_fragment() {
        assert_eq!(unknown("`no value 7 links use …`"), [""; 0]);
        assert_eq!(unknown("`no value \"like this one\" links <name> …`"), [""; 0]);
    }

    #[test]
    fn composed_messages_are_checked_by_clause() {
        assert_eq!(unknown("`… has no value: links use TCP …`"), [""; 0]);
        assert_eq!(unknown("`… links use TCP (stop the program)`"), [""; 0]);
        assert_eq!(unknown("`… links use TCP (stop a program)`").len(), 1);
    }
}
