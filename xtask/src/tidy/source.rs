//! Separates Rust code from comments and literals, by the lexical rules only. It replaces comments
//! and literals by blanks and keeps the lines. It is not a parser, so it needs no dependency and
//! cannot fail.

/// Returns the text with comments, strings and character literals replaced by blanks.
pub(super) fn code_only(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    for (_, part, kind) in Parts::of(text) {
        match kind {
            Kind::Code => code.push_str(part),
            _ => code.extend(part.chars().map(|c| if c == '\n' { '\n' } else { ' ' })),
        }
    }
    code
}

/// Returns the text without the contents of strings. Keeps comments and line ends.
pub(super) fn without_strings(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    for (_, part, kind) in Parts::of(text) {
        match kind {
            Kind::Literal => kept.extend(part.chars().filter(|c| *c == '\n')),
            Kind::Code | Kind::Comment => kept.push_str(part),
        }
    }
    kept
}

/// Returns the contents of plain string literals with their lines.
pub(super) fn strings(text: &str) -> Vec<(usize, &str)> {
    let literals = Parts::of(text).filter(|(_, _, kind)| *kind == Kind::Literal);
    let inside = |part: &str| Some(part.strip_prefix('"')?.strip_suffix('"')?.len());
    literals.filter_map(|(line, part, _)| Some((line, &part[1..=inside(part)?]))).collect()
}

/// Returns the values of the string literals. An escaped line break joins its lines.
pub(crate) fn string_values(text: &str) -> Vec<String> {
    let literals =
        Parts::of(text).filter(|(_, part, kind)| *kind == Kind::Literal && !part.starts_with('\''));
    let value = |(_, part, _): (usize, &str, Kind)| {
        let quoted = part.trim_end_matches('#');
        let content = quoted.split_once('"').map_or("", |(_, content)| content);
        unescape(content.strip_suffix('"').unwrap_or(content), !part.starts_with('"'))
    };
    literals.map(value).collect()
}

/// Returns the value of a literal's content. An escaped line break vanishes with the blanks after
/// it. An escaped quote or backslash becomes that character. Any other escape becomes a blank.
fn unescape(content: &str, is_raw: bool) -> String {
    if is_raw {
        return content.into();
    }
    let mut value = String::with_capacity(content.len());
    let mut chars = content.chars().peekable();
    while let Some(c) = chars.next() {
        match (c, chars.peek()) {
            ('\\', Some('\n')) => while chars.next_if(|c| c.is_whitespace()).is_some() {},
            ('\\', Some('"' | '\\')) => value.extend(chars.next()),
            ('\\', Some(_)) => {
                chars.next();
                value.push(' ');
            }
            (c, _) => value.push(c),
        }
    }
    value
}

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    Code,
    Comment,
    Literal,
}

/// Splits a text into single characters of code, comments and literals, each with its line.
pub(crate) struct Parts<'a> {
    rest: &'a str,
    previous: char,
    line: usize,
}

impl<'a> Parts<'a> {
    pub(crate) fn of(text: &'a str) -> Self {
        Self { rest: text, previous: ' ', line: 1 }
    }
}

impl<'a> Iterator for Parts<'a> {
    type Item = (usize, &'a str, Kind);

    fn next(&mut self) -> Option<Self::Item> {
        let first = self.rest.chars().next()?;
        let (len, kind) = match prose_len(self.rest, self.previous) {
            0 => (first.len_utf8(), Kind::Code),
            len if first == '/' => (len, Kind::Comment),
            len => (len, Kind::Literal),
        };
        let (part, rest) = self.rest.split_at(len);
        let line = self.line;
        self.line += part.matches('\n').count();
        self.previous = part.chars().next_back().unwrap_or(' ');
        self.rest = rest;
        Some((line, part, kind))
    }
}

/// Returns the length in bytes of the comment or literal at the start of `rest`; 0 for code.
fn prose_len(rest: &str, previous: char) -> usize {
    if rest.starts_with("//") {
        return rest.find('\n').unwrap_or(rest.len());
    }
    if rest.starts_with("/*") {
        return block_comment_len(rest);
    }
    if rest.starts_with('"') {
        return quoted_len(rest, 0, '"');
    }
    if rest.starts_with('\'') {
        return character_len(rest);
    }
    // r"…", br#"…"# and cr"…" have a prefix, which counts only at the start of a word. b"…" and
    // c"…" need no special case.
    let prefix = ["r", "br", "cr"].into_iter().find(|prefix| {
        let after = rest.strip_prefix(prefix).map(|after| after.trim_start_matches('#'));
        after.is_some_and(|after| after.starts_with('"'))
    });
    match prefix {
        Some(prefix) if !is_word(previous) => raw_string_len(rest, prefix.len()),
        _ => 0,
    }
}

fn block_comment_len(rest: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < rest.len() {
        let (step, change) = match &rest.as_bytes()[at..] {
            [b'/', b'*', ..] => (2, 1),
            [b'*', b'/', ..] => (2, -1),
            _ => (1, 0),
        };
        at += step;
        depth += change;
        if depth == 0 {
            return at;
        }
    }
    rest.len()
}

/// Returns the length of a literal with its quotes. Its opening quote is at `open`.
fn quoted_len(rest: &str, open: usize, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip_while(|(at, _)| *at <= open) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

/// Returns the length of a character literal: 'c' and '\n' are literals, 'static and 'label: are
/// not.
fn character_len(rest: &str) -> usize {
    let mut chars = rest[1..].chars();
    match (chars.next(), chars.next()) {
        (Some('\\'), _) | (Some(_), Some('\'')) => quoted_len(rest, 0, '\''),
        _ => 0,
    }
}

fn raw_string_len(rest: &str, prefix: usize) -> usize {
    let hashes = rest[prefix..].bytes().take_while(|byte| *byte == b'#').count();
    let open = prefix + hashes + 1;
    let close = format!("\"{}", "#".repeat(hashes));
    rest[open..].find(&close).map_or(rest.len(), |at| open + at + close.len())
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Returns the identifiers and keywords of `code_only` text with their lines. A raw identifier
/// (`r#unsafe`) is not a keyword and keeps its prefix.
pub(super) fn words(code: &str) -> Vec<(usize, &str)> {
    let mut words = Vec::new();
    for (line, content) in (1..).zip(code.lines()) {
        for word in content.split(|c| !is_word(c) && c != '#') {
            let word = word.trim_start_matches('#');
            if !word.is_empty() {
                words.push((line, word));
            }
        }
    }
    words
}

/// Returns the lines on which `code_only` text exports `module`: `pub mod module`, or a `pub use`
/// with `module` in its path.
pub(super) fn exports_of(code: &str, module: &str) -> Vec<usize> {
    let mut lines = Vec::new();
    let mut line = 1;
    for statement in code.split_inclusive([';', '{']) {
        let words = words(statement);
        for (at, pair) in words.windows(2).enumerate() {
            if let [(offset, "pub"), (_, item @ ("mod" | "use"))] = pair {
                let path = &words[at + 2..];
                let exported = match *item {
                    "mod" => path.first().is_some_and(|(_, word)| *word == module),
                    _ => path.iter().any(|(_, word)| *word == module),
                };
                if exported {
                    lines.push(line + offset - 1);
                }
            }
        }
        line += statement.matches('\n').count();
    }
    lines
}

/// Returns the number of lines before the file's test module, which comes last.
pub(crate) fn lines_before_tests(text: &str) -> usize {
    let lines: Vec<_> = text.lines().collect();
    let tests =
        lines.windows(2).position(|pair| pair[0] == "#[cfg(test)]" && pair[1].starts_with("mod "));
    tests.unwrap_or(lines.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the lines with the keyword `unsafe`.
    fn unsafe_lines(text: &str) -> Vec<usize> {
        let code = code_only(text);
        assert_eq!(code.lines().count(), text.lines().count());
        words(&code).iter().filter(|(_, word)| *word == "unsafe").map(|(line, _)| *line).collect()
    }

    #[test]
    fn finds_the_keyword() {
        assert_eq!(
            unsafe_lines("fn f() {\n    unsafe{ g() }\n}\nunsafe impl Send for X {}"),
            [2, 4]
        );
        assert_eq!(unsafe_lines("#[unsafe(no_mangle)]"), [1]);
        assert_eq!(unsafe_lines("let f: unsafe extern \"C\" fn();"), [1]);
    }

    #[test]
    fn ignores_identifiers_that_contain_the_keyword() {
        assert_eq!(unsafe_lines("#![forbid(unsafe_code)]\nfn not_unsafe(r#unsafe: u8) {}"), [0; 0]);
    }

    #[test]
    fn skips_comments_to_their_end() {
        assert_eq!(unsafe_lines("// unsafe\nunsafe {}"), [2]);
        assert_eq!(unsafe_lines("/* unsafe /* unsafe */ unsafe */ unsafe {}"), [1]);
        assert_eq!(unsafe_lines("/* unsafe /* */ unsafe"), [0; 0]);
    }

    #[test]
    fn skips_strings_to_their_end() {
        assert_eq!(unsafe_lines(r#"let s = "unsafe \" unsafe"; unsafe {}"#), [1]);
        assert_eq!(unsafe_lines("let s = r#\"unsafe \" unsafe \\\"#;\nunsafe {}"), [2]);
        assert_eq!(unsafe_lines("let s = br\"unsafe\\\";\nunsafe {}"), [2]);
        assert_eq!(unsafe_lines("let s = \"a\nunsafe\n\";\nunsafe {}"), [4]);
        assert_eq!(unsafe_lines("let s = \"// no comment\"; unsafe {}"), [1]);
    }

    #[test]
    fn distinguishes_characters_from_lifetimes() {
        assert_eq!(unsafe_lines("let q = '\"'; unsafe {} let r = '\"';"), [1]);
        assert_eq!(unsafe_lines("let q = '\\''; unsafe {} let r = '\\'';"), [1]);
        assert_eq!(unsafe_lines("fn f<'a>(x: &'a str) { unsafe {} }"), [1]);
        assert_eq!(unsafe_lines("let b = b'\"'; unsafe {} let c = 'é';"), [1]);
    }

    #[test]
    fn finds_the_contents_of_strings() {
        assert_eq!(strings("f(\"a\",\n'b', \"c d\"); // \"e\""), [(1, "a"), (2, "c d")]);
        assert_eq!(without_strings("f(\"a\nb\"); // \"e\""), "f(\n); // \"e\"");
    }

    #[test]
    fn finds_exports_with_their_line() {
        assert_eq!(exports_of("mod a;\n\npub mod sys;", "sys"), [3]);
        assert_eq!(
            exports_of("mod a {\n}\npub use crate::{\n    sys::x,\n    b,\n};", "b"),
            [0; 0]
        );
        assert_eq!(exports_of("pub use crate::sys::{x, y};", "sys"), [1]);
        assert_eq!(exports_of("pub(crate) mod sys;\nuse sys::x;\npub mod sys_x;", "sys"), [0; 0]);
    }

    #[test]
    fn counts_lines_up_to_the_test_module() {
        assert_eq!(lines_before_tests("a\nb\n"), 2);
        assert_eq!(
            lines_before_tests("a\n#[cfg(test)]\nuse b;\n#[cfg(test)]\nmod tests {\n}\n"),
            3
        );
    }

    #[test]
    fn returns_the_values_of_string_values() {
        let text = "f(\"a \\\n   b\", 'c', r#\"d \"e\" \\\"#); // \"f\"\ng(b\"\\\"h\\\"\\r\\n\")";
        assert_eq!(string_values(text), ["a b", "d \"e\" \\", "\"h\"  "]);
    }
}
