//! Protected mode: asks engines whether they require a password.
//!
//! The engine sees a client of its own host. The engine's own protected mode accepts such clients,
//! so it does not tell whether clients of other hosts need a password.

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::time::timeout;

use crate::engine::{EngineAccess, EngineAddress, EngineSocket, probe_access, probe_bus};

/// How long an answer is used. The engine's password can change at any time.
const REMEMBERED: Duration = Duration::from_secs(1);
/// How long the engine may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// What an engine has answered, or why there is no answer.
type Answer = Result<EngineAccess, (io::ErrorKind, String)>;
/// What is known about a port.
#[derive(Debug, Default)]
struct Port {
    /// The last answer, and when it arrived. The lock is held while the engine is asked.
    last: tokio::sync::Mutex<Option<(Instant, Answer)>>,
    /// Whether the last definite answer was that no password is required.
    was_open: AtomicBool,
}

/// The answers of the engines on this host.
#[derive(Debug, Default)]
pub(super) struct EngineAccessProbe {
    ports: Mutex<HashMap<u16, Arc<Port>>>,
}

impl EngineAccessProbe {
    /// Asks the engine at a port of the alias, or returns its answer of a moment ago. Callers that
    /// wait for the same engine share one answer, also if it is a failure.
    ///
    /// # Errors
    /// If the engine cannot be reached, does not answer in time, or does not speak RESP.
    pub(super) async fn ask(&self, alias: Ipv4Addr, port: u16) -> io::Result<EngineAccess> {
        self.port(port).ask(ask_now(alias, port, false)).await
    }

    /// Asks what listens at the port of a cluster bus, as [`ask`](Self::ask) does.
    ///
    /// # Errors
    /// If a cluster bus listens there, and in the cases of `ask`.
    pub(super) async fn ask_bus(&self, alias: Ipv4Addr, port: u16) -> io::Result<EngineAccess> {
        self.port(port).ask(ask_now(alias, port, true)).await
    }

    /// Returns whether the last definite answer of the engine was that it requires no password.
    pub(super) fn was_open(&self, port: u16) -> bool {
        self.port(port).was_open.load(Ordering::Relaxed)
    }

    fn port(&self, port: u16) -> Arc<Port> {
        let mut ports = self.ports.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(ports.entry(port).or_default())
    }
}

impl Port {
    async fn ask(
        &self,
        asking: impl Future<Output = io::Result<EngineAccess>>,
    ) -> io::Result<EngineAccess> {
        let begun = Instant::now();
        let mut last = self.last.lock().await;
        let answer = match &*last {
            Some((at, answer)) if is_usable(*at, answer, begun, Instant::now()) => answer.clone(),
            _ => {
                let answer = asking.await;
                let answer = answer.map_err(|error| (error.kind(), error.to_string()));
                match answer {
                    Ok(EngineAccess::Open) => self.was_open.store(true, Ordering::Relaxed),
                    Ok(EngineAccess::NeedsPassword) => {
                        self.was_open.store(false, Ordering::Relaxed);
                    }
                    Ok(EngineAccess::Refused(_)) | Err(_) => {}
                }
                *last = Some((Instant::now(), answer.clone()));
                answer
            }
        };
        answer.map_err(|(kind, why)| io::Error::new(kind, why))
    }
}

/// Returns whether a caller that has waited since `begun` may use the last answer, which arrived at
/// the time `at`. It may if the answer arrived while it waited, or if the answer is definite and
/// not older than [`REMEMBERED`].
fn is_usable(at: Instant, answer: &Answer, begun: Instant, now: Instant) -> bool {
    let is_definite = matches!(answer, Ok(EngineAccess::Open | EngineAccess::NeedsPassword));
    at >= begun || is_definite && now.duration_since(at) < REMEMBERED
}

async fn ask_now(alias: Ipv4Addr, port: u16, is_bus: bool) -> io::Result<EngineAccess> {
    let asking = async {
        let address = EngineAddress::Tcp(SocketAddr::from((alias, port)).to_string());
        let mut engine = EngineSocket::connect(&address).await?;
        if is_bus { probe_bus(&mut engine).await } else { probe_access(&mut engine).await }
    };
    timeout(TIMEOUT, asking).await.unwrap_or_else(|_| {
        let message = format!("no answer to PING within {TIMEOUT:?}");
        Err(io::Error::new(io::ErrorKind::TimedOut, message))
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    const ALIAS: Ipv4Addr = Ipv4Addr::new(127, 1, 0, 1);

    /// Returns the number of connections that wait at a listener.
    fn waiting(listener: &TcpListener) -> usize {
        listener.set_nonblocking(true).expect("an option");
        std::iter::from_fn(|| listener.accept().ok()).count()
    }

    #[tokio::test(start_paused = true)]
    async fn callers_that_wait_together_share_a_failure() {
        let silent = TcpListener::bind((ALIAS, 0)).expect("listen");
        let port = silent.local_addr().expect("an address").port();
        let probe = EngineAccessProbe::default();
        let ask = || probe.ask(ALIAS, port);
        for answer in <[_; 3]>::from(tokio::join!(ask(), ask(), ask())) {
            assert_eq!(answer.expect_err("no answer").kind(), io::ErrorKind::TimedOut);
        }
        assert_eq!(waiting(&silent), 1);
        // A later caller asks again.
        assert!(ask().await.is_err());
        assert_eq!(waiting(&silent), 1);
    }

    #[tokio::test]
    async fn last_definite_answer_is_remembered() {
        let port = Port::default();
        let was_open = || port.was_open.load(Ordering::Relaxed);
        for (answer, expected) in [
            (Ok(EngineAccess::Refused("-ERR max\r\n".into())), false),
            (Ok(EngineAccess::Open), true),
            (Ok(EngineAccess::Refused("-ERR max\r\n".into())), true),
            (Err(io::ErrorKind::TimedOut.into()), true),
            (Ok(EngineAccess::NeedsPassword), false),
            (Err(io::ErrorKind::TimedOut.into()), false),
        ] {
            *port.last.lock().await = None; // as after a second
            let _ = port.ask(async { answer }).await;
            assert_eq!(was_open(), expected);
        }
    }

    #[test]
    fn only_definite_answers_are_used_later_and_only_for_a_moment() {
        let at = Instant::now();
        let open: Answer = Ok(EngineAccess::Open);
        let refused: Answer = Ok(EngineAccess::Refused("-ERR\r\n".into()));
        let failed: Answer = Err((io::ErrorKind::TimedOut, "late".into()));
        let soon = at + REMEMBERED / 2;
        assert!(is_usable(at, &open, soon, soon));
        assert!(!is_usable(at, &open, at + REMEMBERED, at + REMEMBERED));
        assert!(!is_usable(at, &refused, soon, soon) && !is_usable(at, &failed, soon, soon));
        // A caller that began to wait before the answer arrived uses every answer, however late it
        // gets the lock.
        assert!(is_usable(at, &failed, at, at + 9 * REMEMBERED));
    }
}
