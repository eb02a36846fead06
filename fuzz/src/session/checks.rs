//! Properties of ferrite-session that must hold for any peer. A check panics if a property does not
//! hold.
//!
//! A test of ferrite-session (`tests/corpus.rs`) includes this file, too. So this file must not
//! depend on the fuzzer.

#[path = "../input.rs"]
mod input;
mod stream;

pub use stream::valkey_stream;

/// A check that any bytes must pass.
pub type Check = fn(&[u8]);

/// All checks, by the names of their targets.
pub const CHECKS: &[(&str, Check)] = &[("valkey_stream", valkey_stream)];
