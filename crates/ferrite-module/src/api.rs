//! Safe wrappers of the engine's module API, whose functions are in `table.rs`.
//!
//! Handles ([`Context`], [`Info`]) are valid until the callback that received them returns. Every
//! function except [`log`] must be called on the engine's main thread. Handles cannot leave that
//! thread, since pointers are not [`Send`].
#![expect(
    unsafe_code,
    reason = "calls by function pointers, with pointers that the engine gave us"
)]

pub(crate) mod calls;
pub(crate) mod clients;
pub(crate) mod cluster;
pub(crate) mod fork;
pub(crate) mod keys;
mod replies;
mod rights;
mod settings;
mod table;

use std::ffi::{CStr, CString, c_char, c_int};
use std::marker::PhantomData;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::OnceLock;

pub(crate) use replies::{Info, Reply, Value};
use table::{Api, EventFn, FdFn, InfoFn, find};
pub(crate) use table::{CommandFn, RawContext, RawEvent, RawInfo, RawString};

pub(crate) const OK: c_int = 0;
pub(crate) const ERR: c_int = 1;
const API_VERSION: c_int = 1;

pub(crate) mod flag {
    //! Constants of the module API.
    pub(crate) const CONFIG_IMMUTABLE: u32 = 1 << 0;
    pub(crate) const CONFIG_MEMORY: u32 = 1 << 7;
    /// Allows the engine to load a full synchronisation while it serves the old data. The module
    /// keeps no data of its own.
    pub(crate) const HANDLE_REPL_ASYNC_LOAD: i32 = 1 << 2;
    /// Allows atomic slot migration (Valkey 9), which a module without this flag prevents.
    pub(crate) const HANDLE_ATOMIC_SLOT_MIGRATION: i32 = 1 << 5;
    pub(crate) const EVENT_CLIENT: u64 = 4;
    pub(crate) const EVENT_CLIENT_CONNECTED: u64 = 0;
    pub(crate) const EVENT_CLIENT_DISCONNECTED: u64 = 1;
    pub(crate) const EVENT_SHUTDOWN: u64 = 5;
    pub(crate) const EVENT_LOOP: u64 = 15;
    pub(crate) const EVENT_LOOP_AFTER_SLEEP: u64 = 1;
    pub(crate) const EVENT_CONFIG: u64 = 16;
    pub(crate) const READABLE: i32 = 1;
}

/// The functions of the engine that has loaded the module. They stay the same if the module is
/// loaded a second time.
static API: OnceLock<Api> = OnceLock::new();

/// Returns the engine's functions. Must be called only after [`Context::find_api`] has succeeded.
fn api() -> &'static Api {
    API.get().expect("the API was found at load")
}

/// Writes to the engine's log, from any thread. Does nothing without an engine (in unit tests).
pub(crate) fn log(level: &CStr, text: &str) {
    let Some(api) = API.get() else { return };
    // The engine truncates messages at 1,024 bytes and does not split lines.
    for line in text.lines() {
        let line = c_string(&format!("ferrite: {line}"));
        // SAFETY: the format takes one string, which is valid. The context is null, which the
        // engine allows for this function. The context of the load is not used: after a failed load
        // it may be gone when a thread logs.
        unsafe { (api.log)(ptr::null_mut(), level.as_ptr(), c"%s".as_ptr(), line.as_ptr()) };
    }
}

/// Returns a C string, with zero bytes replaced by `?`.
fn c_string(text: &str) -> CString {
    CString::new(text.replace('\0', "?")).unwrap_or_default()
}

/// Makes the engine's event loop call a function, on the main thread, while the descriptor is
/// readable. Returns whether the engine accepted the descriptor.
pub(crate) fn watch_readable(descriptor: RawFd, call: FdFn) -> bool {
    // SAFETY: the function is never unloaded and gets no pointer of ours. The kernel does not
    // report a descriptor that was closed.
    unsafe { (api().event_loop_add)(descriptor, flag::READABLE, call, ptr::null_mut()) == OK }
}

/// Makes the engine's event loop stop watching a descriptor.
pub(crate) fn unwatch(descriptor: RawFd) {
    let Some(api) = API.get() else { return };
    // SAFETY: the engine ignores a descriptor that it does not watch.
    unsafe { (api.event_loop_del)(descriptor, flag::READABLE) };
}

/// The kind and version of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Server {
    pub(crate) is_valkey: bool,
    /// Major, minor and patch, a byte each.
    pub(crate) version: u32,
}

/// A context that the engine passed to a callback. It is valid until the callback returns.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a>(ptr::NonNull<RawContext>, PhantomData<&'a ()>);

impl<'a> Context<'a> {
    /// Wraps a context. Returns `None` if it is null.
    ///
    /// # Safety
    /// The engine passed `raw` to a callback that runs on its main thread and outlives `'a`, or
    /// `raw` is null.
    pub(crate) unsafe fn new(raw: *mut RawContext) -> Option<Self> {
        ptr::NonNull::new(raw).map(|raw| Self(raw, PhantomData))
    }

    /// Finds the functions of the API. Must be called before any other function.
    ///
    /// # Errors
    /// Returns the names of the functions that the engine does not have.
    pub(crate) fn find_api(self) -> Result<(), Vec<&'static str>> {
        // SAFETY: every context begins with this function of the engine.
        let found = unsafe { Api::find(self.0.as_ref().get_api) };
        found.map(|api| drop(API.set(api)))
    }

    /// Writes to the engine's log when the other functions of the API were not found.
    pub(crate) fn log_without_api(self, text: &str) {
        type Log = unsafe extern "C" fn(*mut RawContext, *const c_char, *const c_char, ...);
        // SAFETY: every context begins with this function of the engine. The type is that of the
        // function in the table.
        let log: Option<Log> = unsafe {
            find(self.0.as_ref().get_api, "RedisModule_Log\0")
                .map(|found| std::mem::transmute(found))
        };
        if let Some(log) = log {
            let text = c_string(text);
            // SAFETY: the format takes one string, which is valid. The engine allows a null context
            // for this function.
            unsafe { log(ptr::null_mut(), c"warning".as_ptr(), c"%s".as_ptr(), text.as_ptr()) };
        }
    }

    fn raw(self) -> *mut RawContext {
        self.0.as_ptr()
    }

    /// Sets the module's name. Returns false if another module has it.
    pub(crate) fn set_name(self, name: &CStr, version: i32) -> bool {
        // SAFETY: the name ends with a zero and the engine copies it; the context is the engine's.
        unsafe {
            if (api().is_module_name_busy)(name.as_ptr()) != 0 {
                return false;
            }
            (api().set_module_attribs)(self.raw(), name.as_ptr(), version, API_VERSION);
        }
        true
    }

    pub(crate) fn server(self) -> Server {
        // SAFETY: every context begins with the function that finds others. `get_server_version`
        // takes no arguments. Only Valkey has a function with the name that is looked up here.
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

    /// Creates a command that only has subcommands. Returns false if the engine refuses.
    pub(crate) fn create_container(self, name: &CStr, flags: &CStr) -> bool {
        // SAFETY: the engine copies the strings. A command without a function is allowed if it has
        // subcommands.
        let made = unsafe {
            (api().create_command)(self.raw(), name.as_ptr(), None, flags.as_ptr(), 0, 0, 0)
        };
        made == OK
    }

    /// Creates a subcommand, with ACL categories if the engine supports them for commands of
    /// modules. Returns false if the engine refuses.
    pub(crate) fn create_subcommand(
        self,
        of: &CStr,
        name: &CStr,
        flags: &CStr,
        categories: &CStr,
        call: CommandFn,
    ) -> bool {
        let full = c_string(&format!("{}|{}", of.to_string_lossy(), name.to_string_lossy()));
        // SAFETY: the engine copies the strings. The function remains valid, since the library is
        // never unloaded.
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
        // SAFETY: the function remains valid, since the library is never unloaded.
        unsafe { (api().register_info_func)(self.raw(), call) == OK }
    }

    /// Subscribes to a server event, or unsubscribes (`None`). Returns false if the engine refuses.
    /// Must be called only when the load can no longer fail, since the engine keeps the
    /// subscriptions of a failed load.
    pub(crate) fn subscribe(self, id: u64, call: Option<EventFn>) -> bool {
        // SAFETY: the function remains valid, since the library is never unloaded. It reads only
        // version 1 of each event.
        unsafe {
            (api().subscribe_to_server_event)(self.raw(), RawEvent { id, version: 1 }, call) == OK
        }
    }

    /// Replicates a PING to replicas and the AOF as a write of the client that runs this command.
    pub(crate) fn replicate_ping(self) {
        // SAFETY: the context is that of a command; the format takes no further arguments.
        unsafe { (api().replicate)(self.raw(), c"PING".as_ptr(), c"".as_ptr()) };
    }
}

/// Returns the text of one of the engine's strings. Returns an empty text if `raw` is null.
///
/// # Safety
/// `raw` is null, or the engine passed it to a callback that still runs.
pub(crate) unsafe fn text_of(raw: *const RawString) -> String {
    if raw.is_null() {
        return String::new();
    }
    let mut len = 0;
    // SAFETY: the caller guarantees a valid string, and the bytes live as long as the string.
    let bytes = unsafe {
        let bytes = (api().string_ptr_len)(raw, &raw mut len);
        std::slice::from_raw_parts(bytes.cast::<u8>(), len)
    };
    String::from_utf8_lossy(bytes).into_owned()
}

/// Creates a string of the engine, which the caller must free or pass on.
pub(crate) fn new_string(text: &str) -> *mut RawString {
    // SAFETY: the engine copies the bytes. Without a context only the caller owns the string.
    unsafe { (api().create_string)(ptr::null_mut(), text.as_ptr().cast(), text.len()) }
}

/// Frees a string.
///
/// # Safety
/// The caller owns `raw`, which the engine created, and nobody uses it any more.
pub(crate) unsafe fn free_string(raw: *mut RawString) {
    // SAFETY: the caller guarantees that the string is owned and no longer used.
    unsafe { (api().free_string)(ptr::null_mut(), raw) };
}
