//! How `ferrite server` ends when it does not end well: words, and an exit code.

use std::fmt;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

/// EX_USAGE of sysexits.h and the rest.
pub(crate) const USAGE: u8 = 64;
const UNAVAILABLE: u8 = 69;
const INTERNAL: u8 = 70;
const CANNOT_START: u8 = 71;
/// Added to the number of the signal that killed the engine, as shells do.
const BY_SIGNAL: i32 = 128;

/// Why there is no server, or no longer.
#[derive(Debug)]
pub(crate) struct Ending {
    code: u8,
    kind: &'static str,
    message: String,
}

impl Ending {
    /// The file is wrong, or something that it names.
    pub(super) fn config(message: impl Into<String>) -> Self {
        Self { code: USAGE, kind: "config", message: message.into() }
    }

    /// There is no RDMA, and it is required.
    pub(super) fn no_rdma(message: impl Into<String>) -> Self {
        Self { code: UNAVAILABLE, kind: "absent", message: message.into() }
    }

    /// The engine is not there, or does not come up.
    pub(super) fn cannot_start(message: impl Into<String>) -> Self {
        Self { code: CANNOT_START, kind: "engine", message: message.into() }
    }

    /// The engine has ended by itself: its own code.
    pub(super) fn engine(status: ExitStatus, message: impl Into<String>) -> Self {
        Self { code: code(status), kind: "engine", message: message.into() }
    }

    /// Something of ours that should not have happened.
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

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Ending {}

/// The engine's exit code as ours.
pub(super) fn code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| BY_SIGNAL + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(INTERNAL)
}

/// `with code 1`, `by signal 11`
pub(super) fn how(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("with code {code}"),
        (_, Some(signal)) => format!("by signal {signal}"),
        _ => "in an unknown way".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_the_engines_or_those_of_its_signal() {
        for (raw, is, words) in [
            (0, 0, "with code 0"),
            (3 << 8, 3, "with code 3"),
            (11, 139, "by signal 11"),
            (9, 137, "by signal 9"),
        ] {
            let status = ExitStatus::from_raw(raw);
            assert_eq!((code(status), how(status).as_str()), (is, words));
        }
    }
}
