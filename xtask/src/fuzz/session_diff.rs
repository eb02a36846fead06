//! `cargo xtask fuzz session-diff`: runs whole sessions directly with an engine and through the
//! module, and compares them.
//!
//! The generator, the engines and the comparison are in the test `host_session_diff`. The test
//! needs no instrumented build, because coverage does not show the state of a client.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, ensure};
use clap::Args;

/// The name of the pseudo target.
pub(crate) const NAME: &str = "session-diff";

/// Options that only `session-diff` has.
#[derive(Args)]
#[command(next_help_heading = "Options of session-diff")]
pub(crate) struct SessionOptions {
    /// Run only the session of this seed; with --seconds, start with it [default: from the clock]
    #[arg(long)]
    seed: Option<u64>,
    /// Engine to run [default: redis-server]
    #[arg(long, value_name = "PATH")]
    engine: Option<PathBuf>,
    /// Module to load [default: the one of this checkout]
    #[arg(long, value_name = "PATH.so")]
    module: Option<PathBuf>,
    /// Value of the module's argument call-path [default: the module's own]
    #[arg(long, value_name = "yes|no")]
    call_path: Option<String>,
    /// Continue after a finding
    #[arg(long)]
    keep_going: bool,
    /// Print each session before it runs
    #[arg(long)]
    show: bool,
}

impl SessionOptions {
    /// Returns whether any of the options was given.
    pub(crate) fn any(&self) -> bool {
        let paths = self.engine.is_some() || self.module.is_some();
        self.seed.is_some() || paths || self.call_path.is_some() || self.keep_going || self.show
    }
}

pub(crate) fn run(
    root: &Path,
    options: &SessionOptions,
    seconds: Option<u32>,
) -> anyhow::Result<ExitCode> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?;
    // Multiplies the time, so that the seeds of two runs do not overlap.
    let seed = options.seed.unwrap_or(now.as_secs() * 1000);
    let seconds = match (options.seed, seconds) {
        (Some(_), None) => None,
        (_, given) => Some(given.unwrap_or(super::SECONDS)),
    };
    let duration =
        seconds.map_or(String::new(), |seconds| format!(" and those after it, for {seconds} s"));
    println!("{NAME}: seed {seed}{duration}");

    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .current_dir(root)
        .args(["test", "--quiet", "--package", "ferrite-module", "--test", "host_session_diff"])
        .args(["--", "--ignored", "--exact", "hunt", "--nocapture"])
        .env("FERRITE_DIFF_SEED", seed.to_string())
        .env("FERRITE_DIFF_FOLDER", root.join("target/session-diff"))
        .env("RUST_BACKTRACE", "0");
    if let Some(seconds) = seconds {
        cargo.env("FERRITE_DIFF_SECONDS", seconds.to_string());
    }
    if options.keep_going {
        cargo.env("FERRITE_DIFF_KEEP_GOING", "1");
    }
    if options.show {
        cargo.env("FERRITE_DIFF_SHOW", "1");
    }
    if let Some(engine) = &options.engine {
        cargo.env("FERRITE_DIFF_ENGINE", absolute_path(engine)?);
    }
    if let Some(module) = &options.module {
        cargo.env("FERRITE_MODULE", absolute_path(module)?);
    }
    if let Some(value) = &options.call_path {
        ensure!(matches!(&value[..], "yes" | "no"), "--call-path {value:?}: expected yes or no");
        cargo.env("FERRITE_DIFF_CALL_PATH", value);
    }
    let status = cargo.status().context("cannot start cargo")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Makes the path of an existing file absolute. Leaves a bare name for the lookup in PATH.
///
/// Does not resolve symbolic links. Some packages have one program for several tasks, and the
/// name with which it is started selects the task.
fn absolute_path(path: &Path) -> anyhow::Result<PathBuf> {
    if path.components().count() == 1 && !path.exists() {
        return Ok(path.into());
    }
    ensure!(path.exists(), "cannot find {}", path.display());
    std::path::absolute(path).with_context(|| format!("cannot find {}", path.display()))
}
