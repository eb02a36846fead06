//! Values read where they lie.
//!
//! - Only strings that are not encoded: to be given any other, the engine would encode it anew, for
//!   good.
//! - A key whose time is over is not deleted where the engine can be told so. Redis 7.0 cannot:
//!   there the deletion is propagated with the batch
//!   ([`CallContext::propagate`](super::calls::CallContext::propagate)).
#![expect(
    unsafe_code,
    reason = "calls by function pointers, with pointers that the engine gave us"
)]

use std::ffi::c_int;
use std::ptr::NonNull;

use super::calls::{Acting, Text};
use super::table::{Api, RawKey};
use super::{OK, api};

const READ: c_int = 1 << 0;
/// Leave a key whose time is over to others.
const NOEXPIRE: c_int = 1 << 19;
const STRING: c_int = 1;

/// What there is of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    /// A string of at least that length.
    Long,
    /// Nothing.
    Nothing,
    /// Something else, or nothing that this user may see: to be called for.
    Other,
}

impl Acting<'_> {
    /// Gives the string of at least `min` bytes that a key has to `take`, if the user may `command`
    /// it.
    ///
    /// The engine counts this as a read that found the key or missed it, as GET does.
    pub(crate) fn read_string(
        &mut self,
        command: &Text,
        key: &[u8],
        min: usize,
        take: impl FnOnce(&[u8]),
    ) -> Found {
        let Some(key) = Text::of(key) else { return Found::Other };
        let api = api();
        let mut words = [command.as_ptr(), key.as_ptr()];
        // SAFETY: it takes nothing.
        let how = READ | api.open_key_modes.map_or(0, |modes| NOEXPIRE & unsafe { modes() });
        // SAFETY: the user is there as long as this is, the strings until the end of this, and so
        // is the context; all are only read. The key is closed before the strings go.
        let open = unsafe {
            if (api.may_call)(self.user.as_ptr(), words.as_mut_ptr(), 2) != OK {
                return Found::Other;
            }
            let Some(open) = NonNull::new((api.open_key)(self.raw_context(), key.as_ptr(), how))
            else {
                return Found::Nothing;
            };
            Open { key: open, api }
        };
        open.read(min, take)
    }
}

/// A key that is closed at the end.
struct Open {
    key: NonNull<RawKey>,
    api: &'static Api,
}

impl Open {
    fn read(&self, min: usize, take: impl FnOnce(&[u8])) -> Found {
        let (key, api) = (self.key.as_ptr(), self.api);
        // SAFETY: the key is open. Its value stays where it is until the engine runs something
        // else, which it does not while `take` looks at it: that has no way to call.
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

impl Drop for Open {
    fn drop(&mut self) {
        // SAFETY: opened by us, and no longer used.
        unsafe { (self.api.close_key)(self.key.as_ptr()) };
    }
}
