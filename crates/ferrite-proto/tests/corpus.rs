//! Runs the checks of the fuzz targets on their committed corpora (`fuzz/corpus`) and on random
//! bytes. So inputs that a fuzzer once found are tested without a fuzzer.

use ferrite_testkit::corpus;
use proptest::collection::vec;
use proptest::prelude::*;

#[path = "../../../fuzz/src/proto/checks.rs"]
pub mod checks;

#[test]
fn every_input_passes() {
    corpus::every_input_passes(checks::CHECKS);
}

#[test]
fn every_corpus_has_a_check() {
    corpus::every_corpus_has_a_check(checks::CHECKS, |name| {
        name.starts_with("resp_") || name.starts_with("mux") || name == "valkey_endpoint"
    });
}

/// Generates bytes from pieces of RESP, which random bytes rarely contain.
fn like_resp() -> impl Strategy<Value = Vec<u8>> {
    const PIECES: &[&str] = &[
        "\r\n",
        "*2\r\n",
        "$1\r\n",
        "x\r\n",
        "|1\r\n",
        "*?\r\n",
        "%?\r\n",
        ".\r\n",
        "$?\r\n;1\r\n",
        ";0\r\n",
        ":1\r\n",
        ",1\r\n",
        "=4\r\ntxt:\r\n",
        "-",
        "+",
        "1",
        "*",
        "$",
        "PING",
        "\0",
    ];
    let piece = proptest::sample::select(PIECES);
    (any::<u8>(), vec(piece, 0..30))
        .prop_map(|(seed, pieces)| [&[seed], pieces.concat().as_bytes()].concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn endpoint_handles_any_events(bytes in vec(any::<u8>(), 0..300)) {
        checks::valkey_endpoint(&bytes);
    }

    #[test]
    fn multiplexer_handles_any_events(bytes in vec(any::<u8>(), 0..300)) {
        checks::mux(&bytes);
        checks::mux_records(&bytes);
    }

    #[test]
    fn framers_handle_any_pieces(bytes in like_resp()) {
        checks::resp_command(&bytes);
        checks::resp_reply(&bytes);
    }
}
