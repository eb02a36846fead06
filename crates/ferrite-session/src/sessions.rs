//! The sessions that a gateway has at the moment: to be listed, and to be ended by number.
//!
//! Any thread may ask. What is locked is the list, for as long as it takes to copy it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ferrite_fabric::{Link, Transport};
use tokio::sync::Notify;

use crate::connector::SessionTransport;
use crate::in_process::ProxyClient;
use crate::pump::Moved;

/// A session that is open.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SessionInfo {
    /// Its number, which no other session of the gateway ever has.
    pub id: u64,
    /// Where the client is.
    pub peer: Option<SocketAddr>,
    /// Where it came in.
    pub local: Option<SocketAddr>,
    /// What carries it at this moment.
    pub transport: SessionTransport,
    /// The RDMA device that does, if one does.
    pub device: Option<String>,
    /// Whether the engine around the gateway answers it by calls, as far as it can.
    pub is_called: bool,
    /// The engine's id of its proxy connection, where the gateway runs inside the engine.
    pub client_id: Option<u64>,
    /// The memory that it holds for commands and replies under way, apart from its window.
    pub held_bytes: usize,
    /// Since when.
    pub age: Duration,
    /// Bytes to the engine so far.
    pub to_engine_bytes: u64,
    /// Bytes to the client so far.
    pub to_client_bytes: u64,
}

/// What a client came over.
pub(crate) enum ClientTransport {
    /// A link, which may change from RDMA to TCP and back.
    Ferrite(Link),
    /// Valkey Over RDMA, on this device.
    Valkey(Option<String>),
    Tcp,
}

impl ClientTransport {
    /// Whether RDMA carries it, or has: then its addresses may be those that the peer has told the
    /// connection manager.
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

    fn now(&self) -> (SessionTransport, Option<String>) {
        match self {
            Self::Ferrite(link) => match link.transport() {
                Transport::Rdma => (SessionTransport::FerriteRdma, link.device()),
                Transport::TcpTls => (SessionTransport::Tls, None),
                _ => (SessionTransport::Tcp, None),
            },
            Self::Valkey(device) => (SessionTransport::ValkeyRdma, device.clone()),
            Self::Tcp => (SessionTransport::Tcp, None),
        }
    }
}

/// What is known of an open session.
pub(crate) struct Entry {
    id: u64,
    pub(crate) peer: Option<SocketAddr>,
    pub(crate) local: Option<SocketAddr>,
    transport: ClientTransport,
    begun: Instant,
    pub(crate) moved: Moved,
    pub(crate) is_called: AtomicBool,
    /// The engine's record of its proxy connection.
    pub(crate) record: OnceLock<Arc<dyn ProxyClient>>,
    pub(crate) held: Held,
    /// Somebody wants it to end.
    pub(crate) is_killed: AtomicBool,
    /// That has changed, or the engine has freed its client.
    pub(crate) ended: Arc<Notify>,
}

impl Entry {
    fn kill(&self) {
        self.is_killed.store(true, Ordering::Relaxed);
        self.ended.notify_one();
    }

    /// Whether the engine has freed its client.
    pub(crate) fn is_gone(&self) -> bool {
        self.record.get().is_some_and(|record| record.is_gone())
    }
}

/// What a session holds, as a part of what all hold.
pub(crate) struct Held {
    bytes: AtomicUsize,
    all: Arc<AtomicUsize>,
    /// The session was told to end because of it, and is counted no longer.
    is_evicted: AtomicBool,
}

impl Held {
    /// Counts so many bytes from now on, unless the session was evicted.
    pub(crate) fn set(&self, bytes: usize) {
        if !self.is_evicted() {
            self.count(bytes);
        }
    }

    fn count(&self, bytes: usize) {
        let before = self.bytes.swap(bytes, Ordering::Relaxed);
        if bytes != before {
            // Wraps around for a session that holds less than before.
            self.all.fetch_add(bytes.wrapping_sub(before), Ordering::Relaxed);
        }
    }

    /// What all sessions hold.
    pub(crate) fn total(&self) -> usize {
        self.all.load(Ordering::Relaxed)
    }

    fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Counts the session no longer; false if it was evicted before.
    fn evict(&self) -> bool {
        let is_first = !self.is_evicted.swap(true, Ordering::Relaxed);
        self.count(0);
        is_first
    }

    pub(crate) fn is_evicted(&self) -> bool {
        self.is_evicted.load(Ordering::Relaxed)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.count(0);
    }
}

#[derive(Default)]
struct List {
    open: BTreeMap<u64, Arc<Entry>>,
    last_id: u64,
    /// Bytes of sessions that have ended: to the engine, to clients.
    ended: (u64, u64),
}

/// All of a gateway's.
#[derive(Default)]
pub(crate) struct Sessions {
    list: Mutex<List>,
    pub(crate) killed: AtomicU64,
    /// Sessions that were ended because all together held too much.
    pub(crate) evicted: AtomicU64,
    held: Arc<AtomicUsize>,
}

impl Sessions {
    /// A session begins, and ends when what this returns is dropped. The second is how many there
    /// were before.
    pub(crate) fn begin(
        self: &Arc<Self>,
        peer: Option<SocketAddr>,
        local: Option<SocketAddr>,
        transport: ClientTransport,
    ) -> (Open, usize) {
        let mut list = self.list();
        list.last_id += 1;
        let (id, before) = (list.last_id, list.open.len());
        let (begun, moved, ended) = (Instant::now(), Moved::default(), Arc::default());
        let (is_called, is_killed, record) =
            (AtomicBool::new(false), AtomicBool::new(false), OnceLock::new());
        let (bytes, is_evicted) = (AtomicUsize::new(0), AtomicBool::new(false));
        let held = Held { bytes, all: Arc::clone(&self.held), is_evicted };
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
            ended,
        };
        let entry = Arc::new(entry);
        list.open.insert(id, Arc::clone(&entry));
        drop(list);
        (Open { sessions: Arc::clone(self), entry }, before)
    }

    pub(crate) fn count(&self) -> usize {
        self.list().open.len()
    }

    /// Bytes of all that there ever were: to the engine, to clients.
    pub(crate) fn moved(&self) -> (u64, u64) {
        let list = self.list();
        let add = |(to_engine, to_client), entry: &Arc<Entry>| {
            let (more_to_engine, more_to_client) = entry.moved.both();
            (to_engine + more_to_engine, to_client + more_to_client)
        };
        list.open.values().fold(list.ended, add)
    }

    /// The oldest first.
    pub(crate) fn all(&self) -> Vec<SessionInfo> {
        let entries: Vec<_> = self.list().open.values().cloned().collect();
        let info = |entry: &Arc<Entry>| {
            let (transport, device) = entry.transport.now();
            let (to_engine_bytes, to_client_bytes) = entry.moved.both();
            SessionInfo {
                id: entry.id,
                peer: entry.peer,
                local: entry.local,
                transport,
                device,
                is_called: entry.is_called.load(Ordering::Relaxed),
                client_id: entry.record.get().and_then(|record| record.id()),
                held_bytes: entry.held.bytes(),
                age: entry.begun.elapsed(),
                to_engine_bytes,
                to_client_bytes,
            }
        };
        entries.iter().map(info).collect()
    }

    /// Asks a session to end; whether there is one of this number.
    pub(crate) fn kill(&self, id: u64) -> bool {
        let entry = self.list().open.get(&id).cloned();
        entry.is_some_and(|entry| {
            self.killed.fetch_add(1, Ordering::Relaxed);
            entry.kill();
            true
        })
    }

    fn list(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A session for as long as it is open.
pub(crate) struct Open {
    sessions: Arc<Sessions>,
    pub(crate) entry: Arc<Entry>,
}

impl Open {
    /// Asks the session that holds most to end, as the engine does beyond `maxmemory-clients`.
    pub(crate) fn evict_largest(&self) {
        let largest =
            self.sessions.list().open.values().max_by_key(|entry| entry.held.bytes()).cloned();
        let Some(entry) = largest else { return };
        let held_bytes = entry.held.bytes();
        if entry.held.evict() {
            self.sessions.evicted.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                session = entry.id,
                held_bytes,
                "client disconnected: sessions hold more than maxmemory-clients"
            );
            entry.kill();
        }
    }
}

impl Drop for Open {
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

    /// An evicted session may run on for a moment: nobody goes in its place meanwhile.
    #[test]
    fn evicts_the_largest_once_and_counts_it_no_longer() {
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
