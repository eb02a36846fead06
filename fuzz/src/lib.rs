//! The checks of all targets, by the crate whose code they try.
//!
//! Each crate's test of the corpora includes its own file of checks by its path, and so does this
//! one: modules inside are then looked for in the same place.

#[path = "fabric/checks.rs"]
pub mod fabric;
pub mod oracle;
#[path = "proto/checks.rs"]
pub mod proto;
#[path = "session/checks.rs"]
pub mod session;

pub use fabric::{connection, control, grant, hello, inbox, link, refusal, tcp_frame};
pub use proto::{resp_command, resp_reply, valkey_endpoint};
pub use session::valkey_stream;
