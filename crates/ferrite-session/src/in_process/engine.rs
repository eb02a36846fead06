//! What a session needs of the engine that it runs inside of.
//!
//! The engine knows who a client is, which database it is at, whether it is in a transaction and
//! whether it still exists. A session keeps no copy of that: it asks [`ProxyClient`], which asks
//! the engine by the id of the session's proxy connection.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_proto::SessionCommand;
use ferrite_proto::resp::Args;
use tokio::sync::Notify;

use super::commands::{Callable, Commands};
use super::replies::Replies;

/// A session, to be run somewhere.
pub type SessionFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The engine that the gateway runs inside of.
pub trait InProcessEngine: Send + Sync {
    /// Runs a session where calls can be made.
    fn spawn(&self, session: SessionFuture);

    /// Returns whether a client that connects now needs no password. `None`: nothing can be called,
    /// and the engine's socket is to be asked.
    fn is_open_to_all(&self) -> Option<bool>;

    /// Returns whether the engine had no place (`maxclients`) for a client that was accepted and
    /// heard at these times: its own port would have refused it.
    fn was_full(&self, _accepted: Instant, _heard: Instant) -> bool {
        false
    }

    /// Makes the engine's record of a new session's proxy connection. `gone` is notified when the
    /// engine has freed that client.
    fn new_client(&self, peer: Option<SocketAddr>, gone: Arc<Notify>) -> Arc<dyn ProxyClient>;

    /// Looks up the command that a client has typed, by its name and first argument.
    fn look_up(&self, name: &[u8], first: Option<&[u8]>) -> CommandKind;

    /// Returns the command that is proxied in the place of one with these words, if there is such.
    fn instead(&self, words: Args<'_>) -> Option<&'static [u8]>;

    /// Returns whether sessions may go on for now; if not, others have their turn first.
    fn has_time(&self) -> bool {
        true
    }

    /// Returns a number that changes once a second while sessions run.
    fn seconds(&self) -> u64 {
        0
    }

    /// Notes that something was sent over a proxy connection. What others ask for after that is not
    /// to be called before the engine has read it.
    fn on_proxied(&self) {}

    /// Is ready when what was written before is as safe as the engine makes it before it answers.
    fn settled(&self) -> SessionFuture;

    /// Returns the engine's limits for what clients make it keep.
    fn client_limits(&self) -> ClientLimits;
}

/// A session's proxy connection, as the engine knows it: one of the engine's clients, by its id.
pub trait ProxyClient: Send + Sync {
    /// Returns the command that identifies the proxy connection to the engine. It has one reply,
    /// runs whatever the client's rights are, and is also the way to learn what the engine shows
    /// only to commands (the protocol version). To be sent first, and after
    /// [`ProxyClient::identity_changes`].
    fn identify(&self) -> Vec<u8>;

    /// Returns a command that does nothing and has one reply, which begins with `-NOAUTH` if, and
    /// only if, the engine refuses all commands of the client but a login.
    fn probe_login(&self) -> &'static [u8];

    /// Notes that this command, which may change the user, the authentication or the protocol, is
    /// proxied.
    fn identity_changes(&self, command: SessionCommand);

    /// Asks the engine what the client is now. To be called when all replies to proxied commands
    /// are in.
    fn refresh(&self) -> Access;

    /// Calls these commands in order as the client, and adds their replies, until one cannot be
    /// called.
    fn call(&self, commands: Commands<'_>, replies: &mut Replies) -> Called;

    /// Returns the command that makes WAIT on the proxy connection cover what was called. It has
    /// one reply.
    fn mark_writes(&self) -> &'static [u8];

    /// Returns whether the engine has run [`ProxyClient::mark_writes`] since the last call that
    /// wrote.
    fn is_marked(&self) -> bool;

    /// Returns whether the client waits in the engine (BLPOP and the like).
    fn is_blocked(&self) -> bool;

    /// Returns whether the engine has freed the client.
    fn is_gone(&self) -> bool;

    /// Returns the engine's id of the client, once it is identified.
    fn id(&self) -> Option<u64>;
}

/// What the engine allows a client at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Data commands may be called in-process.
    InProcess,
    /// Every command goes over the proxy connection for now.
    Proxy {
        /// The client has an open transaction: what is proxied is queued there.
        in_transaction: bool,
        /// The engine takes the client for a user, by a password or because it asks for none.
        is_authenticated: bool,
    },
    /// The engine has freed the client, or is about to.
    Gone,
}

impl Access {
    /// Returns whether the engine takes the client for a user.
    #[must_use]
    pub fn is_authenticated(self) -> bool {
        match self {
            Self::InProcess => true,
            Self::Proxy { is_authenticated, .. } => is_authenticated,
            Self::Gone => false,
        }
    }
}

/// How a command that a client has typed is treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandKind {
    /// It may be called in-process.
    Callable(Callable),
    /// It goes over the proxy connection and means this for the session.
    Session(SessionCommand),
    /// It goes over the proxy connection, has one reply and leaves the session as it was.
    Plain,
}

/// What has become of calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Called {
    /// How many have their reply. The next one, if there is one, was not executed.
    pub done: usize,
    /// The next command may be called, but not yet: replies are many and should leave before, or
    /// the engine has to serve clients that wait for what was written.
    pub is_full: bool,
    /// It is not about that command: none can be called at the moment.
    pub is_closed: bool,
    /// The engine's view of the client has changed: [`ProxyClient::refresh`] before the next call.
    pub is_stale: bool,
    /// Something may have been written.
    pub wrote: bool,
    /// Replies must wait until that has settled ([`InProcessEngine::settled`]).
    pub must_settle: bool,
}

/// The engine's limits for what clients make it keep. Zero means no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ClientLimits {
    /// `client-output-buffer-limit normal`: a client with more unread bytes is disconnected at
    /// once.
    pub hard_bytes: usize,
    /// A client with more unread bytes is disconnected after [`ClientLimits::soft_time`].
    pub soft_bytes: usize,
    /// How long a client may be over the soft limit.
    pub soft_time: Duration,
    /// `client-query-buffer-limit`: a client with more commands that wait is disconnected.
    pub query_bytes: usize,
    /// `timeout`: a client that says nothing for so long is disconnected.
    pub silent_time: Duration,
    /// `maxmemory-clients`: beyond this, the session that holds most is disconnected.
    pub all_clients_bytes: usize,
}
