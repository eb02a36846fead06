//! What the engine calls. Every function here is behind [`guard`]: no panic leaves it.
//!
//! The order in `load` matters. A module that is refused is freed by the engine, but for its
//! subscriptions to events: those come last, when nothing can fail any more.
#![expect(unsafe_code, reason = "functions that C calls, and the pointers that it gives them")]

use std::ffi::{c_char, c_int, c_longlong, c_void};
use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

use crate::api::{
    self, Context, ERR, Info, OK, RawContext, RawEvent, RawInfo, RawString, Reply, flag,
};
use crate::capacity;
use crate::clients;
use crate::command::{self, SUBCOMMANDS, Subcommand};
use crate::event_loop;
use crate::info;
use crate::log;
use crate::module::{Module, replace_module, with_module};
use crate::options::{Kind, Options, SETTINGS, SettingValue};

const NAME: &std::ffi::CStr = c"ferrite";
/// For MODULE LIST: a number, as it is there for modules.
const VERSION: i32 = 1;
/// The first that has CONFIG for modules and subcommands.
const OLDEST: u32 = 0x0007_0000;
const VALKEY_9: u32 = 0x0009_0000;

/// Runs what a callback does. A panic is logged, and this is the answer then.
fn guard<T>(what: &str, otherwise: T, act: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(act)).unwrap_or_else(|panic| {
        let words = panic.downcast_ref::<String>().map(String::as_str);
        let words = words.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no words");
        // Not by `tracing`: it may be what panicked.
        let _ = catch_unwind(|| api::log(c"warning", &format!("a bug: panic in {what}: {words}")));
        otherwise
    })
}

/// The engine loads the module.
///
/// # Safety
/// Called by an engine that has the module API, with its context and arguments.
#[unsafe(no_mangle)]
unsafe extern "C" fn RedisModule_OnLoad(
    raw: *mut RawContext,
    argv: *mut *mut RawString,
    argc: c_int,
) -> c_int {
    guard("OnLoad", ERR, || {
        // SAFETY: the engine's context, for the length of this call, on its main thread.
        let Some(context) = (unsafe { Context::new(raw) }) else { return ERR };
        if let Err(missing) = context.find_api() {
            context.log_without_api(&format!(
                "ferrite: this engine's module API lacks {}: Redis 7.0 or Valkey 7.2 is the oldest that will do",
                missing.join(", ")
            ));
            return ERR;
        }
        // SAFETY: the arguments are the engine's, for the length of this call.
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

/// Never: sessions live in this process, and their threads and memory cannot be taken back safely.
#[unsafe(no_mangle)]
extern "C" fn RedisModule_OnUnload(_: *mut RawContext) -> c_int {
    guard("OnUnload", ERR, || {
        api::log(c"warning", "the module cannot be unloaded: restart the engine without it");
        ERR
    })
}

fn load(context: Context<'_>, arguments: &[String]) -> Result<(), String> {
    if !context.set_name(NAME, VERSION) {
        return Err("a module of this name is loaded already".into());
    }
    log::install();
    let server = context.server();
    if server.version < OLDEST {
        return Err(format!(
            "engine version {:#08x} is too old: Redis 7.0 or Valkey 7.2 will do",
            server.version
        ));
    }
    let options = Options::from_arguments(arguments)?;
    replace_module(Some(Module::new(options.clone())));
    let begun = begin(context, &options);
    if begun.is_err() {
        replace_module(None); // not before: another of this name would lose its own
    }
    begun
}

fn begin(context: Context<'_>, options: &Options) -> Result<(), String> {
    register_settings(context, options)?;
    // Sets every one of them, by the callbacks below.
    if !context.load_configs() {
        return Err(
            "a ferrite.* setting in the configuration was refused; the engine's line above names it".into()
        );
    }
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
        return Err("the engine takes no INFO section".into());
    }
    with_module(|module| module.begin(context)).unwrap_or(Ok(()))?;
    for event in
        [flag::EVENT_CLIENT, flag::EVENT_SHUTDOWN, flag::EVENT_CONFIG, flag::EVENT_CRON_LOOP]
    {
        subscribe(context, event);
    }
    Ok(())
}

fn subscribe(context: Context<'_>, event: u64) {
    if !context.subscribe(event, Some(on_event)) {
        // All engines that got this far have them. Without, the listener still works.
        tracing::warn!("the engine does not tell of its event {event}");
    }
}

/// From now on [`event_loop::turned`] hears of the loop's turns. Not earlier than somebody waits
/// for one: it costs each turn as much as a small command.
pub(crate) fn listen_to_turns(context: Context<'_>) {
    subscribe(context, flag::EVENT_LOOP);
}

fn register_settings(context: Context<'_>, options: &Options) -> Result<(), String> {
    for (index, setting) in SETTINGS.iter().enumerate() {
        let flags = if setting.is_mutable { 0 } else { flag::CONFIG_IMMUTABLE };
        let registered = match (&setting.kind, options.get(index)) {
            (Kind::Number { range, is_size }, SettingValue::Number(default)) => {
                let flags = flags | if *is_size { flag::CONFIG_MEMORY } else { 0 };
                context.register_number(
                    setting.name,
                    *default,
                    flags,
                    *range,
                    (get_number, set_number),
                    index,
                )
            }
            (Kind::Choice(choices), SettingValue::Number(default)) => {
                let default = i32::try_from(*default).unwrap_or(0);
                context.register_choice(
                    setting.name,
                    default,
                    flags,
                    choices,
                    (get_choice, set_choice),
                    index,
                )
            }
            (_, SettingValue::Text(default)) => {
                context.register_text(setting.name, default, flags, (get_text, set_text), index)
            }
            (Kind::Text(_), SettingValue::Number(_)) => false,
        };
        if !registered {
            return Err(format!("the engine takes no setting {}", setting.name.to_string_lossy()));
        }
    }
    Ok(())
}

fn register_commands(context: Context<'_>) -> Result<(), String> {
    let made = context.create_container(NAME, c"admin deny-script allow-loading allow-stale")
        && SUBCOMMANDS.iter().all(|Subcommand { name, flags, categories, .. }| {
            context.create_subcommand(NAME, name, flags, categories, on_command)
        });
    if made { Ok(()) } else { Err("the engine takes no command FERRITE".into()) }
}

/// # Safety
/// `argv` has `argc` strings of the engine's.
unsafe fn words(argv: *mut *mut RawString, argc: c_int) -> Vec<String> {
    let count = usize::try_from(argc).unwrap_or(0);
    if argv.is_null() {
        return Vec::new();
    }
    // SAFETY: the caller's promise.
    (0..count).map(|index| unsafe { api::text_of(*argv.add(index)) }).collect()
}

/// FERRITE, whatever the subcommand.
unsafe extern "C" fn on_command(
    raw: *mut RawContext,
    argv: *mut *mut RawString,
    argc: c_int,
) -> c_int {
    guard("a command", ERR, || {
        // SAFETY: the engine's context and arguments, for the length of this call, on its main
        // thread.
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
        // Whatever happens, there is an answer: a client that gets none loses count.
        let reply = guard("a command", None, || {
            let found = found?;
            if !found.needs.is_empty() && !context.caller_may(found.needs) {
                return Some(command::denied(found));
            }
            with_module(|module| (found.run)(module, words))
        });
        context.reply(&reply.unwrap_or_else(command::failed));
        OK
    })
}

/// The commands that sessions send over their proxy connections. They are about the client that
/// runs them, and answer anybody else with an error.
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
        false => Reply::Error("ERR only sessions of the RDMA listener may run this command".into()),
    })
}

/// INFO.
unsafe extern "C" fn on_info(raw: *mut RawInfo, for_crash_report: c_int) {
    guard("INFO", (), || {
        // SAFETY: the engine's, for the length of this call.
        let Some(out) = (unsafe { Info::new(raw) }) else { return };
        let in_crash = for_crash_report != 0;
        let Some(sections) = with_module(|module| info::sections(module, in_crash)) else { return };
        out.section(c"", &sections.general);
        out.section(c"rdma", &sections.rdma);
    });
}

/// A client's end, shutdown, CONFIG SET of anybody's settings, and the engine's heartbeat.
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
        // SAFETY: the engine's context, for the length of this call, on its main thread.
        let Some(context) = (unsafe { Context::new(raw) }) else { return };
        if event.id == flag::EVENT_LOOP {
            if subevent == flag::EVENT_LOOP_AFTER_SLEEP {
                event_loop::turned();
            }
            return;
        }
        with_module(|module| match event.id {
            flag::EVENT_SHUTDOWN => module.end(),
            flag::EVENT_CRON_LOOP => module.beat(context),
            flag::EVENT_CONFIG => module.follow_engine(context),
            _ => {}
        });
    });
}

/// A descriptor of ours is readable.
unsafe extern "C" fn on_readable(descriptor: c_int, _: *mut c_void, _: c_int) {
    guard("the loop", (), || event_loop::turn(descriptor));
}

/// The loop turns when one of these is readable.
pub(crate) fn listen_to(descriptors: &[RawFd]) -> Result<(), String> {
    match descriptors.iter().all(|descriptor| api::listen_to(*descriptor, on_readable)) {
        true => Ok(()),
        false => Err("the engine's loop takes no descriptors of ours".into()),
    }
}

/// The value of the setting that `private` numbers.
fn get(private: *mut c_void) -> Option<SettingValue> {
    let index = private.addr();
    with_module(|module| (index < SETTINGS.len()).then(|| module.options.get(index).clone()))?
}

/// Sets it, or tells the engine why not.
fn set(private: *mut c_void, value: SettingValue, why_not: *mut *mut RawString) -> c_int {
    let index = private.addr();
    let set =
        if index < SETTINGS.len() { with_module(|module| module.set(index, value)) } else { None };
    match set.unwrap_or_else(|| Err("not now".into())) {
        Ok(()) => OK,
        Err(text) => {
            if !why_not.is_null() {
                // SAFETY: the engine's place for a string, which it frees.
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

/// The strings that CONFIG GET was last answered with, by setting: they are ours to keep until the
/// next answer. Addresses of [`RawString`]s that [`api::new_string`] made.
static ANSWERS: Mutex<[usize; SETTINGS.len()]> = Mutex::new([0; SETTINGS.len()]);

unsafe extern "C" fn get_text(_: *const c_char, private: *mut c_void) -> *mut RawString {
    guard("CONFIG GET", std::ptr::null_mut(), || {
        let text = match get(private) {
            Some(SettingValue::Text(text)) => text,
            _ => String::new(),
        };
        let answer = api::new_string(&text);
        let mut answers = ANSWERS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let kept = &mut answers[private.addr().min(SETTINGS.len() - 1)];
        let before = std::mem::replace(kept, answer.expose_provenance());
        if before != 0 {
            // SAFETY: made here, given to nobody who keeps it, and no longer in the list.
            unsafe { api::free_string(std::ptr::with_exposed_provenance_mut(before)) };
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
        // SAFETY: the engine's string, for the length of this call.
        let text = unsafe { api::text_of(value) };
        set(private, SettingValue::Text(text), why_not)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_panic_leaves_a_callback() {
        assert_eq!(guard("a test", ERR, || panic!("out of {}", "words")), ERR);
        assert_eq!(guard("a test", ERR, || OK), OK);
    }

    /// Without an engine behind them: as after a load that was refused.
    #[test]
    fn callbacks_without_a_module_answer() {
        let nothing = std::ptr::null_mut();
        // SAFETY: none of them uses a pointer that is null.
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
