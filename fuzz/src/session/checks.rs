//! What must hold of ferrite-session for any peer. A check panics if it does not.
//!
//! A test of ferrite-session (`tests/corpus.rs`) includes this file too. So it knows nothing of the
//! fuzzer.

#[path = "../input.rs"]
mod input;
mod stream;

pub use stream::valkey_stream;

/// A check that any bytes must pass.
pub type Check = fn(&[u8]);

/// All checks by the names of their targets.
pub const CHECKS: &[(&str, Check)] = &[("valkey_stream", valkey_stream)];
