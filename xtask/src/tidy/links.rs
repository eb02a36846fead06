//! Checks the links between Markdown files: the file and the heading must exist.
//!
//! Headings get the same anchors from GitHub and from mdBook: lower case, without punctuation, a
//! hyphen for each space, and a number for a repeated heading. Links to other sites are not
//! checked.

use std::collections::{BTreeMap, BTreeSet};

use super::Findings;

/// The Markdown files, with their anchors and links.
#[derive(Default)]
pub(super) struct Pages(BTreeMap<String, Page>);

#[derive(Default)]
struct Page {
    anchors: BTreeSet<String>,
    /// Line and target.
    links: Vec<(usize, String)>,
}

impl Pages {
    /// Adds a file, if it is Markdown.
    pub(super) fn add(&mut self, file: &str, text: &str) {
        if file.ends_with(".md") {
            self.0.insert(file.into(), page(text));
        }
    }

    /// Checks all links. `files` are all files of the project.
    pub(super) fn check(&self, files: &[String], findings: &mut Findings) {
        for (file, page) in &self.0 {
            for (line, target) in &page.links {
                if let Some(what) = self.missing(file, target, files) {
                    findings.fail(file, *line, what, "correct the link");
                }
            }
        }
    }

    /// Returns the missing file or heading of a link's target.
    fn missing(&self, from: &str, target: &str, files: &[String]) -> Option<String> {
        let (path, anchor) = target.split_once('#').map_or((target, None), |(p, a)| (p, Some(a)));
        let Some(path) = resolve(from, path) else {
            return Some(format!("{target} leads out of the repository"));
        };
        let below = format!("{path}/");
        let exists = |file: &String| *file == path || file.starts_with(&below) || path.is_empty();
        if !files.iter().any(exists) {
            return Some(format!("{target}: there is no file {path}"));
        }
        let (anchor, page) = (anchor?, self.0.get(&path)?);
        (!page.anchors.contains(anchor)).then(|| format!("{target}: {path} has no such heading"))
    }
}

/// Returns the path of a link's target, from the root of the repository.
fn resolve(from: &str, path: &str) -> Option<String> {
    if path.is_empty() {
        return Some(from.into());
    }
    let folder = from.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut parts: Vec<_> = match path.strip_prefix('/') {
        Some(_) => Vec::new(),
        None => folder.split('/').filter(|part| !part.is_empty()).collect(),
    };
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

fn page(text: &str) -> Page {
    let mut page = Page::default();
    let mut in_code_block = false;
    for (line, content) in (1..).zip(text.lines()) {
        if content.trim_start().starts_with("```") {
            in_code_block = !in_code_block;
        }
        if in_code_block {
            continue;
        }
        let heading = content.trim_start_matches('#');
        if heading.len() < content.len() && heading.starts_with(' ') {
            page.add_heading(heading.trim());
        }
        for id in content.split("<a id=\"").skip(1).filter_map(|rest| rest.split('"').next()) {
            page.anchors.insert(id.into());
        }
        let content = without_code(content);
        page.links.extend(targets(&content).map(|target| (line, target.to_owned())));
    }
    page
}

impl Page {
    fn add_heading(&mut self, heading: &str) {
        let anchor = anchor(heading);
        let is_new = self.anchors.insert(anchor.clone());
        if !is_new {
            let numbered = (1..).map(|number| format!("{anchor}-{number}"));
            let mut free = numbered.filter(|anchor| !self.anchors.contains(anchor));
            let free = free.next().unwrap_or(anchor);
            self.anchors.insert(free);
        }
    }
}

/// Returns the anchor of a heading. Links and code in the heading count as their text.
fn anchor(heading: &str) -> String {
    let mut text = String::new();
    let mut rest = heading;
    while let Some((before, link)) = rest.split_once("](") {
        text.push_str(before);
        rest = link.split_once(')').map_or("", |(_, after)| after);
    }
    text.push_str(rest);
    let kept = text.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// Replaces `code` by spaces.
fn without_code(line: &str) -> String {
    let pieces = line.split('`').enumerate();
    pieces.map(|(at, piece)| if at % 2 == 0 { piece } else { " " }).collect()
}

/// Returns the link targets in this repository: of `[text](target)` and of `[name]: target`.
fn targets(line: &str) -> impl Iterator<Item = &str> {
    let inline = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let definition = line
        .strip_prefix('[')
        .and_then(|rest| rest.split_once("]: "))
        .filter(|(name, _)| !name.contains(']'))
        .map(|(_, target)| target);
    inline
        .chain(definition)
        .filter_map(|target| target.split_whitespace().next())
        .map(|target| target.trim_matches(['<', '>']))
        .filter(|target| !target.contains("://") && !target.starts_with("mailto:"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(pages: &[(&str, &str)]) -> Vec<String> {
        let mut checked = Pages::default();
        for (file, text) in pages {
            checked.add(file, text);
        }
        let mut files: Vec<String> = pages.iter().map(|(file, _)| (*file).into()).collect();
        files.push("crates/a/src/lib.rs".into());
        let mut findings = Findings::default();
        checked.check(&files, &mut findings);
        findings.violations.iter().map(|v| format!("{}:{}: {}", v.file, v.line, v.what)).collect()
    }

    #[test]
    fn follows_relative_links() {
        let text = "\n[a](../README.md) [b](b.md#two-words) [c](../crates/a) [d](#here)\n# Here\n";
        let pages = [("README.md", ""), ("docs/a.md", text), ("docs/b.md", "## Two words\n")];
        assert_eq!(found(&pages), [""; 0]);
    }

    #[test]
    fn reports_missing_files_and_headings() {
        let text = "[a](gone.md)\n\n[b](b.md#gone) [c](../../x)\n\n[d]: gone.md#x\n";
        let expected = [
            "docs/a.md:1: gone.md: there is no file docs/gone.md",
            "docs/a.md:3: b.md#gone: docs/b.md has no such heading",
            "docs/a.md:3: ../../x leads out of the repository",
            "docs/a.md:5: gone.md#x: there is no file docs/gone.md",
        ];
        assert_eq!(found(&[("docs/a.md", text), ("docs/b.md", "# B\n")]), expected);
    }

    #[test]
    fn ignores_code_and_other_sites() {
        let text = "`[a](gone.md)` <https://a.b> [c](https://a.b/c#d) [m](mailto:a@b)\n\
            ```\n[a](gone.md)\n# No heading\n```\n[t](#no-heading)\n";
        let found = found(&[("a.md", text)]);
        assert_eq!(found, ["a.md:6: #no-heading: a.md has no such heading"]);
    }

    #[test]
    fn anchors_are_those_of_github_and_mdbook() {
        assert_eq!(anchor("What `CONFIG SET` does: 3 rules"), "what-config-set-does-3-rules");
        assert_eq!(anchor("The path of a [GET](x.md)"), "the-path-of-a-get");
        assert_eq!(anchor("A – b"), "a--b");
        let page = page("# A\n## A\n<a id=\"own\"></a>\n");
        assert_eq!(page.anchors.into_iter().collect::<Vec<_>>(), ["a", "a-1", "own"]);
    }
}
