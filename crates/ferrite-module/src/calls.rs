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
//!
//! | file | |
//! |---|---|
//! | `access.rs` | who a client is, and whether its commands may be called |
//! | `batch.rs` | the calls for one client within one callback from the engine |
//! | `engine_settings.rs` | the engine's settings that calls depend on, and its limits for clients |

mod access;
mod batch;
mod engine_settings;

use ferrite_session::{ClientLimits, CommandKind};

use crate::api::Context;
use crate::api::calls::{CallContext, EngineString, state};
use crate::clients::ClientRecord;
use crate::keys::Keys;
use crate::router::Router;
use access::shows_authenticated;
use batch::Batch;
use engine_settings::{client_limits, has_idle_timeout, syncs_always};

/// States of the engine in which nothing is called.
const NOT_NOW: i32 =
    state::SCRIPT | state::MULTI | state::LOADING | state::ASYNC_LOADING | state::CHILD;

/// Redis 7.2, the first version that propagates the writes of a call to AOF and replicas with the
/// call.
const PROPAGATES: u32 = 0x0007_0200;

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
