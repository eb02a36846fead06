//! What an endpoint is told of limits and times, with the defaults.

use std::time::Duration;

/// Limits and times of an [`Endpoint`](super::Endpoint).
///
/// ```
/// use std::time::Duration;
/// use ferrite_proto::Config;
///
/// let config = Config { keepalive_interval: Duration::from_secs(1), ..Config::default() };
/// assert!(config.check().is_ok());
/// let config = Config { max_writes_in_flight: 0, ..config };
/// assert_eq!(config.check().unwrap_err().to_string(), "max_writes_in_flight must not be 0");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The longest window that a peer may announce. It costs nothing here: bytes are gathered from
    /// where they are. Default 1 GiB.
    pub max_peer_window: u32,
    /// The longest single write. Default 1 GiB: a network card takes no more than 2 GiB.
    pub max_write: u32,
    /// Writes without a local completion. A send queue needs room for these and for
    /// [`MESSAGES_IN_FLIGHT`](super::MESSAGES_IN_FLIGHT) messages. Default 512.
    pub max_writes_in_flight: u32,
    /// Writes and messages of a client since the last sign of the server's, after which no write is
    /// begun.
    ///
    /// Each takes one of the server's receives (1024 where nothing else is known) until its
    /// software has seen it, and a local completion does not say that it has. A sign does, for what
    /// came before it was sent; what went out while the sign was on its way is not covered, hence
    /// at most half of what the server has, and better a quarter. Default 256: a Valkey server's
    /// connection dies of the first write that finds no receive. A client whose queue pair tries
    /// again (RNR retry 7) may have none. The longest wait is the server's keepalive interval.
    ///
    /// Servers have no such limit: clients send no keepalives, so that they would wait for ever,
    /// and need none, because their network card tries again for as long as it takes.
    pub max_unseen: Option<u32>,
    /// How often a server sends a keepalive. Default 3 s. Clients send none.
    pub keepalive_interval: Duration,
    /// Keepalives without a local completion, after which none are sent. Default 3.
    pub max_keepalives: u32,
    /// How long a keepalive may be without a local completion, and the peer silent, before it
    /// counts as dead. Default 30 s.
    pub dead_after: Duration,
    /// What a server answers who asks for its features. Default 0: none are defined.
    pub features: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            max_peer_window: 1 << 30,
            max_write: 1 << 30,
            max_writes_in_flight: 512,
            max_unseen: Some(256),
            keepalive_interval: Duration::from_secs(3),
            max_keepalives: 3,
            dead_after: Duration::from_secs(30),
            features: 0,
        }
    }
}

impl Config {
    /// Whether an endpoint can work by it.
    ///
    /// # Errors
    /// Names a field that is zero: with it nothing would ever be sent, or everything at once.
    pub fn check(&self) -> Result<(), ConfigError> {
        let zero = [
            ("max_peer_window", self.max_peer_window == 0),
            ("max_write", self.max_write == 0),
            ("max_writes_in_flight", self.max_writes_in_flight == 0),
            ("max_unseen", self.max_unseen == Some(0)),
            ("keepalive_interval", self.keepalive_interval.is_zero()),
            ("max_keepalives", self.max_keepalives == 0),
            ("dead_after", self.dead_after.is_zero()),
        ];
        match zero.into_iter().find(|(_, is_zero)| *is_zero) {
            Some((field, _)) => Err(ConfigError { field }),
            None => Ok(()),
        }
    }
}

/// A setting by which an endpoint cannot work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{field} must not be 0")]
pub struct ConfigError {
    /// Which.
    pub field: &'static str,
}
