//! The log line for a client that its session disconnects.

use std::fmt;

use ferrite_fabric::LogLimit;

/// Logs why a client was disconnected, unless the limit `lines` suppresses the line. `client` is
/// the client's id in the engine.
pub(crate) fn log_disconnect(lines: &LogLimit, client: Option<u64>, why: impl fmt::Display) {
    if let Some(others) = lines.pass() {
        tracing::warn!(client, "client disconnected: {why}{others}");
    }
}
