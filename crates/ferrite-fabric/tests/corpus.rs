//! Runs the checks of this crate's fuzz targets over their committed corpora (`fuzz/corpus`). So
//! every test run repeats the earlier findings of a fuzzer. Also tests that each of these corpora
//! has a check.

#[path = "../../../fuzz/src/fabric/checks.rs"]
pub mod checks;

use ferrite_testkit::corpus;

#[test]
fn every_input_passes() {
    corpus::every_input_passes(checks::CHECKS);
}

#[test]
fn every_corpus_has_a_check() {
    corpus::every_corpus_has_a_check(checks::CHECKS, |name| {
        !["mux", "resp_", "valkey_"].iter().any(|other| name.starts_with(other))
    });
}
