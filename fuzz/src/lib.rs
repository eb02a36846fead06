//! The checks of all targets, by the crate whose code they test.
//!
//! Each crate's corpus test includes its own file of checks by path. This crate includes them by
//! path, too, so that the submodules of the checks are found in the same place.

#[path = "fabric/checks.rs"]
pub mod fabric;
pub mod oracle;
#[path = "proto/checks.rs"]
pub mod proto;
#[path = "session/checks.rs"]
pub mod session;

pub use fabric::{connection, control, grant, hello, inbox, link, refusal, tcp_frame};
pub use proto::{mux, mux_records, resp_command, resp_reply, valkey_endpoint};
pub use session::valkey_stream;
