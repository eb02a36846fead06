//! The callbacks that the engine calls. Each one runs in [`guard`], so that no panic leaves it.
//!
//! The order in `load` matters. If a load fails, the engine frees the module but keeps its event
//! subscriptions. Therefore the module subscribes last, when nothing can fail any more.
#![expect(unsafe_code, reason = "functions that C calls, and the pointers that it gives them")]

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_longlong, c_void};
use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::time::Duration;

use crate::api::cluster::NodeId;
use crate::api::{
    self, Context, ERR, Info, OK, RawContext, RawEvent, RawInfo, RawString, Reply, flag,
};
use crate::capacity;
use crate::clients;
use crate::command::{self, SUBCOMMANDS, Subcommand};
use crate::endpoints;
use crate::event_loop;
use crate::info;
use crate::log;
use crate::module::{Callbacks, Module, replace_module, with_module};
use crate::options::{Options, SETTINGS, SettingValue, Shape, is_mutable};

const NAME: &std::ffi::CStr = c"ferrite";
/// The module's version as MODULE LIST shows it.
const VERSION: i32 = 1;
/// Redis 7.0, the first engine with subcommands and CONFIG settings of modules.
const OLDEST: u32 = 0x0007_0000;
const VALKEY_9: u32 = 0x0009_0000;

/// Runs the body of a callback. If it panics, logs that and returns `otherwise`.
fn guard<T>(what: &str, otherwise: T, act: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(act)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
        // `tracing` itself may have panicked, so this logs directly.
        let _ = catch_unwind(|| api::log(c"warning", &format!("a bug: panic in {what}: {text}")));
        otherwise
    })
}

/// Loads the module.
///
/// # Safety
/// The caller is an engine that has the module API, and passes its context and arguments.
#[unsafe(no_mangle)]
unsafe extern "C" fn RedisModule_OnLoad(
    raw: *mut RawContext,
    argv: *mut *mut RawString,
    argc: c_int,
) -> c_int {
    guard("OnLoad", ERR, || {
        // SAFETY: the engine's context is valid until this callback, on its main thread, returns.
        let Some(context) = (unsafe { Context::new(raw) }) else { return ERR };
        if let Err(missing) = context.find_api() {
            context.log_without_api(&format!(
                "ferrite: not loaded: this engine's module API lacks {}; use Redis 7.0, \
                 Valkey 7.2 or later",
                missing.join(", ")
            ));
            return ERR;
        }
        // SAFETY: the engine's arguments are valid until this callback returns.
        let arguments = unsafe { words(argv, argc) };
        match load(context, &arguments) {
            Ok(()) => OK,
            Err(why) => {
                api::log(c"warning", &format!("not loaded: {why}"));
                ERR
            }
        }
    })
}

/// Refuses to unload the module: the threads and the memory of its sessions cannot be reclaimed
/// safely.
#[unsafe(no_mangle)]
extern "C" fn RedisModule_OnUnload(_: *mut RawContext) -> c_int {
    guard("OnUnload", ERR, || {
        api::log(c"warning", "the module cannot be unloaded; restart the engine without it");
        ERR
    })
}

fn load(context: Context<'_>, arguments: &[String]) -> Result<(), String> {
    if !context.set_name(NAME, VERSION) {
        return Err("another module named ferrite is already loaded".into());
    }
    log::install();
    let server = context.server();
    if server.version < OLDEST {
        return Err(format!(
            "engine version {:#08x} is too old; use Redis 7.0, Valkey 7.2 or later",
            server.version
        ));
    }
    let options = Options::from_arguments(arguments)?;
    let callbacks =
        Callbacks { watch: watch_descriptors, subscribe_to_loop: subscribe_to_loop_iterations };
    replace_module(Some(Module::new(options.clone(), callbacks)));
    let started = start(context, &options);
    if started.is_err() {
        // The module is removed only here: a second load fails earlier and must not remove the
        // module that runs.
        replace_module(None);
    }
    started
}

fn start(context: Context<'_>, options: &Options) -> Result<(), String> {
    register_settings(context, options)?;
    // This calls the setter of every setting.
    if !context.load_configs() {
        return Err("the engine's configuration has an invalid ferrite.* setting; \
                    the log line above names it"
            .into());
    }
    with_module(|module| module.check_options()).unwrap_or(Ok(()))?;
    register_commands(context)?;
    let server = context.server();
    context.set_options(
        flag::HANDLE_REPL_ASYNC_LOAD
            | if server.is_valkey && server.version >= VALKEY_9 {
                flag::HANDLE_ATOMIC_SLOT_MIGRATION
            } else {
                0
            },
    );
    if !context.register_info(on_info) {
        return Err("the engine refused to register the module's INFO sections".into());
    }
    with_module(|module| module.start(context)).unwrap_or(Ok(()))?;
    for event in [flag::EVENT_CLIENT, flag::EVENT_SHUTDOWN, flag::EVENT_CONFIG] {
        subscribe(context, event);
    }
    if let Some(cluster) = context.cluster() {
        cluster.receive(endpoints::MESSAGE_TYPE, on_cluster_message);
        context.call_after(Duration::ZERO, on_timer);
    }
    Ok(())
}

fn subscribe(context: Context<'_>, event: u64) {
    if !context.subscribe(event, Some(on_event)) {
        // All engines that can load the module have these events. The listener works without them.
        tracing::warn!("the engine refused the subscription to server event {event}");
    }
}

/// Makes the engine call [`event_loop::on_loop_iteration`] in every iteration of its event loop.
fn subscribe_to_loop_iterations(context: Context<'_>) {
    subscribe(context, flag::EVENT_LOOP);
}

fn register_settings(context: Context<'_>, options: &Options) -> Result<(), String> {
    for (index, setting) in SETTINGS.iter().enumerate() {
        let flags = if is_mutable(setting) { 0 } else { flag::CONFIG_IMMUTABLE };
        let name = CString::new(setting.name).map_err(|error| error.to_string())?;
        let registered = match (Shape::of(setting), options.get(index)) {
            (Shape::Number { range, is_size }, SettingValue::Number(default)) => {
                let flags = flags | if is_size { flag::CONFIG_MEMORY } else { 0 };
                context.register_number(
                    &name,
                    default,
                    flags,
                    range,
                    (get_number, set_number),
                    index,
                )
            }
            (Shape::Choice(words), SettingValue::Number(default)) => {
                let default = i32::try_from(default).unwrap_or(0);
                let words: Vec<_> = words.iter().map(CString::as_c_str).collect();
                context.register_choice(
                    &name,
                    default,
                    flags,
                    &words,
                    (get_choice, set_choice),
                    index,
                )
            }
            (Shape::Text, SettingValue::Text(default)) => {
                context.register_text(&name, &default, flags, (get_text, set_text), index)
            }
            _ => false,
        };
        if !registered {
            return Err(format!("the engine refused to register the setting {}", setting.name));
        }
    }
    Ok(())
}

fn register_commands(context: Context<'_>) -> Result<(), String> {
    let registered = context.create_container(NAME, c"admin deny-script allow-loading allow-stale")
        && SUBCOMMANDS.iter().all(|Subcommand { name, flags, categories, .. }| {
            context.create_subcommand(NAME, name, flags, categories, on_command)
        });
    match registered {
        true => Ok(()),
        false => Err("the engine refused to register the command FERRITE".into()),
    }
}

/// Copies the words of a command, or the module's arguments.
///
/// # Safety
/// `argv` is null or points to `argc` valid strings of the engine.
unsafe fn words(argv: *mut *mut RawString, argc: c_int) -> Vec<String> {
    let count = usize::try_from(argc).unwrap_or(0);
    if argv.is_null() {
        return Vec::new();
    }
    // SAFETY: the caller guarantees that `argv` has `argc` strings.
    (0..count).map(|index| unsafe { api::text_of(*argv.add(index)) }).collect()
}

/// Runs FERRITE with any of its subcommands.
unsafe extern "C" fn on_command(
    raw: *mut RawContext,
    argv: *mut *mut RawString,
    argc: c_int,
) -> c_int {
    guard("a command", ERR, || {
        // SAFETY: the engine's context and arguments are valid until this callback, on its main
        // thread, returns.
        let (context, words) = unsafe { (Context::new(raw), words(argv, argc)) };
        let (Some(context), [_, name, words @ ..]) = (context, words.as_slice()) else {
            return ERR;
        };
        let found = SUBCOMMANDS
            .iter()
            .find(|subcommand| subcommand.name.to_bytes().eq_ignore_ascii_case(name.as_bytes()));
        if let Some(reply) = internal_command(context, name, words) {
            context.reply(&reply);
            return OK;
        }
        // There is always a reply: a client that gets none would match later replies to the wrong
        // commands.
        let reply = guard("a command", None, || {
            let found = found?;
            if !found.needs.is_empty() && !context.caller_may(found.needs) {
                return Some(command::denied(found));
            }
            with_module(|module| (found.run)(module, context.client_id(), words))
        });
        context.reply(&reply.unwrap_or_else(command::failed));
        OK
    })
}

/// Runs the commands that sessions send over their proxy connections. They concern the proxy
/// connection that runs them; any other client gets an error. Returns `None` for other commands.
fn internal_command(context: Context<'_>, name: &str, words: &[String]) -> Option<Reply> {
    let is = |other| name.eq_ignore_ascii_case(other);
    let is_done = match words {
        [token] if is("bind") => clients::identify(context, token, false),
        [token] if is("attest") => clients::identify(context, token, true),
        [] if is("mark") => clients::mark(context),
        _ if is("bind") || is("attest") || is("mark") => return Some(Reply::WrongArity),
        _ => return None,
    };
    Some(match is_done {
        true => Reply::Simple("OK".into()),
        false => Reply::Error(
            "ERR only the module's own connections to the engine may run this command".into(),
        ),
    })
}

/// Adds the module's sections to INFO.
unsafe extern "C" fn on_info(raw: *mut RawInfo, for_crash_report: c_int) {
    guard("INFO", (), || {
        // SAFETY: the engine gave `raw` to this callback, and it is valid until the callback
        // returns.
        let Some(out) = (unsafe { Info::new(raw) }) else { return };
        let in_crash = for_crash_report != 0;
        let Some(sections) = with_module(|module| info::sections(module, in_crash)) else { return };
        out.section(c"", &sections.general);
        out.section(c"rdma", &sections.rdma);
    });
}

/// Handles the engine's events: connects and disconnects of clients, shutdown, changed settings,
/// and iterations of the event loop.
unsafe extern "C" fn on_event(
    raw: *mut RawContext,
    event: RawEvent,
    subevent: u64,
    data: *mut c_void,
) {
    guard("an event", (), || {
        if event.id == flag::EVENT_CLIENT {
            match subevent {
                flag::EVENT_CLIENT_CONNECTED => capacity::on_connected(),
                flag::EVENT_CLIENT_DISCONNECTED => {
                    capacity::on_disconnected();
                    // SAFETY: the engine passes this data with its event about a client.
                    if let Some(id) = unsafe { api::clients::client_of_event(data) } {
                        clients::on_disconnected(id);
                    }
                }
                _ => {}
            }
            return;
        }
        // SAFETY: the engine's context is valid until this callback, on its main thread, returns.
        let Some(context) = (unsafe { Context::new(raw) }) else { return };
        if event.id == flag::EVENT_LOOP {
            if subevent == flag::EVENT_LOOP_AFTER_SLEEP {
                event_loop::on_loop_iteration();
            }
            return;
        }
        with_module(|module| match event.id {
            flag::EVENT_SHUTDOWN => module.shut_down(),
            flag::EVENT_CONFIG => module.follow_engine(context),
            _ => {}
        });
    });
}

/// Takes a message of the module of another cluster node.
unsafe extern "C" fn on_cluster_message(
    _: *mut RawContext,
    sender: *const c_char,
    _: u8,
    message: *const u8,
    len: u32,
) {
    guard("a cluster message", (), || {
        // SAFETY: the sender's id, which the engine passes, is valid until this callback returns.
        let Some(sender) = (unsafe { NodeId::copy(sender) }) else { return };
        if message.is_null() {
            return;
        }
        // SAFETY: the engine's message has this length and is valid until this callback returns.
        let message = unsafe { std::slice::from_raw_parts(message, len as usize) };
        // If a callback of the module is running, the message is lost. It will be repeated.
        with_module(|module| module.receive(sender, message));
    });
}

/// Announces the module's endpoints in the cluster, once a second.
unsafe extern "C" fn on_timer(raw: *mut RawContext, _: *mut c_void) {
    guard("a timer", (), || {
        // SAFETY: the engine's context is valid until this callback, on its main thread, returns.
        let Some(context) = (unsafe { Context::new(raw) }) else { return };
        // The timer comes first: a panic in the announcement must not end it.
        context.call_after(endpoints::TICK, on_timer);
        with_module(|module| module.announce(context));
    });
}

/// Runs a slice when one of the module's descriptors is readable.
unsafe extern "C" fn on_readable(descriptor: c_int, _: *mut c_void, _: c_int) {
    guard("the event loop", (), || event_loop::run_slice(descriptor));
}

/// Makes the engine's event loop watch these descriptors.
fn watch_descriptors(descriptors: &[RawFd]) -> Result<(), String> {
    match descriptors.iter().all(|descriptor| api::watch_readable(*descriptor, on_readable)) {
        true => Ok(()),
        false => Err("the engine's event loop refused the module's descriptors".into()),
    }
}

/// Returns the value of the setting whose index is `private`.
fn get(private: *mut c_void) -> Option<SettingValue> {
    let index = private.addr();
    with_module(|module| (index < SETTINGS.len()).then(|| module.options.get(index)))?
}

/// Changes the setting whose index is `private`. On failure, gives the engine the reason.
fn set(private: *mut c_void, value: SettingValue, why_not: *mut *mut RawString) -> c_int {
    let index = private.addr();
    let set =
        if index < SETTINGS.len() { with_module(|module| module.set(index, value)) } else { None };
    match set.unwrap_or_else(|| Err("the module is busy; try again".into())) {
        Ok(()) => OK,
        Err(text) => {
            if !why_not.is_null() {
                // SAFETY: the engine passes a valid place for a string, and frees the string.
                unsafe { *why_not = api::new_string(&text) };
            }
            ERR
        }
    }
}

unsafe extern "C" fn get_number(_: *const c_char, private: *mut c_void) -> c_longlong {
    guard("CONFIG GET", 0, || match get(private) {
        Some(SettingValue::Number(number)) => number,
        _ => 0,
    })
}

unsafe extern "C" fn set_number(
    _: *const c_char,
    value: c_longlong,
    private: *mut c_void,
    why_not: *mut *mut RawString,
) -> c_int {
    guard("CONFIG SET", ERR, || set(private, SettingValue::Number(value), why_not))
}

unsafe extern "C" fn get_choice(_: *const c_char, private: *mut c_void) -> c_int {
    guard("CONFIG GET", 0, || match get(private) {
        Some(SettingValue::Number(number)) => c_int::try_from(number).unwrap_or(0),
        _ => 0,
    })
}

unsafe extern "C" fn set_choice(
    _: *const c_char,
    value: c_int,
    private: *mut c_void,
    why_not: *mut *mut RawString,
) -> c_int {
    guard("CONFIG SET", ERR, || set(private, SettingValue::Number(value.into()), why_not))
}

/// The last string that CONFIG GET returned for each setting. The module owns each string and must
/// keep it until the next CONFIG GET of that setting. The entries are addresses of [`RawString`]s
/// that [`api::new_string`] made.
static ANSWERS: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

unsafe extern "C" fn get_text(_: *const c_char, private: *mut c_void) -> *mut RawString {
    guard("CONFIG GET", std::ptr::null_mut(), || {
        let text = match get(private) {
            Some(SettingValue::Text(text)) => text,
            _ => String::new(),
        };
        let answer = api::new_string(&text);
        let mut answers = ANSWERS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let previous = answers.insert(private.addr(), answer.expose_provenance());
        if let Some(previous) = previous {
            // SAFETY: the string was made here, the engine does not keep it, and it is no longer
            // in the list.
            unsafe { api::free_string(std::ptr::with_exposed_provenance_mut(previous)) };
        }
        answer
    })
}

unsafe extern "C" fn set_text(
    _: *const c_char,
    value: *mut RawString,
    private: *mut c_void,
    why_not: *mut *mut RawString,
) -> c_int {
    guard("CONFIG SET", ERR, || {
        // SAFETY: the engine's string is valid until this callback returns.
        let text = unsafe { api::text_of(value) };
        set(private, SettingValue::Text(text), why_not)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_panic_leaves_a_callback() {
        assert_eq!(guard("a test", ERR, || panic!("on {}", "purpose")), ERR);
        assert_eq!(guard("a test", ERR, || OK), OK);
    }

    /// After a failed load there is no module. In this test there is no engine either.
    #[test]
    fn callbacks_return_without_a_module() {
        let nothing = std::ptr::null_mut();
        // SAFETY: none of these callbacks dereferences a null pointer.
        unsafe {
            assert_eq!(RedisModule_OnLoad(std::ptr::null_mut(), std::ptr::null_mut(), 0), ERR);
            assert_eq!(on_command(std::ptr::null_mut(), std::ptr::null_mut(), 0), ERR);
            assert_eq!(
                (get_number(std::ptr::null(), nothing), get_choice(std::ptr::null(), nothing)),
                (0, 0)
            );
            on_info(std::ptr::null_mut(), 1);
            on_event(
                std::ptr::null_mut(),
                RawEvent { id: flag::EVENT_SHUTDOWN, version: 1 },
                0,
                nothing,
            );
        }
        assert_eq!(RedisModule_OnUnload(std::ptr::null_mut()), ERR);
    }
}
