//! Starts the engine as a child process that does not outlive ferrite.
//!
//! Only the child itself can ask the kernel for a signal at its parent's death (PR_SET_PDEATHSIG).
//! The child would have to ask between fork and exec, which needs unsafe code in Rust. Therefore
//! ferrite starts itself again with the hidden command `server-exec`. That command asks for the
//! signal and then executes the engine.

use std::ffi::OsString;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus, Stdio};

use anyhow::Context as _;
use rustix::process::{
    Pid, Signal, geteuid, getppid, kill_process, set_parent_process_death_signal,
};
use rustix::thread::{CapabilitySet, configure_capability_in_ambient_set};
use tokio::io::AsyncWriteExt as _;
use tokio::process::{Child, Command};

use super::ServerError;
use super::log::EngineLog;
use super::plan::{PRIVATE_DIR, Plan};

/// The arguments of `ferrite server-exec`.
pub(crate) struct ExecOptions {
    parent: i32,
    program: PathBuf,
}

impl ExecOptions {
    /// Reads the arguments of a process if they are those of `server-exec`.
    ///
    /// clap does not know this command: it would offer even a hidden command in completions.
    pub(crate) fn requested(arguments: impl Iterator<Item = OsString>) -> Option<Self> {
        let arguments: Vec<_> = arguments.skip(1).collect();
        match &arguments[..] {
            [command, parent, program] if command == COMMAND => {
                Some(Self { parent: parent.to_str()?.parse().ok()?, program: program.into() })
            }
            _ => None,
        }
    }
}

/// The name of the command.
const COMMAND: &str = "server-exec";

/// Replaces this process by the engine. Returns only on failure.
pub(crate) fn exec(options: &ExecOptions) -> anyhow::Result<ExitCode> {
    set_parent_process_death_signal(Some(Signal::TERM)).context("PR_SET_PDEATHSIG")?;
    // Capabilities that an agent in transparent mode needs, and that the engine would inherit.
    for capability in [CapabilitySet::NET_ADMIN, CapabilitySet::NET_RAW] {
        configure_capability_in_ambient_set(capability, false).context("PR_CAP_AMBIENT")?;
    }
    // If the parent died before the call above, no signal will come, so the engine is not started.
    if getppid().map(Pid::as_raw_pid) == Some(options.parent) {
        let error = std::process::Command::new(&options.program).arg("-").exec();
        return Err(
            ServerError::cannot_start(format!("{}: {error}", options.program.display())).into()
        );
    }
    Ok(ExitCode::FAILURE)
}

/// A running engine.
pub(super) struct Engine {
    process: Child,
    pid: Pid,
    pub(super) log: EngineLog,
}

impl Engine {
    /// Starts the engine and writes its configuration to its standard input.
    ///
    /// Call this on a thread that lives as long as ferrite: the kernel signals the engine when the
    /// thread that started it ends.
    pub(super) async fn start(plan: &Plan) -> anyhow::Result<Self> {
        // Runs the same binary even if an upgrade has replaced the file.
        let mut process = Command::new("/proc/self/exe")
            .arg0("ferrite")
            .arg(COMMAND)
            .arg(std::process::id().to_string())
            .arg(&plan.engine)
            // Signals from the terminal reach only ferrite, which stops the engine itself.
            .process_group(0)
            .env_remove("NOTIFY_SOCKET")
            .env_remove("WATCHDOG_USEC")
            .env_remove("WATCHDOG_PID")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("cannot start another ferrite process (/proc/self/exe) to run the engine")?;
        let mut log = EngineLog::new();
        if let Some(output) = process.stdout.take() {
            log.follow(output);
        }
        if let Some(output) = process.stderr.take() {
            log.follow(output);
        }
        if let Some(mut input) = process.stdin.take() {
            // An engine that does not read its configuration exits and logs the reason.
            let _ = input.write_all(&plan.text()).await;
        }
        let id = process.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        let pid = id.context("the engine's process has no id")?;
        Ok(Self { process, pid, log })
    }

    pub(super) fn id(&self) -> i32 {
        self.pid.as_raw_pid()
    }

    /// Waits until the engine has ended and its output has been passed on. Cancel-safe.
    pub(super) async fn wait(&mut self) -> anyhow::Result<ExitStatus> {
        let status = self.process.wait().await?;
        self.log.end().await;
        Ok(status)
    }

    pub(super) fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    pub(super) fn kill(&self) {
        self.signal(Signal::KILL);
    }

    /// Sends a signal, unless the process has been waited for: another process may have its id by
    /// then.
    fn signal(&self, signal: Signal) {
        if self.process.id().is_some() {
            let _ = kill_process(self.pid, signal);
        }
    }
}

/// A directory for the engine's socket that no other user can enter; removed on drop.
pub(super) struct PrivateDir(PathBuf);

impl PrivateDir {
    /// Creates the directory, or takes over an existing one that is ours and closed to others.
    /// Before that, removes the directories of killed ferrite processes beside it.
    ///
    /// An existing directory may be left from a killed ferrite that had the same process id. In a
    /// container, ferrite usually has the same process id at every start.
    pub(super) fn make(path: &Path) -> anyhow::Result<Self> {
        path.parent().into_iter().for_each(remove_left_over);
        let made = std::fs::DirBuilder::new().mode(0o700).create(path);
        let made = made.or_else(|error| if is_left_over(path) { Ok(()) } else { Err(error) });
        made.with_context(|| {
            format!(
                "cannot create {} (set server.runtime_dir to use another directory)",
                path.display()
            )
        })?;
        Ok(Self(path.to_owned()))
    }
}

/// Removes the directories of killed ferrite processes. These are the private directories in which
/// no engine listens and whose name has the id of no running process.
fn remove_left_over(parent: &Path) {
    for entry in parent.read_dir().into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let id = name.to_str().and_then(|name| name.strip_prefix(PRIVATE_DIR)?.parse::<u32>().ok());
        let is_gone = |id: u32| !Path::new("/proc").join(id.to_string()).exists();
        if id.is_some_and(is_gone)
            && is_left_over(&path)
            && std::os::unix::net::UnixStream::connect(path.join("engine.sock")).is_err()
        {
            let _ = std::fs::remove_dir_all(&path);
        }
    }
}

fn is_left_over(path: &Path) -> bool {
    // Does not follow symbolic links: one may lead anywhere.
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
    fn removes_directories_of_killed_processes() {
        let parent = std::env::temp_dir().join(format!("ferrite-parent-{}", std::process::id()));
        create_dir(&parent).expect("a directory");
        // No process has an id beyond the kernel's limit of 4,194,304.
        let [dead, own, other] = [
            format!("{PRIVATE_DIR}4999999"),
            format!("{PRIVATE_DIR}{}", std::process::id()),
            "ferrite-other-4999999".to_owned(),
        ]
        .map(|name| parent.join(name));
        for path in [&dead, &own, &other] {
            create_dir(path).expect("a directory");
            set_permissions(path, Permissions::from_mode(0o700)).expect("closed");
        }
        let socket = std::os::unix::net::UnixListener::bind(dead.join("engine.sock"));
        remove_left_over(&parent);
        assert!(dead.exists(), "its engine still runs");
        drop(socket);
        remove_left_over(&parent);
        assert_eq!([&dead, &own, &other].map(|path| path.exists()), [false, true, true]);
        std::fs::remove_dir_all(&parent).expect("removed");
    }

    #[test]
    fn takes_over_a_private_directory_only_if_it_is_closed_to_others() {
        let path = std::env::temp_dir().join(format!("ferrite-private-{}", std::process::id()));
        let mode = || path.metadata().map(|about| about.permissions().mode() & 0o777).ok();
        let first = PrivateDir::make(&path).expect("made");
        assert_eq!(mode(), Some(0o700));
        write(path.join("engine.sock"), "").expect("a file");
        std::mem::forget(first); // as if ferrite had been killed
        let second = PrivateDir::make(&path).expect("taken over");
        drop(second);
        assert!(!path.exists(), "removed with its contents");
        create_dir(&path).expect("a directory");
        set_permissions(&path, Permissions::from_mode(0o755)).expect("open");
        assert!(PrivateDir::make(&path).is_err(), "open to others");
        std::fs::remove_dir(&path).expect("removed");
        std::os::unix::fs::symlink("/", &path).expect("a link");
        assert!(PrivateDir::make(&path).is_err(), "a symbolic link");
        std::fs::remove_file(&path).expect("removed");
    }
}
