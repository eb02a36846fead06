//! What the command line came to.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use ferrite_fabric::Rdma;

use crate::format::Format;

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Address {
    Unix(PathBuf),
    Net { host: String, port: u16 },
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => path.display().fmt(f),
            Self::Net { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Net { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

/// What is spoken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    Resp2,
    Resp3,
    /// For `--json`: a server that knows only RESP2 will do.
    Resp3IfKnown,
}

/// What holds for every mode.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) server: Address,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) database: u32,
    pub(crate) protocol: Protocol,
    /// For connecting, on each way.
    pub(crate) timeout: Duration,
    pub(crate) rdma: Rdma,
    /// Somebody typed the policy: then a way that is not RDMA is told.
    pub(crate) is_rdma_asked_for: bool,
    pub(crate) local: Option<SocketAddr>,
    pub(crate) verbose: bool,
    pub(crate) format: Format,
    pub(crate) shows_pushes: bool,
    /// Negative: for ever.
    pub(crate) repeat: i64,
    pub(crate) interval: Option<Duration>,
    pub(crate) fails_on_error: bool,
    /// 0: no limit.
    pub(crate) max_reply_bytes: u64,
}

/// Which keys a scan is about.
#[derive(Debug, Clone)]
pub(crate) struct Scan {
    pub(crate) pattern: Option<Vec<u8>>,
    pub(crate) count: Option<u64>,
}

/// What there is to do.
#[derive(Debug)]
pub(crate) enum Mode {
    /// Commands from the terminal or from stdin.
    Prompt,
    Command(Vec<Vec<u8>>),
    Pipe {
        /// After the end of stdin, without a reply.
        patience: Option<Duration>,
    },
    Latency {
        history: bool,
    },
    Stat,
    Scan(Scan),
    BigKeys(Scan),
    /// With the number of elements to look at.
    MemoryKeys(Scan, Option<u64>),
}
