//! Runs the fuzz targets' checks over their committed corpora (`fuzz/corpus`), without a fuzzer. An
//! input that once failed under the fuzzer fails here if the bug comes back.

#[path = "../../../fuzz/src/session/checks.rs"]
pub mod checks;

use ferrite_testkit::corpus;

#[test]
fn every_input_passes() {
    corpus::every_input_passes(checks::CHECKS);
}

#[test]
fn every_corpus_has_a_check() {
    corpus::every_corpus_has_a_check(checks::CHECKS, |name| name == "valkey_stream");
}
