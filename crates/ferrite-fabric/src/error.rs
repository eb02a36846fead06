//! What can go wrong on the fabric, and what to do about it.
//!
//! A link fails once. Its first failure is kept, and everything that was under way gets a clone of
//! it: the flush that follows is never shown.

mod io;

use std::fmt;
use std::sync::{Arc, OnceLock};

use ferrite_verbs::{Absence, Rejection, Status};

use crate::diagnose::Cause;
use crate::mem::PoolError;
use crate::wire::Refusal;

/// What family a failure belongs to: this decides what to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// RDMA is not to be had here: use another transport. See [`Error::absence`].
    Absent,
    /// The host or the device has nothing left of something: the text has the figures. Free some,
    /// or raise the limit.
    Resources,
    /// A queue is full: back-pressure. Go on when something has been taken out.
    Full,
    /// The peer said no. See [`Error::refusal`].
    Refused,
    /// There is no way to the peer from here, or it does not answer: another address, or later.
    Unreachable,
    /// The deadline passed.
    Timeout,
    /// The link broke: reconnect, perhaps elsewhere.
    LinkDown,
    /// The peer's device answers and its process does not.
    PeerStalled,
    /// The link was closed, by either side.
    Closed,
    /// The peer broke the protocol: the link is down, and trying again is no use.
    Protocol,
    /// The peer took its grant back, or it does not cover this.
    Denied,
    /// More than the peer or the configuration allows.
    TooLarge,
    /// The local device was removed or failed: reconnect over another, or over the same when it is
    /// back.
    DeviceGone,
    /// The call was wrong: a bug in the caller.
    Misuse,
    /// Anything else the system reported.
    System,
}

/// A failure. Clones share it.
///
/// ```
/// # use ferrite_fabric::{Error, ErrorKind};
/// # fn show(error: &Error) {
/// match error.kind() {
///     ErrorKind::Absent | ErrorKind::Unreachable => println!("use TCP: {error}"),
///     ErrorKind::LinkDown | ErrorKind::PeerStalled => println!("connect again: {error}"),
///     _ => println!("{error}"),
/// }
/// for cause in error.causes() {
///     println!("  {}: {}", cause.what, cause.evidence);
/// }
/// # }
/// ```
#[derive(Clone)]
pub struct Error(Arc<Inner>);

struct Inner {
    kind: ErrorKind,
    what: String,
    status: Option<Status>,
    refusal: Option<Refusal>,
    /// Set once, perhaps after the error was told.
    causes: OnceLock<Vec<Cause>>,
    source: Option<Source>,
}

enum Source {
    Verbs(ferrite_verbs::Error),
    Pool(PoolError),
    /// RDMA was not tried; this allows it.
    ClearText(&'static str),
    /// RDMA has no loopback address.
    Loopback,
    /// A device uses the host's TCP ports for RDMA.
    PortIsTcps,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, what: impl Into<String>) -> Self {
        Self(Arc::new(Inner {
            kind,
            what: what.into(),
            status: None,
            refusal: None,
            causes: OnceLock::new(),
            source: None,
        }))
    }

    /// A work request of a link ended with `status`.
    pub(crate) fn completion(kind: ErrorKind, what: String, status: Status) -> Self {
        let causes = OnceLock::new();
        Self(Arc::new(Inner {
            kind,
            what,
            status: Some(status),
            refusal: None,
            causes,
            source: None,
        }))
    }

    pub(crate) fn refused(peer: &str, refusal: Refusal) -> Self {
        let mut what = format!("{peer} refused: {}", refusal.code);
        if !refusal.text.is_empty() {
            what = format!("{what} ({})", refusal.text);
        }
        Self(Arc::new(Inner {
            kind: ErrorKind::Refused,
            what,
            status: None,
            refusal: Some(refusal),
            causes: OnceLock::new(),
            source: None,
        }))
    }

    /// Why RDMA is not even tried where the payload must be encrypted; `remedy` is how the caller
    /// can allow it all the same. For
    /// [`Fabric::fell_back_to_tcp`](crate::Fabric::fell_back_to_tcp).
    #[must_use]
    pub fn clear_text(remedy: &'static str) -> Self {
        Self(Arc::new(Inner {
            kind: ErrorKind::Absent,
            what: "TLS is set, and RDMA payload is clear text".into(),
            status: None,
            refusal: None,
            causes: OnceLock::new(),
            source: Some(Source::ClearText(remedy)),
        }))
    }

    /// RDMA cannot be had at an address that means this host alone.
    pub(crate) fn loopback(local: std::net::SocketAddr) -> Self {
        Self(Arc::new(Inner {
            kind: ErrorKind::Unreachable,
            what: format!("{} is for this host alone, and RDMA comes from others", local.ip()),
            status: None,
            refusal: None,
            causes: OnceLock::new(),
            source: Some(Source::Loopback),
        }))
    }

    /// A device wanted a TCP port of the host's to listen for RDMA, as iWARP does, and our own TCP
    /// listener has it.
    pub(crate) fn port_is_tcps(local: std::net::SocketAddr) -> Self {
        Self(Arc::new(Inner {
            kind: ErrorKind::Absent,
            what: format!(
                "an RDMA device cannot listen on {local}: it uses the host's TCP ports, and TCP has this one"
            ),
            status: None,
            refusal: None,
            causes: OnceLock::new(),
            source: Some(Source::PortIsTcps),
        }))
    }

    pub(crate) fn is_clear_text(&self) -> bool {
        matches!(self.0.source, Some(Source::ClearText(_)))
    }

    /// The same with the causes that were found.
    pub(crate) fn with_causes(self, causes: Vec<Cause>) -> Self {
        self.set_causes(causes);
        self
    }

    /// The causes were found: all clones have them. The first to say so counts.
    pub(crate) fn set_causes(&self, causes: Vec<Cause>) {
        let _ = self.0.causes.set(causes);
    }

    /// What to do next.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The status of the work request that failed first, if that is what broke the link.
    #[must_use]
    pub fn status(&self) -> Option<Status> {
        self.0.status
    }

    /// How the peer refused, if it speaks our protocol and did.
    #[must_use]
    pub fn refusal(&self) -> Option<&Refusal> {
        self.0.refusal.as_ref()
    }

    /// How the peer's connection manager refused, if that is what this is.
    #[must_use]
    pub fn rejection(&self) -> Option<&Rejection> {
        match &self.0.source {
            Some(Source::Verbs(error)) => error.rejection(),
            _ => None,
        }
    }

    /// Why RDMA is absent, if that is what this is.
    #[must_use]
    pub fn absence(&self) -> Option<&Absence> {
        match &self.0.source {
            Some(Source::Verbs(error)) => error.absence(),
            _ => None,
        }
    }

    /// Likely causes by what was measured when it happened, the likeliest first. A fabric with
    /// [command threads](crate::Builder::command_threads) measures there: then they are known a
    /// moment after the error.
    #[must_use]
    pub fn causes(&self) -> &[Cause] {
        self.0.causes.get().map_or(&[], Vec::as_slice)
    }

    /// The error with its remedy, for a line of a log.
    pub(crate) fn with_remedy(&self) -> String {
        match self.remedy() {
            Some(remedy) => format!("{self}; to do: {remedy}"),
            None => self.to_string(),
        }
    }

    /// What to do about it, where that is known.
    #[must_use]
    pub fn remedy(&self) -> Option<String> {
        match &self.0.source {
            Some(Source::Verbs(error)) => error.remedy(),
            Some(Source::Pool(error)) => error.remedy(),
            Some(Source::ClearText(remedy)) => Some((*remedy).into()),
            Some(Source::Loopback) => Some("bind to an address of an RDMA device".into()),
            Some(Source::PortIsTcps) => Some(
                "bind to an address of another RDMA device, or remove the iWARP device (`rdma link` names it; siw is one)"
                    .into(),
            ),
            None => self.causes().first().and_then(|cause| cause.remedy.clone()),
        }
    }
}

impl From<ferrite_verbs::Error> for Error {
    fn from(error: ferrite_verbs::Error) -> Self {
        use ferrite_verbs::ErrorKind as Verbs;
        let kind = match error.kind() {
            Verbs::Absent => ErrorKind::Absent,
            Verbs::Memlock
            | Verbs::OutOfMemory
            | Verbs::CgroupLimit
            | Verbs::FileDescriptors
            | Verbs::DeviceLimit
            | Verbs::Permission => ErrorKind::Resources,
            Verbs::QueueFull => ErrorKind::Full,
            Verbs::DeviceGone => ErrorKind::DeviceGone,
            Verbs::NoRoute | Verbs::Unreachable => ErrorKind::Unreachable,
            Verbs::Rejected => ErrorKind::Refused,
            Verbs::Disconnected => ErrorKind::LinkDown,
            Verbs::Timeout => ErrorKind::Timeout,
            Verbs::Misuse | Verbs::AddressInUse => ErrorKind::Misuse,
            _ => ErrorKind::System,
        };
        let (what, source) = (error.to_string(), Some(Source::Verbs(error)));
        Self(Arc::new(Inner {
            kind,
            what,
            status: None,
            refusal: None,
            causes: OnceLock::new(),
            source,
        }))
    }
}

impl From<PoolError> for Error {
    fn from(error: PoolError) -> Self {
        use crate::mem::ErrorKind as Pool;
        let kind = match error.kind() {
            Pool::Exhausted => ErrorKind::Full,
            Pool::Refused => ErrorKind::Resources,
            Pool::DeviceGone => ErrorKind::DeviceGone,
            Pool::Misuse => ErrorKind::Misuse,
        };
        let (what, source) = (error.to_string(), Some(Source::Pool(error)));
        Self(Arc::new(Inner {
            kind,
            what,
            status: None,
            refusal: None,
            causes: OnceLock::new(),
            source,
        }))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.what)?;
        match self.causes().first() {
            Some(cause) => write!(f, "; {}: {} ({})", cause.likelihood, cause.what, cause.evidence),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.0.kind)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.0.source {
            Some(Source::Verbs(error)) => Some(error),
            Some(Source::Pool(error)) => Some(error),
            Some(Source::ClearText(_) | Source::Loopback | Source::PortIsTcps) | None => None,
        }
    }
}
