//! How it ends badly: a line on stderr and an exit code.

use std::process::ExitCode;

use ferrite_fabric::ErrorKind;

use crate::dial::with_remedy;
use crate::output::{self, NobodyReads};
use crate::pipe::Errors;

/// RDMA is required and not to be had on this host (EX_UNAVAILABLE of sysexits.h): as the `ferrite`
/// command has it.
const UNAVAILABLE: u8 = 69;

/// A reply that is an error, where that is a failure (`-e`).
#[derive(Debug)]
pub(crate) struct ErrorReply(pub(crate) String);

impl std::fmt::Display for ErrorReply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ErrorReply {}

/// Says what went wrong.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    let is_told = error.is::<NobodyReads>() || error.is::<Errors>();
    if !is_told {
        output::tell(line(error));
    }
    let fabric = error.chain().find_map(|cause| cause.downcast_ref::<ferrite_fabric::Error>());
    match fabric.map(ferrite_fabric::Error::kind) {
        Some(ErrorKind::Absent) => ExitCode::from(UNAVAILABLE),
        _ => ExitCode::FAILURE,
    }
}

/// As redis-cli words it: a failure of the connection is an `Error:`.
pub(crate) fn line(error: &anyhow::Error) -> String {
    match error.chain().next().and_then(|cause| cause.downcast_ref::<std::io::Error>()) {
        Some(error) => format!("Error: {error}"),
        None => with_remedy(error),
    }
}
