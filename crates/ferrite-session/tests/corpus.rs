//! The fuzz targets' checks over their committed corpora (`fuzz/corpus`): what a fuzzer once found
//! fails here, without one.

#[path = "../../../fuzz/src/session/checks.rs"]
pub mod checks;
#[path = "../../../fuzz/src/corpus.rs"]
mod corpus;

#[test]
fn every_input_passes() {
    corpus::every_input_passes(checks::CHECKS);
}

#[test]
fn every_corpus_has_a_check() {
    corpus::every_corpus_has_a_check(checks::CHECKS, |name| name == "valkey_stream");
}
