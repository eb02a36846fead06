//! The error of `ferrite server`: a message and an exit code.

use std::fmt;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

use ferrite_config::exit_code::{BY_SIGNAL, ENGINE, INTERNAL, UNAVAILABLE, USAGE};

use crate::exit;

/// Why the server did not start, or why it stopped.
#[derive(Debug)]
pub(crate) struct ServerError {
    code: u8,
    kind: &'static str,
    message: String,
}

impl ServerError {
    /// Reports an error in the settings: in the file, the environment or the flags.
    pub(super) fn config(message: impl Into<String>) -> Self {
        Self { code: USAGE, kind: "config", message: message.into() }
    }

    /// Reports that RDMA is required and unavailable.
    pub(super) fn no_rdma(message: impl Into<String>) -> Self {
        Self { code: UNAVAILABLE, kind: "absent", message: message.into() }
    }

    /// Reports that the engine or the module is missing, that the engine cannot be executed, or
    /// that it does not answer.
    pub(super) fn cannot_start(message: impl Into<String>) -> Self {
        Self { code: ENGINE, kind: "engine", message: message.into() }
    }

    /// Reports that the engine ended by itself. The exit code is that of [`exit_code()`], but
    /// never 0.
    pub(super) fn engine(status: ExitStatus, message: impl Into<String>) -> Self {
        let code = if status.success() { ENGINE } else { exit_code(status) };
        Self { code, kind: "engine", message: message.into() }
    }

    /// Reports why the agent does not start, or has failed.
    pub(super) fn agent(error: &anyhow::Error) -> Self {
        let (code, message) = exit::describe(error);
        let kind = match code {
            USAGE => "config",
            UNAVAILABLE => "absent",
            _ => "agent",
        };
        Self { code, kind, message: format!("agent: {message}") }
    }

    /// Reports an internal failure of ferrite.
    pub(super) fn internal(error: &anyhow::Error) -> Self {
        Self { code: INTERNAL, kind: "failure", message: format!("{error:#}") }
    }

    pub(crate) fn code(&self) -> u8 {
        self.code
    }

    pub(crate) fn kind_name(&self) -> &'static str {
        self.kind
    }
}

impl fmt::Display for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ServerError {}

/// Returns the exit code of ferrite for the engine's exit status.
pub(super) fn exit_code(status: ExitStatus) -> u8 {
    let code =
        status.code().or_else(|| status.signal().map(|signal| i32::from(BY_SIGNAL) + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(INTERNAL)
}

/// Returns why an engine ended: its last message, except after SIGKILL. SIGKILL leaves an engine no
/// time for a message, so the last message is about something else.
pub(super) fn cause_of_exit(status: ExitStatus, last_message: Option<String>) -> Option<String> {
    if status.signal() == Some(rustix::process::Signal::KILL.as_raw()) {
        return Some("the kernel does this if memory runs out (see dmesg)".into());
    }
    last_message
}

/// Describes how a process ended: `exited with code 1`, `was killed by signal 11`.
pub(super) fn describe_exit(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with code {code}"),
        (_, Some(signal)) => format!("was killed by signal {signal}"),
        _ => "ended with an unknown status".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_code_is_the_engines_or_128_plus_its_signal() {
        for (raw, code, text) in [
            (0, 0, "exited with code 0"),
            (3 << 8, 3, "exited with code 3"),
            (11, 139, "was killed by signal 11"),
            (9, 137, "was killed by signal 9"),
        ] {
            let status = ExitStatus::from_raw(raw);
            assert_eq!((exit_code(status), describe_exit(status).as_str()), (code, text));
        }
    }
}
