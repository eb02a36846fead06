//! Commands that run by a call within the engine's own loop, instead of over a connection to its
//! socket.
//!
//! `RedisModule_Call` skips what the engine checks before it runs a client's command. Here is what
//! stands for that, so that a call never does what the same command on a connection would not:
//!
//! | the engine checks | here |
//! |---|---|
//! | loading, a script that runs, paused clients | [`Calls::begin`] gives no batch |
//! | NOAUTH, the user's rights | no batch unless the engine says that the client is still there and still this user; each call is held to the user's rights |
//! | READONLY, MASTERDOWN, redirects of a cluster | no batch on replicas and in clusters |
//! | MISCONF, NOREPLICAS, memory | each call; memory is freed by eviction on the proxy path alone |
//! | unknown commands, arity | each call |
//! | `timeout` | no batch: the session's own connection would be silent |
//! | what needs a client | [`Router`] |
//!
//! A GET of a long value is read by its key instead ([`Keys`]), with the same checks and a copy
//! less.
//!
//! What a call refuses has not run, and goes over the proxy connection: there the engine gives its
//! own answer, or frees memory, or redirects.

use std::time::Duration;

use ferrite_proto::resp::{Value, Words};
use ferrite_session::{Access, Callable, ClientLimits, CommandKind, ProxyClient as _, Replies};

use crate::api::calls::{Acting, CallContext, Outcome, Text, state};
use crate::api::clients::{client_flag, client_info};
use crate::api::{Context, Server};
use crate::clients::{ClientRecord, DEFAULT_USER};
use crate::keys::Keys;
use crate::router::Router;

/// While the engine is at any of these, nothing is called. The last two are states that calls could
/// serve in part; their checks are many, and the proxy path has them all.
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
    user: Option<(Box<[u8]>, Text)>,
    /// Users who have been denied something. A call that is denied goes into ACL LOG, and the proxy
    /// path's denial does once more: who is here is asked for before, at some cost, so that it
    /// happens to each of them once.
    denied: Vec<Box<[u8]>>,
    /// Whether the engine shows that a client has authenticated.
    shows_authenticated: bool,
    client_limits: ClientLimits,
    /// Redis 7.0: the key of the event that ends a batch. See [`CallContext::propagate`].
    batch_key: Option<Text>,
    has_aof: bool,
    syncs_always: bool,
    /// The engine tells of its loop's turns, for which replies wait.
    hears_turns: bool,
    /// The engine hangs up on who is silent for long (`timeout`). Connections of sessions whose
    /// commands are called would be.
    ends_the_silent: bool,
}

impl Calls {
    /// An error if this engine cannot be called: all goes over the proxy connection then.
    pub(crate) fn new(context: Context<'_>) -> Result<Self, String> {
        let server = context.server();
        let (ends_the_silent, syncs_always) = (ends_the_silent(context), syncs_always(context));
        let client_limits = client_limits(context);
        let context = CallContext::new(context).ok_or(
            "the engine cannot hold a call to a user's rights (Redis 7.0.6 is the first that can)",
        )?;
        let router = Router::new(|names| context.ask(c"COMMAND", names))?;
        let keys = Keys::new(server).ok_or("no memory")?;
        let batch_key = if server.version < PROPAGATES {
            Some(Text::new("ferrite").ok_or("no memory")?)
        } else {
            None
        };
        let has_aof = context.state() & state::AOF != 0;
        Ok(Self {
            context,
            router,
            keys,
            user: None,
            denied: Vec::new(),
            shows_authenticated: shows_authenticated(server),
            client_limits,
            batch_key,
            has_aof,
            syncs_always,
            hears_turns: false,
            ends_the_silent,
        })
    }

    /// Looks up the command that a client has typed, by its name and first argument.
    pub(crate) fn look_up(&mut self, name: &[u8], first_arg: Option<&[u8]>) -> CommandKind {
        let Self { router, context, .. } = self;
        router.look_up(name, first_arg, |name| {
            // Nothing is called while a script runs or data are loaded.
            let is_busy = context.state() & (state::SCRIPT | state::LOADING) != 0;
            if is_busy { None } else { context.ask(c"COMMAND", &[b"INFO", name]) }
        })
    }

    /// How many commands and subcommands may be.
    pub(crate) fn callable_commands(&self) -> usize {
        self.router.len()
    }

    /// Asks the engine what a client is now.
    pub(crate) fn refresh(&mut self, client: &ClientRecord) -> Access {
        const HELD: u64 = client_flag::PUBSUB
            | client_flag::BLOCKED
            | client_flag::TRACKING
            | client_flag::MULTI
            | client_flag::READONLY
            | client_flag::MONITOR;
        let Some(id) = client.id() else {
            return Access::Proxy { in_transaction: false, is_authenticated: false };
        };
        let (false, Some(info)) = (client.is_gone(), client_info(id)) else { return Access::Gone };
        let Some(user) = self.context.with_user_name(id, |name| Box::<[u8]>::from(name)) else {
            return Access::Gone;
        };
        let mut state = client.state();
        if *user != *state.user {
            // A name that was not proven before proves nothing now: the user may have been deleted.
            state.is_default_proven &= state.user.is_empty();
            state.user = user;
        }
        state.db = info.db;
        if std::mem::take(&mut state.is_new) {
            state.is_default_proven |=
                *state.user == *DEFAULT_USER && self.default_user_is_open() == Some(true);
        }
        let is_authenticated = if *state.user != *DEFAULT_USER {
            true
        } else if self.shows_authenticated {
            info.flags & client_flag::AUTHENTICATED != 0
        } else {
            state.is_default_proven
        };
        if info.flags & HELD == 0 && is_authenticated && state.is_identified {
            return Access::InProcess;
        }
        let in_transaction = info.flags & client_flag::MULTI != 0;
        Access::Proxy { in_transaction, is_authenticated }
    }

    /// Returns whether only a command that needs a login can tell whether the client has one, and
    /// the client may run it.
    pub(crate) fn needs_attestation(&mut self, client: &ClientRecord) -> bool {
        let (is_default, is_proven) = {
            let state = client.state();
            (*state.user == *DEFAULT_USER, state.is_default_proven)
        };
        // An engine that lets everybody in would run it for everybody.
        if client.id().is_none()
            || self.shows_authenticated
            || !is_default
            || is_proven
            || self.default_user_is_open() != Some(false)
        {
            return false;
        }
        let words: [&[u8]; 3] = [b"FERRITE", b"ATTEST", b""];
        let acting = Text::of(DEFAULT_USER)
            .and_then(|user| Some(self.context.act_as(&user)?.may(words.into_iter())));
        acting.unwrap_or(false)
    }

    /// Begins a batch of calls for a client, if all that the engine would check of its next command
    /// allows calls now. [`NoBatch::Closed`]: everything is proxied for now.
    pub(crate) fn begin(&mut self, client: &ClientRecord) -> Result<Batch<'_>, NoBatch> {
        let Some(id) = client.id().filter(|_| !client.is_gone()) else {
            return Err(NoBatch::Stale);
        };
        let speaker = client.state();
        // The engine may have freed the client, or have deleted its user, since it was last asked.
        let is_same = self.context.with_user_name(id, |name| *name == *speaker.user);
        if is_same != Some(true) || !speaker.is_identified {
            return Err(NoBatch::Stale);
        }
        let state = self.context.state();
        self.has_aof = state & state::AOF != 0;
        if state & NOT_NOW != 0
            || self.ends_the_silent
            || self.context.is_paused()
            || !self.context.select(i32::from(speaker.db))
        {
            return Err(NoBatch::Closed);
        }
        if self.user.as_ref().is_none_or(|(known, _)| **known != *speaker.user) {
            let name = Text::of(&speaker.user).ok_or(NoBatch::Closed)?;
            self.user = Some((speaker.user.clone(), name));
        }
        let (name, user) = self.user.as_ref().ok_or(NoBatch::Closed)?;
        let acting = self.context.act_as(user).ok_or(NoBatch::Closed)?;
        let is_wary = self.denied.contains(name);
        Ok(Batch {
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

    /// Whether replies of a batch may leave only after the loop's next turn. The AOF is written,
    /// and with `appendfsync always` synchronised, when a turn ends: before, an answer to a write
    /// could be one to a write that is lost, and with `always` one to a read could tell of such a
    /// write. As of the last batch.
    pub(crate) fn replies_wait(&mut self, wrote: bool) -> bool {
        let wait = self.has_aof && (wrote || self.syncs_always);
        if wait && !std::mem::replace(&mut self.hears_turns, true) {
            self.context.context().into_iter().for_each(crate::entry::listen_to_turns);
        }
        wait
    }

    /// Returns whether a client that connects now is the user `default` without a password. `None`:
    /// the engine does not tell (ACL is renamed, say).
    pub(crate) fn default_user_is_open(&self) -> Option<bool> {
        self.context.ask(c"ACL", &[b"GETUSER", b"default"]).as_deref().map(is_open)
    }

    /// Returns how many clients the engine has, if it tells.
    pub(crate) fn connected_clients(&self) -> Option<u64> {
        let info = self.context.ask(c"INFO", &[b"clients"])?;
        let field = info
            .split(|byte| *byte == b'\n')
            .find_map(|line| line.strip_prefix(b"connected_clients:"))?;
        std::str::from_utf8(field).ok()?.trim_end().parse().ok()
    }

    /// The engine's settings have changed.
    pub(crate) fn follow_engine(&mut self, context: Context<'_>) {
        self.ends_the_silent = ends_the_silent(context);
        self.syncs_always = syncs_always(context);
        self.client_limits = client_limits(context);
    }

    /// Shows the name of a client's user.
    pub(crate) fn user_of(&self, id: u64) -> Option<String> {
        self.context.with_user_name(id, |name| String::from_utf8_lossy(name).into_owned())
    }

    /// Returns the engine's limits for what clients make it keep.
    pub(crate) fn client_limits(&self) -> ClientLimits {
        self.client_limits
    }
}

/// Why there is no batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoBatch {
    /// The engine allows no calls at the moment.
    Closed,
    /// The client is not what it was when the engine was last asked.
    Stale,
}

/// Valkey 9.1 is the first.
fn shows_authenticated(server: Server) -> bool {
    server.is_valkey && server.version >= 0x0009_0100
}

/// What an engine does not tell is limited most: to the default of pub/sub clients.
fn client_limits(context: Context<'_>) -> ClientLimits {
    const UNKNOWN: ClientLimits = ClientLimits {
        hard_bytes: 32 << 20,
        soft_bytes: 8 << 20,
        soft_time: Duration::from_secs(60),
        query_bytes: 1 << 20,
        silent_time: Duration::ZERO,
        all_clients_bytes: 0,
    };
    let output =
        context.config(c"client-output-buffer-limit").and_then(|text| output_limits(&text));
    let maxmemory = context.config(c"maxmemory").and_then(|text| text.parse().ok()).unwrap_or(0);
    let all =
        context.config(c"maxmemory-clients").map_or(0, |text| memory_or_percent(&text, maxmemory));
    let query = context.config(c"client-query-buffer-limit").and_then(|text| text.parse().ok());
    let query_bytes = query.unwrap_or(UNKNOWN.query_bytes);
    let silent = context.config(c"timeout").and_then(|text| text.parse().ok()).unwrap_or(0);
    let silent_time = Duration::from_secs(silent);
    ClientLimits { all_clients_bytes: all, query_bytes, silent_time, ..output.unwrap_or(UNKNOWN) }
}

/// From `normal HARD SOFT SECONDS slave … pubsub …`, as the engine tells it.
fn output_limits(text: &str) -> Option<ClientLimits> {
    let mut words = text.split_ascii_whitespace().skip_while(|word| *word != "normal").skip(1);
    let mut number = || words.next()?.parse::<u64>().ok();
    let (hard, soft, seconds) = (number()?, number()?, number()?);
    Some(ClientLimits {
        hard_bytes: usize::try_from(hard).ok()?,
        soft_bytes: usize::try_from(soft).ok()?,
        soft_time: Duration::from_secs(seconds),
        ..ClientLimits::default()
    })
}

/// A number of bytes, or a part of `maxmemory`.
fn memory_or_percent(text: &str, maxmemory: usize) -> usize {
    match text.strip_suffix('%') {
        Some(percent) => percent.parse().map_or(0, |percent: usize| maxmemory / 100 * percent),
        None => text.parse().unwrap_or(0),
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
    let Some([Value::Bulk(b"flags"), Value::Array(flags)]) = fields.first_chunk() else {
        return false;
    };
    let has = |wanted: &[u8]| {
        flags
            .iter()
            .any(|flag| matches!(flag, Value::Bulk(it) | Value::Simple(it) if *it == wanted))
    };
    has(b"on") && has(b"nopass")
}

/// Calls of one speaker, within one callback of the engine's.
pub(crate) struct Batch<'a> {
    acting: Acting<'a>,
    /// Whose it is.
    name: &'a [u8],
    denied: &'a mut Vec<Box<[u8]>>,
    /// He is among those.
    is_wary: bool,
    keys: &'a mut Keys,
    batch_key: Option<&'a Text>,
    resp3: bool,
    /// A call may have left something for AOF and replicas. Reads do: they delete keys whose time
    /// is over.
    leaves: bool,
    wrote: bool,
}

impl Batch<'_> {
    /// Runs a command and appends its reply to `out`. False: it was refused before execution,
    /// nothing was appended, and it must go over the proxy connection, which gives the exact native
    /// answer.
    pub(crate) fn call(&mut self, callable: Callable, words: Words<'_>, out: &mut Replies) -> bool {
        // The engine must not be asked for a user's right to a command that has too few words:
        // Redis 7.0 looks for keys beyond them, and dies.
        if !callable.takes(words.len()) || (self.is_wary && !self.acting.may(words.iter())) {
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

    #[test]
    fn reads_the_engines_limits() {
        let read =
            output_limits("normal 1048576 524288 10 slave 268435456 67108864 60 pubsub 1 2 3");
        let expected = ClientLimits {
            hard_bytes: 1 << 20,
            soft_bytes: 512 << 10,
            soft_time: Duration::from_secs(10),
            ..ClientLimits::default()
        };
        assert_eq!(read, Some(expected));
        assert_eq!(output_limits("slave 1 2 3"), None);
        assert_eq!(memory_or_percent("1000", 0), 1000);
        assert_eq!(memory_or_percent("10%", 5000), 500);
        assert_eq!(memory_or_percent("0", 5000), 0);
    }

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
