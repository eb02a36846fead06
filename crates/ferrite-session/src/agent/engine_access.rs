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

/// What an engine has answered, and when. The lock is held while the engine is asked, so that
/// connections that arrive together ask once.
type Answer = Arc<tokio::sync::Mutex<Option<(Instant, EngineAccess)>>>;

/// The answers of the engines on this host.
#[derive(Debug, Default)]
pub(super) struct EngineAccessProbe {
    /// By port.
    answers: Mutex<HashMap<u16, Answer>>,
}

impl EngineAccessProbe {
    /// Asks the engine at a port of the alias, or returns its answer of a moment ago.
    ///
    /// # Errors
    /// If the engine cannot be reached, does not answer in time, or does not speak RESP.
    pub(super) async fn ask(&self, alias: Ipv4Addr, port: u16) -> io::Result<EngineAccess> {
        let entry = {
            let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(answers.entry(port).or_default())
        };
        let mut answer = entry.lock().await;
        if let Some((at, access)) = &*answer
            && at.elapsed() < REMEMBERED
        {
            return Ok(access.clone());
        }
        *answer = None;
        let asking = async {
            let address = EngineAddress::Tcp(SocketAddr::from((alias, port)).to_string());
            let mut engine = EngineSocket::connect(&address).await?;
            probe_access(&mut engine).await
        };
        let late = |_| {
            let message = format!("no answer to PING within {TIMEOUT:?}");
            Err(io::Error::new(io::ErrorKind::TimedOut, message))
        };
        let access = timeout(TIMEOUT, asking).await.unwrap_or_else(late)?;
        if !matches!(access, EngineAccess::Refused(_)) {
            *answer = Some((Instant::now(), access.clone()));
        }
        Ok(access)
    }
}
