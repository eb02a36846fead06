//! `cargo xtask sample --seed N`: prints comments and user-visible strings at random, so that a
//! person can judge how the project reads. The same seed and the same code give the same sample.
//!
//! A comment is a block of comment lines without code between them. User-visible strings are the
//! literals of programs (messages, log lines, output) and the help texts of their options. Texts of
//! one or two words are left out, because they are always easy to read.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use clap::Args;

use crate::tidy::source::{self, Kind};
use crate::tidy::{self, quotes};

const MIN_WORDS: usize = 3;

/// Code that precedes a literal that no user reads: reasons for lints, and panics that are bugs.
const NOT_SHOWN: &[&str] = &["reason =", ".expect(", "unreachable!(", "assert!(", "env!("];

#[derive(Args)]
pub(crate) struct Options {
    /// Number of comments to print
    #[arg(long, default_value_t = 100)]
    comments: usize,
    /// Number of user-visible strings to print
    #[arg(long, default_value_t = 50)]
    strings: usize,
    /// Seed of the random choice
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// A text with its place, `file:line`.
#[derive(Debug, PartialEq)]
struct Sample {
    place: String,
    text: String,
}

pub(crate) fn run(root: &Path, options: &Options) -> anyhow::Result<ExitCode> {
    let (mut comments, mut strings) = (Vec::new(), Vec::new());
    for file in tidy::files(root)?.iter().filter(|file| is_read(file)) {
        let Ok(text) = fs::read_to_string(root.join(file)) else { continue }; // deleted
        comments.extend(comments_of(file, &text));
        if quotes::is_program(file) {
            strings.extend(strings_of(file, &text));
        }
    }
    let mut random = Random(options.seed);
    print("comments", choose(comments, options.comments, &mut random));
    print("strings", choose(strings, options.strings, &mut random));
    Ok(ExitCode::SUCCESS)
}

fn is_read(file: &str) -> bool {
    let is_ours = file.starts_with("crates/") || file.starts_with("xtask/");
    is_ours && file.ends_with(".rs") && !tidy::is_generated(file)
}

fn print(what: &str, (all, chosen): (usize, Vec<Sample>)) {
    println!("== {what}: {} of {all}", chosen.len());
    for (number, Sample { place, text }) in (1..).zip(chosen) {
        println!("{number}. {place}: {text}");
    }
}

/// Returns the comments with their markers removed, one per block.
fn comments_of(file: &str, text: &str) -> Vec<Sample> {
    blocks(text).into_iter().filter_map(|(line, text)| sample(file, line, &text)).collect()
}

/// Returns the literals that users may see, and the help texts of options.
fn strings_of(file: &str, text: &str) -> Vec<Sample> {
    let lines = text.split_inclusive('\n').take(source::lines_before_tests(text));
    let text = lines.collect::<String>();
    let mut found = Vec::new();
    let mut code = String::new();
    for (line, part, kind) in source::Parts::of(&text) {
        match kind {
            Kind::Code => code.push_str(part),
            Kind::Literal if part.contains('"') => {
                let before = code.trim_end();
                if !NOT_SHOWN.iter().any(|start| before.ends_with(start)) {
                    let value = source::string_values(part).concat();
                    found.extend(sample(file, line, &value));
                }
                code.clear();
            }
            Kind::Literal | Kind::Comment => {}
        }
    }
    if text.contains("use clap::") {
        // clap shows a doc comment unchanged, so help texts have no full stop.
        let docs = blocks(&text).into_iter().filter(|(_, text)| !text.ends_with(['.', ':']));
        found.extend(docs.filter_map(|(line, text)| sample(file, line, &text)));
    }
    found
}

/// Returns the blocks of comment lines, each with the number of its first line.
fn blocks(text: &str) -> Vec<(usize, String)> {
    let mut blocks: Vec<(usize, String)> = Vec::new();
    let mut is_open = false;
    for (line, part, kind) in source::Parts::of(text) {
        if kind != Kind::Comment {
            is_open &= part.trim().is_empty();
            continue;
        }
        let content = part.trim_start_matches(['/', '!', '*']).trim();
        match blocks.last_mut() {
            Some((_, block)) if is_open => {
                block.push(' ');
                block.push_str(content);
            }
            _ => blocks.push((line, content.into())),
        }
        is_open = true;
    }
    blocks
}

fn sample(file: &str, line: usize, text: &str) -> Option<Sample> {
    let words = text.split_whitespace().collect::<Vec<_>>();
    let is_prose = words.iter().filter(|word| word.chars().any(char::is_alphabetic)).count();
    (is_prose >= MIN_WORDS)
        .then(|| Sample { place: format!("{file}:{line}"), text: words.join(" ") })
}

/// Returns the number of all samples, and `count` of them at random.
fn choose(mut all: Vec<Sample>, count: usize, random: &mut Random) -> (usize, Vec<Sample>) {
    let total = all.len();
    let count = count.min(total);
    for at in 0..count {
        let other = at + random.below(total - at);
        all.swap(at, other);
    }
    all.truncate(count);
    (total, all)
}

/// `SplitMix64`: small, and the same on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % limit as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(samples: Vec<Sample>) -> Vec<String> {
        samples.into_iter().map(|Sample { place, text }| format!("{place}: {text}")).collect()
    }

    #[test]
    fn joins_the_lines_of_a_comment() {
        let text = "//! A file\n//! of tests.\nfn f() {} // so it is\n// short\nfn g() {}\n";
        let expected = ["a.rs:1: A file of tests.", "a.rs:3: so it is short"];
        assert_eq!(texts(comments_of("a.rs", text)), expected);
    }

    #[test]
    fn finds_what_users_see() {
        let text = "use clap::Args;\n/// Number of seeds\nseeds: u64,\n/// It is a type.\n\
                    bail!(\"cannot open {file}: \\\n   denied\");\nx.expect(\"a b c d\");\n\
                    #[cfg(test)]\nmod tests {\n f(\"in a test\");\n}\n";
        let expected = ["a.rs:5: cannot open {file}: denied", "a.rs:2: Number of seeds"];
        assert_eq!(texts(strings_of("a.rs", text)), expected);
    }

    #[test]
    fn a_seed_repeats_its_choice() {
        let chosen = |seed| {
            let all = (0..100).filter_map(|n| sample("a.rs", n, "one two three")).collect();
            choose(all, 10, &mut Random(seed))
        };
        assert_eq!(chosen(1), chosen(1));
        assert_ne!(chosen(1), chosen(2));
        assert_eq!((chosen(1).0, chosen(1).1.len()), (100, 10));
    }
}
