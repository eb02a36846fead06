//! The settings and the mode that the command line asks for.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use ferrite_fabric::Rdma;
use ferrite_session::{Host, TlsFiles};

use crate::format::Format;

/// The address of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Address {
    Unix(PathBuf),
    /// Hosts, in the order in which they are tried. There is at least one.
    Net(Vec<Host>),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => path.display().fmt(f),
            Self::Net(hosts) => {
                let hosts: Vec<_> = hosts.iter().map(ToString::to_string).collect();
                f.write_str(&hosts.join(","))
            }
        }
    }
}

/// The protocol version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    Resp2,
    Resp3,
    /// RESP3, or RESP2 if the server does not support RESP3. Used for `--json`.
    Resp3IfKnown,
}

/// The settings of TLS.
#[derive(Debug, Clone)]
pub(crate) struct Tls {
    /// The name that the server's certificate must be valid for, instead of the host's.
    pub(crate) name: Option<String>,
    pub(crate) files: TlsFiles,
}

/// The settings that all modes use. Not `Debug`, because of the password.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) server: Address,
    pub(crate) tls: Option<Tls>,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) database: u32,
    pub(crate) protocol: Protocol,
    /// The time limit for connecting. It applies to RDMA and to TCP separately.
    pub(crate) timeout: Duration,
    pub(crate) rdma: Rdma,
    /// Whether `--rdma` or the URI sets the RDMA policy. If so, a fallback to TCP is always
    /// reported.
    pub(crate) is_rdma_explicit: bool,
    pub(crate) local: Option<SocketAddr>,
    pub(crate) verbose: bool,
    pub(crate) format: Format,
    pub(crate) shows_pushes: bool,
    /// How many times the command runs; forever if negative.
    pub(crate) repeat: i64,
    pub(crate) interval: Option<Duration>,
    pub(crate) fails_on_error: bool,
    /// Whether the redirects of a cluster are followed.
    pub(crate) follows_redirects: bool,
    /// The largest reply; 0 for no limit.
    pub(crate) max_reply_bytes: u64,
}

/// The options of a scan.
#[derive(Debug, Clone)]
pub(crate) struct Scan {
    pub(crate) pattern: Option<Vec<u8>>,
    pub(crate) count: Option<u64>,
}

/// The mode in which the program runs. Not `Debug`, because a command may have a password.
pub(crate) enum Mode {
    /// Commands from the terminal or from stdin.
    Prompt,
    Command(Vec<Vec<u8>>),
    Pipe {
        /// How long to wait for the next reply after the end of stdin.
        reply_timeout: Option<Duration>,
    },
    Latency {
        history: bool,
    },
    Stat,
    Scan(Scan),
    BigKeys(Scan),
    /// The scan, and the number of elements to sample in a key.
    MemoryKeys(Scan, Option<u64>),
}
