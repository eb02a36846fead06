//! Commands run by the engine on our behalf, outside of any command: the part of the module API
//! that crashes the engine if it is used as it looks.
//!
//! - The context is a detached one. With any other, Redis 7.0 dies when it refuses a call by the
//!   user's rights.
//! - `E` always: Valkey 9.1 dies when it refuses a call without.
//! - `!` always: without, Redis 7.0 drops the writes of the whole batch from AOF and replicas.
//! - After a batch on Redis 7.0: [`CallContext::propagate`], or it dies before it sleeps.
//! - Which commands may be called, and when, is for `crate::calls` to know.
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

/// The most arguments of a call after the command's name. Lists of strings, the API's way for more,
/// change how the engine encodes values.
const ARGS_MAX: usize = 32;

/// `b` is an argument by address and length. A call with fewer takes the end of it.
///
/// `!` to AOF and replicas, `E` refusals are replies, `M` none that takes memory when there is
/// none, `S` only what scripts may call and only when they may write, `C` within the user's rights,
/// `3` RESP3.
const AS_USER: &CStr = c"bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb!EMSC";
const AS_USER_RESP3: &CStr = c"bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb!EMSC3";
/// By the module itself, which may everything.
const AS_MODULE: &CStr = c"bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbE";

/// Of `errno`, on Linux.
const EACCES: c_int = 13;

/// A class of keyspace events that no engine and, so we hope, no other module has.
const OUR_EVENTS: c_int = 1 << 30;

/// What the engine is at; numbers of the API.
pub(crate) mod state {
    pub(crate) const SCRIPT: i32 = 1 << 0;
    pub(crate) const MULTI: i32 = 1 << 1;
    pub(crate) const REPLICA: i32 = 1 << 3;
    pub(crate) const CLUSTER: i32 = 1 << 5;
    pub(crate) const AOF: i32 = 1 << 6;
    pub(crate) const LOADING: i32 = 1 << 13;
    pub(crate) const CHILD: i32 = 1 << 20;
    pub(crate) const ASYNC_LOADING: i32 = 1 << 23;
}

unsafe extern "C" {
    /// Of the C library: where this thread's `errno` is.
    safe fn __errno_location() -> *mut c_int;
}

/// A context of our own, for the engine's main thread. It is not freed: there is one per load, and
/// at the end of the process, when it could be, the engine's own things go.
pub(crate) struct CallContext {
    raw: NonNull<RawContext>,
    /// Whether [`Self::propagate`] has its subscriber.
    is_subscribed: bool,
}

impl CallContext {
    /// `None` if this engine cannot hold a call to a user's rights, or gives no context.
    pub(crate) fn new(context: Context<'_>) -> Option<Self> {
        api().set_context_user?;
        // SAFETY: the context is the engine's, and has a module: ours.
        let raw = unsafe { (api().detached_context)(context.raw()) };
        NonNull::new(raw).map(|raw| Self { raw, is_subscribed: false })
    }

    pub(super) fn raw(&self) -> *mut RawContext {
        self.raw.as_ptr()
    }

    /// For what the module asks for itself.
    pub(crate) fn context(&self) -> Option<Context<'_>> {
        // SAFETY: it is there as long as this is, and used on the engine's main thread alone, as
        // this is.
        unsafe { Context::new(self.raw.as_ptr()) }
    }

    /// What the engine is at: see [`state`].
    pub(crate) fn state(&self) -> i32 {
        // SAFETY: the context is there as long as this is.
        unsafe { (api().context_flags)(self.raw.as_ptr()) }
    }

    /// Whether clients are paused: a write now would be one that replicas must not get, and the
    /// engine dies of it.
    pub(crate) fn is_paused(&self) -> bool {
        // SAFETY: it takes nothing.
        unsafe { (api().avoid_replica_traffic)() != 0 }
    }

    /// For the calls to come; false if there is no such database.
    pub(crate) fn select(&self, db: i32) -> bool {
        // SAFETY: the context is there as long as this is.
        unsafe { (api().select_db)(self.raw.as_ptr(), db) == OK }
    }

    /// Calls as this user, who is looked for now: one that was kept may be deleted by the next
    /// command. `None`: there is none.
    pub(crate) fn act_as(&mut self, name: &Text) -> Option<Acting<'_>> {
        let set_user = api().set_context_user?;
        // SAFETY: the string is there, and only read. The user is freed by `Acting`, after the
        // context has forgotten it.
        let user = unsafe {
            let user = NonNull::new((api().user_from_name)(name.0.as_ptr()))?;
            set_user(self.raw.as_ptr(), user.as_ptr());
            user
        };
        Some(Acting { context: self, user })
    }

    /// A reply to a command of the module's own, as it would be on a connection. `None` if it was
    /// refused.
    pub(crate) fn ask(&self, name: &CStr, args: &[&[u8]]) -> Option<Vec<u8>> {
        let (name, mut reply) = (name.to_bytes(), Vec::new());
        let outcome =
            self.call(name, AS_MODULE, args.len(), |index| args.get(index).copied(), &mut reply);
        (outcome == Outcome::Done).then_some(reply)
    }

    /// Sends what the calls of a batch wrote to the AOF and to replicas. Redis 7.0 does it where a
    /// context of its own ends, and calls from a file's event have none; an event does it, whose
    /// only subscriber is us. Later engines do it with each call.
    pub(crate) fn propagate(&mut self, key: &Text) {
        let raw = self.raw.as_ptr();
        // SAFETY: the context is there as long as this is; the function stays; strings are only
        // read. Subscribed not earlier than here, since a module that is refused at load leaves its
        // subscriptions behind.
        unsafe {
            if !self.is_subscribed {
                (api().subscribe_to_keyspace_events)(raw, OUR_EVENTS, on_nothing);
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
        // The name as it came: the slow log and MONITOR show it. At least one zero stays behind it.
        let mut terminated = [0; NAME_MAX + 1];
        let (Some(place), Some(skipped)) =
            (terminated[..NAME_MAX].get_mut(..name.len()), ARGS_MAX.checked_sub(count))
        else {
            return Outcome::Refused;
        };
        place.copy_from_slice(name);
        let errno = __errno_location();
        // SAFETY: `errno` is this thread's. The name ends with a zero. The format has as many `b`
        // as there are arguments, of which each is there until the call is over. The reply is used
        // before it is freed, and is as long as the engine says.
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
            // Refused before it ran: that leaves a number in `errno`. A command that ran may leave
            // one too, but not by rule, and one that ran and failed has changed nothing.
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

    /// # Safety
    /// `name` ends with a zero, and `format` has `count` times `b`.
    unsafe fn raw_call<'a>(
        &self,
        name: *const c_char,
        format: &CStr,
        count: usize,
        arg: impl Fn(usize) -> Option<&'a [u8]>,
    ) -> *mut RawReply {
        let at =
            |index: usize| arg(index).map_or((ptr::null(), 0), |arg| (arg.as_ptr(), arg.len()));
        // Arguments beyond the format's are not looked at, so that a few lengths do for all.
        macro_rules! call {
            ($($index:literal)*) => {
                // SAFETY: a pair for each `b`, and maybe more. The context is there as long as this
                // is.
                unsafe {
                    (api().call)(self.raw.as_ptr(), name, format.as_ptr() $(, at($index).0, at($index).1)*)
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
                call!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31)
            }
        }
    }
}

/// Whether a call ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It did, and its reply, which may be an error, was appended.
    Done,
    /// It did not, and nothing was appended.
    Refused,
    /// The same, since the user may not.
    Denied,
}

/// Calls as a user. Within one callback: the user may be deleted in the next.
pub(crate) struct Acting<'a> {
    context: &'a mut CallContext,
    pub(super) user: NonNull<RawUser>,
}

impl Acting<'_> {
    pub(super) fn raw_context(&self) -> *mut RawContext {
        self.context.raw.as_ptr()
    }

    pub(crate) fn call(&mut self, words: Words<'_>, resp3: bool, out: &mut Vec<u8>) -> Outcome {
        let format = if resp3 { AS_USER_RESP3 } else { AS_USER };
        let (Some(name), args) = (words.get(0), words.args()) else { return Outcome::Refused };
        self.context.call(name, format, args.len(), |index| args.get(index), out)
    }

    /// Whether the user may call this. A call would say so too, and leave a word of it in ACL LOG.
    pub(crate) fn may<'w>(&self, words: impl Iterator<Item = &'w [u8]>) -> bool {
        let Some(words) = words.map(Text::of).collect::<Option<Vec<_>>>() else {
            return false;
        };
        let mut raw: Vec<_> = words.iter().map(Text::as_ptr).collect();
        let count = raw.len() as c_int; // a few
        // SAFETY: the user is there as long as this is, and the strings until the end of this.
        unsafe { (api().may_call)(self.user.as_ptr(), raw.as_mut_ptr(), count) == OK }
    }

    pub(crate) fn propagate(&mut self, key: &Text) {
        self.context.propagate(key);
    }
}

impl Drop for Acting<'_> {
    fn drop(&mut self) {
        // SAFETY: the context is there; it forgets the user before that is freed. Only our handle
        // of the user is: he is the engine's.
        unsafe {
            if let Some(set_user) = api().set_context_user {
                set_user(self.context.raw.as_ptr(), ptr::null());
            }
            (api().free_user)(self.user.as_ptr());
        }
    }
}

/// A string of the engine's that is ours.
pub(crate) struct Text(NonNull<RawString>, PhantomData<*mut ()>);

impl Text {
    pub(crate) fn new(text: &str) -> Option<Self> {
        Self::of(text.as_bytes())
    }

    pub(crate) fn of(bytes: &[u8]) -> Option<Self> {
        // SAFETY: the bytes are copied. Without a context the string is nobody's but ours.
        let raw =
            unsafe { (api().create_string)(ptr::null_mut(), bytes.as_ptr().cast(), bytes.len()) };
        NonNull::new(raw).map(|raw| Self(raw, PhantomData))
    }

    /// Takes a string that the engine made; `None` if it is null.
    ///
    /// # Safety
    /// The string is the caller's to free, and is used by nobody else.
    pub(super) unsafe fn from_raw(raw: *mut RawString) -> Option<Self> {
        NonNull::new(raw).map(|raw| Self(raw, PhantomData))
    }

    pub(super) fn as_ptr(&self) -> *mut RawString {
        self.0.as_ptr()
    }
}

impl Drop for Text {
    fn drop(&mut self) {
        // SAFETY: made by `new_string`, and nobody uses it any more.
        unsafe { super::free_string(self.0.as_ptr()) };
    }
}

/// That there is somebody is all that [`CallContext::propagate`] needs.
unsafe extern "C" fn on_nothing(
    _: *mut RawContext,
    _: c_int,
    _: *const c_char,
    _: *mut RawString,
) -> c_int {
    OK
}
