//! Checks that words of the old private vocabulary do not come back. Each of them has a common word
//! that every reader of the field knows.
//!
//! The words are searched in identifiers, in file names, and in names of settings, INFO fields and
//! environment variables. Prose is not checked, because most of these words are ordinary English
//! there.

use super::{Findings, GENERATED, source, within};

/// Words that no name may contain, with the word to write instead.
const IN_NAMES: &[(&str, &str)] = &[
    ("attend", "serve"),
    ("attends", "serves"),
    ("bell", "event fd"),
    ("climb", "upgrade"),
    ("climbs", "upgrades"),
    ("gear", "device objects"),
    ("harbour", "peer"),
    ("manners", "violations"),
    ("meet", "connect"),
    ("meeting", "handshake"),
    ("minds", "affects connection"),
    ("parcel", "TCP frame"),
    ("parcels", "TCP frames"),
    ("patience", "keepalive or timeout"),
    ("porch", "task queue"),
    ("rig", "harness"),
    ("rouse", "task waker"),
    ("scene", "server or setup"),
    ("setpoint", "setting value"),
    ("stayed", "pinned"),
    ("stranger", "foreign peer"),
    ("strangers", "foreign peers"),
    ("talk", "client or messages"),
    ("troubles", "faults"),
];

/// Words that are fine in other names, but not in the name of a type or a module.
const AS_TYPES: &[(&str, &str)] = &[
    ("around", "engine handle"),
    ("bare", "raw connection"),
    ("bridge", "proxy"),
    ("carrier", "transport"),
    ("inside", "in-process engine"),
    ("lane", "path, or device queues"),
    ("letter", "queued message"),
    ("met", "connected"),
    ("opening", "handshake"),
    ("resident", "event loop"),
    ("standing", "client state"),
    ("trouble", "fault"),
];

/// Files that must contain the words, because they are about them.
const EXEMPT: &[&str] = &["xtask/src/tidy/words.rs"];

const REMEDY: &str = "use the field's word (docs/book/src/glossary.md)";

/// Checks the name of a file.
pub(super) fn check_name(file: &str, findings: &mut Findings) {
    if within(file, EXEMPT) {
        return;
    }
    for word in words_of(file) {
        report(file, 1, file, &word, IN_NAMES, findings);
    }
    if let Some(stem) = file.strip_suffix(".rs").and_then(|name| name.rsplit('/').next()) {
        for word in words_of(stem) {
            report(file, 1, file, &word, AS_TYPES, findings);
        }
    }
}

/// Checks the names in a file.
pub(super) fn check(file: &str, text: &str, findings: &mut Findings) {
    if within(file, EXEMPT) || within(file, GENERATED) {
        return;
    }
    for (line, name) in settings(text) {
        for word in words_of(name) {
            report(file, line, name, &word, IN_NAMES, findings);
        }
    }
    if file.ends_with(".rs") {
        check_code(file, text, findings);
    }
}

fn check_code(file: &str, text: &str, findings: &mut Findings) {
    let code = source::code_only(text);
    let mut previous = "";
    for (line, name) in source::words(&code) {
        let declares = ["mod", "struct", "enum", "union", "trait", "type"].contains(&previous);
        for word in words_of(name) {
            report(file, line, name, &word, IN_NAMES, findings);
            if declares {
                report(file, line, name, &word, AS_TYPES, findings);
            }
        }
        previous = name;
    }
    for (line, literal) in source::strings(text).into_iter().filter(|(_, text)| is_name(text)) {
        // `settings` has already found the names with this prefix.
        if !literal.to_ascii_lowercase().starts_with("ferrite_") {
            for word in words_of(literal) {
                report(file, line, literal, &word, IN_NAMES, findings);
            }
        }
    }
}

fn report(
    file: &str,
    line: usize,
    name: &str,
    word: &str,
    list: &[(&str, &str)],
    findings: &mut Findings,
) {
    if let Some((_, instead)) = list.iter().find(|(forbidden, _)| *forbidden == word) {
        let what = format!("`{name}` contains `{word}`; write, for example, `{instead}` instead");
        findings.fail(file, line, what, REMEDY);
    }
}

/// Returns the words of a name in snake, kebab or camel case, in lower case.
fn words_of(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut was_lower = false;
    for c in name.chars() {
        let starts_word = c.is_uppercase() && was_lower;
        was_lower = c.is_lowercase();
        if starts_word || !c.is_alphabetic() {
            words.push(String::new());
        }
        if let Some(word) = words.last_mut().filter(|_| c.is_alphabetic()) {
            word.extend(c.to_lowercase());
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

/// Returns the names of environment variables and INFO fields in a text: `FERRITE_…`, `ferrite_…`.
fn settings(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    for (line, content) in (1..).zip(text.lines()) {
        let names = content.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let ours = |name: &&str| name.starts_with("FERRITE_") || name.starts_with("ferrite_");
        found.extend(names.filter(ours).map(|name| (line, name)));
    }
    found
}

/// Returns whether a string is a name of several words: `call-path`, `rdma_port`, `CALL_PATH`.
fn is_name(text: &str) -> bool {
    let is_word = |word: &str| {
        let lower = word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
        let upper = word.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit());
        !word.is_empty() && (lower || upper)
    };
    text.contains(['-', '_']) && text.split(['-', '_']).all(is_word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(file: &str, text: &str) -> Vec<String> {
        let mut findings = Findings::default();
        check_name(file, &mut findings);
        check(file, text, &mut findings);
        let name = |what: &str| what.split('`').nth(1).unwrap_or_default().to_owned();
        findings.violations.iter().map(|v| format!("{}: {}", v.line, name(&v.what))).collect()
    }

    #[test]
    fn finds_whole_words_of_identifiers() {
        let text = "struct TaskPorch;\nfn open_parcel() {}\nconst MAX_PATIENCE: u8 = 1;\n";
        let expected = ["1: TaskPorch", "2: open_parcel", "3: MAX_PATIENCE"];
        assert_eq!(found("a.rs", text), expected);
        assert_eq!(found("a.rs", "fn origin() {}\nstruct Trigger;\nlet scenery = 1;\n"), [""; 0]);
    }

    #[test]
    fn allows_english_words_in_names_that_are_no_types() {
        let text = "let carrier = 1;\nfn wraps_around() {}\nlet lanes = 4;\n";
        assert_eq!(found("a.rs", text), [""; 0]);
        let text = "struct Carrier;\nmod around;\nenum BareLink {}\n";
        assert_eq!(found("a.rs", text), ["1: Carrier", "2: around", "3: BareLink"]);
    }

    #[test]
    fn ignores_prose() {
        let text = "//! The scene of a parcel.\nlet s = \"a stranger has patience\"; // climb\n";
        assert_eq!(found("a.rs", text), [""; 0]);
        assert_eq!(found("a.md", "The scene: a parcel.\n"), [""; 0]);
    }

    #[test]
    fn finds_names_of_files() {
        assert_eq!(found("tests/scene/start.txt", ""), ["1: tests/scene/start.txt"]);
        assert_eq!(found("src/lane.rs", ""), ["1: src/lane.rs"]);
        assert_eq!(found("docs/lane.md", ""), [""; 0]);
    }

    #[test]
    fn finds_names_of_settings_fields_and_variables() {
        assert_eq!(found("a.rs", "f(\"max-patience\");\ng(\"GEAR_MAX\");\n").len(), 2);
        assert_eq!(found("x.sh", "FERRITE_RIG=1\n"), ["1: FERRITE_RIG"]);
        assert_eq!(found("x.md", "`ferrite_parcels_total`\n"), ["1: ferrite_parcels_total"]);
    }

    #[test]
    fn splits_names_into_words() {
        assert_eq!(words_of("openTcpFrame"), ["open", "tcp", "frame"]);
        assert_eq!(words_of("MAX_SIZE-of.rs"), ["max", "size", "of", "rs"]);
    }

    #[test]
    fn no_word_is_listed_twice() {
        let mut words: Vec<_> = IN_NAMES.iter().chain(AS_TYPES).map(|(word, _)| word).collect();
        words.sort_unstable();
        let count = words.len();
        words.dedup();
        assert_eq!(words.len(), count);
    }
}
