//! TCP listeners. They accept connections and start the handshakes with the peers.

use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd, RawFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{SocketFlags, sockopt};
use rustls::ServerConfig;

use super::admission::Admission;
use super::greeting::{Greeting, Side};
use super::silent_limits;
use super::socket_calls::{address, open_socket, tcp_error};
use super::sockets::{SOCKETS_PER_PASS, Use};
use crate::descriptors;
use crate::error::Error;
use crate::fabric::Shared;
use crate::fabric::listener::ListenerShared;
use crate::fabric::poller::Poller;
use crate::fabric::timers::Timer;
use crate::link::tls::Tls;
use crate::log_limit::LogLimit;
use crate::source::{Source, UNKNOWN_PEER};
use crate::wake::wait_set::Ready;

/// The delay after which a listener that ran out of descriptors or memory tries again. Nothing
/// reports when they become available again.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

impl Poller {
    /// Starts to listen. Returns the number of the listening socket and its address.
    pub(crate) fn listen_tcp(
        &mut self,
        shared: &Shared,
        (local, one_family): (SocketAddr, bool),
        tls: Option<Arc<ServerConfig>>,
        listener: &Arc<ListenerShared>,
    ) -> Result<(u64, SocketAddr), Error> {
        let socket = open_socket(local).map_err(tcp_error("socket", local))?;
        sockopt::set_socket_reuseaddr(&socket, true).map_err(tcp_error("SO_REUSEADDR", local))?;
        if one_family {
            sockopt::set_ipv6_v6only(&socket, true).map_err(tcp_error("IPV6_V6ONLY", local))?;
        }
        rustix::net::bind(&socket, &local).map_err(tcp_error("bind", local))?;
        rustix::net::listen(&socket, 1024).map_err(tcp_error("listen", local))?;
        let bound = address(rustix::net::getsockname(&socket)).unwrap_or(local);
        let id = self.sockets.next;
        self.sockets.next += 1;
        shared.waits.add_socket(socket.as_fd(), Ready::Socket(id))?;
        self.sockets.put(id, Use::Listening { socket, listener: Arc::downgrade(listener), tls });
        Ok((id, bound))
    }

    pub(crate) fn listening_descriptor(&self, id: u64) -> Option<RawFd> {
        match self.sockets.uses.get(&id)? {
            Use::Listening { socket, .. } => Some(socket.as_raw_fd()),
            _ => None,
        }
    }

    pub(crate) fn stop_listening_tcp(&mut self, id: u64) {
        self.sockets.uses.remove(&id);
    }

    pub(super) fn accept_some(&mut self, shared: &Shared, id: u64) {
        let Some(Use::Listening { socket, listener, tls }) = self.sockets.uses.get(&id) else {
            return;
        };
        let (listener, tls) = (listener.clone(), tls.clone());
        let (mut taken, mut count) = (Vec::new(), 0);
        // The connections of this pass must not displace each other before they are looked at.
        let most = silent_limits(shared).all.min(SOCKETS_PER_PASS);
        while count < most {
            match rustix::net::acceptfrom_with(socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
            {
                Ok((socket, peer)) => {
                    count += 1;
                    match descriptors::lift(socket) {
                        Ok(socket) => taken.push((socket, address(peer.ok_or(Errno::INVAL)))),
                        Err(error) => {
                            accept_failed(
                                shared,
                                &format!("{error}; raise LimitNOFILE= or ulimit -n"),
                            );
                        }
                    }
                }
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => break,
                // Edge-triggered epoll does not report waiting connections again, so try later.
                Err(errno) => {
                    accept_failed(shared, &format!("{errno}; trying again soon"));
                    self.timers.add(self.now + ACCEPT_AGAIN, Timer::Accept(id));
                    break;
                }
            }
        }
        for (socket, peer) in taken {
            self.start_greeting(
                shared,
                socket,
                peer.unwrap_or(UNKNOWN_PEER),
                &listener,
                tls.clone(),
            );
        }
        if count == most {
            self.sockets.on_ready(id); // there may be more, after those of this pass
        }
    }

    /// Starts the handshake with a peer that has connected.
    fn start_greeting(
        &mut self,
        shared: &Shared,
        socket: OwnedFd,
        peer: SocketAddr,
        listener: &Weak<ListenerShared>,
        tls: Option<Arc<ServerConfig>>,
    ) {
        let tls = match tls.map(Tls::server).transpose() {
            Ok(tls) => tls.map(Box::new),
            Err(_) => return, // without a certificate, no handshake is possible
        };
        let _ = sockopt::set_tcp_nodelay(&socket, true);
        let id = self.sockets.next;
        self.sockets.next += 1;
        if shared.waits.add_socket(socket.as_fd(), Ready::Socket(id)).is_err() {
            return;
        }
        let deadline = self.now + shared.config.connection_timeout;
        let greeting = Greeting {
            socket,
            tls,
            trusted: None,
            to_send: Vec::new(),
            sent: 0,
            heard: Vec::new(),
            ours: None,
            side: Side::Answering { listener: listener.clone(), resumes: None },
            peer,
            since: Instant::now(),
            refusing: false,
        };
        let admission =
            self.sockets.silent.admit(Source::of(peer), self.now, silent_limits(shared));
        if let Admission::Displaces(oldest) = admission {
            self.displace(shared, oldest);
        }
        self.sockets.silent.enter(id, Source::of(peer), self.now);
        self.sockets.put(id, Use::Greeting(Box::new(greeting)));
        self.timers.add(deadline, Timer::Greeting(id));
        self.sockets.on_ready(id);
    }
}

fn accept_failed(shared: &Shared, why: &str) {
    static LINES: LogLimit = LogLimit::new();
    shared.counters.accept_failures.fetch_add(1, Ordering::Relaxed);
    if let Some(others) = LINES.pass() {
        tracing::warn!("cannot accept a connection: {why}{others}");
    }
}
