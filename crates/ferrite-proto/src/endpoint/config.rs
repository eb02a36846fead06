//! Limits and times of an endpoint, with their defaults.

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
    /// The longest window that a peer may announce. A long window takes no memory on this side,
    /// because the driver gathers the bytes of a write from wherever they are. Default 1 GiB.
    pub max_peer_window: u32,
    /// The longest single write. Default 1 GiB; a network card accepts at most 2 GiB.
    pub max_write: u32,
    /// Maximum number of writes that have not completed yet. A send queue needs room for these and
    /// for [`MESSAGES_IN_FLIGHT`](super::MESSAGES_IN_FLIGHT) messages. Default 512.
    pub max_writes_in_flight: u32,
    /// Maximum number of writes and messages that a client sends without an arrival from the
    /// server. At the limit, no write starts. Default 256.
    ///
    /// Each write and each message takes one of the server's receives (assume 1024) until the
    /// server's software has processed it. If a write finds no receive, the connection to a Valkey
    /// server fails. A local completion does not prove that the server's software has processed a
    /// request. A message from the server proves it for all requests that had arrived when the
    /// server sent the message, but not for later requests. So the limit must be at most half of
    /// the server's receives, better a quarter.
    ///
    /// A client whose queue pair retries (RNR retry 7) needs no limit. A write that the limit holds
    /// back waits at most for the server's next keepalive.
    ///
    /// The limit does not apply to servers. A server could wait for ever, because clients send no
    /// keepalives. A server needs no limit either, because its network card retries without end.
    pub max_unseen: Option<u32>,
    /// How often a server sends a keepalive. Default 3 s. Clients send none.
    pub keepalive_interval: Duration,
    /// Maximum number of keepalives that have not completed yet. At the limit, no further ones are
    /// sent. Default 3.
    pub max_keepalives: u32,
    /// How long a keepalive may take to complete, while nothing arrives, before the peer counts as
    /// dead. Default 30 s.
    pub dead_after: Duration,
    /// The features that a server reports when asked. Default 0, because no features are defined.
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
    /// Checks whether an endpoint can work with this configuration.
    ///
    /// # Errors
    /// If a field that must not be 0 is 0. The error has the name of that field.
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

/// A setting that an endpoint cannot work with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{field} must not be 0")]
pub struct ConfigError {
    /// The name of the field.
    pub field: &'static str,
}
