//! `RedisModule_Call` outside of any command. The obvious use of this part of the module API
//! crashes engines, hence these rules:
//!
//! - Always use a detached context. With any other, Redis 7.0 crashes when it refuses a call for
//!   lack of rights.
//! - Always pass `E`. Without it Valkey 9.1 crashes when it refuses a call.
//! - Always pass `!` for a user's calls. Without it Redis 7.0 propagates no write of the batch to
//!   AOF and replicas.
//! - On Redis 7.0, call [`CallContext::propagate`] after a batch. Otherwise the engine crashes
//!   before its event loop sleeps.
//!
//! `crate::calls` decides which commands may be called, and when.
#![expect(
    unsafe_code,
    reason = "calls by function pointers, with pointers that the engine gave us"
)]

use std::ffi::{CStr, c_char, c_int};
use std::marker::PhantomData;
use std::ptr::{self, NonNull};

use ferrite_proto::resp::Words;

use super::table::{RawContext, RawReply, RawString, RawUser};
use super::{Context, OK, api};
use crate::router::NAME_MAX;

/// The most arguments of a call after the command's name. The API could take more as a vector of
/// strings, but that changes how the engine encodes values.
const ARGS_MAX: usize = 32;

/// The format of a user's call. Each `b` is an argument, passed as an address and a length. A call
/// with fewer arguments uses only the end of the string, with one `b` for each argument. The flags:
///
/// - `!`: propagate to AOF and replicas.
/// - `E`: return a refusal as a reply.
/// - `M`: refuse commands that may need more memory if the engine is beyond `maxmemory`.
/// - `S`: allow only what scripts may call, and writes only when scripts may write.
/// - `C`: check the user's rights.
/// - `3`: reply in RESP3.
const AS_USER: &CStr = c"bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb!EMSC";
const AS_USER_RESP3: &CStr = c"bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb!EMSC3";
/// The format of the module's own calls, which are not subject to any user's rights.
const AS_MODULE: &CStr = c"bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbE";

/// A value of `errno` on Linux.
const EACCES: c_int = 13;

/// A class of keyspace events that no engine uses, and presumably no other module.
const OUR_EVENTS: c_int = 1 << 30;

/// Flags of the engine's state; constants of the module API.
pub(crate) mod state {
    pub(crate) const SCRIPT: i32 = 1 << 0;
    pub(crate) const MULTI: i32 = 1 << 1;
    pub(crate) const REPLICA: i32 = 1 << 3;
    pub(crate) const CLUSTER: i32 = 1 << 5;
    pub(crate) const AOF: i32 = 1 << 6;
    /// Whether the engine saves its data at times (`save`).
    pub(crate) const RDB: i32 = 1 << 7;
    pub(crate) const LOADING: i32 = 1 << 13;
    /// Whether a replica is synchronised and connected to its primary.
    pub(crate) const REPLICA_IS_ONLINE: i32 = 1 << 17;
    pub(crate) const CHILD: i32 = 1 << 20;
    pub(crate) const ASYNC_LOADING: i32 = 1 << 23;
}

unsafe extern "C" {
    /// Returns the address of this thread's `errno`. From the C library.
    safe fn __errno_location() -> *mut c_int;
}

/// A detached context, for calls on the engine's main thread. It is never freed: there is one per
/// load, and at process exit the engine's own structures may already be gone.
pub(crate) struct CallContext {
    raw: NonNull<RawContext>,
    /// Whether [`Self::propagate`] has subscribed to its event.
    is_subscribed: bool,
}

impl CallContext {
    /// Creates a context. Returns `None` if this engine cannot check a user's rights in calls, or
    /// gives no context.
    pub(crate) fn new(context: Context<'_>) -> Option<Self> {
        api().set_context_user?;
        // SAFETY: the context is the engine's and belongs to this module.
        let raw = unsafe { (api().detached_context)(context.raw()) };
        NonNull::new(raw).map(|raw| Self { raw, is_subscribed: false })
    }

    pub(super) fn raw(&self) -> *mut RawContext {
        self.raw.as_ptr()
    }

    /// Returns the context for other functions of the API.
    pub(crate) fn context(&self) -> Option<Context<'_>> {
        // SAFETY: the context is never freed, and this type is used only on the engine's main
        // thread.
        unsafe { Context::new(self.raw.as_ptr()) }
    }

    /// Returns the engine's state as flags of [`state`].
    pub(crate) fn state(&self) -> i32 {
        // SAFETY: the context is never freed.
        unsafe { (api().context_flags)(self.raw.as_ptr()) }
    }

    /// Returns whether clients are paused. Meanwhile nothing may be propagated to replicas, and a
    /// write would crash the engine.
    pub(crate) fn is_paused(&self) -> bool {
        // SAFETY: the function takes no arguments.
        unsafe { (api().avoid_replica_traffic)() != 0 }
    }

    /// Selects the database of the following calls. Returns false if there is no such database.
    pub(crate) fn select(&self, db: i32) -> bool {
        // SAFETY: the context is never freed.
        unsafe { (api().select_db)(self.raw.as_ptr(), db) == OK }
    }

    /// Begins calls as this user. Returns `None` if there is no such user. The user is looked up
    /// each time, since any command may delete it.
    pub(crate) fn act_as(&mut self, name: &EngineString) -> Option<UserCalls<'_>> {
        let set_user = api().set_context_user?;
        // SAFETY: the engine only reads the string, which is valid. `UserCalls` frees the user
        // after it has removed it from the context.
        let user = unsafe {
            let user = NonNull::new((api().user_from_name)(name.0.as_ptr()))?;
            set_user(self.raw.as_ptr(), user.as_ptr());
            user
        };
        Some(UserCalls { context: self, user })
    }

    /// Runs a command as the module itself and returns its reply in RESP2. Returns `None` if the
    /// engine refused the command.
    pub(crate) fn ask(&self, name: &CStr, args: &[&[u8]]) -> Option<Vec<u8>> {
        let (name, mut reply) = (name.to_bytes(), Vec::new());
        let outcome =
            self.call(name, AS_MODULE, args.len(), |index| args.get(index).copied(), &mut reply);
        (outcome == Outcome::Done).then_some(reply)
    }

    /// Propagates the writes of a batch to the AOF and to replicas, on Redis 7.0.
    ///
    /// Redis 7.0 propagates writes when one of its own contexts ends, and calls from the event loop
    /// have no such context. A keyspace event has one. So this function sends an event to which
    /// only this module subscribes. Later engines propagate with each call.
    pub(crate) fn propagate(&mut self, key: &EngineString) {
        let raw = self.raw.as_ptr();
        // SAFETY: the context is never freed; the function remains valid; the engine only reads
        // the strings. The subscription is made only here because a module that fails to load
        // leaves its subscriptions behind.
        unsafe {
            if !self.is_subscribed {
                (api().subscribe_to_keyspace_events)(raw, OUR_EVENTS, ignore_event);
                self.is_subscribed = true;
            }
            (api().notify_keyspace_event)(raw, OUR_EVENTS, c"batch".as_ptr(), key.0.as_ptr());
        }
    }

    fn call<'a>(
        &self,
        name: &[u8],
        format: &CStr,
        count: usize,
        arg: impl Fn(usize) -> Option<&'a [u8]>,
        out: &mut Vec<u8>,
    ) -> Outcome {
        // The name is passed as the client sent it, since the slow log and MONITOR show it. At
        // least one zero byte follows it.
        let mut terminated = [0; NAME_MAX + 1];
        let (Some(buffer), Some(skipped)) =
            (terminated[..NAME_MAX].get_mut(..name.len()), ARGS_MAX.checked_sub(count))
        else {
            return Outcome::Refused;
        };
        buffer.copy_from_slice(name);
        let errno = __errno_location();
        // SAFETY: `errno` is this thread's. The name ends with a zero. The format has one `b` for
        // each argument, and every argument is valid until the call returns. The reply is used only
        // before it is freed, and has the length that the engine returns.
        unsafe {
            *errno = 0;
            let reply = self.raw_call(terminated.as_ptr().cast(), &format[skipped..], count, arg);
            let errno = *errno;
            if reply.is_null() {
                return Outcome::Refused;
            }
            let mut len = 0;
            let bytes = (api().call_reply_proto)(reply, &raw mut len);
            let bytes: &[u8] =
                if bytes.is_null() { &[] } else { std::slice::from_raw_parts(bytes.cast(), len) };
            // The engine sets `errno` if it refuses a command before it runs. A command that ran
            // may by chance also leave an `errno`. If such a command returned an error, it has
            // changed nothing, so it is safe to run it again.
            let is_refused = bytes.is_empty() || (errno != 0 && bytes[0] == b'-');
            if !is_refused {
                out.extend_from_slice(bytes);
            }
            (api().free_call_reply)(reply);
            match (is_refused, errno) {
                (false, _) => Outcome::Done,
                (true, EACCES) => Outcome::Denied,
                (true, _) => Outcome::Refused,
            }
        }
    }

    /// Calls the engine with up to [`ARGS_MAX`] arguments.
    ///
    /// # Safety
    /// `name` ends with a zero, and `format` contains `b` `count` times.
    unsafe fn raw_call<'a>(
        &self,
        name: *const c_char,
        format: &CStr,
        count: usize,
        arg: impl Fn(usize) -> Option<&'a [u8]>,
    ) -> *mut RawReply {
        let at =
            |index: usize| arg(index).map_or((ptr::null(), 0), |arg| (arg.as_ptr(), arg.len()));
        // The engine ignores arguments beyond those in the format, so a few argument counts are
        // enough.
        macro_rules! call {
            ($($index:literal)*) => {
                // SAFETY: each `b` has an address and a length; the engine does not read further
                // ones. The context is never freed.
                unsafe {
                    (api().call)(
                        self.raw.as_ptr(), name, format.as_ptr() $(, at($index).0, at($index).1)*
                    )
                }
            };
        }
        match count {
            0 => call!(),
            1 => call!(0),
            2 => call!(0 1),
            3..=4 => call!(0 1 2 3),
            5..=8 => call!(0 1 2 3 4 5 6 7),
            9..=16 => call!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15),
            _ => {
                call!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15
                    16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31)
            }
        }
    }
}

/// The outcome of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The command ran, and its reply, which may be an error, was appended.
    Done,
    /// The command did not run, or it returned an error and changed nothing. Nothing was appended.
    Refused,
    /// Like [`Outcome::Refused`], but because the user lacks the right.
    Denied,
}

/// Calls as a user, within one callback. The user may be deleted before the next callback.
pub(crate) struct UserCalls<'a> {
    context: &'a mut CallContext,
    pub(super) user: NonNull<RawUser>,
}

impl UserCalls<'_> {
    pub(super) fn raw_context(&self) -> *mut RawContext {
        self.context.raw.as_ptr()
    }

    pub(crate) fn call(&mut self, words: Words<'_>, resp3: bool, out: &mut Vec<u8>) -> Outcome {
        let format = if resp3 { AS_USER_RESP3 } else { AS_USER };
        let (Some(name), args) = (words.get(0), words.args()) else { return Outcome::Refused };
        self.context.call(name, format, args.len(), |index| args.get(index), out)
    }

    /// Returns whether the user may run this command. Unlike a call, this adds nothing to ACL LOG.
    pub(crate) fn may_call<'w>(&self, words: impl Iterator<Item = &'w [u8]>) -> bool {
        let Some(words) = words.map(EngineString::of).collect::<Option<Vec<_>>>() else {
            return false;
        };
        let mut raw: Vec<_> = words.iter().map(EngineString::as_ptr).collect();
        let count = raw.len() as c_int; // few words
        // SAFETY: the user is valid until `self` is dropped, and the strings until this returns.
        unsafe { (api().may_call)(self.user.as_ptr(), raw.as_mut_ptr(), count) == OK }
    }

    pub(crate) fn propagate(&mut self, key: &EngineString) {
        self.context.propagate(key);
    }
}

impl Drop for UserCalls<'_> {
    fn drop(&mut self) {
        // SAFETY: the context is never freed. The user is removed from the context before the
        // handle is freed. The handle is the module's; the user itself belongs to the engine.
        unsafe {
            if let Some(set_user) = api().set_context_user {
                set_user(self.context.raw.as_ptr(), ptr::null());
            }
            (api().free_user)(self.user.as_ptr());
        }
    }
}

/// A string of the engine that the module owns.
pub(crate) struct EngineString(NonNull<RawString>, PhantomData<*mut ()>);

impl EngineString {
    pub(crate) fn new(text: &str) -> Option<Self> {
        Self::of(text.as_bytes())
    }

    pub(crate) fn of(bytes: &[u8]) -> Option<Self> {
        // SAFETY: the engine copies the bytes. Without a context only the module owns the string.
        let raw =
            unsafe { (api().create_string)(ptr::null_mut(), bytes.as_ptr().cast(), bytes.len()) };
        NonNull::new(raw).map(|raw| Self(raw, PhantomData))
    }

    /// Takes ownership of a string that the engine created. Returns `None` if it is null.
    ///
    /// # Safety
    /// The caller owns the string, and nobody else uses it.
    pub(super) unsafe fn from_raw(raw: *mut RawString) -> Option<Self> {
        NonNull::new(raw).map(|raw| Self(raw, PhantomData))
    }

    pub(super) fn as_ptr(&self) -> *mut RawString {
        self.0.as_ptr()
    }
}

impl Drop for EngineString {
    fn drop(&mut self) {
        // SAFETY: the engine created the string, the module owns it, and nobody uses it any more.
        unsafe { super::free_string(self.0.as_ptr()) };
    }
}

/// Does nothing. [`CallContext::propagate`] only needs its event to have a subscriber.
unsafe extern "C" fn ignore_event(
    _: *mut RawContext,
    _: c_int,
    _: *const c_char,
    _: *mut RawString,
) -> c_int {
    OK
}
