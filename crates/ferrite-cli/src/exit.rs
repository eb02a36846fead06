//! Reports a failure: a line on stderr and an exit code.

use std::process::ExitCode;

use ferrite_fabric::ErrorKind;

use crate::dial::with_remedy;
use crate::output::{self, OutputClosed};
use crate::pipe::ErrorReplies;

/// The exit code if RDMA is required and this host cannot use it (EX_UNAVAILABLE of sysexits.h).
/// The `ferrite` command uses the same code.
const UNAVAILABLE: u8 = 69;

/// The exit code of wrong usage, which clap uses, too.
pub(crate) const WRONG_USAGE: u8 = 2;

/// An error reply that ends the program (`-e`).
#[derive(Debug)]
pub(crate) struct ErrorReply(pub(crate) String);

impl std::fmt::Display for ErrorReply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ErrorReply {}

/// Options that contradict each other.
#[derive(Debug)]
pub(crate) struct WrongUsage(pub(crate) String);

impl std::fmt::Display for WrongUsage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongUsage {}

/// Prints an error, unless that is done already or pointless, and returns the exit code.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    let is_reported = error.is::<OutputClosed>() || error.is::<ErrorReplies>();
    if !is_reported {
        output::write_stderr(line(error));
    }
    let fabric = error.chain().find_map(|cause| cause.downcast_ref::<ferrite_fabric::Error>());
    match fabric.map(ferrite_fabric::Error::kind) {
        Some(ErrorKind::Absent) => ExitCode::from(UNAVAILABLE),
        _ if error.is::<WrongUsage>() => ExitCode::from(WRONG_USAGE),
        _ => ExitCode::FAILURE,
    }
}

/// Returns the line for an error. As in redis-cli, a connection error begins with `Error:`.
pub(crate) fn line(error: &anyhow::Error) -> String {
    match error.chain().next().and_then(|cause| cause.downcast_ref::<std::io::Error>()) {
        Some(error) => format!("Error: {error}"),
        None => with_remedy(error),
    }
}
