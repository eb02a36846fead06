//! The functions of the module API, with their types from the API's header. They are found by name,
//! once, at load.
//!
//! The names are those of Redis, which Valkey supports as well. All required functions exist in
//! Redis 7.0 and later.
#![expect(unsafe_code, reason = "pointers that the engine says are functions of these types")]

use std::ffi::{c_char, c_int, c_long, c_longlong, c_uint, c_ulonglong, c_void};
use std::marker::{PhantomData, PhantomPinned};
use std::ptr;

use super::OK;

macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident;)+) => { $(
        $(#[$doc])*
        #[repr(C)]
        pub(crate) struct $name {
            _bytes: [u8; 0],
            _not_ours: PhantomData<(*mut u8, PhantomPinned)>,
        }
    )+ };
}

opaque! {
    RawString;
    RawReply;
    RawInfo;
    RawCommand;
    RawUser;
    RawKey;
}

/// A context. By convention, its first word is the function that finds all others.
#[repr(C)]
pub(crate) struct RawContext {
    pub(super) get_api: GetApi,
}

pub(super) type GetApi = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;

/// An event, which the API passes by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RawEvent {
    pub(crate) id: u64,
    pub(crate) version: u64,
}

/// The engine's description of a client, in the first version of the structure, which all engines
/// support.
#[repr(C)]
pub(crate) struct RawClientInfo {
    pub(super) version: u64,
    pub(super) flags: u64,
    pub(super) id: u64,
    address: [c_char; 46],
    port: u16,
    pub(super) db: u16,
}

impl RawClientInfo {
    pub(super) fn new() -> Self {
        Self { version: 1, flags: 0, id: 0, address: [0; 46], port: 0, db: 0 }
    }
}

pub(crate) type CommandFn =
    unsafe extern "C" fn(*mut RawContext, *mut *mut RawString, c_int) -> c_int;
pub(crate) type InfoFn = unsafe extern "C" fn(*mut RawInfo, c_int);
pub(crate) type EventFn = unsafe extern "C" fn(*mut RawContext, RawEvent, u64, *mut c_void);
pub(crate) type FdFn = unsafe extern "C" fn(c_int, *mut c_void, c_int);
/// Gets the sender's id, which has no zero at its end, the type and the message.
pub(crate) type ClusterMessageFn =
    unsafe extern "C" fn(*mut RawContext, *const c_char, u8, *const u8, u32);
pub(crate) type TimerFn = unsafe extern "C" fn(*mut RawContext, *mut c_void);
pub(super) type KeyspaceFn =
    unsafe extern "C" fn(*mut RawContext, c_int, *const c_char, *mut RawString) -> c_int;
pub(crate) type GetNumber = unsafe extern "C" fn(*const c_char, *mut c_void) -> c_longlong;
pub(crate) type SetNumber =
    unsafe extern "C" fn(*const c_char, c_longlong, *mut c_void, *mut *mut RawString) -> c_int;
pub(crate) type GetChoice = unsafe extern "C" fn(*const c_char, *mut c_void) -> c_int;
pub(crate) type SetChoice =
    unsafe extern "C" fn(*const c_char, c_int, *mut c_void, *mut *mut RawString) -> c_int;
pub(crate) type GetText = unsafe extern "C" fn(*const c_char, *mut c_void) -> *mut RawString;
pub(crate) type SetText =
    unsafe extern "C" fn(*const c_char, *mut RawString, *mut c_void, *mut *mut RawString) -> c_int;
/// The type of the argument `applyfn`, which is not used: the pointer is always null.
pub(super) type NoApply = *const c_void;

macro_rules! table {
    (
        required { $($field:ident = $name:literal: $kind:ty;)+ }
        optional { $($maybe:ident = $maybe_name:literal: $maybe_kind:ty;)+ }
    ) => {
        /// The functions that the module uses.
        pub(crate) struct Api {
            $(pub(super) $field: $kind,)+
            $(pub(super) $maybe: Option<$maybe_kind>,)+
        }

        impl Api {
            /// Finds all functions.
            ///
            /// # Errors
            /// Returns the names of the required functions that this engine does not have.
            ///
            /// # Safety
            /// `get_api` is the engine's function.
            pub(super) unsafe fn find(get_api: GetApi) -> Result<Self, Vec<&'static str>> {
                let mut missing = Vec::new();
                $(
                    // SAFETY: the caller guarantees that `get_api` is the engine's. The name ends
                    // with a zero.
                    let $field = unsafe { find(get_api, concat!("RedisModule_", $name, "\0")) };
                    if $field.is_none() {
                        missing.push(concat!("RedisModule_", $name));
                    }
                )+
                if !missing.is_empty() {
                    return Err(missing);
                }
                Ok(Self { $(
                    $field: {
                        let found = $field.unwrap_or(ptr::null_mut()); // never null here
                        // SAFETY: the function of this name has this type in every version of the
                        // API's header, and the pointer is not null, since no function is missing.
                        unsafe { std::mem::transmute::<*mut c_void, $kind>(found) }
                    },
                )+ $(
                    // SAFETY: the caller guarantees that `get_api` is the engine's. The name ends
                    // with a zero, and the function of this name has this type.
                    $maybe: unsafe {
                        find(get_api, concat!("RedisModule_", $maybe_name, "\0"))
                            .map(|found| std::mem::transmute::<*mut c_void, $maybe_kind>(found))
                    },
                )+ })
            }
        }
    };
}

table! { required {
    set_module_attribs = "SetModuleAttribs":
        unsafe extern "C" fn(*mut RawContext, *const c_char, c_int, c_int);
    is_module_name_busy = "IsModuleNameBusy": unsafe extern "C" fn(*const c_char) -> c_int;
    set_module_options = "SetModuleOptions": unsafe extern "C" fn(*mut RawContext, c_int);
    get_server_version = "GetServerVersion": unsafe extern "C" fn() -> c_int;
    log = "Log": unsafe extern "C" fn(*mut RawContext, *const c_char, *const c_char, ...);
    call = "Call":
        unsafe extern "C" fn(*mut RawContext, *const c_char, *const c_char, ...) -> *mut RawReply;
    free_call_reply = "FreeCallReply": unsafe extern "C" fn(*mut RawReply);
    call_reply_proto = "CallReplyProto":
        unsafe extern "C" fn(*mut RawReply, *mut usize) -> *const c_char;
    call_reply_array_element = "CallReplyArrayElement":
        unsafe extern "C" fn(*mut RawReply, usize) -> *mut RawReply;
    call_reply_string_ptr = "CallReplyStringPtr":
        unsafe extern "C" fn(*mut RawReply, *mut usize) -> *const c_char;
    create_string = "CreateString":
        unsafe extern "C" fn(*mut RawContext, *const c_char, usize) -> *mut RawString;
    free_string = "FreeString": unsafe extern "C" fn(*mut RawContext, *mut RawString);
    string_ptr_len = "StringPtrLen":
        unsafe extern "C" fn(*const RawString, *mut usize) -> *const c_char;
    create_command = "CreateCommand":
        unsafe extern "C" fn(
            *mut RawContext, *const c_char, Option<CommandFn>, *const c_char, c_int, c_int, c_int
        ) -> c_int;
    get_command = "GetCommand":
        unsafe extern "C" fn(*mut RawContext, *const c_char) -> *mut RawCommand;
    create_subcommand = "CreateSubcommand":
        unsafe extern "C" fn(
            *mut RawCommand, *const c_char, Option<CommandFn>, *const c_char, c_int, c_int, c_int
        ) -> c_int;
    wrong_arity = "WrongArity": unsafe extern "C" fn(*mut RawContext) -> c_int;
    reply_with_error = "ReplyWithError":
        unsafe extern "C" fn(*mut RawContext, *const c_char) -> c_int;
    reply_with_simple_string = "ReplyWithSimpleString":
        unsafe extern "C" fn(*mut RawContext, *const c_char) -> c_int;
    reply_with_string_buffer = "ReplyWithStringBuffer":
        unsafe extern "C" fn(*mut RawContext, *const c_char, usize) -> c_int;
    reply_with_verbatim_string = "ReplyWithVerbatimString":
        unsafe extern "C" fn(*mut RawContext, *const c_char, usize) -> c_int;
    reply_with_long_long = "ReplyWithLongLong":
        unsafe extern "C" fn(*mut RawContext, c_longlong) -> c_int;
    reply_with_array = "ReplyWithArray": unsafe extern "C" fn(*mut RawContext, c_long) -> c_int;
    reply_with_map = "ReplyWithMap": unsafe extern "C" fn(*mut RawContext, c_long) -> c_int;
    register_info_func = "RegisterInfoFunc": unsafe extern "C" fn(*mut RawContext, InfoFn) -> c_int;
    info_add_section = "InfoAddSection": unsafe extern "C" fn(*mut RawInfo, *const c_char) -> c_int;
    info_add_text = "InfoAddFieldCString":
        unsafe extern "C" fn(*mut RawInfo, *const c_char, *const c_char) -> c_int;
    info_add_number = "InfoAddFieldULongLong":
        unsafe extern "C" fn(*mut RawInfo, *const c_char, c_ulonglong) -> c_int;
    subscribe_to_server_event = "SubscribeToServerEvent":
        unsafe extern "C" fn(*mut RawContext, RawEvent, Option<EventFn>) -> c_int;
    register_numeric_config = "RegisterNumericConfig":
        unsafe extern "C" fn(
            *mut RawContext, *const c_char, c_longlong, c_uint, c_longlong, c_longlong, GetNumber,
            SetNumber, NoApply, *mut c_void
        ) -> c_int;
    register_enum_config = "RegisterEnumConfig":
        unsafe extern "C" fn(
            *mut RawContext, *const c_char, c_int, c_uint, *const *const c_char, *const c_int,
            c_int, GetChoice, SetChoice, NoApply, *mut c_void
        ) -> c_int;
    register_string_config = "RegisterStringConfig":
        unsafe extern "C" fn(
            *mut RawContext, *const c_char, *const c_char, c_uint, GetText, SetText, NoApply,
            *mut c_void
        ) -> c_int;
    event_loop_add = "EventLoopAdd": unsafe extern "C" fn(c_int, c_int, FdFn, *mut c_void) -> c_int;
    event_loop_del = "EventLoopDel": unsafe extern "C" fn(c_int, c_int) -> c_int;
    replicate = "Replicate":
        unsafe extern "C" fn(*mut RawContext, *const c_char, *const c_char, ...) -> c_int;
    load_configs = "LoadConfigs": unsafe extern "C" fn(*mut RawContext) -> c_int;
    detached_context = "GetDetachedThreadSafeContext":
        unsafe extern "C" fn(*mut RawContext) -> *mut RawContext;
    context_flags = "GetContextFlags": unsafe extern "C" fn(*mut RawContext) -> c_int;
    avoid_replica_traffic = "AvoidReplicaTraffic": unsafe extern "C" fn() -> c_int;
    select_db = "SelectDb": unsafe extern "C" fn(*mut RawContext, c_int) -> c_int;
    user_from_name = "GetModuleUserFromUserName":
        unsafe extern "C" fn(*mut RawString) -> *mut RawUser;
    free_user = "FreeModuleUser": unsafe extern "C" fn(*mut RawUser) -> c_int;
    may_call = "ACLCheckCommandPermissions":
        unsafe extern "C" fn(*mut RawUser, *mut *mut RawString, c_int) -> c_int;
    client_id = "GetClientId": unsafe extern "C" fn(*mut RawContext) -> c_ulonglong;
    client_info = "GetClientInfoById": unsafe extern "C" fn(*mut RawClientInfo, u64) -> c_int;
    client_user_name = "GetClientUserNameById":
        unsafe extern "C" fn(*mut RawContext, u64) -> *mut RawString;
    close_client = "DeauthenticateAndCloseClient":
        unsafe extern "C" fn(*mut RawContext, u64) -> c_int;
    client_name = "GetClientNameById":
        unsafe extern "C" fn(*mut RawContext, u64) -> *mut RawString;
    set_client_name = "SetClientNameById": unsafe extern "C" fn(u64, *mut RawString) -> c_int;
    open_key = "OpenKey":
        unsafe extern "C" fn(*mut RawContext, *mut RawString, c_int) -> *mut RawKey;
    close_key = "CloseKey": unsafe extern "C" fn(*mut RawKey);
    key_type = "KeyType": unsafe extern "C" fn(*mut RawKey) -> c_int;
    value_length = "ValueLength": unsafe extern "C" fn(*mut RawKey) -> usize;
    string_dma = "StringDMA": unsafe extern "C" fn(*mut RawKey, *mut usize, c_int) -> *mut c_char;
    subscribe_to_keyspace_events = "SubscribeToKeyspaceEvents":
        unsafe extern "C" fn(*mut RawContext, c_int, KeyspaceFn) -> c_int;
    notify_keyspace_event = "NotifyKeyspaceEvent":
        unsafe extern "C" fn(*mut RawContext, c_int, *const c_char, *mut RawString) -> c_int;
    create_timer = "CreateTimer":
        unsafe extern "C" fn(*mut RawContext, i64, TimerFn, *mut c_void) -> u64;
    register_cluster_message_receiver = "RegisterClusterMessageReceiver":
        unsafe extern "C" fn(*mut RawContext, u8, ClusterMessageFn);
    send_cluster_message = "SendClusterMessage":
        unsafe extern "C" fn(*mut RawContext, *const c_char, u8, *const c_char, u32) -> c_int;
    cluster_nodes_list = "GetClusterNodesList":
        unsafe extern "C" fn(*mut RawContext, *mut usize) -> *mut *mut c_char;
    free_cluster_nodes_list = "FreeClusterNodesList": unsafe extern "C" fn(*mut *mut c_char);
    cluster_node_info = "GetClusterNodeInfo":
        unsafe extern "C" fn(
            *mut RawContext, *const c_char, *mut c_char, *mut c_char, *mut c_int, *mut c_int
        ) -> c_int;
} optional {
    // Since 7.2: the modes that `open_key` supports.
    open_key_modes = "GetOpenKeyModesAll": unsafe extern "C" fn() -> c_int;
    // Since 7.0.6. Before, calls cannot check a user's rights.
    set_context_user = "SetContextUser": unsafe extern "C" fn(*mut RawContext, *const RawUser);
    // Since 7.2. Before, commands of modules are in no category except @all.
    set_command_acl_categories = "SetCommandACLCategories":
        unsafe extern "C" fn(*mut RawCommand, *const c_char) -> c_int;
} }

/// Finds a function of the API by its name.
///
/// # Safety
/// `get_api` is the engine's function, and `name` ends with a zero.
pub(super) unsafe fn find(get_api: GetApi, name: &str) -> Option<*mut c_void> {
    let mut found = ptr::null_mut();
    // SAFETY: the caller guarantees that `get_api` is the engine's function and that `name` ends
    // with a zero. The engine reads the name and writes one pointer.
    let answer = unsafe { get_api(name.as_ptr().cast(), &raw mut found) };
    (answer == OK && !found.is_null()).then_some(found)
}
