//! The fuzz targets' checks over their committed corpora (`fuzz/corpus`): what a fuzzer once found fails here, without
//! one.
#![expect(clippy::print_stdout, reason = "the last input that is printed is the one that failed")]

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

#[path = "../../../fuzz/src/fabric/checks.rs"]
pub mod checks;

fn corpora() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus"))
}

#[test]
fn every_input_passes() {
    for (name, check) in checks::CHECKS {
        let inputs: Vec<_> = fs::read_dir(corpora().join(name)).expect("a corpus for each check").collect();
        assert!(!inputs.is_empty(), "the corpus of {name} is empty");
        for input in inputs {
            let path = input.expect("a readable folder").path();
            println!("{}", path.display());
            check(&fs::read(&path).expect("a file"));
        }
    }
}

#[test]
fn every_corpus_has_a_check() {
    let folders = fs::read_dir(corpora()).expect("the corpora");
    let folders = folders.map(|entry| entry.expect("a readable folder").file_name().into_string());
    let folders = folders.map(|name| name.expect("a plain name"));
    // The others are the protocol's: ferrite-proto and ferrite-session have the same test.
    let ours = |name: &String| !name.starts_with("resp_") && !name.starts_with("valkey_");
    let folders: BTreeSet<_> = folders.filter(ours).collect();
    let checks = checks::CHECKS.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(folders, checks);
}
