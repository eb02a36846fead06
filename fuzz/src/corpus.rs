//! What each crate's test does with the committed corpora (`fuzz/corpus`). They include this file
//! by its path.
#![expect(clippy::print_stdout, reason = "the last input that is printed is the one that failed")]

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

/// The name of a corpus, and what its inputs must pass.
type Check = (&'static str, fn(&[u8]));

fn corpora() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus"))
}

/// What a fuzzer once found fails here, without one.
pub(crate) fn every_input_passes(checks: &[Check]) {
    for (name, check) in checks {
        let inputs: Vec<_> =
            fs::read_dir(corpora().join(name)).expect("a corpus for each check").collect();
        assert!(!inputs.is_empty(), "the corpus of {name} is empty");
        for input in inputs {
            let path = input.expect("a readable folder").path();
            println!("{}", path.display());
            check(&fs::read(&path).expect("a file"));
        }
    }
}

/// Every corpus that is this crate's by its name; the others have the same test in theirs.
pub(crate) fn every_corpus_has_a_check(checks: &[Check], is_ours: impl Fn(&str) -> bool) {
    let folders = fs::read_dir(corpora()).expect("the corpora");
    let folders = folders.map(|entry| entry.expect("a readable folder").file_name().into_string());
    let folders = folders.map(|name| name.expect("a plain name"));
    let folders: BTreeSet<_> = folders.filter(|name| is_ours(name)).collect();
    let checks = checks.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(folders, checks);
}
