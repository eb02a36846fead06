//! Properties of ferrite-proto that must hold for any bytes from a peer. A check panics if a
//! property does not hold.
//!
//! A test of ferrite-proto (`tests/corpus.rs`) includes this file, too. So this file must depend
//! neither on the fuzzer nor on the other decoder that `oracle.rs` uses.

mod endpoint;
#[path = "../input.rs"]
mod input;
mod mux;
mod resp;

pub use endpoint::valkey_endpoint;
pub use mux::{mux, mux_records};
pub use resp::{resp_command, resp_reply};

/// A check that any bytes must pass.
pub type Check = fn(&[u8]);

/// All checks, by the names of their targets.
pub const CHECKS: &[(&str, Check)] = &[
    ("mux", mux),
    ("mux_records", mux_records),
    ("resp_command", resp_command),
    ("resp_reply", resp_reply),
    ("valkey_endpoint", valkey_endpoint),
];
