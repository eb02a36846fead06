//! `cargo xtask interop [FILTER]`: runs Valkey's and Ferrite's clients against Valkey's server and
//! against Ferrite's gateway and module, in the lab's guest.
//!
//! `lab/lab setup valkey` builds Valkey from Debian's source package in the lab's cache. This
//! repository contains no part of Valkey. The tests are the integration test `lab_interop` of
//! ferrite. `cargo xtask lab-test` leaves it out, because it needs Valkey.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use crate::lab_test::{self, Options, Suite};
use anyhow::{Context as _, ensure};

pub(crate) fn run(root: &Path, options: &Options) -> anyhow::Result<ExitCode> {
    let valkey = valkey(root)?;
    let version = std::fs::read_to_string(valkey.join("version"))
        .context("the build of Valkey has no version file")?;
    eprintln!("interop: valkey {}", version.trim());
    lab_test::run(root, options, &Suite::Interop { valkey })
}

/// Builds Valkey if needed. Returns the directory of its programs.
fn valkey(root: &Path) -> anyhow::Result<PathBuf> {
    let lab = root.join("lab/lab");
    let built =
        Command::new(&lab).args(["setup", "valkey"]).status().context("cannot start lab/lab")?;
    ensure!(built.success(), "cannot build Valkey (lab/lab setup valkey)");
    let path = Command::new(&lab).args(["path", "valkey"]).stderr(Stdio::inherit()).output()?;
    ensure!(path.status.success(), "lab/lab path valkey failed");
    Ok(String::from_utf8(path.stdout)?.trim_end().into())
}
