//! Reads the engine's settings, and registers the module's settings with the engine.
#![expect(
    unsafe_code,
    reason = "calls by function pointers, with pointers that the engine gave us"
)]

use std::ffi::{CStr, c_int};
use std::ptr;

use super::table::{GetChoice, GetNumber, GetText, RawReply, SetChoice, SetNumber, SetText};
use super::{Context, OK, api, c_string};

impl Context<'_> {
    /// Returns one of the engine's own settings; `None` if the engine has no such setting or
    /// refuses CONFIG GET.
    pub(crate) fn config(self, name: &CStr) -> Option<String> {
        // `E` returns errors as replies. Without it Valkey 9.1 crashes when it refuses a call, for
        // example because CONFIG is renamed.
        //
        // SAFETY: there are two strings for the two `c` in the format. `take_text` gets the reply
        // of this call, and nobody else has it.
        unsafe {
            let (config, get) = (c"CONFIG".as_ptr(), c"GET".as_ptr());
            let reply = (api().call)(self.raw(), config, c"Ecc".as_ptr(), get, name.as_ptr());
            take_text(reply, Some(1))
        }
    }

    /// Returns whether clients are connected to the engine, which means that it has already
    /// started. Also returns true if the engine refuses INFO.
    pub(crate) fn has_clients(self) -> bool {
        // SAFETY: there is one string for the one `c` in the format. `take_text` gets the reply of
        // this call, and nobody else has it.
        let text = unsafe {
            let (info, clients) = (c"INFO".as_ptr(), c"clients".as_ptr());
            take_text((api().call)(self.raw(), info, c"Ec".as_ptr(), clients), None)
        };
        !text.is_some_and(|text| text.lines().any(|line| line == "connected_clients:0"))
    }

    pub(crate) fn register_number(
        self,
        name: &CStr,
        default: i64,
        flags: u32,
        [min, max]: [i64; 2],
        (get, set): (GetNumber, SetNumber),
        index: usize,
    ) -> bool {
        let private = ptr::without_provenance_mut(index);
        // SAFETY: the engine copies the strings, and the functions remain valid. `private` is an
        // index that is never dereferenced.
        let made = unsafe {
            (api().register_numeric_config)(
                self.raw(),
                name.as_ptr(),
                default,
                flags,
                min,
                max,
                get,
                set,
                ptr::null(),
                private,
            )
        };
        made == OK
    }

    pub(crate) fn register_choice(
        self,
        name: &CStr,
        default: i32,
        flags: u32,
        choices: &[&CStr],
        (get, set): (GetChoice, SetChoice),
        index: usize,
    ) -> bool {
        let names: Vec<_> = choices.iter().map(|choice| choice.as_ptr()).collect();
        let numbers: Vec<_> = (0..).take(names.len()).collect::<Vec<c_int>>();
        let count = numbers.len() as c_int; // few choices
        let private = ptr::without_provenance_mut(index);
        // SAFETY: the engine copies the strings and both lists, which have `count` entries. The
        // functions remain valid. `private` is an index that is never dereferenced.
        let made = unsafe {
            (api().register_enum_config)(
                self.raw(),
                name.as_ptr(),
                default,
                flags,
                names.as_ptr(),
                numbers.as_ptr(),
                count,
                get,
                set,
                ptr::null(),
                private,
            )
        };
        made == OK
    }

    pub(crate) fn register_text(
        self,
        name: &CStr,
        default: &str,
        flags: u32,
        (get, set): (GetText, SetText),
        index: usize,
    ) -> bool {
        let default = c_string(default);
        let private = ptr::without_provenance_mut(index);
        // SAFETY: the engine copies the strings, and the functions remain valid. `private` is an
        // index that is never dereferenced.
        let made = unsafe {
            (api().register_string_config)(
                self.raw(),
                name.as_ptr(),
                default.as_ptr(),
                flags,
                get,
                set,
                ptr::null(),
                private,
            )
        };
        made == OK
    }

    /// Sets all registered settings, from the configuration file or to their defaults. Returns
    /// false if a value was refused.
    pub(crate) fn load_configs(self) -> bool {
        // SAFETY: the context is the engine's.
        unsafe { (api().load_configs)(self.raw()) == OK }
    }
}

/// Frees a reply, and returns its text or, if `element` is given, the text of the element with this
/// index. Returns `None` if there is no such text.
///
/// # Safety
/// `reply` is null, or the engine made it for the caller, who does not use it afterwards.
unsafe fn take_text(reply: *mut RawReply, element: Option<usize>) -> Option<String> {
    let api = api();
    // SAFETY: the caller guarantees a valid reply. An element and the text live as long as the
    // reply, and the text is copied before the reply is freed. Both functions return null if there
    // is nothing.
    unsafe {
        ptr::NonNull::new(reply)?;
        let part = match element {
            Some(index) => (api.call_reply_array_element)(reply, index),
            None => reply,
        };
        let mut text = None;
        if !part.is_null() {
            let mut len = 0;
            let bytes = (api.call_reply_string_ptr)(part, &raw mut len);
            if !bytes.is_null() {
                let bytes = std::slice::from_raw_parts(bytes.cast::<u8>(), len);
                text = Some(String::from_utf8_lossy(bytes).into_owned());
            }
        }
        (api.free_call_reply)(reply);
        text
    }
}
