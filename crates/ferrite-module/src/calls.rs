//! The call path: commands that run in-process, in the engine's event loop, instead of over the
//! proxy connection.
//!
//! `RedisModule_Call` skips checks that the engine makes before it runs a client's command. The
//! call path makes up for each of them, so that a call does only what the same command would do on
//! a connection:
//!
//! | the engine checks | the call path |
//! |---|---|
//! | loading, a script that runs, paused clients | [`Calls::begin`] begins no batch of calls |
//! | NOAUTH | no batch unless the engine says that the client still exists and has the same user |
//! | the user's rights | each call checks them |
//! | redirects of a cluster | each call checks that its key is served here; commands with several keys, and the key path, are not used |
//! | READONLY | only reads are called on replicas |
//! | MASTERDOWN | no batch on replicas without a connection to their primary, and on replicas of a cluster |
//! | MISCONF, NOREPLICAS, memory | each call of a write checks; only the proxy path evicts keys |
//! | MISCONF for PING | PING is not called if the engine has an AOF or saves its data |
//! | unknown commands, arity | each call checks |
//! | `timeout` | no batch: the proxy connection would be idle and be closed |
//! | commands that need a client | [`Router`] excludes them |
//!
//! A GET of a long value takes the key path ([`Keys`]) instead, with the same checks and fewer
//! copies.
//!
//! A command that a call refuses has changed nothing. It goes over the proxy connection, where the
//! engine gives its own reply, frees memory, or redirects.

use std::time::Duration;

use ferrite_proto::resp::{Value, Words};
use ferrite_session::{Access, Callable, ClientLimits, CommandKind, Replies};

use crate::api::calls::{CallContext, EngineString, Outcome, UserCalls, state};
use crate::api::clients::{client_flag, client_info};
use crate::api::{Context, Server};
use crate::clients::{ClientRecord, DEFAULT_USER};
use crate::keys::Keys;
use crate::router::Router;

/// States of the engine in which nothing is called.
const NOT_NOW: i32 =
    state::SCRIPT | state::MULTI | state::LOADING | state::ASYNC_LOADING | state::CHILD;

/// Redis 7.2, the first version that propagates the writes of a call to AOF and replicas with the
/// call.
const PROPAGATES: u32 = 0x0007_0200;

/// The most users in [`Calls::denied_users`].
const DENIED_MAX: usize = 64;

/// Makes calls to the engine, on its main thread and from its event loop.
pub(crate) struct Calls {
    context: CallContext,
    router: Router,
    keys: Keys,
    /// The user of the last batch, cached because most batches have the same user.
    user: Option<(Box<[u8]>, EngineString)>,
    /// Users who have been denied a command. A denied call adds an entry to ACL LOG, and the proxy
    /// path then adds a second one. For these users the rights are checked before the call, at some
    /// cost, so that each of these users gets a double entry only once.
    denied_users: Vec<Box<[u8]>>,
    /// Whether the engine shows if a client has authenticated.
    shows_authenticated: bool,
    client_limits: ClientLimits,
    /// The name of the key in the keyspace event that Redis 7.0 needs after a batch that may have
    /// written. `None` on later engines. See [`CallContext::propagate`].
    batch_key: Option<EngineString>,
    has_aof: bool,
    syncs_always: bool,
    /// Makes the engine report the iterations of its event loop. Each report costs as much as a
    /// small command, so this is called only when a reply first has to wait for an iteration.
    subscribe_to_loop: fn(Context<'_>),
    /// Whether the engine reports the iterations of its event loop, which replies may have to wait
    /// for.
    is_subscribed_to_loop: bool,
    /// Whether the engine closes idle connections (`timeout`). Proxy connections are idle while
    /// commands are called.
    has_idle_timeout: bool,
}

impl Calls {
    /// Prepares calls.
    ///
    /// # Errors
    /// Returns an error if this engine cannot be called. Then all commands must be proxied.
    pub(crate) fn new(
        context: Context<'_>,
        subscribe_to_loop: fn(Context<'_>),
    ) -> Result<Self, String> {
        let server = context.server();
        let (has_idle_timeout, syncs_always) = (has_idle_timeout(context), syncs_always(context));
        let client_limits = client_limits(context);
        let context = CallContext::new(context).ok_or(
            "the engine cannot check a user's permissions when a module runs a command; use \
             Redis 7.0.6 or later",
        )?;
        let router = Router::new(|names| context.ask(c"COMMAND", names))?;
        let keys = Keys::new(server).ok_or("no memory")?;
        let batch_key = if server.version < PROPAGATES {
            Some(EngineString::new("ferrite").ok_or("no memory")?)
        } else {
            None
        };
        let has_aof = context.state() & state::AOF != 0;
        Ok(Self {
            context,
            router,
            keys,
            user: None,
            denied_users: Vec::new(),
            shows_authenticated: shows_authenticated(server),
            client_limits,
            batch_key,
            has_aof,
            syncs_always,
            subscribe_to_loop,
            is_subscribed_to_loop: false,
            has_idle_timeout,
        })
    }

    /// Looks up the command that a client has sent, by its name and first argument.
    pub(crate) fn look_up(&mut self, name: &[u8], first_arg: Option<&[u8]>) -> CommandKind {
        let Self { router, context, .. } = self;
        router.look_up(name, first_arg, |name| {
            // Nothing may be called while a script runs or data is loaded.
            let is_busy = context.state() & (state::SCRIPT | state::LOADING) != 0;
            if is_busy { None } else { context.ask(c"COMMAND", &[b"INFO", name]) }
        })
    }

    /// Returns how many commands and subcommands may be called.
    pub(crate) fn callable_commands(&self) -> usize {
        self.router.len()
    }

    /// Asks the engine for the current state of a client.
    pub(crate) fn refresh(&mut self, client: &ClientRecord) -> Access {
        const PROXY_ONLY: u64 = client_flag::PUBSUB
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
            // If the client had another user before, `default` proves nothing: that user may have
            // been deleted.
            state.is_default_proven &= state.user.is_empty();
            state.user = user;
        }
        state.db = info.db;
        if std::mem::take(&mut state.is_new) {
            state.is_default_proven |=
                *state.user == *DEFAULT_USER && self.default_user_is_open() == Some(true);
        }
        let is_proven = if *state.user != *DEFAULT_USER {
            true
        } else if self.shows_authenticated {
            info.flags & client_flag::AUTHENTICATED != 0
        } else {
            state.is_default_proven
        };
        if info.flags & PROXY_ONLY == 0 && is_proven && state.is_identified {
            return Access::InProcess;
        }
        let in_transaction = info.flags & client_flag::MULTI != 0;
        // While its default user needs no password, the engine requires no login. That proves
        // nothing for later, when the default user may need a password.
        let is_authenticated = is_proven || self.default_user_is_open() == Some(true);
        Access::Proxy { in_transaction, is_authenticated }
    }

    /// Returns whether only FERRITE ATTEST, which needs a login, can show that the client has
    /// authenticated. Returns false if the client may not run it.
    pub(crate) fn needs_attestation(&mut self, client: &ClientRecord) -> bool {
        let (is_default, is_proven) = {
            let state = client.state();
            (*state.user == *DEFAULT_USER, state.is_default_proven)
        };
        // An engine whose default user needs no password would run ATTEST for everybody.
        if client.id().is_none()
            || self.shows_authenticated
            || !is_default
            || is_proven
            || self.default_user_is_open() != Some(false)
        {
            return false;
        }
        let words: [&[u8]; 3] = [b"FERRITE", b"ATTEST", b""];
        let is_allowed = EngineString::of(DEFAULT_USER)
            .and_then(|user| Some(self.context.act_as(&user)?.may_call(words.into_iter())));
        is_allowed.unwrap_or(false)
    }

    /// Begins a batch of calls for a client.
    ///
    /// # Errors
    /// [`NoBatch`] says why the client's commands cannot be called now.
    pub(crate) fn begin(&mut self, client: &ClientRecord) -> Result<Batch<'_>, NoBatch> {
        let Some(id) = client.id().filter(|_| !client.is_gone()) else {
            return Err(NoBatch::Stale);
        };
        let client_state = client.state();
        // The engine may have freed the client or deleted its user since the last refresh.
        let is_same = self.context.with_user_name(id, |name| *name == *client_state.user);
        if is_same != Some(true) || !client_state.is_identified {
            return Err(NoBatch::Stale);
        }
        let state = self.context.state();
        self.has_aof = state & state::AOF != 0;
        let is_replica = state & state::REPLICA != 0;
        if state & NOT_NOW != 0
            || (is_replica && !can_read_on_replica(state))
            || self.has_idle_timeout
            || self.context.is_paused()
            || !self.context.select(i32::from(client_state.db))
        {
            return Err(NoBatch::Closed);
        }
        if self.user.as_ref().is_none_or(|(known, _)| **known != *client_state.user) {
            let name = EngineString::of(&client_state.user).ok_or(NoBatch::Closed)?;
            self.user = Some((client_state.user.clone(), name));
        }
        let (name, user) = self.user.as_ref().ok_or(NoBatch::Closed)?;
        let user_calls = self.context.act_as(user).ok_or(NoBatch::Closed)?;
        let checks_rights_first = self.denied_users.contains(name);
        Ok(Batch {
            user_calls,
            name,
            denied_users: &mut self.denied_users,
            checks_rights_first,
            keys: &mut self.keys,
            is_cluster: state & state::CLUSTER != 0,
            is_replica,
            writes_to_disk: state & (state::AOF | state::RDB) != 0,
            batch_key: self.batch_key.as_ref(),
            resp3: client_state.resp3,
            must_propagate: false,
            wrote: false,
        })
    }

    /// Returns whether the replies of the last batch must wait for the event loop's next iteration.
    /// `wrote` says whether the batch may have written. If the replies must wait, makes the engine
    /// report the iterations.
    ///
    /// The engine writes the AOF at the end of an iteration, and synchronises it then with
    /// `appendfsync always`. A reply sent earlier could confirm a write that a crash can still
    /// lose. With `always`, even the reply to a read could show such a write.
    pub(crate) fn replies_wait(&mut self, wrote: bool) -> bool {
        let wait = self.has_aof && (wrote || self.syncs_always);
        if wait && !std::mem::replace(&mut self.is_subscribed_to_loop, true) {
            self.context.context().into_iter().for_each(self.subscribe_to_loop);
        }
        wait
    }

    /// Returns whether a client that connects now is the user `default` without a password. Returns
    /// `None` if the engine does not say, for example because ACL is renamed.
    pub(crate) fn default_user_is_open(&self) -> Option<bool> {
        self.context.ask(c"ACL", &[b"GETUSER", b"default"]).as_deref().map(is_open)
    }

    /// Returns whether the engine is a replica.
    pub(crate) fn is_replica(&self) -> bool {
        self.context.state() & state::REPLICA != 0
    }

    /// Returns how many clients the engine has; `None` if that is unknown.
    pub(crate) fn connected_clients(&self) -> Option<u64> {
        let info = self.context.ask(c"INFO", &[b"clients"])?;
        let field = info
            .split(|byte| *byte == b'\n')
            .find_map(|line| line.strip_prefix(b"connected_clients:"))?;
        std::str::from_utf8(field).ok()?.trim_end().parse().ok()
    }

    /// Reads the engine's settings again after they have changed.
    pub(crate) fn follow_engine(&mut self, context: Context<'_>) {
        self.has_idle_timeout = has_idle_timeout(context);
        self.syncs_always = syncs_always(context);
        self.client_limits = client_limits(context);
    }

    /// Returns the name of a client's user.
    pub(crate) fn user_of(&self, id: u64) -> Option<String> {
        self.context.with_user_name(id, |name| String::from_utf8_lossy(name).into_owned())
    }

    /// Frees a client at once, and returns whether there was one. The client must not be the one
    /// that runs a command now.
    ///
    /// `DeauthenticateAndCloseClient` would free it only before the event loop sleeps. Until then a
    /// blocked client could still take an element that another client adds, and lose it.
    pub(crate) fn kill_client(&self, id: u64) -> bool {
        let id = id.to_string();
        let killed = self.context.ask(c"CLIENT", &[b"KILL", b"ID", id.as_bytes()]);
        killed.as_deref() == Some(b":1\r\n")
    }

    /// Returns the engine's limits for the memory that clients use.
    pub(crate) fn client_limits(&self) -> ClientLimits {
        self.client_limits
    }
}

/// Why a batch cannot begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoBatch {
    /// Nothing can be called at the moment; commands must be proxied.
    Closed,
    /// The client has changed since the last [`Calls::refresh`].
    Stale,
}

/// Returns whether reads can be called on a replica whose engine is in this state.
///
/// - While the replica has no connection to its primary, Redis 7.0 would read expired keys, and the
///   engine may have to refuse reads (`replica-serve-stale-data`).
/// - A replica of a cluster serves reads only to clients that have sent READONLY, which a call
///   cannot tell the engine.
fn can_read_on_replica(state: i32) -> bool {
    state & state::REPLICA_IS_ONLINE != 0 && state & state::CLUSTER == 0
}

/// Returns whether the engine shows if a client has authenticated. Valkey 9.1 is the first engine
/// that does.
fn shows_authenticated(server: Server) -> bool {
    server.is_valkey && server.version >= 0x0009_0100
}

/// Reads the engine's limits for the memory that clients use. Unknown output limits are replaced by
/// the strict defaults of pub/sub clients, and an unknown query limit by 1 MiB. Other unknown
/// limits do not apply.
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

/// Parses `normal HARD SOFT SECONDS slave … pubsub …`, as CONFIG GET returns it.
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

/// Parses a number of bytes, or a percentage of `maxmemory`.
fn memory_or_percent(text: &str, maxmemory: usize) -> usize {
    match text.strip_suffix('%') {
        Some(percent) => percent.parse().map_or(0, |percent: usize| maxmemory / 100 * percent),
        None => text.parse().unwrap_or(0),
    }
}

fn has_idle_timeout(context: Context<'_>) -> bool {
    context.config(c"timeout").is_some_and(|seconds| seconds != "0")
}

/// Returns whether `appendfsync` is `always`. Returns true if the engine does not say.
fn syncs_always(context: Context<'_>) -> bool {
    context.config(c"appendfsync").is_none_or(|when| when == "always")
}

/// Returns whether a reply to ACL GETUSER shows a user who needs no password.
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

/// Calls on behalf of one client, within one callback from the engine.
pub(crate) struct Batch<'a> {
    user_calls: UserCalls<'a>,
    /// The name of the client's user.
    name: &'a [u8],
    denied_users: &'a mut Vec<Box<[u8]>>,
    /// Whether each call checks the user's rights first, because the user has been denied a command
    /// before.
    checks_rights_first: bool,
    keys: &'a mut Keys,
    /// Whether the engine is a node of a cluster.
    ///
    /// Then the key path is not used, because it does not check whether this node serves the key's
    /// slot. A command that may have several keys is not called. A call with keys of different
    /// slots would make Valkey 9.1 refuse the scripts of all clients from then on.
    /// `clusterSlotByCommand` sets `READ_FLAGS_CROSSSLOT` in a client that `VM_Call` uses again,
    /// and nothing resets it.
    is_cluster: bool,
    /// Whether the engine is a replica. Then only reads are called.
    is_replica: bool,
    /// Whether the engine has an AOF or saves its data, and so may have failed to write to disk. A
    /// call checks that only for writes.
    writes_to_disk: bool,
    batch_key: Option<&'a EngineString>,
    resp3: bool,
    /// Whether a call may have left something to propagate to AOF and replicas. Even reads may,
    /// since they delete expired keys.
    must_propagate: bool,
    wrote: bool,
}

impl Batch<'_> {
    /// Runs a command and appends its reply to `out`. Returns false if the command was refused.
    /// Then it has changed nothing, nothing was appended, and the command must be proxied, so that
    /// the client gets the engine's own reply.
    pub(crate) fn call(&mut self, callable: Callable, words: Words<'_>, out: &mut Replies) -> bool {
        // The arity is checked first: when Redis 7.0 checks the rights to a command with too few
        // words, it reads keys beyond them and crashes.
        if !self.may_call(callable, words.len())
            || (self.checks_rights_first && !self.user_calls.may_call(words.iter()))
        {
            return false;
        }
        let Callable { writes, reads_string, .. } = callable;
        let takes_key_path = reads_string && words.len() == 2 && !self.is_cluster;
        let key = if takes_key_path { words.get(1) } else { None };
        if let Some(key) = key
            && let Some(exists) = self.keys.read(&mut self.user_calls, key, self.resp3, out)
        {
            self.must_propagate |= !exists;
            return true;
        }
        let out = out.bytes();
        let before = out.len();
        let outcome = self.user_calls.call(words, self.resp3, out);
        let reply = &out[before..];
        self.must_propagate |= key.is_none() || !is_value(reply);
        if let Some(key) = key {
            self.keys.learn(key, reply.len());
        }
        match outcome {
            Outcome::Done => self.wrote |= writes,
            Outcome::Denied
                if !self.checks_rights_first && self.denied_users.len() < DENIED_MAX =>
            {
                self.checks_rights_first = true;
                self.denied_users.push(self.name.into());
            }
            Outcome::Denied | Outcome::Refused => {}
        }
        outcome == Outcome::Done
    }

    /// Returns whether a command with this number of words may be called at all in the engine's
    /// present state. [`Self::call`] refuses it otherwise.
    pub(crate) fn may_call(&self, callable: Callable, words: usize) -> bool {
        callable.takes(words)
            && !(self.is_replica && callable.writes)
            && !(self.writes_to_disk && callable.reports_disk_errors)
            && !(self.is_cluster && callable.has_several_keys && words > 2)
    }

    /// Returns whether a call may have written.
    pub(crate) fn wrote(&self) -> bool {
        self.wrote
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        if let Some(key) = self.batch_key.filter(|_| self.must_propagate) {
            self.user_calls.propagate(key);
        }
    }
}

/// Returns whether a reply to GET is a string, which means that the key exists.
fn is_value(reply: &[u8]) -> bool {
    reply.starts_with(b"$") && !reply.starts_with(b"$-")
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

    /// Redis 7.0 and Valkey 9.1 send replies of this form.
    #[test]
    fn recognises_a_user_without_a_password() {
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
