//! The state of the thread `ferrite`, for other threads to read.

use std::sync::{Arc, OnceLock};

/// Tells whether the thread serves clients, or why it does not any more. Clones share one state.
#[derive(Debug, Clone, Default)]
pub(crate) struct ThreadState(Arc<OnceLock<String>>);

impl ThreadState {
    /// Returns why the thread serves no clients any more; `None` while it does.
    pub(crate) fn why_ended(&self) -> Option<&str> {
        self.0.get().map(String::as_str)
    }

    /// Sets why the thread ends. A second reason is ignored: it follows from the first.
    pub(super) fn end(&self, why: String) {
        let _ = self.0.set(why);
    }
}
