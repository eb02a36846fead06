//! Checks which crate of the workspace may depend on which. A layer imports only layers below it.
//! The programs, the module and the Python package never import each other. ferrite-verbs,
//! ferrite-proto, ferrite-config and ferrite-blob import no workspace crate.

use std::collections::BTreeSet;

use anyhow::Context as _;
use serde_json::Value;

use super::Findings;

/// The crate with shared test code. Every crate may use it, but only for its tests.
const TESTKIT: &str = "ferrite-testkit";

/// Each crate with the crates that it may depend on.
const LAYERS: &[(&str, &[&str])] = &[
    ("ferrite-verbs", &[]),
    ("ferrite-proto", &[]),
    ("ferrite-config", &[]),
    ("ferrite-blob", &[]),
    ("ferrite-fabric", &["ferrite-verbs"]),
    (TESTKIT, &["ferrite-verbs", "ferrite-proto", "ferrite-fabric"]),
    ("ferrite-session", &["ferrite-fabric", "ferrite-proto", "ferrite-config"]),
    ("ferrite-metrics", &["ferrite-session", "ferrite-fabric"]),
    ("ferrite-client", &["ferrite-session", "ferrite-fabric", "ferrite-proto", "ferrite-config"]),
    ("ferrite-cli", &["ferrite-session", "ferrite-fabric", "ferrite-proto", "ferrite-config"]),
    (
        "ferrite-module",
        &[
            "ferrite-metrics",
            "ferrite-session",
            "ferrite-fabric",
            "ferrite-proto",
            "ferrite-config",
        ],
    ),
    ("ferrite-python", &["ferrite-session", "ferrite-fabric"]),
    (
        "ferrite",
        &[
            "ferrite-verbs",
            "ferrite-fabric",
            "ferrite-metrics",
            "ferrite-session",
            "ferrite-proto",
            "ferrite-config",
            "ferrite-client",
        ],
    ),
    ("ferrite-examples", &["ferrite-verbs", "ferrite-fabric", "ferrite-session", "ferrite-client"]),
    ("xtask", &[]),
];

/// Compares the table with `cargo metadata --no-deps`.
pub(super) fn check(metadata: &Value, findings: &mut Findings) -> anyhow::Result<()> {
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let names: Vec<_> = packages.iter().filter_map(|package| package["name"].as_str()).collect();
    for package in packages {
        let name = package["name"].as_str().context("a package has no name")?;
        let manifest = manifest(package, metadata);
        let Some(allowed) = allowed(name) else {
            let remedy = "add it to LAYERS in xtask/src/tidy/layers.rs with its dependencies";
            findings.fail(&manifest, 1, format!("{name} has no layer"), remedy);
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let target = dependency["name"].as_str().context("a dependency has no name")?;
            if !names.contains(&target) {
                continue; // not a workspace crate
            }
            // Tests may use the test kit and any lower layer, not only the next one.
            let test_only = dependency["kind"] == "dev";
            let for_tests = target == TESTKIT || below(name).contains(target);
            if allowed.contains(&target) || (test_only && for_tests) {
                continue;
            }
            let remedy = "import a lower layer only, or change LAYERS in xtask/src/tidy/layers.rs";
            findings.fail(&manifest, 1, format!("{name} may not depend on {target}"), remedy);
        }
    }
    Ok(())
}

fn allowed(name: &str) -> Option<&'static [&'static str]> {
    LAYERS.iter().find(|(layer, _)| *layer == name).map(|(_, allowed)| *allowed)
}

/// Returns all crates that `name` may depend on, directly or indirectly.
fn below(name: &str) -> BTreeSet<&'static str> {
    let mut found = BTreeSet::new();
    for direct in allowed(name).unwrap_or_default() {
        found.insert(*direct);
        found.append(&mut below(direct));
    }
    found
}

/// Returns the path of the package's Cargo.toml, relative to the workspace.
fn manifest(package: &Value, metadata: &Value) -> String {
    let path = package["manifest_path"].as_str().unwrap_or("Cargo.toml");
    let root = metadata["workspace_root"].as_str().unwrap_or_default();
    path.strip_prefix(root).unwrap_or(path).trim_start_matches('/').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn package(name: &str, dependencies: &[(&str, Option<&str>)]) -> Value {
        let dependencies: Vec<_> =
            dependencies.iter().map(|(name, kind)| json!({"name": name, "kind": kind})).collect();
        let manifest_path = format!("/src/crates/{name}/Cargo.toml");
        json!({"name": name, "manifest_path": manifest_path, "dependencies": dependencies})
    }

    fn found(packages: &[Value]) -> Vec<String> {
        let mut findings = Findings::default();
        let metadata = json!({"workspace_root": "/src", "packages": packages});
        check(&metadata, &mut findings).expect("well-formed metadata");
        findings.violations.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn layer_may_import_the_one_below_and_external_crates() {
        let fabric = package("ferrite-fabric", &[("ferrite-verbs", None), ("rustix", None)]);
        assert_eq!(found(&[fabric, package("ferrite-verbs", &[])]), [""; 0]);
    }

    #[test]
    fn layer_may_not_import_upwards() {
        let verbs = package("ferrite-verbs", &[("ferrite-fabric", None)]);
        let found = found(&[verbs, package("ferrite-fabric", &[])]);
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with(
            "crates/ferrite-verbs/Cargo.toml:1: ferrite-verbs may not depend on ferrite-fabric: "
        ));
    }

    #[test]
    fn only_tests_may_skip_a_layer() {
        let verbs = package("ferrite-verbs", &[]);
        let skips = |kind| package("ferrite-session", &[("ferrite-verbs", kind)]);
        assert_eq!(found(&[skips(None), verbs.clone()]).len(), 1);
        assert_eq!(found(&[skips(Some("build")), verbs.clone()]).len(), 1);
        assert_eq!(found(&[skips(Some("dev")), verbs]), [""; 0]);
    }

    #[test]
    fn only_tests_may_use_the_testkit() {
        let testkit = package("ferrite-testkit", &[("ferrite-fabric", None)]);
        let uses = |name, kind| package(name, &[("ferrite-testkit", kind)]);
        let fabric = package("ferrite-fabric", &[]);
        for name in ["ferrite-verbs", "ferrite-module"] {
            let found = |kind| found(&[uses(name, kind), fabric.clone(), testkit.clone()]);
            assert_eq!(found(Some("dev")), [""; 0]);
            assert_eq!((found(None).len(), found(Some("build")).len()), (1, 1));
        }
    }

    #[test]
    fn tests_may_not_import_upwards_either() {
        let verbs = package("ferrite-verbs", &[("ferrite", Some("dev"))]);
        assert_eq!(found(&[verbs, package("ferrite", &[])]).len(), 1);
    }

    #[test]
    fn new_crate_needs_a_layer() {
        let found = found(&[package("ferrite-new", &[])]);
        assert!(found[0].contains("ferrite-new has no layer: add it to LAYERS"));
    }

    #[test]
    fn table_lists_each_crate_after_its_dependencies() {
        for (at, (name, allowed)) in LAYERS.iter().enumerate() {
            for target in *allowed {
                let place = LAYERS.iter().position(|(layer, _)| layer == target);
                assert!(place.is_some_and(|place| place < at), "{name} imports {target}");
            }
        }
    }
}
