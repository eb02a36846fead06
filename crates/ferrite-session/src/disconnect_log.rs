//! The log line for a client that its session disconnects.

use std::fmt;

use ferrite_fabric::LogLimit;

/// Logs why the client with this id in the engine was disconnected, unless `lines` is reached.
pub(crate) fn log_disconnect(lines: &LogLimit, client: Option<u64>, why: impl fmt::Display) {
    if let Some(others) = lines.pass() {
        tracing::warn!(client, "client disconnected: {why}{others}");
    }
}
