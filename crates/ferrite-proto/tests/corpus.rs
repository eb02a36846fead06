//! The fuzz targets' checks over their committed corpora (`fuzz/corpus`) and over bytes of chance: what a fuzzer once
//! found fails here, without one.
#![expect(clippy::print_stdout, reason = "the last input that is printed is the one that failed")]

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use proptest::collection::vec;
use proptest::prelude::*;

#[path = "../../../fuzz/src/proto/checks.rs"]
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
    // The others are those of ferrite-fabric and ferrite-session, which have the same test.
    let ours = |name: &String| name.starts_with("resp_") || name == "valkey_endpoint";
    let folders: BTreeSet<_> = folders.filter(ours).collect();
    let checks = checks::CHECKS.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(folders, checks);
}

/// Bytes of which RESP is made, more often than chance has them.
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
    (any::<u8>(), vec(piece, 0..30)).prop_map(|(seed, pieces)| [&[seed], pieces.concat().as_bytes()].concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn any_events(bytes in vec(any::<u8>(), 0..300)) {
        checks::valkey_endpoint(&bytes);
    }

    #[test]
    fn any_pieces(bytes in like_resp()) {
        checks::resp_command(&bytes);
        checks::resp_reply(&bytes);
    }
}
