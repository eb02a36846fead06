//! Reports a failure: a line on stderr and an exit code.

use std::process::ExitCode;

use ferrite_fabric::ErrorKind;

use crate::dial::with_remedy;
use crate::output::{self, OutputClosed};
use crate::pipe::ErrorReplies;

/// The exit code if RDMA is required and this host cannot use it (EX_UNAVAILABLE of sysexits.h).
/// The `ferrite` command uses the same code.
const UNAVAILABLE: u8 = 69;

/// An error reply that ends the program (`-e`).
#[derive(Debug)]
pub(crate) struct ErrorReply(pub(crate) String);

impl std::fmt::Display for ErrorReply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ErrorReply {}

/// Prints an error, unless that is done already or pointless, and returns the exit code.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    let is_reported = error.is::<OutputClosed>() || error.is::<ErrorReplies>();
    if !is_reported {
        output::write_stderr(line(error));
    }
    let fabric = error.chain().find_map(|cause| cause.downcast_ref::<ferrite_fabric::Error>());
    match fabric.map(ferrite_fabric::Error::kind) {
        Some(ErrorKind::Absent) => ExitCode::from(UNAVAILABLE),
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
