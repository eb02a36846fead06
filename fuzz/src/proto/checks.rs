//! What must hold of ferrite-proto for any bytes of a peer's. A check panics if it does not.
//!
//! A test of ferrite-proto (`tests/corpus.rs`) includes this file too. So it knows nothing of the
//! fuzzer, nor of the other decoder to which `oracle.rs` compares.

mod endpoint;
#[path = "../input.rs"]
mod input;
mod resp;

pub use endpoint::valkey_endpoint;
pub use resp::{resp_command, resp_reply};

/// A check that any bytes must pass.
pub type Check = fn(&[u8]);

/// All checks by the names of their targets.
pub const CHECKS: &[(&str, Check)] = &[
    ("resp_command", resp_command),
    ("resp_reply", resp_reply),
    ("valkey_endpoint", valkey_endpoint),
];
