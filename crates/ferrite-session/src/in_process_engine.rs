//! The interface between a session and the engine that it runs in.
//!
//! The engine knows a client's user, its database, whether it is in a transaction, and whether it
//! still exists. A session does not track that itself. It asks [`ProxyClient`], which asks the
//! engine by the client id of the session's proxy connection.

mod commands;
mod input;
mod replies;

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_proto::SessionCommand;
use ferrite_proto::resp::Args;
use tokio::sync::Notify;

pub use commands::{Callable, Commands};
pub(crate) use commands::{RunCommand, range_of};
pub(crate) use input::{BEFORE_AUTH, FoundCommand, Input, PartialCommand, READ_MAX};
pub use replies::Replies;
pub(crate) use replies::{Client, REPLIES_MAX};

/// A session as a future, for [`InProcessEngine::spawn`].
pub type SessionFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The engine that the gateway runs in.
pub trait InProcessEngine: Send + Sync {
    /// Runs a session on a thread where commands can be called.
    fn spawn(&self, session: SessionFuture);

    /// Returns whether a client that connects now needs no password. `None` means that this cannot
    /// be found out in-process, so the gateway must ask over the engine's socket.
    fn is_open_to_all(&self) -> Option<bool>;

    /// Returns whether the engine was at `maxclients` when a client was accepted, or at some time
    /// since the client was handed over to the gateway. If so, the engine's own port would have
    /// rejected the client.
    fn was_full(&self, _accepted: Instant, _handed_over: Instant) -> bool {
        false
    }

    /// Creates the engine's record of a new session's proxy connection. `gone` is notified when the
    /// engine has freed the client of that connection.
    fn new_client(&self, peer: Option<SocketAddr>, gone: Arc<Notify>) -> Arc<dyn ProxyClient>;

    /// Looks up a client's command by its name and first argument.
    fn look_up(&self, name: &[u8], first: Option<&[u8]>) -> CommandKind;

    /// Returns the bytes to proxy in place of the command with these words, or `None` if the
    /// command must not be replaced.
    fn instead(&self, words: Args<'_>) -> Option<&'static [u8]>;

    /// Returns whether sessions may continue. If not, they yield, because the event-loop slice is
    /// used up.
    fn has_time(&self) -> bool {
        true
    }

    /// Returns a number that changes once a second while sessions run.
    fn seconds(&self) -> u64 {
        0
    }

    /// Notes that bytes were sent over a proxy connection. Later commands of other clients must not
    /// be called before the engine has read these bytes.
    fn on_proxied(&self) {}

    /// Waits until earlier writes have the durability that the engine guarantees before it replies
    /// to a write. They are in the engine's AOF, if it has one, and synchronised if `appendfsync`
    /// is `always`.
    fn settled(&self) -> SessionFuture;

    /// Returns the engine's limits for the memory that clients use.
    fn client_limits(&self) -> ClientLimits;
}

/// A session's proxy connection, as the engine knows it: one of the engine's clients, by its id.
pub trait ProxyClient: Send + Sync {
    /// Returns the command that identifies the proxy connection to the engine. The session sends it
    /// first, and again after [`ProxyClient::identity_changes`]. The command has one reply. The
    /// first one runs whatever permissions the client has; a later one may be rejected before a
    /// login. The command also reads the client's protocol version, which the engine shows only to
    /// a running command of that client.
    fn identify(&self) -> Vec<u8>;

    /// Returns a command that does nothing and has one reply. The reply begins with `-NOAUTH` if,
    /// and only if, the engine rejects all commands of the client except a login.
    fn probe_login(&self) -> &'static [u8];

    /// Notes that a proxied command may change the user, the authentication or the protocol
    /// version.
    fn identity_changes(&self, command: SessionCommand);

    /// Asks the engine for the client's state. Must be called when all replies to proxied commands
    /// have arrived.
    fn refresh(&self) -> Access;

    /// Calls these commands in order as the client, and adds their replies, until one cannot be
    /// called.
    fn call(&self, commands: Commands<'_>, replies: &mut Replies) -> Called;

    /// Returns the command that makes a later WAIT on the proxy connection cover the writes of
    /// called commands. The command has one reply.
    fn mark_writes(&self) -> &'static [u8];

    /// Returns whether the engine has run [`ProxyClient::mark_writes`] since the last call that
    /// wrote data.
    fn is_marked(&self) -> bool;

    /// Returns whether the engine now refuses WAIT, because it is a replica. It then refuses
    /// [`ProxyClient::mark_writes`], too.
    fn refuses_wait(&self) -> bool;

    /// Returns whether the client is blocked in the engine (BLPOP and the like).
    fn is_blocked(&self) -> bool;

    /// Returns whether the engine has freed the client.
    fn is_gone(&self) -> bool;

    /// Returns the engine's client id, once the client is identified.
    fn id(&self) -> Option<u64>;
}

/// The access that the engine grants a client at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Data commands may be called in-process.
    InProcess,
    /// Every command goes over the proxy connection for now.
    Proxy {
        /// Whether the client has an open transaction, in which proxied commands are queued.
        in_transaction: bool,
        /// Whether the engine treats the client as authenticated, either by a password or because
        /// the engine requires none.
        is_authenticated: bool,
    },
    /// The engine has freed the client, or is about to free it.
    Gone,
}

impl Access {
    /// Returns whether the engine treats the client as authenticated.
    #[must_use]
    pub fn is_authenticated(self) -> bool {
        match self {
            Self::InProcess => true,
            Self::Proxy { is_authenticated, .. } => is_authenticated,
            Self::Gone => false,
        }
    }
}

/// How a command is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandKind {
    /// The command may be called in-process.
    Callable(Callable),
    /// The command goes over the proxy connection, and has this effect on the session.
    Session(SessionCommand),
    /// The command goes over the proxy connection, has one reply and does not change the session.
    Plain,
}

/// The result of [`ProxyClient::call`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Called {
    /// How many commands have their reply. The command after them, if any, was not executed.
    pub done: usize,
    /// How many of the commands after those must be proxied, because they cannot be called. They
    /// are proxied together, in one exchange with the engine.
    pub refused: usize,
    /// Whether the next command may be called, but not yet. Either there are many replies, which
    /// should be sent first, or the engine must first serve clients that are blocked on a key that
    /// was just written.
    pub is_full: bool,
    /// Whether no command at all can be called at the moment, not just the next one.
    pub is_closed: bool,
    /// Whether the client's state has changed in the engine. Then [`ProxyClient::refresh`] must run
    /// before the next call.
    pub is_stale: bool,
    /// Whether the commands may have written data.
    pub wrote: bool,
    /// Whether replies must wait until the writes are durable ([`InProcessEngine::settled`]).
    pub must_settle: bool,
}

/// The engine's limits for the memory that clients use. Zero means no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ClientLimits {
    /// `client-output-buffer-limit normal`: a client with more unread bytes is disconnected at
    /// once.
    pub hard_bytes: usize,
    /// A client with more unread bytes is disconnected after [`ClientLimits::soft_time`].
    pub soft_bytes: usize,
    /// How long a client may be over the soft limit.
    pub soft_time: Duration,
    /// `client-query-buffer-limit`: a client with more bytes of pending commands is disconnected.
    pub query_bytes: usize,
    /// `timeout`: a client that sends nothing for this long is disconnected.
    pub silent_time: Duration,
    /// `maxmemory-clients`: if all sessions together hold more, the session that holds the most
    /// memory is disconnected.
    pub all_clients_bytes: usize,
}
