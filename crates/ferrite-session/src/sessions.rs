//! The list of a gateway's open sessions. They can be listed, and killed by their number.
//!
//! Any thread may use the list. Its lock is held only while the list is read or changed.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ferrite_fabric::{Link, LogLimit, Transport};
use tokio::sync::Notify;

use crate::disconnect_log::log_disconnect;
use crate::in_process_engine::ProxyClient;
use crate::pump::Moved;
use crate::session::{SessionTransport, of_link};

/// Describes an open session.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SessionInfo {
    /// The session's number. The gateway never uses it for another session.
    pub id: u64,
    /// The client's address.
    pub peer: Option<SocketAddr>,
    /// The local address that the client has connected to.
    pub local: Option<SocketAddr>,
    /// The transport that the session uses at the moment.
    pub transport: SessionTransport,
    /// The RDMA device, if the session uses RDMA.
    pub device: Option<String>,
    /// Whether the engine runs the session's commands in-process where it can.
    pub is_called: bool,
    /// The client id of the session's proxy connection, if the gateway runs inside the engine.
    pub client_id: Option<u64>,
    /// The memory that the session holds for pending commands and replies, without its window. Zero
    /// if the session only copies bytes, as every session of a gateway outside of the engine does.
    pub held_bytes: usize,
    /// The time since the session began.
    pub age: Duration,
    /// The number of bytes of commands passed to the engine so far, proxied or called in-process.
    pub to_engine_bytes: u64,
    /// The number of bytes sent to the client so far.
    pub to_client_bytes: u64,
}

/// What remains to be done after a session was killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Killed {
    /// The caller must make the engine close its client with this id. Otherwise the engine would
    /// still run the commands that it has received.
    CloseClient(u64),
    /// Nothing: the session closes its proxy connection. The session's client in the engine is not
    /// known, so the engine may still run commands that have already reached its socket.
    Ending,
}

/// The transport that a client connected over.
pub(crate) enum ClientTransport {
    /// A link, which may migrate from RDMA to TCP and back.
    Ferrite(Link),
    /// Valkey Over RDMA, on this device.
    Valkey(Option<String>),
    Tcp,
}

impl ClientTransport {
    /// Returns whether the client uses RDMA, or has used it before. The client's addresses then
    /// prove nothing, because they may be what the client itself has told the connection manager.
    pub(crate) fn is_rdma(&self) -> bool {
        match self {
            Self::Ferrite(link) => {
                !matches!(link.transport(), Transport::Tcp | Transport::TcpTls)
                    || link.stats().moves > 0
            }
            Self::Valkey(_) => true,
            Self::Tcp => false,
        }
    }

    /// Returns the transport in use at the moment, and the RDMA device if there is one.
    fn current(&self) -> (SessionTransport, Option<String>) {
        match self {
            Self::Ferrite(link) => (of_link(link.transport()), link.device()),
            Self::Valkey(device) => (SessionTransport::ValkeyRdma, device.clone()),
            Self::Tcp => (SessionTransport::Tcp, None),
        }
    }
}

/// The state of an open session.
pub(crate) struct Entry {
    id: u64,
    pub(crate) peer: Option<SocketAddr>,
    pub(crate) local: Option<SocketAddr>,
    transport: ClientTransport,
    begun: Instant,
    pub(crate) moved: Moved,
    pub(crate) is_called: AtomicBool,
    /// The engine's record of the session's proxy connection.
    pub(crate) record: OnceLock<Arc<dyn ProxyClient>>,
    pub(crate) held: HeldBytes,
    /// Whether the session was asked to end, or was evicted. Not set if the session's own client is
    /// known to have asked: see `is_closing`.
    pub(crate) is_killed: AtomicBool,
    /// Whether the session's own client has asked to kill the session. The session ends when the
    /// engine closes the client, or when the client has stopped reading.
    pub(crate) is_closing: AtomicBool,
    /// Notified when `is_killed` or `is_closing` is set, and when the engine has freed the
    /// session's client.
    pub(crate) ended: Arc<Notify>,
}

impl Entry {
    fn kill(&self) {
        self.moved.drops_commands.store(true, Ordering::Relaxed);
        self.is_killed.store(true, Ordering::Relaxed);
        self.ended.notify_one();
    }

    /// Notes that the engine closes the session's client after the pending replies.
    fn close(&self) {
        self.moved.drops_commands.store(true, Ordering::Relaxed);
        self.is_closing.store(true, Ordering::Relaxed);
        self.ended.notify_one();
    }

    /// Returns the client id of the session's proxy connection.
    fn client_id(&self) -> Option<u64> {
        self.record.get().and_then(|record| record.id())
    }

    /// Returns whether the engine has freed the session's client.
    pub(crate) fn is_gone(&self) -> bool {
        self.record.get().is_some_and(|record| record.is_gone())
    }
}

/// The memory that a session holds. `all` is the total of all sessions, including this one.
pub(crate) struct HeldBytes {
    bytes: AtomicUsize,
    all: Arc<AtomicUsize>,
    /// Whether the session was asked to end because of its memory. Its memory is not counted any
    /// more.
    is_evicted: AtomicBool,
}

impl HeldBytes {
    /// Sets the number of bytes that the session holds, unless it was evicted.
    pub(crate) fn set(&self, bytes: usize) {
        if !self.is_evicted() {
            self.count(bytes);
        }
    }

    fn count(&self, bytes: usize) {
        let before = self.bytes.swap(bytes, Ordering::Relaxed);
        if bytes != before {
            // If the session holds less than before, the difference wraps around and so does the
            // addition.
            self.all.fetch_add(bytes.wrapping_sub(before), Ordering::Relaxed);
        }
    }

    /// Returns the number of bytes that all sessions hold together.
    pub(crate) fn total(&self) -> usize {
        self.all.load(Ordering::Relaxed)
    }

    fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Marks the session as evicted and no longer counts its memory. Returns false if it was
    /// already evicted.
    fn evict(&self) -> bool {
        let is_first = !self.is_evicted.swap(true, Ordering::Relaxed);
        self.count(0);
        is_first
    }

    pub(crate) fn is_evicted(&self) -> bool {
        self.is_evicted.load(Ordering::Relaxed)
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.count(0);
    }
}

#[derive(Default)]
struct SessionList {
    open: BTreeMap<u64, Arc<Entry>>,
    last_id: u64,
    /// The numbers of bytes that ended sessions have passed to the engine and sent to their
    /// clients.
    ended: (u64, u64),
}

/// All sessions of a gateway.
#[derive(Default)]
pub(crate) struct Sessions {
    list: Mutex<SessionList>,
    pub(crate) killed: AtomicU64,
    /// The number of sessions that were ended because all sessions together held too much memory.
    pub(crate) evicted: AtomicU64,
    held: Arc<AtomicUsize>,
}

impl Sessions {
    /// Adds a session, and returns it with the number of sessions that were open before. The
    /// session ends when the returned value is dropped.
    pub(crate) fn begin(
        self: &Arc<Self>,
        peer: Option<SocketAddr>,
        local: Option<SocketAddr>,
        transport: ClientTransport,
    ) -> (OpenSession, usize) {
        let mut list = self.list();
        list.last_id += 1;
        let (id, before) = (list.last_id, list.open.len());
        let (begun, moved, ended) = (Instant::now(), Moved::default(), Arc::default());
        let [is_called, is_killed, is_closing] = [const { AtomicBool::new(false) }; 3];
        let record = OnceLock::new();
        let (bytes, is_evicted) = (AtomicUsize::new(0), AtomicBool::new(false));
        let held = HeldBytes { bytes, all: Arc::clone(&self.held), is_evicted };
        let entry = Entry {
            id,
            peer,
            local,
            transport,
            begun,
            moved,
            is_called,
            record,
            held,
            is_killed,
            is_closing,
            ended,
        };
        let entry = Arc::new(entry);
        list.open.insert(id, Arc::clone(&entry));
        drop(list);
        (OpenSession { sessions: Arc::clone(self), entry }, before)
    }

    pub(crate) fn count(&self) -> usize {
        self.list().open.len()
    }

    /// Returns the numbers of bytes that all sessions, open and ended, have passed to the engine
    /// and sent to clients.
    pub(crate) fn moved(&self) -> (u64, u64) {
        let list = self.list();
        let add = |(to_engine, to_client), entry: &Arc<Entry>| {
            let (more_to_engine, more_to_client) = entry.moved.both();
            (to_engine + more_to_engine, to_client + more_to_client)
        };
        list.open.values().fold(list.ended, add)
    }

    /// Returns all open sessions, the oldest first.
    pub(crate) fn all(&self) -> Vec<SessionInfo> {
        let entries: Vec<_> = self.list().open.values().cloned().collect();
        let info = |entry: &Arc<Entry>| {
            let (transport, device) = entry.transport.current();
            let (to_engine_bytes, to_client_bytes) = entry.moved.both();
            SessionInfo {
                id: entry.id,
                peer: entry.peer,
                local: entry.local,
                transport,
                device,
                is_called: entry.is_called.load(Ordering::Relaxed),
                client_id: entry.client_id(),
                held_bytes: entry.held.bytes(),
                age: entry.begun.elapsed(),
                to_engine_bytes,
                to_client_bytes,
            }
        };
        entries.iter().map(info).collect()
    }

    /// Asks a session to end. `caller` is the id of the engine's client that asks. If the session
    /// belongs to that client, it ends only after the client has got its reply. Returns `None` if
    /// there is no session with this number.
    pub(crate) fn kill(&self, id: u64, caller: Option<u64>) -> Option<Killed> {
        let entry = self.list().open.get(&id).cloned()?;
        self.killed.fetch_add(1, Ordering::Relaxed);
        let client = entry.client_id();
        match client.is_some() && client == caller {
            true => entry.close(),
            false => entry.kill(),
        }
        Some(client.map_or(Killed::Ending, Killed::CloseClient))
    }

    /// Returns the client id of a session's proxy connection, if the session exists and its client
    /// is known.
    pub(crate) fn client_id(&self, id: u64) -> Option<u64> {
        self.list().open.get(&id)?.client_id()
    }

    fn list(&self) -> MutexGuard<'_, SessionList> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A session that stays in the list until this is dropped.
pub(crate) struct OpenSession {
    sessions: Arc<Sessions>,
    pub(crate) entry: Arc<Entry>,
}

impl OpenSession {
    /// Asks the session that holds the most memory to end, as the engine does with its clients
    /// beyond `maxmemory-clients`.
    pub(crate) fn evict_largest(&self) {
        let largest =
            self.sessions.list().open.values().max_by_key(|entry| entry.held.bytes()).cloned();
        let Some(entry) = largest else { return };
        let held_bytes = entry.held.bytes();
        if entry.held.evict() {
            self.sessions.evicted.fetch_add(1, Ordering::Relaxed);
            static LINES: LogLimit = LogLimit::new();
            let why = format_args!(
                "sessions hold more memory than maxmemory-clients, and session {} holds the most \
                 ({held_bytes} bytes)",
                entry.id
            );
            log_disconnect(&LINES, entry.client_id(), why);
            entry.kill();
        }
    }
}

impl Drop for OpenSession {
    fn drop(&mut self) {
        let mut list = self.sessions.list();
        list.open.remove(&self.entry.id);
        let (to_engine, to_client) = self.entry.moved.both();
        list.ended.0 += to_engine;
        list.ended.1 += to_client;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An evicted session may run for a moment longer. In the meantime, its memory does not cause
    /// the eviction of another session.
    #[test]
    fn evicts_the_largest_session_once_and_stops_counting_it() {
        let sessions = Arc::<Sessions>::default();
        let [(small, _), (large, _)] =
            [(); 2].map(|()| sessions.begin(None, None, ClientTransport::Tcp));
        small.entry.held.set(10);
        for bytes in [100, 200] {
            large.entry.held.set(bytes);
            if large.entry.held.total() > 50 {
                large.evict_largest();
            }
        }
        assert_eq!(sessions.evicted.load(Ordering::Relaxed), 1);
        assert!(large.entry.held.is_evicted() && !small.entry.held.is_evicted());
        assert_eq!(small.entry.held.total(), 10);
        drop((small, large));
        assert_eq!(sessions.held.load(Ordering::Relaxed), 0);
    }
}
