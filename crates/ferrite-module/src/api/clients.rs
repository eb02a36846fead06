//! Queries about the engine's clients, and the name of a client. Only the engine's main thread may
//! use these functions.
#![expect(
    unsafe_code,
    reason = "calls by function pointers, with pointers that the engine gave us"
)]

use super::calls::{CallContext, EngineString};
use super::table::RawClientInfo;
use super::{Context, OK, api, free_string};

/// Bits of [`ClientInfo::flags`]; constants of the module API.
pub(crate) mod client_flag {
    pub(crate) const PUBSUB: u64 = 1 << 1;
    pub(crate) const BLOCKED: u64 = 1 << 2;
    pub(crate) const TRACKING: u64 = 1 << 3;
    pub(crate) const MULTI: u64 = 1 << 5;
    // Since Valkey 9.1. Other engines leave these bits zero.
    pub(crate) const READONLY: u64 = 1 << 6;
    pub(crate) const MONITOR: u64 = 1 << 9;
    pub(crate) const AUTHENTICATED: u64 = 1 << 11;
}

/// The state of a client.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClientInfo {
    /// See [`client_flag`].
    pub(crate) flags: u64,
    /// The database that the client has selected.
    pub(crate) db: u16,
}

/// Returns the state of a client; `None` if the engine has no client with this id.
pub(crate) fn client_info(id: u64) -> Option<ClientInfo> {
    let mut info = RawClientInfo::new();
    // SAFETY: the structure has the version that its field says. The engine only writes to it.
    let found = unsafe { (api().client_info)(&raw mut info, id) };
    (found == OK).then_some(ClientInfo { flags: info.flags, db: info.db })
}

impl CallContext {
    /// Calls `look` with the name of a client's user. Returns `None` if there is no such client, or
    /// it has no user.
    pub(crate) fn with_user_name<R>(&self, id: u64, look: impl FnOnce(&[u8]) -> R) -> Option<R> {
        // SAFETY: the context is never freed. The module owns the string, and frees it after its
        // last use.
        unsafe {
            let name = (api().client_user_name)(self.raw(), id);
            if name.is_null() {
                return None;
            }
            let mut len = 0;
            let bytes = (api().string_ptr_len)(name, &raw mut len);
            let result = look(std::slice::from_raw_parts(bytes.cast::<u8>(), len));
            free_string(name);
            Some(result)
        }
    }
}

impl Context<'_> {
    /// Returns the id of the client that runs the command.
    pub(crate) fn client_id(self) -> u64 {
        // SAFETY: the context is that of a command.
        unsafe { (api().client_id)(self.raw()) }
    }

    /// Names the client that runs the command, as CLIENT SETNAME does, unless it has a name.
    /// Characters that names cannot have are replaced.
    pub(crate) fn name_client(self, name: &str) {
        let id = self.client_id();
        // SAFETY: the context is that of a command.
        let current = unsafe { (api().client_name)(self.raw(), id) };
        if !current.is_null() {
            // SAFETY: the module owns the string, and this is its last use.
            unsafe { free_string(current) };
            return;
        }
        let name: String =
            name.chars().map(|c| if c.is_ascii_graphic() { c } else { '_' }).collect();
        if let Some(name) = EngineString::new(&name) {
            // SAFETY: the string is valid, and the engine only reads it.
            unsafe { (api().set_client_name)(id, name.as_ptr()) };
        }
    }

    /// Returns whether the client that runs the command gets replies in RESP3.
    pub(crate) fn is_resp3(self) -> bool {
        const RESP3: i32 = 1 << 22;
        // SAFETY: the context is that of a command.
        unsafe { (api().context_flags)(self.raw()) & RESP3 != 0 }
    }
}

/// Returns the client's id from the data of a client event; `None` if `data` is null.
///
/// # Safety
/// `data` is what the engine passed with an event of that kind.
pub(crate) unsafe fn client_of_event(data: *const std::ffi::c_void) -> Option<u64> {
    // SAFETY: the caller guarantees that this is the data of a client event. Every version of the
    // structure begins with version, flags and id.
    unsafe { data.cast::<RawClientInfo>().as_ref().map(|info| info.id) }
}
