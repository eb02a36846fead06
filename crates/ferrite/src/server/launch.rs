//! The engine as a process of ours that does not outlive us.
//!
//! A parent cannot ask the kernel to signal its child (PR_SET_PDEATHSIG): the child has to, between
//! fork and exec, where Rust would have us vouch for memory safety ourselves. So we start ourselves
//! again, as the hidden command `server-exec`, which asks and then becomes the engine.

use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus, Stdio};

use anyhow::Context as _;
use clap::Args;
use rustix::process::{
    Pid, Signal, geteuid, getppid, kill_process, set_parent_process_death_signal,
};
use tokio::io::AsyncWriteExt as _;
use tokio::process::{Child, Command};

use super::Ending;
use super::log::Words;
use super::plan::Plan;

/// Become an engine that ends with its parent (used by `ferrite server` itself)
#[derive(Args)]
pub(crate) struct ExecOptions {
    parent: i32,
    program: PathBuf,
}

/// Returns only if it could not be done.
pub(crate) fn exec(options: &ExecOptions) -> anyhow::Result<ExitCode> {
    set_parent_process_death_signal(Some(Signal::TERM)).context("PR_SET_PDEATHSIG")?;
    // It may have gone before we asked.
    if getppid().map(Pid::as_raw_pid) == Some(options.parent) {
        let error = std::process::Command::new(&options.program).arg("-").exec();
        return Err(Ending::cannot_start(format!("{}: {error}", options.program.display())).into());
    }
    Ok(ExitCode::FAILURE)
}

/// An engine at work.
pub(super) struct Engine {
    process: Child,
    pid: Pid,
    pub(super) words: Words,
}

impl Engine {
    /// Starts it and gives it its configuration. From the thread that lives as long as we do: it is
    /// the thread's end that counts.
    pub(super) async fn start(plan: &Plan) -> anyhow::Result<Self> {
        // our own file, also when another has taken its place
        let mut process = Command::new("/proc/self/exe")
            .arg0("ferrite")
            .arg("server-exec")
            .arg(std::process::id().to_string())
            .arg(&plan.engine)
            // Signals of the terminal are for us: we tell the engine.
            .process_group(0)
            .env_remove("NOTIFY_SOCKET")
            .env_remove("WATCHDOG_USEC")
            .env_remove("WATCHDOG_PID")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("cannot start /proc/self/exe")?;
        let mut words = Words::new();
        if let Some(output) = process.stdout.take() {
            words.follow(output);
        }
        if let Some(output) = process.stderr.take() {
            words.follow(output);
        }
        if let Some(mut input) = process.stdin.take() {
            // If it does not take it, it ends, and says why.
            let _ = input.write_all(plan.text().as_bytes()).await;
        }
        let id = process.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        let pid = id.context("a process without an id")?;
        Ok(Self { process, pid, words })
    }

    pub(super) fn id(&self) -> i32 {
        self.pid.as_raw_pid()
    }

    /// Its end, when all that it said has been passed on. Cancel-safe.
    pub(super) async fn wait(&mut self) -> anyhow::Result<ExitStatus> {
        let status = self.process.wait().await?;
        self.words.end().await;
        Ok(status)
    }

    pub(super) fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    pub(super) fn kill(&self) {
        self.signal(Signal::KILL);
    }

    /// Only while it is ours: its id may be another's once it was waited for.
    fn signal(&self, signal: Signal) {
        if self.process.id().is_some() {
            let _ = kill_process(self.pid, signal);
        }
    }
}

/// A directory for the engine's socket that nobody else may enter; gone at the end.
pub(super) struct PrivateDir(PathBuf);

impl PrivateDir {
    /// Makes it. One that is there already is taken if it is ours and closed to others: it was left
    /// by a ferrite that was killed and had our number, which in a container is always the same.
    pub(super) fn make(path: &Path) -> anyhow::Result<Self> {
        let made = std::fs::DirBuilder::new().mode(0o700).create(path);
        let made = made.or_else(|error| if is_left_over(path) { Ok(()) } else { Err(error) });
        made.with_context(|| {
            format!("cannot make {} (server.runtime_dir names another)", path.display())
        })?;
        Ok(Self(path.to_owned()))
    }
}

fn is_left_over(path: &Path) -> bool {
    // Of the thing itself: a link may lead anywhere.
    path.symlink_metadata().is_ok_and(|about| {
        about.is_dir()
            && about.uid() == geteuid().as_raw()
            && about.permissions().mode() & 0o077 == 0
    })
}

impl Drop for PrivateDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{Permissions, create_dir, set_permissions, write};

    #[test]
    fn a_private_directory_is_made_or_taken_over_only_if_nobody_else_has_it() {
        let path = std::env::temp_dir().join(format!("ferrite-private-{}", std::process::id()));
        let mode = || path.metadata().map(|about| about.permissions().mode() & 0o777).ok();
        let first = PrivateDir::make(&path).expect("made");
        assert_eq!(mode(), Some(0o700));
        write(path.join("engine.sock"), "").expect("a file");
        std::mem::forget(first); // killed
        let second = PrivateDir::make(&path).expect("taken over");
        drop(second);
        assert!(!path.exists(), "gone with what is in it");
        create_dir(&path).expect("another's");
        set_permissions(&path, Permissions::from_mode(0o755)).expect("open");
        assert!(PrivateDir::make(&path).is_err(), "open to others");
        std::fs::remove_dir(&path).expect("removed");
        std::os::unix::fs::symlink("/", &path).expect("a link");
        assert!(PrivateDir::make(&path).is_err(), "it leads elsewhere");
        std::fs::remove_file(&path).expect("removed");
    }
}
