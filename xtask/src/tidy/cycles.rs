//! Checks that sibling modules of a crate do not import each other in a cycle. A module in a cycle
//! cannot be read, tested or moved without all the others. A module may use its parent and its
//! children.
//!
//! An import through a re-export (`use crate::Error`, which the root imports from `error`) counts
//! as an import of the module that defines the item.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::Findings;
use super::imports::{self, Module, Use};

/// The known cycles: crate, parent module, and the modules in the cycle. The list may only shrink.
const KNOWN: &[(&str, &str, &[&str])] = &[];

const THIS_FILE: &str = "xtask/src/tidy/cycles.rs";

/// The modules below one parent. For each module: the siblings that it uses, and the file and line
/// of the first use.
type Siblings = BTreeMap<String, BTreeMap<String, (String, usize)>>;

/// Source files of all crates.
#[derive(Default)]
pub(super) struct Crates(BTreeMap<String, Vec<Module>>);

/// Modules of one parent that import each other.
#[derive(Debug, PartialEq)]
struct Cycle {
    parent: String,
    /// In alphabetical order.
    members: Vec<String>,
    /// A shortest cycle through the first member. Each step has a module, and the file and line of
    /// its use of the next module.
    steps: Vec<(String, String, usize)>,
}

impl Crates {
    /// Adds a source file, if it belongs to a crate.
    pub(super) fn add(&mut self, file: &str, text: &str) {
        let Some((folder, rest)) = file.split_once("/src/") else { return };
        let Some(rest) = rest.strip_suffix(".rs") else { return };
        let path: Vec<_> = match rest {
            "lib" | "main" => Vec::new(),
            _ => rest.split('/').map(Into::into).collect(),
        };
        let name = folder.rsplit('/').next().unwrap_or(folder);
        self.0.entry(name.into()).or_default().extend(imports::modules(path, file, text));
    }

    pub(super) fn check(&self, findings: &mut Findings) {
        self.check_against(KNOWN, findings);
    }

    fn check_against(&self, known: &[(&str, &str, &[&str])], findings: &mut Findings) {
        let mut seen = vec![false; known.len()];
        for (name, modules) in &self.0 {
            for cycle in cycles(modules) {
                let listed = known.iter().position(|(krate, parent, members)| {
                    krate == name && *parent == cycle.parent && **members == cycle.members
                });
                match listed {
                    Some(at) => seen[at] = true,
                    None => report(name, &cycle, findings),
                }
            }
        }
        for ((name, parent, members), seen) in known.iter().zip(seen) {
            if !seen {
                let what = format!(
                    "KNOWN lists a cycle in {} that does not exist: {}",
                    place(name, parent),
                    members.join(", ")
                );
                findings.fail(THIS_FILE, 1, what, "remove the entry");
            }
        }
    }
}

fn report(name: &str, cycle: &Cycle, findings: &mut Findings) {
    let Some((first, file, line)) = cycle.steps.first() else { return };
    let uses: Vec<_> = (1..)
        .zip(&cycle.steps)
        .map(|(next, (from, file, line))| {
            let (to, ..) = cycle.steps.get(next).unwrap_or(&cycle.steps[0]);
            format!("{from} uses {to} ({file}:{line})")
        })
        .collect();
    let others = match cycle.members.len() - cycle.steps.len() {
        0 => String::new(),
        _ => format!("; {first} is in cycles with all of: {}", cycle.members.join(", ")),
    };
    let what =
        format!("import cycle in {}: {}{others}", place(name, &cycle.parent), uses.join(", "));
    let remedy = "move what both need into a module below them, or pass or return a value";
    findings.fail(file, *line, what, remedy);
}

fn place(name: &str, parent: &str) -> String {
    if parent.is_empty() { name.into() } else { format!("{name}::{parent}") }
}

fn cycles(modules: &[Module]) -> Vec<Cycle> {
    let mut cycles = Vec::new();
    for (parent, siblings) in &levels(modules) {
        let mut done = BTreeSet::new();
        for module in siblings.keys() {
            if done.contains(module) {
                continue;
            }
            // A module belongs to the cycle if this module reaches it and it reaches this module.
            let members: Vec<_> = reached(module, siblings)
                .into_iter()
                .filter(|other| reached(other, siblings).contains(module))
                .collect();
            if members.is_empty() {
                continue;
            }
            done.extend(members.clone());
            let steps = shortest(module, siblings);
            cycles.push(Cycle { parent: parent.clone(), members, steps });
        }
    }
    cycles
}

/// Returns the uses between siblings, by the path of the parent.
fn levels(modules: &[Module]) -> BTreeMap<String, Siblings> {
    let scope = Scope::new(modules);
    let mut levels: BTreeMap<String, Siblings> = BTreeMap::new();
    for module in modules.iter().filter(|module| !scope.is_test(&module.path)) {
        for used in &module.uses {
            let Some(target) = scope.module_of(used) else { continue };
            let common = module.path.iter().zip(&target).take_while(|(a, b)| a == b).count();
            let (Some(from), Some(to)) = (module.path.get(common), target.get(common)) else {
                continue;
            };
            if scope.is_test(&target) {
                continue;
            }
            let siblings = levels.entry(target[..common].join("::")).or_default();
            let uses = siblings.entry(from.clone()).or_default();
            uses.entry(to.clone()).or_insert_with(|| (module.file.clone(), used.line));
        }
    }
    levels
}

/// The modules of a crate, and the names that they import.
struct Scope<'a> {
    /// Each module with the names that it imports.
    modules: BTreeMap<&'a [String], BTreeMap<&'a str, &'a Use>>,
    tests: BTreeSet<Vec<String>>,
}

impl<'a> Scope<'a> {
    fn new(modules: &'a [Module]) -> Self {
        let mut scope = Self { modules: BTreeMap::new(), tests: BTreeSet::new() };
        for module in modules {
            let imports = scope.modules.entry(&module.path).or_default();
            for used in &module.uses {
                if let Some(name) = used.name.as_deref() {
                    imports.insert(name, used);
                }
            }
            for child in &module.test_only {
                scope.tests.insert(module.path.iter().cloned().chain([child.clone()]).collect());
            }
        }
        scope
    }

    fn is_test(&self, path: &[String]) -> bool {
        path.iter().any(|name| name == "tests")
            || (1..=path.len()).any(|len| self.tests.contains(&path[..len]))
    }

    /// Returns the module that defines the item. Follows imports. Returns `None` for an item of
    /// another crate.
    fn module_of(&self, used: &Use) -> Option<Vec<String>> {
        let mut path = used.path.clone();
        let mut sure = used.sure;
        // A path through more re-exports than this is a cycle.
        for _ in 0..16 {
            let len =
                (0..=path.len()).rev().find(|len| self.modules.contains_key(&path[..*len]))?;
            let import = path.get(len).and_then(|name| self.modules[&path[..len]].get(&**name));
            match import {
                Some(import) if import.path != path => {
                    let rest = path.split_off(len + 1);
                    path = import.path.iter().cloned().chain(rest).collect();
                    sure = import.sure;
                }
                // No child module has the name, so it belongs to another crate.
                _ if sure < path.len() && len <= sure => return None,
                _ => return Some(path[..len].to_vec()),
            }
        }
        None
    }
}

/// Returns the siblings that the module uses, directly or through others.
fn reached(module: &str, siblings: &Siblings) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut open = vec![module];
    while let Some(next) = open.pop() {
        for to in siblings.get(next).into_iter().flat_map(BTreeMap::keys) {
            if found.insert(to.clone()) {
                open.push(to);
            }
        }
    }
    found
}

/// Returns a shortest path from the module back to itself, by breadth-first search.
fn shortest(module: &str, siblings: &Siblings) -> Vec<(String, String, usize)> {
    let mut ways = VecDeque::from([vec![module]]);
    let mut seen = BTreeSet::new();
    while let Some(way) = ways.pop_front() {
        let Some(uses) = way.last().and_then(|last| siblings.get(*last)) else { continue };
        if uses.contains_key(module) {
            let ends = way.iter().copied().skip(1).chain([module]);
            let step = |(from, to): (&&str, &str)| {
                let (file, line) = siblings[*from][to].clone();
                ((*from).to_owned(), file, line)
            };
            return way.iter().zip(ends).map(step).collect();
        }
        for to in uses.keys().filter(|to| seen.insert(*to)) {
            ways.push_back(way.iter().copied().chain([to.as_str()]).collect());
        }
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crates(files: &[(&str, &str)]) -> Crates {
        let mut crates = Crates::default();
        for (file, text) in files {
            crates.add(&format!("crates/x/src/{file}"), text);
        }
        crates
    }

    fn found_with(files: &[(&str, &str)], known: &[(&str, &str, &[&str])]) -> Vec<String> {
        let mut findings = Findings::default();
        crates(files).check_against(known, &mut findings);
        findings.violations.iter().map(|v| format!("{}:{}: {}", v.file, v.line, v.what)).collect()
    }

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        found_with(files, &[])
    }

    #[test]
    fn names_a_cycle_with_one_use_of_each_direction() {
        let files = [
            ("lib.rs", "mod a;\nmod b;\n"),
            ("a.rs", "\nuse crate::b::B;\n"),
            ("b.rs", "\n\nfn f(x: super::a::A) {}\n"),
        ];
        let expected = "crates/x/src/a.rs:2: import cycle in x: \
            a uses b (crates/x/src/a.rs:2), b uses a (crates/x/src/b.rs:3)";
        assert_eq!(found(&files), [expected]);
    }

    #[test]
    fn names_every_module_of_a_longer_cycle() {
        let files = [
            ("lib.rs", "mod a;\nmod b;\nmod c;\n"),
            ("a.rs", "use crate::b;\n"),
            ("b.rs", "use crate::{a, c};\n"),
            ("c.rs", "use crate::a;\n"),
        ];
        let found = found(&files);
        assert_eq!(found.len(), 1);
        assert!(found[0].ends_with("; a is in cycles with all of: a, b, c"), "{found:?}");
    }

    #[test]
    fn finds_a_cycle_below_a_module() {
        let files = [
            ("lib.rs", "mod a;\nmod b;\n"),
            ("a.rs", "mod c;\nmod d;\n"),
            ("a/c.rs", "use super::d::D;\n"),
            ("a/d.rs", "use crate::a::c::C;\nuse crate::b;\n"),
            ("b.rs", ""),
        ];
        let found = found(&files);
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("import cycle in x::a: c uses d"), "{found:?}");
    }

    #[test]
    fn allows_use_between_parent_and_child_and_in_one_direction() {
        let files = [
            ("lib.rs", "mod a;\nmod b;\nuse a::A;\n"),
            ("a.rs", "mod c;\nuse c::C;\nuse crate::b::B;\n"),
            ("a/c.rs", "use super::A;\nuse crate::b::B;\n"),
            ("b.rs", "use crate::Root;\n"),
        ];
        assert_eq!(found(&files), [""; 0]);
    }

    #[test]
    fn ignores_what_tests_import() {
        let files = [
            ("lib.rs", "mod a;\nmod b;\n#[cfg(test)]\nmod check;\n"),
            ("a.rs", "use crate::b::B;\n"),
            ("b.rs", "#[cfg(test)]\nmod tests {\n    use crate::a::A;\n}\n"),
            ("b/tests.rs", "use crate::a::A;\n"),
            ("check.rs", "use crate::a::A;\n"),
        ];
        assert_eq!(found(&files), [""; 0]);
    }

    #[test]
    fn follows_imports_of_the_parent() {
        let root = "mod a;\nmod b;\npub use a::A;\npub(crate) use std::fmt::Debug;\n";
        let a = ("a.rs", "use crate::b::B;\n");
        assert_eq!(found(&[("lib.rs", root), a, ("b.rs", "use crate::A;\n")]).len(), 1);
        assert_eq!(found(&[("lib.rs", root), a, ("b.rs", "use crate::Debug;\n")]), [""; 0]);
        let external = ("b.rs", "use a::A;\n"); // here, `a` is a crate, not the sibling module
        assert_eq!(found(&[("lib.rs", root), a, external]), [""; 0]);
    }

    #[test]
    fn separates_crates() {
        let mut crates = crates(&[("lib.rs", ""), ("a.rs", "use crate::b;\n"), ("b.rs", "")]);
        crates.add("crates/y/src/b.rs", "use crate::a;\n");
        crates.add("crates/y/src/a.rs", "");
        crates.add("crates/y/src/lib.rs", "");
        let mut findings = Findings::default();
        crates.check_against(&[], &mut findings);
        assert_eq!(findings.violations, []);
    }

    #[test]
    fn accepts_a_known_cycle_and_rejects_an_entry_without_one() {
        let files = [("lib.rs", ""), ("a.rs", "use crate::b;\n"), ("b.rs", "use crate::a;\n")];
        assert_eq!(found_with(&files, &[("x", "", &["a", "b"])]), [""; 0]);
        let found = found_with(&files[..2], &[("x", "", &["a", "b"])]);
        let expected = "xtask/src/tidy/cycles.rs:1: \
            KNOWN lists a cycle in x that does not exist: a, b";
        assert_eq!(found, [expected]);
    }
}
