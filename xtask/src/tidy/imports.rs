//! Finds the paths of its own crate that a source file uses. It knows only the lexical rules and
//! the form of `use` declarations, so it needs no dependency and cannot fail. Test modules are left
//! out, because imports of tests are not part of the design.

use super::source;

/// The paths that one module uses from its crate. An inline module `mod x { … }` is a module of its
/// own.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Module {
    /// Path inside the crate; empty for the root.
    pub(super) path: Vec<String>,
    pub(super) file: String,
    /// Paths that the module uses, in the order of the file.
    pub(super) uses: Vec<Use>,
    /// Child modules that are compiled for tests only.
    pub(super) test_only: Vec<String>,
}

/// One path, with `super` and `self` resolved: the segments after `crate::`.
#[derive(Debug, PartialEq)]
pub(super) struct Use {
    pub(super) line: usize,
    pub(super) path: Vec<String>,
    /// The name that a `use` declaration gives to the path; `None` for a path in code.
    pub(super) name: Option<String>,
    /// The number of leading segments that certainly belong to this crate. These are all segments,
    /// with one exception: a `use` that starts with a name in scope. Its path starts with this
    /// module's path, and the rest may belong to another crate.
    pub(super) sure: usize,
}

/// A word or one character of punctuation.
#[derive(Clone, Copy)]
struct Token<'a> {
    line: usize,
    text: &'a str,
}

/// Returns the modules in a file: the file's own module first, then the inline modules.
pub(super) fn modules(path: Vec<String>, file: &str, text: &str) -> Vec<Module> {
    let code = source::code_only(text);
    let mut modules = Vec::new();
    read(&tokens(&code), path, file, &mut modules);
    modules
}

fn tokens(code: &str) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    for (line, mut rest) in (1..).zip(code.lines()) {
        while let Some(first) = rest.chars().next() {
            let is_word = |c: char| c.is_alphanumeric() || c == '_';
            let len = match is_word(first) {
                true => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
                false => first.len_utf8(),
            };
            if !first.is_whitespace() {
                tokens.push(Token { line, text: &rest[..len] });
            }
            rest = &rest[len..];
        }
    }
    tokens
}

fn read(tokens: &[Token<'_>], path: Vec<String>, file: &str, modules: &mut Vec<Module>) {
    let mut module = Module { path, file: file.into(), ..Module::default() };
    let own_place = modules.len();
    let mut inline = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        if let Some(end) = test_item(&tokens[at..]) {
            let item = &tokens[at..at + end];
            if let Some(pair) = item.windows(2).find(|pair| pair[0].text == "mod") {
                module.test_only.push(pair[1].text.into());
            }
            at += end;
            continue;
        }
        let texts = |count: usize| tokens.get(at + count).map_or("", |token| token.text);
        match (tokens[at].text, texts(1), texts(2)) {
            ("mod", name, "{") => {
                let len = block_len(&tokens[at + 2..]);
                let child = module.path.iter().cloned().chain([name.into()]).collect();
                inline.push((child, &tokens[at + 3..at + 2 + len]));
                at += 2 + len;
            }
            ("use", next, _) if next != "<" => {
                let len = tokens[at..].iter().position(|token| token.text == ";");
                let len = len.unwrap_or(tokens.len() - at);
                read_use(&tokens[at + 1..at + len], &[], &mut module);
                at += len;
            }
            ("crate" | "super" | "self", ":", ":") => {
                let segments = path_at(&tokens[at..]);
                let line = tokens[at].line;
                at += segments.len() * 3 - 2;
                add(&segments, None, line, &mut module);
            }
            _ => at += 1,
        }
    }
    modules.insert(own_place, module);
    for (path, tokens) in inline {
        read(tokens, path, file, modules);
    }
}

/// Returns the number of tokens of an item under `#[cfg(test)]` or a similar condition, if one
/// starts here.
fn test_item(tokens: &[Token<'_>]) -> Option<usize> {
    const ITEMS: &[&str] = &[
        "pub", "mod", "use", "fn", "impl", "const", "static", "struct", "enum", "type", "trait",
        "unsafe", "extern", "async",
    ];
    let starts: Vec<_> = tokens.iter().take(4).map(|token| token.text).collect();
    if starts != ["#", "[", "cfg", "("] {
        return None;
    }
    let attribute = tokens.iter().position(|token| token.text == "]")? + 1;
    let condition = &tokens[..attribute];
    let requires_test = condition.iter().any(|token| token.text == "test")
        && !condition.iter().any(|token| matches!(token.text, "not" | "any"));
    if !requires_test {
        return None;
    }
    let mut start = attribute;
    while tokens.get(start)?.text == "#" {
        start += tokens[start..].iter().position(|token| token.text == "]")? + 1;
    }
    if !ITEMS.contains(&tokens[start].text) {
        return None;
    }
    let end = start + tokens[start..].iter().position(|token| matches!(token.text, "{" | ";"))?;
    let len = if tokens[end].text == ";" { 1 } else { block_len(&tokens[end..]) };
    Some(end + len)
}

/// Returns the number of tokens from an opening brace to the matching closing brace.
fn block_len(tokens: &[Token<'_>]) -> usize {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate() {
        match token.text {
            "{" => depth += 1,
            "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at + 1;
        }
    }
    tokens.len()
}

/// Reads a use tree: `a::b`, `a::{b, c::d}`, `a as b`, `a::*`.
fn read_use(tree: &[Token<'_>], prefix: &[&str], module: &mut Module) {
    let mut path = prefix.to_vec();
    let mut at = 0;
    while let Some(token) = tree.get(at) {
        match token.text {
            "{" => {
                let len = block_len(&tree[at..]);
                for branch in branches(&tree[at + 1..at + len - 1]) {
                    read_use(branch, &path, module);
                }
                return;
            }
            "as" => break,
            ":" => {}
            segment => path.push(segment),
        }
        at += 1;
    }
    let Some(first) = tree.first() else { return };
    if path.last() == Some(&"self") && path.len() > 1 {
        path.pop();
    }
    let name = match tree.get(at..) {
        Some([_, name, ..]) => name.text,
        _ => path.last().copied().unwrap_or_default(),
    };
    add(&path, Some(name), first.line, module);
}

/// Splits the contents of the outermost `{…}` of a use tree at its commas.
fn branches<'t, 'a>(inside: &'t [Token<'a>]) -> Vec<&'t [Token<'a>]> {
    let mut depth = 0;
    inside
        .split(|token| {
            match token.text {
                "{" => depth += 1,
                "}" => depth -= 1,
                _ => {}
            }
            depth == 0 && token.text == ","
        })
        .collect()
}

/// Returns the segments of the path `a::b::c` at the start of the tokens.
fn path_at<'a>(tokens: &[Token<'a>]) -> Vec<&'a str> {
    let is_word =
        |token: &&Token<'_>| token.text.starts_with(|c: char| c.is_alphanumeric() || c == '_');
    let mut segments = Vec::new();
    let mut rest = tokens;
    while let Some(word) = rest.first().filter(is_word) {
        segments.push(word.text);
        match rest.get(1..) {
            Some([a, b, after @ ..])
                if a.text == ":" && b.text == ":" && after.first().is_some_and(|t| is_word(&t)) =>
            {
                rest = after;
            }
            _ => break,
        }
    }
    segments
}

/// Resolves `crate`, `super` and `self` at the start of a path, and adds the path to the module.
fn add(segments: &[&str], name: Option<&str>, line: usize, module: &mut Module) {
    let mut base = module.path.clone();
    let mut rest = segments;
    let mut is_sure = false;
    while let Some((first, after)) = rest.split_first() {
        match *first {
            "crate" => base.clear(),
            "super" => drop(base.pop()),
            "self" => {}
            _ => break,
        }
        is_sure = true;
        rest = after;
    }
    let own = base.len();
    base.extend(rest.iter().map(|segment| (*segment).to_owned()));
    let sure = if is_sure { base.len() } else { own };
    module.uses.push(Use { line, path: base, name: name.map(Into::into), sure });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the uses of a file of the module `a::b`, as `line: path`.
    fn used(text: &str) -> Vec<String> {
        let path = vec!["a".to_owned(), "b".to_owned()];
        let modules = modules(path, "a/b.rs", text);
        let uses = modules.iter().flat_map(|module| &module.uses);
        let text = |found: &Use| {
            let name = found.name.as_deref().map(|name| format!(" as {name}"));
            format!("{}: {}{}", found.line, found.path.join("::"), name.unwrap_or_default())
        };
        uses.map(text).collect()
    }

    #[test]
    fn reads_use_trees() {
        assert_eq!(used("use crate::x::Y;"), ["1: x::Y as Y"]);
        let tree = "pub(crate) use super::{\n    x,\n    c::{self, e::F as G},\n};";
        assert_eq!(used(tree), ["2: a::x as x", "3: a::c as c", "3: a::c::e::F as G"]);
        assert_eq!(used("use super::super::x::*;"), ["1: x::* as *"]);
        assert_eq!(used("use c::{self as d, E};"), ["1: a::b::c as d", "1: a::b::c::E as E"]);
    }

    #[test]
    fn reads_paths_in_code() {
        assert_eq!(used("fn f(x: &crate::x::Y) { super::z() }"), ["1: x::Y", "1: a::z"]);
        assert_eq!(used("fn f(self) -> impl Sized + use<> { self.g() }"), [""; 0]);
        assert_eq!(used("fn f() -> Vec<crate::x::Y> { crate::x::Y::<u8>::new() }").len(), 2);
        assert_eq!(used("// crate::x::Y\nconst S: &str = \"crate::x::Y\";"), [""; 0]);
    }

    #[test]
    fn leaves_out_items_for_tests() {
        let text = "#[cfg(test)]\nmod tests {\n    use crate::x;\n}\nuse crate::y;";
        assert_eq!(used(text), ["5: y as y"]);
        let text = "#[cfg(all(test, not_loom))]\n#[path = \"x\"]\npub mod x;\nuse crate::y;";
        assert_eq!(used(text), ["4: y as y"]);
        assert_eq!(used("#[cfg(test)]\nuse crate::{x, y};\nuse crate::z;"), ["3: z as z"]);
        assert_eq!(used("#[cfg(not(test))]\nuse crate::x;"), ["2: x as x"]);
    }

    #[test]
    fn names_modules_for_tests() {
        let found = modules(Vec::new(), "lib.rs", "#[cfg(test)]\nmod simulation;\nmod x;");
        assert_eq!(found[0].test_only, ["simulation"]);
    }

    #[test]
    fn resolves_super_in_an_inline_module() {
        assert_eq!(used("mod c {\n    use super::super::x;\n}\n"), ["2: a::x as x"]);
    }
}
