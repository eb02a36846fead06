//! Reports a failure: a line on stderr and an exit code.

use std::process::ExitCode;

use ferrite_config::exit_code;

use crate::dial::with_remedy;
use crate::output::{self, OutputClosed};
use crate::pipe::ErrorReplies;

/// An error reply that ends the program (`-e`).
#[derive(Debug)]
pub(crate) struct ErrorReply(pub(crate) String);

impl std::fmt::Display for ErrorReply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ErrorReply {}

/// Options that are invalid or contradict each other.
#[derive(Debug)]
pub(crate) struct WrongUsage(pub(crate) String);

impl std::fmt::Display for WrongUsage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongUsage {}

/// Prints an error, unless it was printed already or needs no message. Returns the exit code.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    let is_reported = error.is::<OutputClosed>() || error.is::<ErrorReplies>();
    if !is_reported {
        output::write_stderr(line(error));
    }
    let fabric = error.chain().find_map(|cause| cause.downcast_ref::<ferrite_fabric::Error>());
    ExitCode::from(match fabric {
        Some(error) if error.is_unavailable() => exit_code::UNAVAILABLE,
        _ if error.is::<WrongUsage>() => exit_code::USAGE,
        _ => exit_code::FAILURE,
    })
}

/// Returns the line for an error. As in redis-cli, a connection error begins with `Error:`.
pub(crate) fn line(error: &anyhow::Error) -> String {
    match error.chain().next().and_then(|cause| cause.downcast_ref::<std::io::Error>()) {
        Some(error) => format!("Error: {error}"),
        None => with_remedy(error),
    }
}
