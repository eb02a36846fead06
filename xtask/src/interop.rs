//! `cargo xtask interop [FILTER]`: Valkey's own programs against each other and against Ferrite, in
//! the lab's guest.
//!
//! Valkey comes from Debian's source package, is built by `lab/lab setup valkey` and stays in the
//! lab's cache: nothing of it is in this repository. The matrix itself is the integration test
//! `lab_interop` of ferrite, which `cargo xtask lab-test` leaves out, because it needs that build.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use crate::lab_test::{self, Options, Suite};
use anyhow::{Context as _, ensure};

pub(crate) fn run(root: &Path, options: &Options) -> anyhow::Result<ExitCode> {
    let valkey = valkey(root)?;
    let version =
        std::fs::read_to_string(valkey.join("version")).context("the build has no version")?;
    eprintln!("interop: valkey {}", version.trim());
    lab_test::run(root, options, &Suite::Interop { valkey })
}

/// Where Valkey's programs are, once they are built.
fn valkey(root: &Path) -> anyhow::Result<PathBuf> {
    let lab = root.join("lab/lab");
    let built =
        Command::new(&lab).args(["setup", "valkey"]).status().context("cannot start lab/lab")?;
    ensure!(built.success(), "valkey is not to be had");
    let path = Command::new(&lab).args(["path", "valkey"]).stderr(Stdio::inherit()).output()?;
    ensure!(path.status.success(), "lab/lab does not say where valkey is");
    Ok(String::from_utf8(path.stdout)?.trim_end().into())
}
