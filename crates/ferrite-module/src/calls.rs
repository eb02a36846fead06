//! Commands that run by a call within the engine's own loop, instead of over a connection to its socket.
//!
//! `RedisModule_Call` skips what the engine checks before it runs a client's command. Here is what stands for that, so that a call
//! never does what the same command on a connection would not:
//!
//! | the engine checks | here |
//! |---|---|
//! | loading, a script that runs, paused clients | [`Calls::begin`] gives no batch |
//! | NOAUTH, the user's rights | no batch without a user, who is looked for anew each time; each call is held to his rights |
//! | READONLY, MASTERDOWN, redirects of a cluster | no batch on replicas and in clusters |
//! | MISCONF, NOREPLICAS, memory | each call; memory is freed by eviction on the bridge alone |
//! | unknown commands, arity | each call |
//! | `timeout` | no batch: the session's own connection would be silent |
//! | what needs a client | [`Router`] |
//!
//! A GET of a long value is read by its key instead ([`Keys`]), with the same checks and a copy less.
//!
//! What a call refuses has not run, and goes over the bridge: there the engine gives its own answer, or frees memory, or redirects.

use ferrite_proto::Standing;
use ferrite_proto::resp::{Value, Words};
use ferrite_session::{Callable, Replies};

use crate::api::Context;
use crate::api::calls::{Acting, CallContext, Outcome, Text, state};
use crate::keys::Keys;
use crate::router::Router;

/// While the engine is at any of these, nothing is called. The last two are states that calls could serve in part; their checks
/// are many, and the bridge has them all.
const NOT_NOW: i32 = state::SCRIPT
    | state::MULTI
    | state::LOADING
    | state::ASYNC_LOADING
    | state::CHILD
    | state::REPLICA
    | state::CLUSTER;

/// The first Redis that sends what a call wrote to AOF and replicas at once.
const PROPAGATES: u32 = 0x0007_0200;

/// How many of those who have been denied something are kept in mind.
const DENIED_MAX: usize = 64;

/// The engine, to be called on its main thread, from its loop.
pub(crate) struct Calls {
    context: CallContext,
    router: Router,
    keys: Keys,
    /// Who spoke last: most batches are of one user.
    user: Option<(Box<str>, Text)>,
    /// Users who have been denied something. A call that is denied goes into ACL LOG, and the bridge's denial does once more: who is
    /// here is asked for before, at some cost, so that it happens to each of them once.
    denied: Vec<Box<str>>,
    /// Redis 7.0: the key of the event that ends a batch. See [`CallContext::propagate`].
    batch_key: Option<Text>,
    has_aof: bool,
    syncs_always: bool,
    /// The engine tells of its loop's turns, for which replies wait.
    hears_turns: bool,
    /// The engine hangs up on who is silent for long (`timeout`). Connections of sessions whose commands are called would be.
    ends_the_silent: bool,
}

impl Calls {
    /// An error if this engine cannot be called: all goes over the bridge then.
    pub(crate) fn new(context: Context<'_>) -> Result<Self, String> {
        let server = context.server();
        let (ends_the_silent, syncs_always) = (ends_the_silent(context), syncs_always(context));
        let context = CallContext::new(context)
            .ok_or("the engine cannot hold a call to a user's rights (Redis 7.0.6 is the first that can)")?;
        let table =
            context.ask(c"COMMAND", &[]).ok_or("it does not tell its commands (is COMMAND renamed?)")?;
        let router = Router::from_command_table(&table)?;
        let keys = Keys::new(server).ok_or("no memory")?;
        let batch_key =
            if server.version < PROPAGATES { Some(Text::new("ferrite").ok_or("no memory")?) } else { None };
        let has_aof = context.state() & state::AOF != 0;
        Ok(Self {
            context,
            router,
            keys,
            user: None,
            denied: Vec::new(),
            batch_key,
            has_aof,
            syncs_always,
            hears_turns: false,
            ends_the_silent,
        })
    }

    /// What there is to know of the command of this name (and subcommand), if it may be called at all; everything else goes over
    /// the bridge.
    pub(crate) fn find(&self, name: &[u8], first_arg: Option<&[u8]>) -> Option<Callable> {
        self.router.find(name, first_arg)
    }

    /// How many commands and subcommands may be.
    pub(crate) fn callable_commands(&self) -> usize {
        self.router.len()
    }

    /// A batch for one speaker, if all that the engine would check of his next command allows calls now. `None`: everything goes
    /// over the bridge for now.
    pub(crate) fn begin(&mut self, speaker: &Standing) -> Option<Batch<'_>> {
        let name = speaker.user.as_deref()?;
        let state = self.context.state();
        self.has_aof = state & state::AOF != 0;
        if state & NOT_NOW != 0
            || self.ends_the_silent
            || self.context.is_paused()
            || !i32::try_from(speaker.db).is_ok_and(|db| self.context.select(db))
        {
            return None;
        }
        if self.user.as_ref().is_none_or(|(known, _)| **known != *name) {
            self.user = Some((name.into(), Text::new(name)?));
        }
        let (name, user) = self.user.as_ref()?;
        let acting = self.context.act_as(user)?;
        let is_wary = self.denied.contains(name);
        Some(Batch {
            acting,
            name,
            denied: &mut self.denied,
            is_wary,
            keys: &mut self.keys,
            batch_key: self.batch_key.as_ref(),
            resp3: speaker.resp3,
            leaves: false,
            wrote: false,
        })
    }

    /// Whether replies of a batch may leave only after the loop's next turn. The AOF is written, and with `appendfsync always`
    /// synchronised, when a turn ends: before, an answer to a write could be one to a write that is lost, and with `always` one to a read
    /// could tell of such a write. As of the last batch.
    pub(crate) fn replies_wait(&mut self, wrote: bool) -> bool {
        let wait = self.has_aof && (wrote || self.syncs_always);
        if wait && !std::mem::replace(&mut self.hears_turns, true) {
            self.context.context().into_iter().for_each(crate::entry::listen_to_turns);
        }
        wait
    }

    /// Whether somebody who comes now is the user `default` without a password.
    pub(crate) fn default_user_is_open(&self) -> bool {
        let reply = self.context.ask(c"ACL", &[b"GETUSER", b"default"]);
        reply.as_deref().is_some_and(is_open)
    }

    /// The engine's settings have changed.
    pub(crate) fn follow_engine(&mut self, context: Context<'_>) {
        self.ends_the_silent = ends_the_silent(context);
        self.syncs_always = syncs_always(context);
    }
}

fn ends_the_silent(context: Context<'_>) -> bool {
    context.config(c"timeout").is_some_and(|seconds| seconds != "0")
}

/// An engine that does not say is taken for one that does.
fn syncs_always(context: Context<'_>) -> bool {
    context.config(c"appendfsync").is_none_or(|when| when == "always")
}

/// Whether a reply to ACL GETUSER is of a user who needs no password.
fn is_open(reply: &[u8]) -> bool {
    let Ok(Value::Array(fields)) = Value::parse(reply) else { return false };
    let Some([Value::Bulk(b"flags"), Value::Array(flags)]) = fields.first_chunk() else { return false };
    let has = |wanted: &[u8]| {
        flags.iter().any(|flag| matches!(flag, Value::Bulk(it) | Value::Simple(it) if *it == wanted))
    };
    has(b"on") && has(b"nopass")
}

/// Calls of one speaker, within one callback of the engine's.
pub(crate) struct Batch<'a> {
    acting: Acting<'a>,
    /// Whose it is.
    name: &'a str,
    denied: &'a mut Vec<Box<str>>,
    /// He is among those.
    is_wary: bool,
    keys: &'a mut Keys,
    batch_key: Option<&'a Text>,
    resp3: bool,
    /// A call may have left something for AOF and replicas. Reads do: they delete keys whose time is over.
    leaves: bool,
    wrote: bool,
}

impl Batch<'_> {
    /// Runs a command and appends its reply to `out`. False: it was refused before execution, nothing was appended, and it must go
    /// over the bridge, which gives the exact native answer.
    pub(crate) fn call(&mut self, callable: Callable, words: Words<'_>, out: &mut Replies) -> bool {
        // The engine must not be asked for a user's right to a command that has too few words: Redis 7.0 looks for keys beyond
        // them, and dies.
        if !callable.takes(words.len()) || (self.is_wary && !self.acting.may(words)) {
            return false;
        }
        let Callable { writes, reads_string, .. } = callable;
        let key = if reads_string && words.len() == 2 { words.get(1) } else { None };
        if let Some(key) = key
            && let Some(is_there) = self.keys.read(&mut self.acting, key, self.resp3, out)
        {
            self.leaves |= !is_there;
            return true;
        }
        let out = out.bytes();
        let before = out.len();
        let outcome = self.acting.call(words, self.resp3, out);
        let answer = &out[before..];
        self.leaves |= key.is_none() || !is_value(answer);
        if let Some(key) = key {
            self.keys.learn(key, answer.len());
        }
        match outcome {
            Outcome::Done => self.wrote |= writes,
            Outcome::Denied if !self.is_wary && self.denied.len() < DENIED_MAX => {
                self.is_wary = true;
                self.denied.push(self.name.into());
            }
            Outcome::Denied | Outcome::Refused => {}
        }
        outcome == Outcome::Done
    }

    /// Whether a call may have written.
    pub(crate) fn wrote(&self) -> bool {
        self.wrote
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        if let Some(key) = self.batch_key.filter(|_| self.leaves) {
            self.acting.propagate(key);
        }
    }
}

/// Whether an answer to GET is a string: its key was there.
fn is_value(answer: &[u8]) -> bool {
    answer.starts_with(b"$") && !answer.starts_with(b"$-")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As Redis 7.0 and Valkey 9.1 write it.
    #[test]
    fn a_user_without_a_password_is_open() {
        let reply = |flags: &[&str]| {
            let flags = flags.iter().fold(format!("*{}\r\n", flags.len()), |list, flag| {
                format!("{list}${}\r\n{flag}\r\n", flag.len())
            });
            format!("*4\r\n$5\r\nflags\r\n{flags}$9\r\npasswords\r\n*0\r\n").into_bytes()
        };
        assert!(is_open(&reply(&["on", "nopass", "sanitize-payload"])));
        assert!(!is_open(&reply(&["off", "nopass"])));
        assert!(!is_open(&reply(&["on", "sanitize-payload"])));
        assert!(!is_open(b"*-1\r\n") && !is_open(b"") && !is_open(b"-ERR no such user\r\n"));
    }
}
