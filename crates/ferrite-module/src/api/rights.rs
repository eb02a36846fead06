//! What the client that runs one of our commands may do.
//!
//! Redis 7.0 has no ACL categories for commands of modules: a user with `-@admin -@dangerous` may
//! run all of them. A command of ours that does what one of the engine's own does asks here for the
//! right to that one.
#![expect(
    unsafe_code,
    reason = "calls by function pointers, with pointers that the engine gave us"
)]

use std::ffi::c_int;
use std::ptr::NonNull;

use super::calls::Text;
use super::{Context, OK, api};

impl Context<'_> {
    /// Returns whether the client of this command has the right to the command `words`.
    ///
    /// False if that is not known: for a caller that is no client of the engine (another module),
    /// for a client without a user, and where the engine has no such command.
    pub(crate) fn caller_may(self, words: &[&str]) -> bool {
        // By the client's id: `GetCurrentUserName` of Redis 7.0 crashes for a client without a
        // user, and other modules call commands by such clients. SAFETY: the context is that of a
        // command. The name is a new string, which is ours.
        let name = unsafe { (api().client_user_name)(self.raw(), self.client_id()) };
        // SAFETY: made for us just now, or null.
        let Some(name) = (unsafe { Text::from_raw(name) }) else { return false };
        // SAFETY: the string is there, and only read.
        let Some(user) = NonNull::new(unsafe { (api().user_from_name)(name.as_ptr()) }) else {
            return false;
        };
        let words: Option<Vec<_>> = words.iter().map(|word| Text::new(word)).collect();
        let may = words.is_some_and(|words| {
            let mut raw: Vec<_> = words.iter().map(Text::as_ptr).collect();
            let count = raw.len() as c_int; // a few
            // SAFETY: the user is freed below, and the strings are there until the end of this.
            unsafe { (api().may_call)(user.as_ptr(), raw.as_mut_ptr(), count) == OK }
        });
        // SAFETY: nobody uses our handle any more; the user himself is the engine's.
        unsafe { (api().free_user)(user.as_ptr()) };
        may
    }
}
