//! Runs the checks of fuzz targets over their committed corpora (`fuzz/corpus`), without a fuzzer.
//! Each crate's `tests/corpus.rs` does this for its own checks.
#![expect(clippy::print_stdout, reason = "the last printed input is the one that failed")]

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

/// The name of a corpus, and the check that its inputs must pass.
pub type Check = (&'static str, fn(&[u8]));

fn corpora() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus"))
}

/// Runs every check over its corpus, so that earlier findings of a fuzzer are tested without the
/// fuzzer.
///
/// # Panics
/// If a check panics, or if a corpus is missing or empty.
pub fn every_input_passes(checks: &[Check]) {
    for (name, check) in checks {
        let inputs: Vec<_> =
            fs::read_dir(corpora().join(name)).expect("a corpus for each check").collect();
        assert!(!inputs.is_empty(), "the corpus of {name} is empty");
        for input in inputs {
            let path = input.expect("directory entry").path();
            println!("{}", path.display());
            check(&fs::read(&path).expect("corpus file"));
        }
    }
}

/// Checks that the corpora whose names `is_ours` selects are exactly those of `checks`. Other
/// crates test their own corpora.
///
/// # Panics
/// If a corpus has no check, or a check has no corpus.
pub fn every_corpus_has_a_check(checks: &[Check], is_ours: impl Fn(&str) -> bool) {
    let folders = fs::read_dir(corpora()).expect("corpus directory");
    let folders = folders.map(|entry| entry.expect("directory entry").file_name().into_string());
    let folders = folders.map(|name| name.expect("UTF-8 name"));
    let folders: BTreeSet<_> = folders.filter(|name| is_ours(name)).collect();
    let checks = checks.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(folders, checks);
}
