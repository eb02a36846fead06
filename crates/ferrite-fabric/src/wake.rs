//! How the drivers of a fabric sleep and are woken.
//!
//! | file | what it is |
//! |---|---|
//! | `sleep_flags.rs` | the rule by which a thread sleeps without missing work |
//! | `event_fd.rs` | a descriptor that stays readable until it is cleared |
//! | `mailbox.rs` | requests from other threads, and the hand-over between drivers |
//! | `wakeup.rs` | the waker of a thread that waits for a future |
//! | `wait_set.rs` | the one descriptor to wait on |
//! | `protocol.rs` | the loom model of the rules |

pub(crate) mod event_fd;
pub(crate) mod mailbox;
#[cfg(all(test, loom))]
mod protocol;
pub(crate) mod sleep_flags;
pub(crate) mod wait_set;
pub(crate) mod wakeup;
