//! Reads of string values in the engine's own memory.
//!
//! - Only strings with the encoding `raw` can be read. To give access to a string with another
//!   encoding, the engine would convert it permanently.
//! - A read does not delete an expired key if the engine supports that ([`NOEXPIRE`]). Redis 7.0
//!   does not support it. There, the deletion is propagated with the batch
//!   ([`CallContext::propagate`](super::calls::CallContext::propagate)).
#![expect(
    unsafe_code,
    reason = "calls by function pointers, with pointers that the engine gave us"
)]

use std::ffi::c_int;
use std::ptr::NonNull;

use super::calls::{EngineString, UserCalls};
use super::table::{Api, RawKey};
use super::{OK, api};

const READ: c_int = 1 << 0;
/// Do not delete an expired key.
const NOEXPIRE: c_int = 1 << 19;
const STRING: c_int = 1;

/// The result of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    /// A string of at least the requested length.
    Long,
    /// The key does not exist.
    Nothing,
    /// The value is not a long string, or the user may not read it. GET must be called.
    Other,
}

impl UserCalls<'_> {
    /// Passes the value of a key to `take` if it is a string of at least `min` bytes and the user
    /// may run `command` on the key.
    ///
    /// The engine counts this as a keyspace hit or miss, as it does for GET.
    pub(crate) fn read_string(
        &mut self,
        command: &EngineString,
        key: &[u8],
        min: usize,
        take: impl FnOnce(&[u8]),
    ) -> Found {
        let Some(key) = EngineString::of(key) else { return Found::Other };
        let api = api();
        let mut words = [command.as_ptr(), key.as_ptr()];
        // SAFETY: the function takes no arguments.
        let how = READ | api.open_key_modes.map_or(0, |modes| NOEXPIRE & unsafe { modes() });
        // SAFETY: the user and the context are valid until `self` is dropped, and the strings until
        // this returns. The engine only reads them. The key is closed before the strings are freed.
        let open = unsafe {
            if (api.may_call)(self.user.as_ptr(), words.as_mut_ptr(), 2) != OK {
                return Found::Other;
            }
            let Some(open) = NonNull::new((api.open_key)(self.raw_context(), key.as_ptr(), how))
            else {
                return Found::Nothing;
            };
            OpenKey { key: open, api }
        };
        open.read(min, take)
    }
}

/// An open key, which is closed when it is dropped.
struct OpenKey {
    key: NonNull<RawKey>,
    api: &'static Api,
}

impl OpenKey {
    fn read(&self, min: usize, take: impl FnOnce(&[u8])) -> Found {
        let (key, api) = (self.key.as_ptr(), self.api);
        // SAFETY: the key is open. Its value does not move until the engine runs something else.
        // That cannot happen while `take` reads it, since `take` has no way to call the engine.
        unsafe {
            if (api.key_type)(key) != STRING || (api.value_length)(key) < min {
                return Found::Other;
            }
            let mut len = 0;
            let bytes = (api.string_dma)(key, &raw mut len, READ);
            if bytes.is_null() || len < min {
                return Found::Other;
            }
            take(std::slice::from_raw_parts(bytes.cast(), len));
        }
        Found::Long
    }
}

impl Drop for OpenKey {
    fn drop(&mut self) {
        // SAFETY: this module opened the key and no longer uses it.
        unsafe { (self.api.close_key)(self.key.as_ptr()) };
    }
}
