//! The engine's view of each session's proxy connection, which is one of the engine's clients and
//! has a client id.
//!
//! ```text
//!   the session opens its proxy connection and sends FERRITE BIND token
//!     └─► the engine runs that as a command of its client ──► the module notes the client id
//!   commands were proxied ──► the module asks the engine, by that id, for the client's user,
//!                             database, transaction and tracking
//!   the engine frees the client (KILL, DELUSER, timeout) ──► its event ends the session's calls
//! ```
//!
//! [`ClientState`] holds what the engine reported last. Two of its fields can be read only at
//! certain times, or only from certain engines:
//!
//! - The protocol version. The engine shows it only to a command of the client, so FERRITE BIND and
//!   FERRITE ATTEST note it.
//! - Whether a client of the user `default` has authenticated (before Valkey 9.1). Any other user
//!   name is proof of a login. But clients that never authenticated, and clients whose user was
//!   just deleted, also have the user `default`. For these, one of the following is proof: the
//!   default user needed no password when the client connected or sent RESET, or the engine has run
//!   FERRITE ATTEST, which it refuses before a login.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use ferrite_fabric::random::random;
use tokio::sync::Notify;

use crate::api::Context;

/// The user of clients that have not logged in. Clients can also log in as this user.
pub(crate) const DEFAULT_USER: &[u8] = b"default";

/// A session's proxy connection.
pub(crate) struct ClientRecord {
    token: String,
    peer: Option<SocketAddr>,
    /// The engine's client id; zero until it is known. The engine never reuses an id.
    id: AtomicU64,
    is_gone: AtomicBool,
    gone: Arc<Notify>,
    state: Mutex<ClientState>,
}

/// The state of a client when the engine was last asked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ClientState {
    pub(crate) user: Box<[u8]>,
    pub(crate) db: u16,
    pub(crate) resp3: bool,
    /// Whether the engine has run FERRITE BIND or ATTEST since the last command that may have
    /// changed the client's identity.
    pub(crate) is_identified: bool,
    /// Whether a client of the user `default` has authenticated, or did not need to.
    pub(crate) is_default_proven: bool,
    /// Whether the next refresh must check if the default user needs a password. True after a
    /// connect or RESET.
    pub(crate) is_new: bool,
    /// Whether the client's name in the engine must still be set to the address of the session's
    /// peer.
    pub(crate) is_unnamed: bool,
    /// Whether calls have written data since FERRITE MARK last ran.
    pub(crate) is_mark_due: bool,
}

/// All records. FERRITE BIND and ATTEST find a record by its token. FERRITE MARK and the engine's
/// events find it by the client id.
#[derive(Default)]
struct Registry {
    by_token: HashMap<String, Weak<ClientRecord>>,
    by_id: HashMap<u64, Weak<ClientRecord>>,
}

fn registry() -> MutexGuard<'static, Registry> {
    static REGISTRY: OnceLock<Mutex<Registry>> = OnceLock::new();
    lock(REGISTRY.get_or_init(Mutex::default))
}

/// Locks a mutex. Poisoning is ignored: nothing here panics while it holds a lock, and the data is
/// valid after each step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ClientRecord {
    /// Creates the record of a session whose proxy connection has not identified itself yet.
    pub(crate) fn new(peer: Option<SocketAddr>, gone: Arc<Notify>) -> Arc<Self> {
        // Without random bits the record has no token, and the session cannot identify itself.
        let token = token().unwrap_or_default();
        let state =
            Mutex::new(ClientState { is_new: true, is_unnamed: true, ..ClientState::default() });
        let (id, is_gone) = (AtomicU64::new(0), AtomicBool::new(false));
        let record = Arc::new(Self { token, peer, id, is_gone, gone, state });
        if !record.token.is_empty() {
            registry().by_token.insert(record.token.clone(), Arc::downgrade(&record));
        }
        record
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, ClientState> {
        lock(&self.state)
    }

    /// Returns the token with which the proxy connection identifies itself.
    pub(crate) fn token(&self) -> &str {
        &self.token
    }

    /// Returns the engine's client id, once the client is identified.
    pub(crate) fn id(&self) -> Option<u64> {
        Some(self.id.load(Ordering::Relaxed)).filter(|id| *id != 0)
    }

    /// Returns whether the engine has freed the client.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Relaxed)
    }
}

/// Returns a token of 128 random bits, in hexadecimal.
fn token() -> Result<String, ferrite_fabric::Error> {
    Ok(format!("{:016x}{:016x}", random()?, random()?))
}

impl Drop for ClientRecord {
    fn drop(&mut self) {
        let mut registry = registry();
        registry.by_token.remove(&self.token);
        registry.by_id.remove(&self.id.load(Ordering::Relaxed));
    }
}

/// Runs FERRITE BIND or ATTEST: notes that the client that runs the command is the proxy connection
/// of the session with this token. Returns false if there is no such session, or if another client
/// is its proxy connection.
pub(crate) fn identify(context: Context<'_>, token: &str, is_attested: bool) -> bool {
    let id = context.client_id();
    // The lock is released at once, since dropping a record takes the same lock.
    let record = registry().by_token.get(token).and_then(Weak::upgrade);
    let Some(record) = record else { return false };
    let known = record.id.load(Ordering::Relaxed);
    if known != 0 && known != id {
        return false;
    }
    registry().by_id.insert(id, Arc::downgrade(&record));
    record.id.store(id, Ordering::Relaxed);
    let mut state = record.state();
    if std::mem::take(&mut state.is_unnamed)
        && let Some(peer) = record.peer
    {
        // CLIENT LIST and ACL LOG show the peer's address until the client sets a name of its own.
        // The client may have done so already: after RESET, HELLO can log in and set a name.
        context.name_client(&format!("ferrite:{peer}"));
    }
    state.is_identified = true;
    state.resp3 = context.is_resp3();
    state.is_default_proven |= is_attested;
    true
}

/// Runs FERRITE MARK, which makes WAIT on the proxy connection cover the writes that the session's
/// calls made before.
///
/// Returns false if the client is not the proxy connection of a session, or if its session has
/// written nothing since the last MARK. These checks are necessary because any client can send the
/// command, even without the right to write.
pub(crate) fn mark(context: Context<'_>) -> bool {
    let record = registry().by_id.get(&context.client_id()).and_then(Weak::upgrade);
    record.is_some_and(|record| {
        let is_due = std::mem::take(&mut record.state().is_mark_due);
        if is_due {
            context.replicate_ping();
        }
        is_due
    })
}

/// Notes that the engine has freed a client, or is about to.
pub(crate) fn on_disconnected(id: u64) {
    let record = registry().by_id.remove(&id).and_then(|record| record.upgrade());
    if let Some(record) = record {
        record.is_gone.store(true, Ordering::Relaxed);
        record.gone.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_session_has_its_own_token() {
        let [one, other] = [(); 2].map(|()| ClientRecord::new(None, Arc::default()));
        let is_token =
            |token: &str| token.len() == 32 && token.bytes().all(|byte| byte.is_ascii_hexdigit());
        assert!(is_token(&one.token) && is_token(&other.token), "{} {}", one.token, other.token);
        assert_ne!(one.token, other.token);
    }
}
