//! Protected mode: asks engines whether they require a password.
//!
//! The question comes from this host, so an engine's own protected mode does not answer it.

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::time::timeout;

use crate::engine::{EngineAccess, EngineAddress, EngineSocket, probe_access};

/// How long an answer is used. The engine's password can change at any time.
const REMEMBERED: Duration = Duration::from_secs(1);
/// How long the engine may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// What an engine has answered, or why there is no answer.
type Answer = Result<EngineAccess, (io::ErrorKind, String)>;
/// The last answer, and when it arrived. The lock is held while the engine is asked.
type LastAnswer = Arc<tokio::sync::Mutex<Option<(Instant, Answer)>>>;

/// The answers of the engines on this host.
#[derive(Debug, Default)]
pub(super) struct EngineAccessProbe {
    /// By port.
    answers: Mutex<HashMap<u16, LastAnswer>>,
}

impl EngineAccessProbe {
    /// Asks the engine at a port of the alias, or returns its answer of a moment ago. Callers that
    /// wait for the same engine share one answer, also if it is a failure.
    ///
    /// # Errors
    /// If the engine cannot be reached, does not answer in time, or does not speak RESP.
    pub(super) async fn ask(&self, alias: Ipv4Addr, port: u16) -> io::Result<EngineAccess> {
        let last = {
            let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(answers.entry(port).or_default())
        };
        let begun = Instant::now();
        let mut last = last.lock().await;
        let answer = match &*last {
            Some((at, answer)) if is_usable(*at, answer, begun, Instant::now()) => answer.clone(),
            _ => {
                let answer = ask_now(alias, port).await;
                let answer = answer.map_err(|error| (error.kind(), error.to_string()));
                *last = Some((Instant::now(), answer.clone()));
                answer
            }
        };
        answer.map_err(|(kind, why)| io::Error::new(kind, why))
    }
}

/// Returns whether the last answer serves a caller that has waited since `begun`: if it arrived
/// meanwhile, or if it is definite and came a moment ago.
fn is_usable(at: Instant, answer: &Answer, begun: Instant, now: Instant) -> bool {
    let is_definite = matches!(answer, Ok(EngineAccess::Open | EngineAccess::NeedsPassword));
    at >= begun || is_definite && now.duration_since(at) < REMEMBERED
}

async fn ask_now(alias: Ipv4Addr, port: u16) -> io::Result<EngineAccess> {
    let asking = async {
        let address = EngineAddress::Tcp(SocketAddr::from((alias, port)).to_string());
        let mut engine = EngineSocket::connect(&address).await?;
        probe_access(&mut engine).await
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
