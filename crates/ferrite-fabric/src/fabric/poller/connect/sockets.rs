//! The TCP connections of a fabric: listeners, handshakes in progress, and which connection belongs
//! to which link.
//!
//! ```text
//!   outgoing   connect ─► our hello ─► the peer's hello ─► link
//!   incoming   accept ─► the peer's hello ─► our hello ─► link in the listener's queue
//!                     └► a refusal, with the reason; also for foreign peers that nobody accepts
//! ```
//!
//! As with RDMA CM, everything runs in the poller's pass and never blocks.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustls::ServerConfig;

use super::admission::AdmissionQueue;
use super::dialing::{Dial, Purpose};
use super::greeting::{Greeting, Side};
use super::socket_calls::{open_socket, tcp_error};
use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::fabric::listener::ListenerShared;
use crate::fabric::poller::Poller;
use crate::fabric::timers::Timer;
use crate::link::name::LinkName;
use crate::link::state::Reading;
use crate::link::tls::Tls;
use crate::mem::Account;
use crate::source::Source;
use crate::wake::wait_set::Ready;
use crate::wire;

/// Maximum number of connections that one pass handles, and that one pass accepts from a listener.
pub(super) const SOCKETS_PER_PASS: usize = 16;
/// How long an attempt to connect over TCP may take for a link that has lost its path. Then another
/// attempt is made, perhaps from another local address.
const RECONNECT: Duration = Duration::from_millis(2500);
/// Size of the buffer for bytes that have no other buffer yet. All connections share it.
const SCRATCH_BYTES: usize = 64 << 10;

/// The connections of a fabric, by number.
#[derive(Default)]
pub(crate) struct Sockets {
    pub(super) uses: HashMap<u64, Use>,
    pub(super) next: u64,
    /// Connections that need to be handled.
    ready: VecDeque<u64>,
    /// Connections of peers that have sent nothing yet, or whose TLS handshake is not admitted yet.
    /// They are not counted as half open.
    pub(super) silent: AdmissionQueue<u64>,
    /// Handshakes that have started and not finished.
    pub(super) half_open: AdmissionQueue<u64>,
    /// TLS handshakes that wait until fewer handshakes are half open, and whether the timer for
    /// them is running.
    pub(super) waiting: VecDeque<u64>,
    pub(super) admission_timer: bool,
    /// Handshakes of peers that want to resume a link. They wait until the link can be resumed or
    /// is gone.
    waiting_for_link: HashMap<LinkName, Vec<u64>>,
    /// `starved` connections wait for pool memory, and a timer retries them. `over_budget`
    /// connections exceed their own budget, and are handled again when memory of their link is
    /// released.
    starved: HashSet<u64>,
    over_budget: HashSet<u64>,
    scratch: Vec<u8>,
    /// Connections that carry a link now. Other connections are only the fallback of a link. While
    /// this set is not empty, every pass checks the descriptors.
    carrying: HashSet<u64>,
    /// Receive memory of the links of each source.
    pub(super) sources: HashMap<Source, Account>,
}

/// The current use of a connection.
pub(super) enum Use {
    Listening { socket: OwnedFd, listener: Weak<ListenerShared>, tls: Option<Arc<ServerConfig>> },
    Greeting(Box<Greeting>),
    Link(LinkName),
}

impl Sockets {
    /// Returns whether any connection carries a link. If so, every pass checks the descriptors.
    pub(crate) fn are_in_use(&self) -> bool {
        !self.carrying.is_empty()
    }

    pub(crate) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    pub(crate) fn on_ready(&mut self, id: u64) {
        if !self.ready.contains(&id) {
            self.ready.push_back(id);
        }
    }

    /// Removes a connection whose link is gone.
    pub(crate) fn forget(&mut self, id: u64) {
        self.uses.remove(&id);
        self.carrying.remove(&id);
        self.over_budget.remove(&id);
    }

    /// Sets whether a connection carries its link, or is only its fallback.
    pub(crate) fn set_carrying(&mut self, id: u64, does: bool) {
        if does {
            self.carrying.insert(id);
        } else {
            self.carrying.remove(&id);
        }
    }

    /// Handles a connection again that was over its budget, because some of its memory may have
    /// been released.
    pub(crate) fn on_credit(&mut self, id: u64) {
        if self.over_budget.remove(&id) {
            self.on_ready(id);
        }
    }

    /// Handles connections again that waited for pool memory.
    pub(crate) fn retry_starved(&mut self) {
        self.ready.extend(self.starved.drain());
    }

    /// Makes a handshake wait until the link that it wants to resume can be resumed or is gone.
    pub(super) fn wait_for(&mut self, link: LinkName, id: u64) {
        let waiting_for_link = self.waiting_for_link.entry(link).or_default();
        if !waiting_for_link.contains(&id) {
            waiting_for_link.push(id);
        }
    }

    pub(crate) fn stop_waiting_for(&mut self, link: LinkName) {
        self.ready.extend(self.waiting_for_link.remove(&link).into_iter().flatten());
    }

    pub(super) fn put(&mut self, id: u64, entry: Use) {
        self.uses.insert(id, entry);
    }

    pub(super) fn put_greeting(&mut self, id: u64, greeting: Box<Greeting>) {
        self.put(id, Use::Greeting(greeting));
    }

    /// Removes a handshake that has ended, and lets the next one start.
    pub(super) fn leave_admission(&mut self, id: u64) {
        self.leave_silent(id);
        if self.half_open.leave(id) {
            // Start the handshake that has waited least, because it is the least likely to be slow
            // on purpose.
            self.ready.extend(self.waiting.pop_back());
        }
    }

    /// Removes a connection from the silent ones, and from those that wait for admission. The
    /// connection was admitted or has ended.
    pub(super) fn leave_silent(&mut self, id: u64) {
        if self.silent.leave(id) {
            self.waiting.retain(|waiting| *waiting != id);
        }
    }

    pub(super) fn greeting(&self, id: u64) -> Option<&Greeting> {
        match self.uses.get(&id)? {
            Use::Greeting(greeting) => Some(greeting),
            _ => None,
        }
    }

    pub(super) fn take_greeting(&mut self, id: u64) -> Option<Box<Greeting>> {
        match self.uses.remove(&id)? {
            Use::Greeting(greeting) => Some(greeting),
            other => {
                self.uses.insert(id, other);
                None
            }
        }
    }
}

impl Poller {
    /// Starts an outgoing connection.
    pub(crate) fn dial(&mut self, shared: &Shared, dial: Dial) {
        let Dial { peer, local, deadline, tls, purpose } = dial;
        let trusted = tls.clone();
        let tls = match tls.map(|(config, name)| Tls::client(config, name)).transpose() {
            Ok(tls) => tls.map(Box::new),
            Err(error) => {
                self.dial_failed(
                    shared,
                    purpose,
                    Error::new(ErrorKind::Misuse, format!("cannot start TLS to {peer}: {error}")),
                );
                return;
            }
        };
        let begun = open_socket(peer).and_then(|socket| {
            if let Some(local) = local {
                rustix::net::bind(&socket, &local)?;
            }
            match rustix::net::connect(&socket, &peer) {
                Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
                Err(errno) => Err(errno),
            }
        });
        let socket = match begun {
            Ok(socket) => socket,
            Err(errno) => {
                self.dial_failed(shared, purpose, tcp_error("connect", peer)(errno));
                return;
            }
        };
        let links = shared.links.read().unwrap_or_else(std::sync::PoisonError::into_inner).len();
        let moves =
            matches!(&purpose, Purpose::Link(_, Some(_)) | Purpose::Rdma(..) | Purpose::Resume(..));
        let ours = shared.hello(links, moves);
        let resume = match &purpose {
            Purpose::Link(..) | Purpose::Rdma(..) => None,
            Purpose::Resume(_, resume) => Some(*resume),
        };
        let id = self.sockets.next;
        self.sockets.next += 1;
        if let Err(error) = shared.waits.add_socket(socket.as_fd(), Ready::Socket(id)) {
            self.dial_failed(shared, purpose, error);
            return;
        }
        if resume.is_some() {
            self.timers.add(self.now + RECONNECT, Timer::Connect(id));
        }
        let side = Side::Dialing { connected: false, purpose };
        let greeting = Greeting {
            socket,
            tls,
            trusted,
            to_send: wire::Greeting { hello: ours, resume }.encode().to_vec(),
            sent: 0,
            heard: Vec::new(),
            ours: Some(ours),
            side,
            peer,
            since: Instant::now(),
            refusing: false,
        };
        self.sockets.put(id, Use::Greeting(Box::new(greeting)));
        self.timers.add(deadline, Timer::Greeting(id));
    }

    /// Handles up to [`SOCKETS_PER_PASS`] connections that are ready. Returns how many.
    pub(crate) fn serve_sockets(&mut self, shared: &Shared) -> usize {
        let count = self.sockets.ready.len().min(SOCKETS_PER_PASS);
        for _ in 0..count {
            let Some(id) = self.sockets.ready.pop_front() else { break };
            match self.sockets.uses.get(&id) {
                Some(Use::Link(name)) => {
                    let name = *name;
                    self.serve_link(shared, id, name);
                }
                Some(Use::Listening { .. }) => self.accept_some(shared, id),
                Some(Use::Greeting(_)) => self.handle_greeting(shared, id),
                None => {}
            }
        }
        count
    }

    fn serve_link(&mut self, shared: &Shared, id: u64, name: LinkName) {
        let Some(link) = self.link(shared, name.index).filter(|link| link.name == name) else {
            return;
        };
        let mut scratch = std::mem::take(&mut self.sockets.scratch);
        scratch.resize(SCRATCH_BYTES, 0);
        let now = self.now;
        let read = link.with_wakes(&mut self.wakes, |state, env, wakes| {
            if let Some(tcp) = &mut state.tcp {
                tcp.unblock();
            }
            state.on_socket(env, &mut scratch, now, wakes, &mut |request| {
                shared.regions.serve(&link, request)
            })
        });
        self.sockets.scratch = scratch;
        match read {
            Reading::Done => {}
            Reading::More => self.sockets.ready.push_back(id),
            Reading::NoMemory => {
                self.sockets.starved.insert(id);
                self.refill_later();
            }
            Reading::OverBudget => {
                if self.sockets.over_budget.insert(id) {
                    link.call_on_credit();
                    // Handle the connection once more, because memory may have been released before
                    // that call.
                    self.sockets.on_ready(id);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::tests::source;

    /// Checks that the queue does not grow with every connection that ever waited.
    #[test]
    fn connections_that_ended_do_not_wait_for_admission() {
        let (mut sockets, peer, now) = (Sockets::default(), source("10.0.0.1"), Instant::now());
        sockets.half_open.enter(0, peer, now);
        for id in 1..=3 {
            sockets.silent.enter(id, peer, now);
            sockets.waiting.push_back(id);
        }
        sockets.leave_admission(3);
        assert_eq!(sockets.waiting, [1, 2]);
        sockets.leave_admission(0);
        assert_eq!(
            (&sockets.waiting, &sockets.ready),
            (&[1].into(), &[2].into()),
            "the next one may start"
        );
    }
}
