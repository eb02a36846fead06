//! Passes the commit, the profile and the target to the program, for `--version`. ferrite-cli uses
//! this script, too.
//!
//! `FERRITE_COMMIT` overrides the commit, for source without a Git repository.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=FERRITE_COMMIT");
    let commit = std::env::var("FERRITE_COMMIT").ok().filter(|given| !given.is_empty());
    let commit = commit.or_else(|| {
        // Git appends to this file whenever HEAD moves.
        let log = git(&["rev-parse", "--path-format=absolute", "--git-path", "logs/HEAD"])?;
        println!("cargo::rerun-if-changed={log}");
        git(&["rev-parse", "--short=12", "HEAD"])
    });
    let variable = |name: &str| std::env::var(name).expect("cargo sets this variable");
    println!("cargo::rustc-env=FERRITE_BUILD_COMMIT={}", commit.as_deref().unwrap_or("unknown"));
    println!("cargo::rustc-env=FERRITE_BUILD_PROFILE={}", variable("PROFILE"));
    println!("cargo::rustc-env=FERRITE_BUILD_TARGET={}", variable("TARGET"));
}

/// Returns the output of git, or `None` where there is no git or no repository.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
