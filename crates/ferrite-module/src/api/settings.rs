//! Settings: reads those of the engine, and registers those of the module with it.
#![expect(
    unsafe_code,
    reason = "calls by function pointers, with pointers that the engine gave us"
)]

use std::ffi::{CStr, c_int};
use std::ptr;

use super::table::{GetChoice, GetNumber, GetText, SetChoice, SetNumber, SetText};
use super::{Context, OK, api, c_string};

impl Context<'_> {
    /// Returns one of the engine's own settings; `None` if the engine has no such setting or
    /// refuses CONFIG GET.
    pub(crate) fn config(self, name: &CStr) -> Option<String> {
        let api = api();
        // `E` returns errors as replies. Without it Valkey 9.1 crashes when it refuses a call, for
        // example because CONFIG is renamed.
        //
        // SAFETY: there are two strings for the two `c` in the format. The reply and its elements
        // are not used after the reply is freed.
        unsafe {
            let reply = (api.call)(
                self.raw(),
                c"CONFIG".as_ptr(),
                c"Ecc".as_ptr(),
                c"GET".as_ptr(),
                name.as_ptr(),
            );
            if reply.is_null() {
                return None;
            }
            // Null if the reply is not an array, or has no second element.
            let value = (api.call_reply_array_element)(reply, 1);
            let mut text = None;
            if !value.is_null() {
                let mut len = 0;
                let bytes = (api.call_reply_string_ptr)(value, &raw mut len);
                if !bytes.is_null() {
                    let bytes = std::slice::from_raw_parts(bytes.cast::<u8>(), len);
                    text = Some(String::from_utf8_lossy(bytes).into_owned());
                }
            }
            (api.free_call_reply)(reply);
            text
        }
    }

    /// Returns whether clients are connected to the engine: it has started already. True if the
    /// engine refuses INFO.
    pub(crate) fn has_clients(self) -> bool {
        let api = api();
        // SAFETY: there is one string for the one `c` in the format. The reply is not used after it
        // is freed.
        let text = unsafe {
            let name = c"INFO".as_ptr();
            let reply = (api.call)(self.raw(), name, c"Ec".as_ptr(), c"clients".as_ptr());
            if reply.is_null() {
                return true;
            }
            let mut len = 0;
            let bytes = (api.call_reply_string_ptr)(reply, &raw mut len);
            let mut text = String::new();
            if !bytes.is_null() {
                let bytes = std::slice::from_raw_parts(bytes.cast::<u8>(), len);
                text = String::from_utf8_lossy(bytes).into_owned();
            }
            (api.free_call_reply)(reply);
            text
        };
        !text.lines().any(|line| line == "connected_clients:0")
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
        let count = numbers.len() as c_int; // small
        let private = ptr::without_provenance_mut(index);
        // SAFETY: as above; both lists have `count` entries, and the engine copies them.
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
        // SAFETY: as above.
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
