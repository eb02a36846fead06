//! The engine's module API: safe calls of the functions in `table.rs`.
//!
//! Handles ([`Context`], [`Info`]) live as long as the callback that they were given to. Everything
//! but [`log`] is for the engine's main thread; the handles cannot leave it, since pointers are not
//! [`Send`].
#![expect(
    unsafe_code,
    reason = "calls by function pointers, with pointers that the engine gave us"
)]

pub(crate) mod calls;
pub(crate) mod clients;
pub(crate) mod fork;
pub(crate) mod keys;
mod rights;
mod table;

use std::ffi::{CStr, CString, c_char, c_int, c_long};
use std::marker::PhantomData;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::OnceLock;

use table::{
    Api, EventFn, FdFn, GetChoice, GetNumber, GetText, InfoFn, SetChoice, SetNumber, SetText, find,
};
pub(crate) use table::{CommandFn, RawContext, RawEvent, RawInfo, RawString};

pub(crate) const OK: c_int = 0;
pub(crate) const ERR: c_int = 1;
const API_VERSION: c_int = 1;

pub(crate) mod flag {
    //! Numbers of the API.
    pub(crate) const CONFIG_IMMUTABLE: u32 = 1 << 0;
    pub(crate) const CONFIG_MEMORY: u32 = 1 << 7;
    /// A full synchronisation may be loaded beside the old data: we keep nothing of either.
    pub(crate) const HANDLE_REPL_ASYNC_LOAD: i32 = 1 << 2;
    /// Slots may move as a whole (Valkey 9). Without it our presence would forbid it.
    pub(crate) const HANDLE_ATOMIC_SLOT_MIGRATION: i32 = 1 << 5;
    pub(crate) const EVENT_CLIENT: u64 = 4;
    pub(crate) const EVENT_CLIENT_CONNECTED: u64 = 0;
    pub(crate) const EVENT_CLIENT_DISCONNECTED: u64 = 1;
    pub(crate) const EVENT_SHUTDOWN: u64 = 5;
    pub(crate) const EVENT_CRON_LOOP: u64 = 8;
    pub(crate) const EVENT_LOOP: u64 = 15;
    pub(crate) const EVENT_LOOP_AFTER_SLEEP: u64 = 1;
    pub(crate) const EVENT_CONFIG: u64 = 16;
    pub(crate) const READABLE: i32 = 1;
}

/// Of this process for ever: an engine's functions do not move, also if the module is loaded a
/// second time.
static API: OnceLock<Api> = OnceLock::new();

/// The table, from the moment it was found on. Whoever has a handle has it.
fn api() -> &'static Api {
    API.get().expect("found at load, before any handle was made")
}

/// A line in the engine's log, from any thread. Nothing if there is no engine (tests).
pub(crate) fn log(level: &CStr, text: &str) {
    let Some(api) = API.get() else { return };
    // The engine cuts lines at 1,024 bytes, and knows no line ends.
    for line in text.lines() {
        let line = c_string(&format!("ferrite: {line}"));
        // SAFETY: the format takes one string, which is there. No context: those of a load that is
        // refused are gone by the time that a thread speaks; the engine allows it for this call
        // alone.
        unsafe { (api.log)(ptr::null_mut(), level.as_ptr(), c"%s".as_ptr(), line.as_ptr()) };
    }
}

/// For C: without what it would take for the end.
fn c_string(text: &str) -> CString {
    CString::new(text.replace('\0', "?")).unwrap_or_default()
}

/// From now on the engine's loop calls this when the descriptor is readable, on the main thread.
/// Whether the engine takes it.
pub(crate) fn listen_to(descriptor: RawFd, call: FdFn) -> bool {
    // SAFETY: the function stays; it is given no pointer of ours. A descriptor that is closed is
    // told of no more.
    unsafe { (api().event_loop_add)(descriptor, flag::READABLE, call, ptr::null_mut()) == OK }
}

/// No longer.
pub(crate) fn ignore(descriptor: RawFd) {
    // SAFETY: one that is not listened to is no harm.
    unsafe { (api().event_loop_del)(descriptor, flag::READABLE) };
}

/// What an engine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Server {
    pub(crate) is_valkey: bool,
    /// Major, minor and patch, a byte each.
    pub(crate) version: u32,
}

/// A context that the engine gave to a callback, for as long as that lasts.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a>(ptr::NonNull<RawContext>, PhantomData<&'a ()>);

impl<'a> Context<'a> {
    /// # Safety
    /// The engine gave it to a callback that runs on its main thread and outlives `'a`; it is not
    /// null.
    pub(crate) unsafe fn new(raw: *mut RawContext) -> Option<Self> {
        ptr::NonNull::new(raw).map(|raw| Self(raw, PhantomData))
    }

    /// Finds the functions of the API: the first thing to do. The names of those that are missing
    /// otherwise.
    pub(crate) fn find_api(self) -> Result<(), Vec<&'static str>> {
        // SAFETY: a context begins with this function, which is the engine's.
        let found = unsafe { Api::find(self.0.as_ref().get_api) };
        found.map(|api| drop(API.set(api)))
    }

    /// The log without the table: to say what is missing in it.
    pub(crate) fn log_without_api(self, text: &str) {
        type Log = unsafe extern "C" fn(*mut RawContext, *const c_char, *const c_char, ...);
        // SAFETY: as in `find_api`; the type is that of the function in the table.
        let log: Option<Log> = unsafe {
            find(self.0.as_ref().get_api, "RedisModule_Log\0")
                .map(|found| std::mem::transmute(found))
        };
        if let Some(log) = log {
            let text = c_string(text);
            // SAFETY: as in `log`.
            unsafe { log(ptr::null_mut(), c"warning".as_ptr(), c"%s".as_ptr(), text.as_ptr()) };
        }
    }

    fn raw(self) -> *mut RawContext {
        self.0.as_ptr()
    }

    /// Takes the module's name; false if another has it.
    pub(crate) fn set_name(self, name: &CStr, version: i32) -> bool {
        // SAFETY: a name that ends with a zero, which the engine copies; the context is the
        // engine's.
        unsafe {
            if (api().is_module_name_busy)(name.as_ptr()) != 0 {
                return false;
            }
            (api().set_module_attribs)(self.raw(), name.as_ptr(), version, API_VERSION);
        }
        true
    }

    pub(crate) fn server(self) -> Server {
        // SAFETY: as in `find_api`; only Valkey knows this name. The other call takes nothing.
        let (is_valkey, version) = unsafe {
            let known = find(self.0.as_ref().get_api, "ValkeyModule_GetServerVersion\0");
            (known.is_some(), (api().get_server_version)())
        };
        Server { is_valkey, version: u32::try_from(version).unwrap_or(0) }
    }

    pub(crate) fn set_options(self, options: i32) {
        // SAFETY: the context is the engine's.
        unsafe { (api().set_module_options)(self.raw(), options) };
    }

    /// One of the engine's own settings; `None` if it has none of this name, or does not say.
    pub(crate) fn config(self, name: &CStr) -> Option<String> {
        let api = api();
        // E: Valkey 9.1 crashes when it refuses a call (CONFIG is renamed, say) that does not take
        // errors as replies. SAFETY: two strings for the two in the format. The reply, and what is
        // looked at of it, is used before it is freed.
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
            // Null if the reply is no array, or has no second element.
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

    /// A command that is nothing but its subcommands.
    pub(crate) fn create_container(self, name: &CStr, flags: &CStr) -> bool {
        // SAFETY: strings that the engine copies; a command without a function has subcommands.
        let made = unsafe {
            (api().create_command)(self.raw(), name.as_ptr(), None, flags.as_ptr(), 0, 0, 0)
        };
        made == OK
    }

    /// With its ACL categories, where the engine has such for modules.
    pub(crate) fn create_subcommand(
        self,
        of: &CStr,
        name: &CStr,
        flags: &CStr,
        categories: &CStr,
        call: CommandFn,
    ) -> bool {
        let full = c_string(&format!("{}|{}", of.to_string_lossy(), name.to_string_lossy()));
        // SAFETY: as above; the function stays, since the library is never unloaded.
        unsafe {
            let parent = (api().get_command)(self.raw(), of.as_ptr());
            if parent.is_null()
                || (api().create_subcommand)(
                    parent,
                    name.as_ptr(),
                    Some(call),
                    flags.as_ptr(),
                    0,
                    0,
                    0,
                ) != OK
            {
                return false;
            }
            let made = (api().get_command)(self.raw(), full.as_ptr());
            match api().set_command_acl_categories {
                Some(set) if !made.is_null() => set(made, categories.as_ptr()) == OK,
                _ => true,
            }
        }
    }

    pub(crate) fn register_info(self, call: InfoFn) -> bool {
        // SAFETY: the function stays.
        unsafe { (api().register_info_func)(self.raw(), call) == OK }
    }

    /// From now on, or (`None`) no longer. Not before the load can only succeed: a refused one
    /// leaves subscriptions behind.
    pub(crate) fn subscribe(self, id: u64, call: Option<EventFn>) -> bool {
        // SAFETY: the function stays. Version 1 of each event is all that we take.
        unsafe {
            (api().subscribe_to_server_event)(self.raw(), RawEvent { id, version: 1 }, call) == OK
        }
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
        // SAFETY: strings that the engine copies; functions that stay; a number instead of a
        // pointer to what is private.
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
        let count = numbers.len() as c_int; // a handful
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

    /// Sets all that was registered, from the configuration file or by default; false if a value
    /// was refused.
    pub(crate) fn load_configs(self) -> bool {
        // SAFETY: the context is the engine's.
        unsafe { (api().load_configs)(self.raw()) == OK }
    }

    /// The client of this command has written, as replicas and the AOF see it: a PING.
    pub(crate) fn replicate_ping(self) {
        // SAFETY: the context is that of a command; the format takes nothing more.
        unsafe { (api().replicate)(self.raw(), c"PING".as_ptr(), c"".as_ptr()) };
    }

    pub(crate) fn reply(self, reply: &Reply) {
        let api = api();
        // SAFETY: the context is that of a command; strings end with a zero or come with their
        // length, and are copied.
        unsafe {
            match reply {
                Reply::Error(text) => (api.reply_with_error)(self.raw(), c_string(text).as_ptr()),
                Reply::Simple(text) => {
                    (api.reply_with_simple_string)(self.raw(), c_string(text).as_ptr())
                }
                Reply::Text(text) => {
                    (api.reply_with_verbatim_string)(self.raw(), text.as_ptr().cast(), text.len())
                }
                Reply::Lines(lines) => {
                    let answer = (api.reply_with_array)(self.raw(), lines.len() as c_long);
                    for line in lines {
                        (api.reply_with_simple_string)(self.raw(), c_string(line).as_ptr());
                    }
                    answer
                }
                Reply::Map(fields) => {
                    let answer = (api.reply_with_map)(self.raw(), fields.len() as c_long);
                    for (name, value) in fields {
                        (api.reply_with_string_buffer)(
                            self.raw(),
                            name.as_ptr().cast(),
                            name.len(),
                        );
                        match value {
                            Value::Number(number) => {
                                (api.reply_with_long_long)(self.raw(), (*number).cast_signed())
                            }
                            Value::Text(text) => (api.reply_with_string_buffer)(
                                self.raw(),
                                text.as_ptr().cast(),
                                text.len(),
                            ),
                        };
                    }
                    answer
                }
                Reply::WrongArity => (api.wrong_arity)(self.raw()),
            };
        }
    }
}

/// What a command answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reply {
    Error(String),
    Simple(String),
    Text(String),
    Lines(Vec<String>),
    Map(Vec<(String, Value)>),
    WrongArity,
}

/// A value in INFO or in a reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Value {
    Number(u64),
    Text(String),
}

/// What INFO is written to.
pub(crate) struct Info<'a>(ptr::NonNull<RawInfo>, PhantomData<&'a ()>);

impl Info<'_> {
    /// # Safety
    /// The engine gave it to its info callback, which outlives this; it is not null.
    pub(crate) unsafe fn new(raw: *mut RawInfo) -> Option<Self> {
        ptr::NonNull::new(raw).map(|raw| Self(raw, PhantomData))
    }

    /// The engine puts our name before the section's and before each field's, and drops sections
    /// that nobody asked for.
    pub(crate) fn section(&self, name: &CStr, fields: &[(String, Value)]) {
        // SAFETY: strings that the engine copies.
        unsafe {
            if (api().info_add_section)(self.0.as_ptr(), name.as_ptr()) != OK {
                return;
            }
            for (name, value) in fields {
                let name = c_string(name);
                match value {
                    Value::Number(number) => {
                        (api().info_add_number)(self.0.as_ptr(), name.as_ptr(), *number)
                    }
                    Value::Text(text) => (api().info_add_text)(
                        self.0.as_ptr(),
                        name.as_ptr(),
                        c_string(text).as_ptr(),
                    ),
                };
            }
        }
    }
}

/// What a string of the engine's says; empty if there is none.
///
/// # Safety
/// The engine gave it to a callback that still runs.
pub(crate) unsafe fn text_of(raw: *const RawString) -> String {
    if raw.is_null() {
        return String::new();
    }
    let mut len = 0;
    // SAFETY: the caller's promise; the bytes are there as long as the string is.
    let bytes = unsafe {
        let bytes = (api().string_ptr_len)(raw, &raw mut len);
        std::slice::from_raw_parts(bytes.cast::<u8>(), len)
    };
    String::from_utf8_lossy(bytes).into_owned()
}

/// A string of the engine's, which is whoever's it is given to.
pub(crate) fn new_string(text: &str) -> *mut RawString {
    // SAFETY: the bytes are copied. Without a context the string is nobody's but the caller's.
    unsafe { (api().create_string)(ptr::null_mut(), text.as_ptr().cast(), text.len()) }
}

/// # Safety
/// Made by [`new_string`], and nobody uses it any more.
pub(crate) unsafe fn free_string(raw: *mut RawString) {
    // SAFETY: the caller's promise.
    unsafe { (api().free_string)(ptr::null_mut(), raw) };
}
