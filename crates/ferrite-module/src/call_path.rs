//! The call path: holds the [`Calls`] that all sessions share. Only the engine's main thread uses
//! it.

use std::cell::RefCell;

use ferrite_session::{Access, Called, Commands, Replies};

use crate::api::Context;
use crate::calls::{Calls, NoBatch};
use crate::clients::ClientRecord;
use crate::slice;

thread_local! {
    // Separate from the state in `event_loop.rs`, because that state is borrowed while sessions
    // make calls.
    static CALLS: RefCell<Option<Calls>> = const { RefCell::new(None) };
}

/// Enables the call path, or disables it (`None`).
pub(crate) fn set(calls: Option<Calls>) {
    CALLS.set(calls);
}

/// Returns how many commands may be called; `None` if the call path is disabled.
pub(crate) fn callable_commands() -> Option<usize> {
    CALLS.with(|calls| Some(calls.try_borrow().ok()?.as_ref()?.callable_commands()))
}

/// Reads the engine's settings again after they have changed.
pub(crate) fn follow_engine(context: Context<'_>) {
    CALLS.with(|calls| {
        if let Ok(mut calls) = calls.try_borrow_mut()
            && let Some(calls) = &mut *calls
        {
            calls.follow_engine(context);
        }
    });
}

/// Asks the engine for the current state of a client.
pub(crate) fn refresh(client: &ClientRecord) -> Access {
    // Without the call path the state is unknown, and everything is proxied.
    let unknown = Access::Proxy { in_transaction: false, is_authenticated: false };
    with_calls(|calls| calls.refresh(client)).unwrap_or(unknown)
}

/// Returns whether FERRITE ATTEST is needed to find out if a client has authenticated.
pub(crate) fn needs_attestation(client: &ClientRecord) -> bool {
    with_calls(|calls| calls.needs_attestation(client)).unwrap_or(false)
}

/// Calls commands in order on behalf of a client and appends their replies. Stops at the first one
/// that cannot be called, when the replies are full, and after a command that may unblock other
/// clients.
pub(crate) fn call(client: &ClientRecord, commands: Commands<'_>, replies: &mut Replies) -> Called {
    let none = |is_stale| Called { is_closed: true, is_stale, ..Called::default() };
    let called = with_calls(|calls| {
        let mut batch = match calls.begin(client) {
            Ok(batch) => batch,
            Err(why) => return none(why == NoBatch::Stale),
        };
        let (mut called, mut has_unblocked) = (Called::default(), false);
        let mut commands = commands.iter();
        for (callable, words) in commands.by_ref() {
            called.is_full = has_unblocked || called.done > 0 && replies.is_full();
            if called.is_full {
                break;
            }
            if !batch.call(callable, words, replies) {
                called.refused = 1;
                break;
            }
            called.done += 1;
            has_unblocked = callable.unblocks;
        }
        if called.refused > 0 {
            let refused = commands.take_while(|(it, words)| !batch.may_call(*it, words.len()));
            called.refused += refused.count();
        }
        if has_unblocked {
            // The engine serves clients that are blocked on the key before its event loop sleeps.
            // No other command may run until then, since it could take the element that they wait
            // for.
            slice::end_early();
        }
        called.wrote = batch.wrote();
        drop(batch);
        called.must_settle = calls.replies_wait(called.wrote);
        called
    });
    called.unwrap_or_else(|| none(false))
}

/// Returns the name of a client's user, by the client's id.
pub(crate) fn user_of(id: u64) -> Option<String> {
    with_calls(|calls| calls.user_of(id))?
}

/// Makes the engine free a client at once. Returns false if there is no such client, or nothing can
/// be called now.
pub(crate) fn kill_client(id: u64) -> bool {
    with_calls(|calls| calls.kill_client(id)).unwrap_or(false)
}

/// Returns whether the engine is a replica; false if nothing can be called now.
pub(crate) fn is_replica() -> bool {
    with_calls(|calls| calls.is_replica()).unwrap_or(false)
}

/// Returns how many clients the engine has; `None` if that is unknown.
pub(crate) fn connected_clients() -> Option<u64> {
    with_calls(|calls| calls.connected_clients())?
}

/// Runs `act` with the calls; `None` if the call path is disabled, or a call is being made.
pub(crate) fn with_calls<R>(act: impl FnOnce(&mut Calls) -> R) -> Option<R> {
    CALLS.with(|calls| calls.try_borrow_mut().ok()?.as_mut().map(act))
}
