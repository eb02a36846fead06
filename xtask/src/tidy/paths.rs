//! Checks that no `#[path]` attribute includes a file from another place. Tests share code through
//! `ferrite-testkit`, so that each file belongs to one module of one crate.

use super::Findings;

/// The places that may use `#[path]`: a file, or a directory with everything below it.
///
/// The corpus tests run the checks of the fuzz targets. No crate of the workspace can contain these
/// checks: they need the feature `fuzzing` of ferrite-fabric, which would then be enabled in every
/// build of the workspace. The fuzz package is not a member of the workspace, because libFuzzer
/// needs a C++ compiler and has a licence that we do not ship. The fuzz package's own `#[path]`
/// attributes keep the submodules of the checks where the corpus tests look for them.
const ALLOWED: &[&str] = &[
    "crates/ferrite-fabric/tests/corpus.rs",
    "crates/ferrite-proto/tests/corpus.rs",
    "crates/ferrite-session/tests/corpus.rs",
    "fuzz/src/",
];

const REMEDY: &str = "share test code through ferrite-testkit; a test with modules of its own is \
                      tests/NAME/main.rs; tests of one crate share tests/NAME/ by `mod NAME { … }`";

/// Finds `#[path = …]` and `#[cfg_attr(…, path = …)]` in the code of a file, without its comments
/// and literals.
pub(super) fn check(file: &str, code: &str, findings: &mut Findings) {
    if super::within(file, ALLOWED) {
        return;
    }
    for (start, _) in code.match_indices("#[") {
        if sets_path(attribute(&code[start + 1..])) {
            let line = code[..start].matches('\n').count() + 1;
            findings.fail(file, line, "`#[path]` is not allowed here", REMEDY);
        }
    }
}

/// Returns the attribute at the start of `rest`, from its opening bracket to the matching closing
/// bracket.
fn attribute(rest: &str) -> &str {
    let mut depth = 0;
    for (at, byte) in rest.bytes().enumerate() {
        match byte {
            b'[' => depth += 1,
            b']' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return &rest[..at];
        }
    }
    rest
}

/// Returns whether an attribute has the word `path` followed by an equals sign. `#[command(path =
/// …)]` of another macro would match, too, but the project has no such attribute.
fn sets_path(attribute: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    attribute.match_indices("path").any(|(at, word)| {
        let before = attribute[..at].chars().next_back();
        let behind = attribute[at + word.len()..].trim_start();
        !before.is_some_and(is_word) && behind.starts_with('=')
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::source;

    fn found(file: &str, text: &str) -> Vec<usize> {
        let mut findings = Findings::default();
        check(file, &source::code_only(text), &mut findings);
        findings.violations.iter().map(|violation| violation.line).collect()
    }

    #[test]
    fn finds_path_attributes() {
        let text =
            "//! A.\n\n#[path = \"b/c.rs\"]\nmod c;\n#[cfg_attr(test,\n  path=\"d.rs\")]\nmod d;\n";
        assert_eq!(found("crates/a/tests/a.rs", text), [3, 5]);
        assert_eq!(found("crates/a/src/a.rs", text), [3, 5]);
    }

    #[test]
    fn ignores_text_and_other_attributes() {
        let text = "// #[path = \"b.rs\"]\nconst A: &str = \"#[path = 1]\";\n#[expect(x_path)]\n\
                    #[doc = \"path\"]\nfn path() { let path = [1]; path::b(path); }\n";
        assert_eq!(found("crates/a/tests/a.rs", text), [0; 0]);
    }

    #[test]
    fn allows_only_the_listed_places() {
        let text = "#[path = \"../../../fuzz/src/a/checks.rs\"]\nmod checks;\n";
        assert_eq!(found("crates/ferrite-proto/tests/corpus.rs", text), [0; 0]);
        assert_eq!(found("crates/ferrite-client/tests/corpus.rs", text), [1]);
        assert_eq!(found("fuzz/src/lib.rs", text), [0; 0]);
        assert_eq!(found("fuzz/fuzz_targets/a.rs", text), [1]);
    }
}
