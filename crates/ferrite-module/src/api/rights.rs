//! The rights of the client that runs one of the module's commands.
//!
//! Redis 7.0 has no ACL categories for commands of modules, so a user with `-@admin -@dangerous`
//! may run all of them. Therefore each subcommand of FERRITE that does the same as one of the
//! engine's own commands also checks the right to that command.
#![expect(
    unsafe_code,
    reason = "calls by function pointers, with pointers that the engine gave us"
)]

use std::ffi::c_int;
use std::ptr::NonNull;

use super::calls::EngineString;
use super::{Context, OK, api};

impl Context<'_> {
    /// Returns whether the client that runs this command has the right to run the command `words`.
    ///
    /// Returns false if the engine cannot tell. Then the caller is another module and not a client,
    /// the client has no user, or the engine has no such command.
    pub(crate) fn caller_may(self, words: &[&str]) -> bool {
        // The name is read by the client's id because `GetCurrentUserName` of Redis 7.0 crashes for
        // a client without a user. Other modules call commands with clients that have no user.
        //
        // SAFETY: the context is that of a command. The result is a new string that we own.
        let name = unsafe { (api().client_user_name)(self.raw(), self.client_id()) };
        // SAFETY: the engine just created the string for us, or it is null.
        let Some(name) = (unsafe { EngineString::from_raw(name) }) else { return false };
        // SAFETY: the string is valid, and the engine only reads it.
        let Some(user) = NonNull::new(unsafe { (api().user_from_name)(name.as_ptr()) }) else {
            return false;
        };
        let words: Option<Vec<_>> = words.iter().map(|word| EngineString::new(word)).collect();
        let is_allowed = words.is_some_and(|words| {
            let mut raw: Vec<_> = words.iter().map(EngineString::as_ptr).collect();
            let count = raw.len() as c_int; // few words
            // SAFETY: the user is freed only below, and the strings are valid until this returns.
            unsafe { (api().may_call)(user.as_ptr(), raw.as_mut_ptr(), count) == OK }
        });
        // SAFETY: nobody uses this handle any more. The user itself belongs to the engine.
        unsafe { (api().free_user)(user.as_ptr()) };
        is_allowed
    }
}
