//! Whether transparent mode of the agent works: the agent notes it here, and `/ready` reads it.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Whether connections are redirected, and those of other hosts can be delivered. In alias mode,
/// always.
#[derive(Debug, Default)]
pub(crate) struct RedirectionState(Mutex<Failures>);

#[derive(Debug, Default)]
struct Failures {
    /// Why connections are not redirected.
    rules: Option<String>,
    /// Why connections of other hosts cannot be delivered.
    delivery: Option<String>,
}

impl RedirectionState {
    /// Checks that connections are redirected and delivered, if they should be.
    ///
    /// # Errors
    /// Returns why they are not.
    pub(crate) fn check(&self) -> Result<(), String> {
        let Failures { rules, delivery } = &*self.lock();
        match (rules, delivery) {
            (Some(why), _) => Err(format!("connections are not redirected: {why}")),
            (None, Some(why)) => {
                Err(format!("connections of other hosts cannot be delivered: {why}"))
            }
            (None, None) => Ok(()),
        }
    }

    /// Sets why connections are not redirected. Returns whether that has changed.
    pub(crate) fn set_rules(&self, failure: Option<String>) -> bool {
        replace(&mut self.lock().rules, failure)
    }

    /// Sets why connections of other hosts cannot be delivered. Returns whether that has changed.
    pub(crate) fn set_delivery(&self, failure: Option<String>) -> bool {
        replace(&mut self.lock().delivery, failure)
    }

    fn lock(&self) -> MutexGuard<'_, Failures> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn replace(old: &mut Option<String>, new: Option<String>) -> bool {
    let is_changed = *old != new;
    *old = new;
    is_changed
}
